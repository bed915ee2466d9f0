"""README and docs name only what exists: links, commands, options, make targets, paths, tests, tables of the code."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from coterie.cli.main import app
from coterie.config.load import load_service
from coterie.config.run import RunSettings
from coterie.config.services import settings_model
from coterie.net.authorisation import ALLOWED
from coterie.net.status import status_code
from coterie.privacy import visibility
from coterie.studies.outcome import SeedOutcome, together
from coterie.systems.report_reference import with_tables
from coterie.systems.visibility import matrix
from coterie.telemetry.report import Course
from coterie.wire.refusal import ErrorReason, reason_name
from coterie.wire.v1.orchestrator_pb2 import FetchKind, RoundStep, SubmitKind, TaskKind

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/**/*.md", "services/*/README.md", "deploy/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
MADE = re.compile(r"^(runs|data|state|federation|PATH|\.venv|\.venv/bin|build|dist)(/|$)")
"""Paths that a user or a command makes, which are not in the repository."""


def text(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """Return the anchor that a heading gets."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.strip().replace(" ", "-")


def shell_lines(page: Path) -> Iterator[str]:
    """Yield the lines of code that a reader may type: blocks of shell or of nothing named, and code in a sentence."""
    content = text(page)
    for language, block in BLOCK.findall(content):
        if language in ("", "sh"):
            # A line that ends in a backslash goes on in the next.
            yield from (line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())
    prose = BLOCK.sub("", content)
    # A line break inside code is a space.
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose))


# --- Links and paths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(BLOCK.sub("", text(page))):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, fragment = target.partition("#")
        file = (ROOT / page).parent / place if place else ROOT / page
        found = file.exists()
        if found and fragment:
            found = fragment in map(anchor, HEADING.findall(file.read_text(encoding="utf-8")))
        if not found:
            broken.append(target)
    assert broken == []


@cache
def tops() -> frozenset[str]:
    """Names at the root of the repository: what begins with one of them and a slash is a path."""
    return frozenset(path.name for path in ROOT.iterdir() if path.is_dir())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_path_of_the_repository_exists(page: Path) -> None:
    missing = []
    for code in CODE.findall(BLOCK.sub("", text(page))):
        path, _, test = code.partition("::")
        first = path.split("/", 1)[0]
        if not re.fullmatch(r"[\w./*-]+/[\w./*-]*", path) or first not in tops() or MADE.match(path):
            continue
        if "*" in path:
            found = any(ROOT.glob(path))
        else:
            found = (ROOT / path).exists()
            if found and test:
                found = re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.M) is not None
        if not found:
            missing.append(code)
    assert missing == []


# --- Commands ----------------------------------------------------------------------------------------------------


