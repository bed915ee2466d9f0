import json
import math
import re
import runpy
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import CoterieError
from coterie.systems.reports import read_report
from coterie.telemetry import plots
from coterie.telemetry.quantities import ABSENT, MINUS
from coterie.telemetry.report import Report
from coterie.telemetry.report_html import render, write
from coterie.telemetry.report_picture import picture

SAMPLE: Callable[[], dict[str, Any]] = runpy.run_path(str(Path(__file__).parents[1] / "sample_report.py"))[
    "sample_report"
]
VOID = {"meta", "link", "br", "img", "input", "hr"}
HEADINGS = {
    "metrics": "Results",
    "history": "Course of training",
    "traffic": "Traffic between services",
    "cpu_seconds": "CPU time and memory",
    "staleness": "Ages of gradients",
    "theta_study": "Effect of the threshold Theta",
    "events": "Events during the run",
    "visibility": "Visibility of data",
    "attacks": "Accuracy of attacks",
}
ALSO_NEEDED = {"metrics": {"reference"}, "cpu_seconds": {"peak_rss_mb"}, "system": {"theta_study"}}
"""A heading goes only when all that could stand under it is gone."""


class Page(HTMLParser):
    """Reads a page strictly: every element is closed, in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data.strip()))

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    def inside(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]

    @property
    def text(self) -> str:
        return " ".join(text for where, text in self.texts if where != "style")


@pytest.fixture(scope="module")
def source() -> str:
    return render(read_report(SAMPLE()))


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the drawing, which takes most of the time; plots have tests of their own."""

    def drawn(name: str, title: str, description: str, *_: object, **__: object) -> plots.Plot:
        return plots.Plot(name, title, description, f"<svg><title>{name}</title></svg>")

    for primitive in ("curves", "over_time", "stacked_bars", "histogram"):
        monkeypatch.setattr(plots, primitive, drawn)


def test_a_full_report_has_every_section_under_one_title(page: Page) -> None:
    assert page.inside("h1") == ["DRIFT, published form, on MovieLens 100K"]
    assert page.inside("h2") == [*HEADINGS.values(), "Settings and versions"]


