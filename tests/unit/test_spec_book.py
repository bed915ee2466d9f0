"""The protocol book names what is in the code: labels, layouts, who refuses what."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from coterie.evaluation.leave_one_out import metric_names
from coterie.rounds.pace import pause_s
from coterie.rounds.training import MOST_ABANDONED, Purpose
from coterie.secure_sum.graph import graph_fields
from coterie.systems.fedmvmf.server import layouts
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.fedncf.mathematics import layout
from coterie.systems.fedncf.settings import Aggregation, FedNcfSettings, Touch
from coterie.systems.shared.metric_segments import names_of
from coterie.systems.shared.rated_measures import MEASURES

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "spec"


def rows(page: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with a word."""
    lines = (BOOK / page).read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
    return found


def modules() -> Iterator[ast.Module]:
    for package in (ROOT / "coterie", ROOT / "services"):
        for path in package.rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield ast.parse(path.read_text(encoding="utf-8"))


def purposes(trees: list[ast.Module]) -> set[str]:
    """Return every text that is given as ``purpose: str`` to a function or method that takes one."""
    constants: dict[str, str] = {}
    takes: dict[tuple[type[ast.AST], str], int] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    constants[target.id] = node.value.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bound = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
            for place, one in enumerate(node.args.args[bound:]):
                if one.arg == "purpose" and one.annotation and ast.unparse(one.annotation) == "str":
                    # Methods are called as attributes, so that the encoding of a text is not taken for ours.
                    takes[ast.Attribute if bound else ast.Name, node.name] = place
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        place = takes.get((type(node.func), name))
        if place is None or place >= len(node.args):
            continue
        given = node.args[place]
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            found.add(given.value)
        elif isinstance(given, ast.Name) and given.id in constants:
            found.add(constants[given.id])
    return found


def test_the_book_has_every_label_that_is_signed_hashed_or_derived_from() -> None:
    listed = [row[0] for head in ("label", "inside") for row in rows("explicit-bytes.md", head)]
    assert len(listed) == len(set(listed))
    assert set(listed) == {f"`{purpose}`" for purpose in purposes(list(modules()))}


def test_labels_that_are_handed_on_are_found() -> None:
    source = """
LABEL = "by-name"
def encode(purpose: str, *fields): ...
class Identity:
    def sign(self, purpose: str, *fields):
        return encode(purpose, *fields)
def drawn(beacon, purpose: str): encode(purpose, beacon)
def other(purpose: Purpose): ...
encode("plain", 1); identity.sign("method", 2); drawn(b"", "second"); encode(LABEL)
"a text".encode("ascii"); other("no label")
"""
    assert purposes([ast.parse(source)]) == {"plain", "method", "second", "by-name"}


def test_every_label_is_explained_on_the_page_that_the_book_names() -> None:
    for label, *_, page in rows("explicit-bytes.md", "label"):
        linked = re.fullmatch(r"\[.+\]\((.+)\)", page)
        assert linked is not None
        content = (BOOK / linked[1]).read_text(encoding="utf-8")
        assert f'"{label.strip("`")}"' in content, label


def test_the_book_shows_degrees_and_thresholds_of_the_rule() -> None:
    lines = (BOOK / "graph.md").read_text(encoding="utf-8").splitlines()
    table = {
        line.split("|")[1].strip(): [int(cell.replace(",", "")) for cell in line.split("|")[2:-1]]
        for line in lines
        if re.match(r"\| (members|degree|threshold) \|", line)
    }
    shown = list(zip(table["degree"], table["threshold"], strict=True))
    assert [tuple(graph_fields(members)) for members in table["members"]] == shown


def test_the_book_has_the_segments_of_every_layout_of_fedncf() -> None:
    listed = {row[0].strip("`") for row in rows("contributions.md", "segment")}
    found = {"supports"}
    for aggregation in get_args(Aggregation):
        for touch in get_args(Touch):
            settings = FedNcfSettings(aggregation=aggregation, touch=touch, scaffold=True)
            found |= {segment.name for segment in layout(settings, 3).segments}
    assert listed == found


def test_the_book_has_the_segments_of_every_layout_of_fedmvmf() -> None:
    listed = [(row[0].strip("`"), row[2], row[4]) for row in rows("contributions.md", "part")]
    made = layouts(FedMvmfPlan(biases=False, factors=7, attribute_names=("age",)), 3)
    axes = {3: "I", 7: "K", 1: "l"}
    expected = []
    for purpose in (Purpose.SUPPORTS, Purpose.TRAIN, Purpose.EVALUATE):
        for one in made.layout(purpose).segments:
            named = purpose is not Purpose.EVALUATE
            shape = ", ".join(axes[n] if named else str(n) for n in one.shape)
            bits = "`bits`" if purpose is Purpose.TRAIN else f"{one.bits}{'' if one.clip else ', whole'}"
            expected.append((one.name, f"({shape})", bits))
    assert listed == expected
    content = (BOOK / "contributions.md").read_text(encoding="utf-8")
    section = content[content.index("The ten, in order") :]
    named = re.findall(r"`([a-z_]+(?:@10)?)`", section.partition("The last four")[0])
    assert [name for name in named if name != "validation_"] == [
        name for name in names_of(MEASURES) if not name.startswith("validation_")
    ]


def test_the_book_names_metrics_in_their_order() -> None:
    content = (BOOK / "contributions.md").read_text(encoding="utf-8")
    section = content[content.index("## Metrics") : content.index("## Layouts of FedNCF")]
    named = re.findall(r"`([a-z_]+@10)`", section)
    plain = [name for name in metric_names() if not name.startswith("validation_")]
    assert named == plain
    assert metric_names() == (*plain, *(f"validation_{name}" for name in plain))
    few = [name for name in plain if "_all" not in name]
    assert metric_names(everything=False) == (*few, *(f"validation_{name}" for name in few))


def test_the_book_names_limits_as_they_are() -> None:
    rounds = (BOOK / "rounds.md").read_text(encoding="utf-8")
    assert MOST_ABANDONED == 100
    assert "after 100 in a row, or a day without any sum" in " ".join(rounds.split())
    assert [pause_s(row, 3600.0) for row in (1, 2, 100)] == [1.0, 2.0, 30.0]
    assert "1 s, doubled with each abandoned in a row, at most 30 s" in " ".join(rounds.split())