def commands_in(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command line of coterie that a page shows."""
    for line in shell_lines(page):
        match = re.match(r"(?:\.venv/bin/)?coterie( .*)?$", line.strip())
        if match and match[1]:
            yield shlex.split(match[1].partition(" #")[0], comments=True)


@cache
def coterie() -> Any:
    """Return the tree of commands; it takes long to make."""
    return typer.main.get_command(app)


def complaint(words: list[str]) -> str | None:
    """Return what is wrong with a command line; None when each word is a command, an option or an argument."""
    command = coterie()
    while words and hasattr(command, "commands"):
        if words[0].startswith("-") or words[0] == "COMMAND":
            return None
        if words[0] not in command.commands:
            return f"no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name: one for one in command.params for name in one.opts if name.startswith("-")}
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in {*options, "--help", "..."}:
            return f"no option {word!r} of {command.name!r}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_and_option_exists(page: Path) -> None:
    wrong = [f"{' '.join(words)}: {found}" for words in commands_in(page) if (found := complaint(words))]
    assert wrong == []


def test_commands_that_do_not_exist_are_noticed() -> None:
    assert complaint(["rnu", "file.toml"]) == "no command 'rnu'"
    assert complaint(["data", "descibe"]) == "no command 'descibe'"
    assert complaint(["run", "file.toml", "--dta", "x"]) == "no option '--dta' of 'run'"
    assert complaint(["run", "file.toml", "--data", "x"]) is None


def test_the_readme_and_the_index_show_every_command_and_every_page() -> None:
    shown = {words[0] for page in PAGES for words in commands_in(page)}
    assert set(coterie().commands) <= shown
    linked = {target.partition("#")[0] for target in LINK.findall(text(Path("docs/index.md")))}
    pages = {
        str(page.relative_to("docs")) for page in PAGES if page.parts[0] == "docs" and page.name != "index.md"
    }
    assert {page for page in pages if not page.startswith("exit-codes/")} <= linked


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(Path("Makefile")), re.MULTILINE))
    used = {found[1] for line in shell_lines(page) if (found := re.match(r"make ([a-z-]+)", line.strip()))}
    assert used <= targets


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_key_that_is_set_on_a_command_line_exists(page: Path) -> None:
    for words in commands_in(page):
        pairs = [after for before, after in itertools.pairwise(words) if before == "--set"]
        for pair in pairs:
            model: Any = settings_model(words[1]) if words[0] == "serve" else RunSettings
            for part in pair.partition("=")[0].split("."):
                if part in ("KEY", "key"):
                    break
                assert part in model.model_fields, pair
                model = model.model_fields[part].annotation


# --- Configuration in the pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "role"),
    [("cos", "cos"), ("data_owner", "data-owner"), ("client", "client"), ("thirdparty", "thirdparty")],
)
def test_the_configuration_that_a_service_page_shows_can_be_loaded(
    folder: str, role: str, tmp_path: Path
) -> None:
    blocks = dict(BLOCK.findall(text(Path("services") / folder / "README.md")))
    file = tmp_path / "config.toml"
    file.write_text(blocks["toml"])
    settings = load_service(role, file, environ={}).settings
    assert settings.state.is_relative_to(tmp_path)


def test_the_configuration_that_the_page_on_data_shows_can_be_loaded() -> None:
    blocks = [block for language, block in BLOCK.findall(text(Path("docs/data.md"))) if language == "toml"]
    assert blocks
    for block in blocks:
        RunSettings.model_validate(tomllib.loads(block))


# --- Tables of the pages and of the code -------------------------------------------------------------------------


def rows(page: str, first: str) -> list[list[str]]:
    """Return the cells of the table whose head begins with a word."""
    lines = text(Path(page)).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip()[1:-1].split("|")])
    return found


FEDNCF = {
    (form, secure_sum): matrix("fedncf", form, secure_sum)
    for form in ("hosts", "users")
    for secure_sum in ("clear", "masked")
}


def access(declared: dict[str, dict[str, visibility.Access]], role: str, kind: str) -> str:
    """Return the cell of a role and kind."""
    entry = declared[role][kind]
    return ("own" if entry.own_only else "yes") if entry.allowed else "-"


def test_the_threat_model_says_what_the_code_declares() -> None:
    declared = matrix("drift", "published", "clear")
    # DRIFT has no decrypting clients.
    roles = [role for role in visibility.ROLES if role != "decrypting-client"]
    cells = {kind: [access(declared, role, kind) for role in roles] for kind in visibility.KINDS}
    expected = [
        [f"`{kind}`", meaning, *cells[kind]]
        for kind, meaning in visibility.KINDS.items()
        # What nobody may see has no place in the system; that of fields out of place is said all the same.
        if set(cells[kind]) != {"-"} or kind in ("misplaced", "unclassified")
    ]
    assert rows("docs/threat-model.md", "kind") == expected


def test_the_threat_model_says_of_fedncf_what_differs_from_drift() -> None:
    drift = matrix("drift", "published", "clear")
    expected = []
    for kind, meaning in visibility.KINDS.items():
        cells = {role: [access(table, role, kind) for table in FEDNCF.values()] for role in visibility.ROLES}
        if all({access(drift, role, kind)} == set(cells[role]) for role in cells) or all(
            set(each) == {"-"} for each in cells.values()
        ):
            continue
        cos = [access(FEDNCF[combination], "cos", kind) for combination in FEDNCF]
        hosts_clear, hosts_masked, users_clear, users_masked = cos
        assert hosts_masked == users_masked, kind
        (owner,) = set(cells["data-owner"])
        (client,) = set(cells["client"]) - {"-"} or {"-"}
        assert set(cells["thirdparty"]) == ({"yes"} if kind == "population" else {"-"}), kind
        assert set(cells["operator"]) == ({"yes"} if kind == "recommendation" else {"-"}), kind
        expected.append([f"`{kind}`", meaning, users_clear, hosts_clear, hosts_masked, owner, client])
    assert rows("docs/threat-model.md", "datum") == expected


def test_the_threat_model_says_of_encrypted_sums_what_decrypting_clients_see() -> None:
    shown = ("cos", "client", "decrypting-client", "thirdparty", "operator")
    for form in ("hosts", "users"):
        declared = matrix("fedncf", form, "encrypted")
        expected = [
            [f"`{kind}`", meaning, *(access(declared, role, kind) for role in shown)]
            for kind, meaning in visibility.KINDS.items()
            if declared["decrypting-client"][kind].allowed or kind.startswith("encrypted")
        ]
        assert rows("docs/threat-model.md", "encrypted") == expected
    for system in ("fedmvmf", "fedmf"):
        other = matrix(system, "hosts", "encrypted")["decrypting-client"]
        # What only sparse contributions show is said in words.
        assert {kind for kind, one in other.items() if one.allowed} - {"sent_places"} == {
            kind for kind, one in declared["decrypting-client"].items() if one.allowed
        }


def test_the_threat_model_says_of_a_shared_key_what_differs_from_masks() -> None:
    shown = ("cos", "client", "data-owner")
    for form in ("hosts", "users"):
        declared, masked = (matrix("fedncf", form, one) for one in ("shared-key", "masked"))
        expected = [
            [f"`{kind}`", meaning, *cells]
            for kind, meaning in visibility.KINDS.items()
            if (cells := [access(declared, role, kind) for role in shown])
            != [access(masked, role, kind) for role in shown]
            and set(cells) != {"-"}
        ]
        assert rows("docs/threat-model.md", "shared key") == expected
        for kind, one in declared["decrypting-client"].items():
            assert one.allowed == masked["decrypting-client"][kind].allowed


def test_the_threat_model_says_of_fedmvmf_what_it_has_beside_fedncf() -> None:
    expected = []
    for kind, meaning in visibility.KINDS.items():
        found = set()
        for form, secure_sum in FEDNCF:
            mine = matrix("fedmvmf", form, secure_sum)
            same = FEDNCF[form, secure_sum]
            if all(access(mine, role, kind) == access(same, role, kind) for role in visibility.ROLES):
                continue
            assert {access(mine, role, kind) for role in ("thirdparty", "operator")} == {"-"}, kind
            found.add(tuple(access(mine, role, kind) for role in ("cos", "data-owner", "client")))
        if found:
            (cells,) = found
            expected.append([f"`{kind}`", meaning, *cells])
    assert sorted(rows("docs/threat-model.md", "known")) == sorted(expected)


def test_the_threat_model_says_of_the_shielded_form_what_differs_from_the_published_one() -> None:
    published = matrix("drift", "published", "clear")
    shielded = [matrix("drift", "shielded", secure_sum) for secure_sum in ("clear", "masked")]
    expected = []
    for kind, meaning in visibility.KINDS.items():
        cells = {role: [access(table, role, kind) for table in shielded] for role in visibility.ROLES}
        if all({access(published, role, kind)} == set(cells[role]) for role in cells):
            continue
        # At owners and clients, what belongs to one sum is there only in that.
        owner, client = ((set(cells[role]) - {"-"} or {"-"}) for role in ("data-owner", "client"))
        assert len(owner) == len(client) == 1, kind
        assert set(cells["thirdparty"]) == {"-"}, kind
        if kind not in ("visit_count", "block_count"):
            assert set(cells["operator"]) == {access(published, "operator", kind)}, kind
        expected.append([f"`{kind}`", meaning, *cells["cos"], *owner, *client])
    assert rows("docs/threat-model.md", "value") == expected


def test_the_protocol_lists_every_task_step_fetch_and_submission() -> None:
    for head, enum, prefix in (
        ("task", TaskKind, "TASK_KIND_"),
        ("step", RoundStep, "ROUND_STEP_"),
        ("fetched", FetchKind, "FETCH_KIND_"),
        ("submitted", SubmitKind, "SUBMIT_KIND_"),
    ):
        names = [f"`{name.removeprefix(prefix)}`" for name in enum.keys()[1:]]
        assert [row[0] for row in rows("docs/protocol.md", head)] == names, head


def test_the_protocol_lists_every_refusal_with_its_status() -> None:
    expected = {
        f"`{reason_name(reason)}`": status_code(reason).name
        for reason in ErrorReason.values()
        if reason != ErrorReason.ERROR_REASON_UNSPECIFIED
    }
    assert {row[0]: row[1] for row in rows("docs/protocol.md", "reason")} == expected


def test_the_protocol_lists_every_rpc_with_who_may_call_it() -> None:
    words = {"cos": "COS", "data-owner": "data owners", "client": "clients", "operator": "operators"}
    service, found = "", {}
    for cells in rows("docs/protocol.md", "service"):
        service = cells[0].strip("`") or service
        for rpc in CODE.findall(cells[2]):
            found[f"{service}/{rpc}"] = cells[3]
    ours = {
        method.removeprefix("/coterie.v1."): roles
        for method, roles in ALLOWED.items()
        if "coterie.v1" in method
    }
    assert set(found) == {
        *ours,
        "Enrolment/Enrol",
        "Enrolment/RenewExpired",
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
    }
    for method, roles in ours.items():
        for role in words:
            assert (words[role] in found[method]) == (role in roles), method


def test_the_page_on_the_report_describes_every_key() -> None:
    described = {key for row in rows("docs/report.md", "key") for key in re.findall(r"`(\w+)`", row[0])}
    course = Course(**{key: getattr(Course(), key) for key in Course.model_fields} | {"history": [{}]})
    single = SeedOutcome(0, "", course, {})
    made = set(together(RunSettings(seeds=(0, 1)), {}, "run", [single, single]).content())
    # Keys of one system have a table of their own.
    assert described == made | {"beside", "over_users", "started", "duration_s", "taken_up"}


def test_the_tables_of_keys_on_the_page_on_the_report_are_current() -> None:
    page = text(Path("docs/report.md"))
    assert with_tables(page) == page, "run: make docs"