def test_the_page_asks_for_nothing_outside_itself(source: str, page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in {"script", "iframe", "object", "embed", "img", "form"}
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert re.match(r"#|data:,$", attributes.get(name) or "#")
        assert not [name for name in attributes if name.startswith("on")]
    assert re.findall(r"url\((?!#)", source) == []
    assert "@import" not in source
    assert "http://" not in source
    assert "https://" not in source


def test_a_content_security_policy_forbids_scripts_and_connections(page: Page) -> None:
    policies = [
        one["content"] for one in page.tags("meta") if one.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")
    assert "script-src" not in (policies[0] or "")


def test_ids_are_unique_and_every_reference_has_a_target(source: str, page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {(one.get("href") or "#")[1:] for tag in ("a", "use") for one in page.tags(tag)}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", source))
    for _, attributes in page.elements:
        wanted |= set((attributes.get("aria-labelledby") or "").split())
    assert wanted - {""} <= set(ids)


def test_every_plot_is_named_and_described_for_who_cannot_see_it(page: Page) -> None:
    drawings = page.tags("svg")
    assert len(drawings) == 15
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert len((drawing["aria-labelledby"] or "").split()) == 2
    descriptions = page.inside("desc")
    assert len(descriptions) == len(drawings)
    assert descriptions[0].startswith("1 COS, 1 third party, 3 data owners, 2 client hosts. ")
    assert "DRIFT ends at 0.2136" in descriptions[1]
    assert "SAROS ends at 0.2048" in descriptions[1]


@pytest.mark.parametrize("experiment", [True, False])
def test_the_heading_says_whether_floors_count_users(experiment: bool) -> None:
    found = Page(render(read_report({**SAMPLE(), "experiment": experiment})))
    assert ("Experiment" in found.inside("dt")) == experiment
    assert ("floors count users, not devices" in found.inside("dd")) == experiment


def test_every_table_has_a_caption_and_scoped_headings(page: Page) -> None:
    assert len(page.tags("table")) == len(page.tags("caption")) > 0
    assert {one.get("scope") for one in page.tags("th")} == {"row", "col"}


def test_the_best_score_of_each_column_is_bold_even_when_it_is_not_ours(page: Page) -> None:
    # NDCG and MAP over all unseen items and the loss go to DRIFT, both test-items columns to popularity.
    assert page.inside("strong") == ["0.2144", "0.1219", "0.4621", "0.9003", "0.8672"]
    assert "± 0.0019" in page.inside("small")


def test_security_is_stated_as_a_share_of_the_cpu_time(page: Page) -> None:
    sample = SAMPLE()["cpu_seconds"].values()
    share = sum(one["security"] for one in sample) / sum(one["total"] for one in sample)
    assert f"{100 * share:.2f}%" in page.inside("dd")


def test_the_network_is_stated_as_a_share_of_training_at_the_party_where_it_took_most(page: Page) -> None:
    assert "Network's share of training" in page.inside("dt")
    assert "of data-owner/late; at the others less. Calls overlap with work" in page.text
    assert any(one.startswith("26") for one in page.inside("dd"))


def test_the_matrix_says_seen_or_not_seen_in_words(page: Page) -> None:
    cells = [one.get("class") for one in page.tags("td") if one.get("class")]
    assert {word: cells.count(word) for word in set(cells)} == {"seen": 10, "unseen": 9, "unstated": 1}
    assert page.inside("td").count("seen") == 10
    assert page.inside("td").count("not seen") == 9
    assert page.inside("td").count("not stated") == 1


def test_an_attack_counts_only_beyond_the_popularity_only_attacker(page: Page) -> None:
    cells = page.inside("td")
    assert cells.count("more than popularity") == 2
    assert cells.count("no more than popularity") == 1
    # 0.8698 with popularity between equals, against 0.8712: the transcript adds nothing.
    assert f"{MINUS}0.001" in cells


def test_an_attack_without_a_ranking_says_how_many_ratings_it_read_off() -> None:
    report = SAMPLE()
    report["system"] = "fedmf"
    report["attacks"] = {"profiles": {"sums": 1, "found": 0.25}, "other profiles": {"sums": 1, "found": 0.0}}
    cells = Page(render(read_report(report))).inside("td")
    assert cells.count("25.0% of the ratings in sums") == 1
    assert cells.count("no rating") == 1


def test_markup_in_any_name_or_value_stays_text() -> None:
    hostile = "<script>alert(1)</script>"
    report = SAMPLE()

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poisoned(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [poisoned(inner) for inner in value]
        return value + hostile if isinstance(value, str) else value

    report = poisoned(report)
    for name in ("traffic", "cpu_seconds", "peak_rss_mb", "visibility", "attacks", "versions", "machine"):
        report[name] = {f"{key}{hostile}": value for key, value in report[name].items()}
    report["metrics"][f"ndcg{hostile}@10"] = {"mean": 0.5, "std": None}
    report["history"][-1]["metrics"][f"ndcg{hostile}@10"] = 0.5
    for row in report["cpu_seconds"].values():
        row["activities"][hostile] = 0.25
    found = Page(render(read_report(report)))
    assert found.tags("script") == []
    assert hostile in " ".join(found.inside("h1"))
    assert f"Exchange{hostile}" in found.inside("th")
    # The stacked bars cut long names short; the text of a plot is text as well.
    assert any(re.fullmatch("Exchange<sc….+>", text) for text in found.inside("text"))


def test_dollar_signs_in_names_are_no_formulas() -> None:
    report = {"peak_rss_mb": {"a$^2$b": 10.0}}
    assert "a$^2$b" in Page(render(read_report(report))).inside("text")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", sorted(SAMPLE()))
def test_any_section_may_be_missing_and_only_it_is_then_gone(name: str) -> None:
    report = SAMPLE()
    for gone in {name} | ALSO_NEEDED.get(name, set()):
        del report[gone]
    expected = [title for key, title in HEADINGS.items() if key in report] + ["Settings and versions"]
    assert Page(render(read_report(report))).inside("h2") == expected


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("empty", [None, {}, [], "", 0, math.nan, "text", [None], {"a": None}], ids=repr)
def test_sections_that_hold_nothing_are_not_shown(empty: object) -> None:
    report: dict[str, Any] = dict.fromkeys([*HEADINGS, "reference", "peak_rss_mb", "dataset", "seeds"], empty)
    shown = Page(render(read_report(report))).inside("h2")
    assert set(shown) <= {"CPU time and memory"} if empty == {"a": None} else shown == []


def test_an_empty_report_is_a_page_with_a_title() -> None:
    found = Page(render(Report()))
    assert found.inside("h1") == ["Federated run"]
    assert found.tags("section") == []


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf], ids=repr)
def test_numbers_that_were_not_measured_read_as_a_dash(nothing: float | None) -> None:
    def emptied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: emptied(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [emptied(inner) for inner in value]
        return nothing if isinstance(value, int | float) and not isinstance(value, bool) else value

    report = emptied(SAMPLE())
    for written_out in ("seeds", "settings", "machine"):
        del report[written_out]
    found = Page(render(read_report(report)))
    assert "nan" not in found.text.lower().split()
    assert "inf" not in found.text.lower().split()
    assert "None" not in found.text.split()
    assert found.inside("td").count(ABSENT) > 50


def test_gaps_in_the_history_leave_the_rest_of_the_curves() -> None:
    report = SAMPLE()
    for entry in report["history"][1::2]:
        entry["metrics"]["ndcg@10"] = None
        entry["time_s"] = math.nan
        entry["train_loss"] = None
    kept = {name: report[name] for name in ("system", "metrics", "history")}
    assert len(Page(render(read_report(kept))).tags("svg")) == 8


def test_owners_are_drawn_only_when_their_number_changes() -> None:
    report = {name: SAMPLE()[name] for name in ("metrics", "history", "owners_timeline")}
    assert "Owners" in Page(render(read_report(report))).inside("text")
    for entry in (*report["owners_timeline"], *report["history"]):
        entry["owners"] = 3
    assert "Owners" not in Page(render(read_report(report))).inside("text")


def test_joining_before_the_first_update_is_no_change_of_owners() -> None:
    report = {name: SAMPLE()[name] for name in ("metrics", "history")}
    report["owners_timeline"] = [
        {"time_s": time, "version": version, "owners": owners, "hosts": 2}
        for time, version, owners in ((0.0, 0, 1), (0.1, 0, 3), (9.0, 400, 3))
    ]
    assert "Owners" not in Page(render(read_report(report))).inside("text")
    report["owners_timeline"].append({"time_s": 12.0, "version": 900, "owners": 2, "hosts": 2})
    assert "Owners" in Page(render(read_report(report))).inside("text")


def test_an_rpc_that_was_never_called_is_left_out(page: Page) -> None:
    assert "Poll" in page.inside("th")
    assert "Flush" not in page.inside("th")


def test_curves_over_several_seeds_are_said_to_be_of_the_first(page: Page) -> None:
    assert "of the first seed, 0." in page.text


def test_metrics_beyond_the_headline_are_folded_away_and_not_lost(page: Page) -> None:
    assert "More plots: 2 other metrics" in page.inside("summary")
    assert "Every metric, as a table" in page.inside("summary")
    assert "0.1821 ± 0.0016" in page.inside("td")


@pytest.mark.usefixtures("undrawn")
def test_a_long_history_is_thinned_in_the_table_and_keeps_its_end() -> None:
    history = [{"epoch": n, "version": n, "metrics": {"ndcg@10": n / 5000}} for n in range(1, 4001)]
    report = {"metrics": {"ndcg@10": {"mean": 0.8, "std": None}}, "history": history}
    found = Page(render(read_report(report)))
    epochs = [text for text in found.inside("th") if text.isdigit()]
    assert len(epochs) == 200
    assert epochs[-1] == "4000"


def test_write_leaves_the_page_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write(Report(run_id="r"), path)
    assert path.read_text(encoding="utf-8") == render(Report(run_id="r"))
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "report.html"
    path.write_text("older", encoding="utf-8")
    with pytest.raises(CoterieError, match=rf"needs {package}.*pip install 'coterie\[report\]'"):
        write(Report(peak_rss_mb={"cos": 10.0}), path)
    assert path.read_text(encoding="utf-8") == "older"


def test_a_report_read_back_from_json_gives_the_same_page_again(source: str) -> None:
    stored = json.dumps(read_report(SAMPLE()).content())
    assert render(read_report(json.loads(stored))) == source


def test_the_picture_has_the_parties_and_what_each_was_called_with() -> None:
    known = {
        "cpu_seconds": {f"client/{n}": {"total": 1.0} for n in range(3)}
        | {"cos/cos": {}, "thirdparty/t": {}},
        "traffic": {
            "Submit": {"calls": 2, "bytes_out": 1_000_000, "bytes_in": 500_000},
            "SubmitInteractions": {"calls": 2, "bytes_out": 7, "bytes_in": 7},
            "LogHead": {"calls": 1, "bytes_out": 0, "bytes_in": 2000},
            "Recommend": {"calls": 1, "bytes_out": 1, "bytes_in": 1},
        },
        "dataset": {"users": 60},
    }
    drawn = picture(Report.read(known))
    assert drawn is not None
    words = re.findall(r"<text[^>]*>([^<]*)</text>", drawn.svg)
    assert words == ["3 client hosts", "60 users", "COS", "calls: 1.50 MB", "third party", "calls: 2.00 kB"]
    assert drawn.svg.count("marker-end") == 2
    assert drawn.description.startswith("3 client hosts, 1 COS, 1 third party.")


def test_a_run_without_services_has_no_picture() -> None:
    assert picture(Report()) is None
    assert picture(Report.read({"cpu_seconds": {"in process": {"total": 1.0}}})) is None


def test_kinds_of_data_that_reached_nobody_are_folded() -> None:
    seen = {"cos/cos": {"masked_vector": "seen", "rating": "not seen", "slot": "not seen"}}
    seen["client/a"] = {"masked_vector": "not seen", "rating": "not seen"}
    source = render(read_report({"visibility": seen}))
    open_part, _, folded = source.partition("Kinds of data that reached nobody: 1")
    assert "masked vector" in open_part
    # Of the slot it is not stated whether the host saw it.
    assert "slot" in open_part.partition('id="visibility"')[2]
    assert "rating" in folded
    assert ">rating" not in open_part.partition('id="visibility"')[2]


@pytest.mark.parametrize(
    ("chosen", "last", "words"),
    [
        (
            2,
            4,
            "The version after 2 passes counts; validation items chose it. "
            "Training stopped early, after 4 of at most 9 passes.",
        ),
        (4, 4, "Training stopped early, after 4 of at most 9 passes."),
        (9, 9, ""),
    ],
)
def test_the_course_of_training_says_which_version_counts_and_that_it_stopped_early(
    chosen: int, last: int, words: str
) -> None:
    known = {
        "history": [{"epoch": epoch, "metrics": {"ndcg@10": 0.1}} for epoch in range(last + 1)],
        "chosen": {"epoch": chosen, "metrics": {"ndcg@10": 0.1}},
        "rounds": [{"round": 1, "purpose": "train"}],
        "settings": {"rounds": {"passes": 9}},
    }
    (lead,) = re.findall(r'<p class="lead">(One point[^<]*)</p>', render(read_report(known)))
    assert lead == f"One point for each evaluation; a pass visits every user once. {words}".strip()
