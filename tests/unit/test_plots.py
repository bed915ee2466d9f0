import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import pytest

from coterie.telemetry.plots import Bars, Line, Plot, curves, histogram, over_time, stacked_bars

LINE = Line("a line", [0.0, 1.0, 2.0], [0.1, 0.3, 0.2], "s1")


def curve() -> Plot:
    level = Line("level", [], [0.2], "muted", style=":")
    return curves("p", "Title <b>", 'Says "x"', [LINE, level], x_label="Epoch", y_label="NDCG")


def bars() -> Plot:
    parts = [Bars("one", [1.0, 2.0], "s1"), Bars("two", [3.0, 0.0], "alert")]
    return stacked_bars(
        "p", "Title", "Says", ["first", "second"], parts, write=lambda value: f"{value:g} units"
    )


def counts() -> Plot:
    return histogram("p", "T", "S", [0, 1, 2, 3], [5, 0, 2], x_label="Age", y_label="Updates", limit=2.5)


def timed() -> Plot:
    steps = [Line("Owners", [0.0, 1.0], [2, 3], "s3"), Line("Hosts", [0.0, 1.0], [1, 2], "s4", style="--")]
    return over_time(
        "p", "T", "S", [LINE], steps, x_label="Time", y_label="NDCG", step_label="Alive", marks=[0.5]
    )


@pytest.mark.parametrize("draw", [curve, bars, counts, timed])
def test_every_colour_and_typeface_is_a_variable_of_the_page(draw: Callable[[], Plot]) -> None:
    svg = draw().svg
    colours = re.findall(r"(?:fill|stroke|stop-color): ?([^;\"]+)", svg)
    assert colours
    assert {colour for colour in colours if not colour.startswith("var(--")} <= {"none"}
    assert set(re.findall(r"font-family: ([^;\"]+)", svg)) == {"var(--sans)"}


@pytest.mark.parametrize("draw", [curve, bars, counts, timed])
def test_an_svg_is_one_element_without_document_parts_or_page_wide_style(draw: Callable[[], Plot]) -> None:
    svg = draw().svg.strip()
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    for part in ("<?xml", "<!DOCTYPE", "<metadata", "<style", "<!--", "xlink", "http"):
        assert part not in svg


def test_title_and_description_are_escaped() -> None:
    svg = curve().svg
    assert '<title id="p-title">Title &lt;b&gt;</title>' in svg
    assert '<desc id="p-desc">Says &quot;x&quot;</desc>' in svg


def test_every_id_carries_the_name_of_its_plot() -> None:
    ids = re.findall(r'\bid="([^"]+)"', timed().svg)
    assert ids
    assert all(one.startswith("p-") for one in ids)


def test_bars_end_with_their_total() -> None:
    svg = bars().svg
    assert ">4 units<" in svg
    assert ">2 units<" in svg


def test_a_limit_far_to_the_right_is_not_drawn() -> None:
    drawn = [
        histogram("p", "T", "S", [0, 1, 2], [5, 1], x_label="Age", y_label="n", limit=limit).svg
        for limit in (2.0, 2000.0)
    ]
    assert ["limit" in svg for svg in drawn] == [True, False]


def test_the_ticks_of_an_axis_share_their_decimals() -> None:
    line = Line("", [0.0, 1.0], [0.0, 0.2], "s1")
    svg = curves("p", "T", "S", [line], x_label="Epoch", y_label="").svg
    assert set(re.findall(r">(0\.\d+)<", svg)) == {"0.00", "0.05", "0.10", "0.15", "0.20"}


def test_text_that_looks_like_an_attribute_stays_as_it_is() -> None:
    lines = [Line('id="a"', [0, 1], [0, 1], "s1"), Line("#010203", [0, 1], [1, 0], "s2")]
    svg = curves("p", "T", "S", lines, x_label="url(#a)", y_label="").svg
    assert '>id="a"<' in svg
    assert ">#010203<" in svg
    assert ">url(#a)<" in svg


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(mpl.rcParams)
    curve()
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("text", ["$x^2$", "日本", "a\tb", "</text><b>"])
def test_any_label_can_be_drawn(text: str, recwarn: pytest.WarningsRecorder) -> None:
    svg = stacked_bars("p", text, text, [text], [Bars(text, [0.0], "s1")], write=lambda _: text).svg
    assert "<b>" not in svg
    assert len(recwarn) == 0


AHEAD = """
import sys
from coterie.telemetry import plots
plots.ready()
before = set(sys.modules)
line = plots.Line("hit ratio", [0, 1], [0.1, 0.2], "s1")
plots.curves("one", "One", "A line.", [line, line], x_label="pass", y_label="value")
assert not set(sys.modules) - before, sorted(set(sys.modules) - before)
"""


def test_the_first_plot_imports_nothing_after_what_draws_was_imported_ahead() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_damaged_installation_of_what_draws_ends_nothing_that_does_not_draw(tmp_path: Path) -> None:
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('of another version of NumPy')\n")
    script = "import sys; sys.path.insert(0, sys.argv[1]); from coterie.telemetry import plots; plots.ready()"
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
