"""Plots of the report as inline SVG, which takes its colours and typeface from the page around it.

Matplotlib draws with one placeholder colour for each role; the placeholders then become CSS variables, so that one
SVG serves a light page, a dark page and print.  Text stays text.  The page defines the variables ``--ink``,
``--muted``, ``--rule``, ``--paper``, ``--alert``, ``--s1`` to ``--s6`` and ``--sans``.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from coterie.errors import PreflightError
from coterie.telemetry.quantities import MINUS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Formatter, MaxNLocator

__all__ = [
    "Bars",
    "Line",
    "Plot",
    "Role",
    "curves",
    "histogram",
    "over_time",
    "ready",
    "report_extra",
    "stacked_bars",
]

Role = Literal["ink", "muted", "rule", "paper", "alert", "s1", "s2", "s3", "s4", "s5", "s6"]
"""Purpose of a colour; the page defines the colour itself."""

# Any distinct colours but black, which the SVG writer leaves out.
_PLACEHOLDERS: dict[Role, str] = {
    "ink": "#010203",
    "muted": "#010205",
    "rule": "#010207",
    "paper": "#010209",
    "alert": "#01020b",
    "s1": "#010301",
    "s2": "#010302",
    "s3": "#010303",
    "s4": "#010304",
    "s5": "#010305",
    "s6": "#010306",
}
_ROLE_OF = {colour: role for role, colour in _PLACEHOLDERS.items()}
_WIDTH_IN = 5.6
"""Narrow enough that 11.5 units of type stay readable when the plot is fitted to a phone."""

_STEPS = (1, 2, 2.5, 5, 10)
Style = Literal["-", "--", ":", "-."]


@dataclass(frozen=True)
class Plot:
    """A finished plot.

    Attributes
    ----------
    name : str
        Name of the plot, unique in the page; prefix of every id inside the SVG.
    title, description : str
        Title of the plot, and its content in words for screen readers.  Both are in the SVG.
    svg : str
        The ``<svg>`` element, without references to anything outside it.
    """

    name: str
    title: str
    description: str
    svg: str


@dataclass(frozen=True)
class Line:
    """A line of a plot: a series of points, or, with a single y value and no x, a level over the whole width."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: Role
    style: Style = "-"
    marker: bool = False


@dataclass(frozen=True)
class Bars:
    """One part of every stacked bar, with one value for each bar."""

    label: str
    values: Sequence[float]
    colour: Role


def ready() -> None:
    """Import what draws, where it is installed: half a second that the first plot would take otherwise."""
    # What is wrong with it is said when something is drawn; nothing else has to end for it.
    with suppress(Exception):
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401


@contextmanager
def report_extra() -> Iterator[None]:
    """Turn the failed import of an optional package into an error that says how to install it.

    Raises
    ------
    PreflightError
        matplotlib or jinja2 is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        if package not in {"matplotlib", "jinja2", "markupsafe"}:
            raise
        raise PreflightError(
            f"report.html needs {package}, which is not installed",
            hint="pip install 'coterie[report]'; report.json is complete without it",
        ) from error


def curves(
    name: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    whole_x: bool = True,
    from_zero: bool = False,
) -> Plot:
    """Draw lines over a common axis; a line with a single y value and no x is a level across the plot.

    Parameters
    ----------
    whole_x : bool
        Whether the axis counts whole things (epochs), so that its ticks are whole numbers.
    from_zero : bool
        Whether the value axis starts at 0, so that a small change looks small.
    """
    with _figure(2.95) as figure:
        axes = figure.add_subplot()
        _draw(axes, lines)
        _axes(axes, x_label, y_label, whole_x=whole_x)
        _from_start(axes, [x for line in lines for x in line.x])
        if from_zero:
            axes.set_ylim(0, 1.12 * max(max(line.y) for line in lines) or 1)
        _legend(figure, axes)
        return _plot(figure, name, title, description)


def over_time(
    name: str,
    title: str,
    description: str,
    lines: Sequence[Line],
    steps: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    step_label: str,
    marks: Sequence[float] = (),
) -> Plot:
    """Draw lines over time, above a panel of counts that change in steps on the same time axis.

    Parameters
    ----------
    steps : sequence of Line
        Counts, each held until the next point; without any there is no second panel.
    marks : sequence of float
        Times of changes, as thin vertical lines through both panels.
    """
    with _figure(3.7 if steps else 2.95) as figure:
        if not steps:
            upper = figure.add_subplot()
            _draw(upper, lines)
            _axes(upper, x_label, y_label, whole_x=False)
        else:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.3, 1))
            _draw(upper, lines)
            _axes(upper, "", y_label, whole_x=False)
            for line in steps:
                lower.step(line.x, line.y, where="post", **_stroke(line))
            _axes(lower, x_label, step_label, whole_x=False)
            lower.set_ylim(0, max(max(line.y) for line in steps) * 1.2 or 1)
            lower.yaxis.set_major_locator(_whole_numbers(4))
        _from_start(upper, [x for line in (*lines, *steps) for x in line.x])
        for axes in figure.axes:
            for mark in marks:
                axes.axvline(mark, color=_PLACEHOLDERS["muted"], linewidth=0.8, linestyle=(0, (2, 3)))
        if len(lines) > 1 or len(steps) > 1:
            _legend(figure, *figure.axes)
        return _plot(figure, name, title, description)


def stacked_bars(
    name: str,
    title: str,
    description: str,
    labels: Sequence[str],
    parts: Sequence[Bars],
    *,
    write: Callable[[float], str],
) -> Plot:
    """Draw one horizontal bar for each label, the first on top, with its total written at its end.

    Parameters
    ----------
    write : callable
        Formats the totals at the ends of the bars.
    """
    totals = [sum(part.values[row] for part in parts) for row in range(len(labels))]
    legend_rows = -(-len(parts) // 3) if len(parts) > 1 else 0
    with _figure(0.55 + 0.33 * len(labels) + 0.22 * legend_rows) as figure:
        axes = figure.add_subplot()
        places = range(len(labels))
        begun = [0.0] * len(labels)
        for part in parts:
            axes.barh(
                places,
                part.values,
                left=begun,
                height=0.62,
                label=part.label,
                color=_PLACEHOLDERS[part.colour],
                edgecolor=_PLACEHOLDERS["paper"],
                linewidth=0.8,
            )
            begun = [start + value for start, value in zip(begun, part.values, strict=True)]
        longest = max(totals, default=0.0) or 1.0
        for place, total in zip(places, totals, strict=True):
            axes.text(
                total + 0.015 * longest,
                place,
                write(total),
                va="center",
                fontsize=11.5,
                color=_PLACEHOLDERS["ink"],
            )
        _axes(axes, "", "", whole_x=False)
        axes.set_yticks(list(places), [_shortened(label) for label in labels])
        axes.tick_params(axis="y", labelcolor=_PLACEHOLDERS["ink"])
        axes.invert_yaxis()
        # Room for the totals, which make ticks below unnecessary.
        axes.set_xlim(0, 1.2 * longest)
        axes.xaxis.set_visible(False)
        axes.grid(visible=False)
        axes.spines["bottom"].set_visible(False)
        _legend(figure, axes)
        return _plot(figure, name, title, description)


def histogram(
    name: str,
    title: str,
    description: str,
    edges: Sequence[float],
    counts: Sequence[float],
    *,
    x_label: str,
    y_label: str,
    limit: float | None = None,
    whole_x: bool = True,
) -> Plot:
    """Draw counts between edges (one more edge than counts), and a limit, if any, as a vertical line.

    Parameters
    ----------
    whole_x : bool
        Whether the axis counts whole things, so that its ticks are whole numbers.
    """
    with _figure(2.95) as figure:
        axes = figure.add_subplot()
        widths = [right - left for left, right in pairwise(edges)]
        axes.bar(
            edges[:-1],
            counts,
            width=widths,
            align="edge",
            color=_PLACEHOLDERS["s1"],
            edgecolor=_PLACEHOLDERS["paper"],
            linewidth=0.8,
        )
        if limit is not None and limit <= 1.5 * edges[-1]:
            axes.axvline(limit, color=_PLACEHOLDERS["alert"], linewidth=1.4, linestyle="--")
            axes.annotate(
                "limit",
                (limit, 0.98),
                xycoords=axes.get_xaxis_transform(),
                xytext=(5, 0),
                textcoords="offset points",
                va="top",
                color=_PLACEHOLDERS["alert"],
            )
        _axes(axes, x_label, y_label, whole_x=whole_x)
        axes.set_ylim(bottom=0)
        return _plot(figure, name, title, description)


@contextmanager
def _figure(height_in: float) -> Iterator[Figure]:
    with report_extra():
        import matplotlib as mpl
        from matplotlib.figure import Figure
    style = mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "coterie",
            # Labels come from data: a dollar sign in them starts no formula.
            "text.parse_math": False,
            "font.family": ["sans-serif"],
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 11.5,
            "path.simplify_threshold": 0.3,
        }
    )
    with style, warnings.catch_warnings():
        # Matplotlib's typeface only measures text; the page's typeface draws it, missing glyphs included.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")


def _draw(axes: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        if line.x:
            axes.plot(line.x, line.y, **_stroke(line))
        else:
            axes.axhline(line.y[0], **_stroke(line))


def _stroke(line: Line) -> dict[str, Any]:
    few = len(line.x) <= 12
    return {
        "label": line.label,
        "color": _PLACEHOLDERS[line.colour],
        "linestyle": line.style,
        "linewidth": 2.0 if line.colour != "muted" else 1.3,
        "marker": "o" if line.x and (len(line.x) == 1 or (line.marker and few)) else "",
        "markersize": 4.5,
    }


def _axes(axes: Axes, x_label: str, y_label: str, *, whole_x: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    muted, rule = _PLACEHOLDERS["muted"], _PLACEHOLDERS["rule"]
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(rule)
    axes.grid(visible=True, axis="y", color=rule, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=muted, labelcolor=muted, labelsize=11.5, length=0)
    axes.set_xlabel(x_label, color=muted, fontsize=11.5)
    axes.set_ylabel(y_label, color=muted, fontsize=11.5)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.xaxis.set_major_locator(_whole_numbers(8) if whole_x else MaxNLocator(7, steps=_STEPS))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_formatter())


def _formatter() -> Formatter:
    """Return a formatter that writes all ticks of an axis with the decimals that the finest of them needs."""
    from matplotlib.ticker import Formatter

    class Ticks(Formatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return self.format_ticks([x])[0]

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            shown = (f"{abs(tick):.6f}".rstrip("0") for tick in values)
            decimals = max((len(text.partition(".")[2]) for text in shown), default=0)
            return [f"{value:,.{decimals}f}".replace("-", MINUS) for value in values]

    return Ticks()


def _whole_numbers(most: int) -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=True, steps=_STEPS)


def _from_start(axes: Axes, places: Sequence[float]) -> None:
    """Begin the horizontal axis at 0, the start of the run, even when the first point comes later."""
    last = max(places, default=0.0) or 1.0
    axes.set_xlim(min(0.0, *places, 0.0) - 0.03 * last, 1.03 * last)


def _legend(figure: Figure, *panels: Axes) -> None:
    found = [axes.get_legend_handles_labels() for axes in panels]
    handles = [handle for some, _ in found for handle in some]
    labels = [_shortened(label) for _, some in found for label in some]
    if len(handles) < 2:  # the title names a single line
        return
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=3 if max(map(len, labels)) <= 15 else 2,
        frameon=False,
        fontsize=11.5,
        labelcolor=_PLACEHOLDERS["ink"],
        handlelength=1.6,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.2,
        borderpad=0.0,
    )


def _shortened(label: str) -> str:
    """Return a label of at most 23 characters, cut in the middle: names of services and RPCs differ at their ends."""
    return label if len(label) <= 23 else f"{label[:11]}…{label[-11:]}"


def _plot(figure: Figure, name: str, title: str, description: str) -> Plot:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.patch.set_visible(False)
    drawn = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # `Figure.savefig` would draw twice: once for the layout, which drawing itself makes as well.
    FigureCanvasSVG(figure).print_svg(drawn, metadata=nothing)  # type: ignore[no-untyped-call]
    return Plot(name, title, description, _themed(drawn.getvalue(), name, title, description))


def _themed(svg: str, name: str, title: str, description: str) -> str:
    """Return a stand-alone SVG document as an element of a page: without prologue, with own ids and CSS colours."""
    body = svg[svg.index("<svg") :]
    # The document's style sheet would apply to the whole page.
    body = re.sub(r"<(metadata|style)\b.*?</\1>|<!--.*?-->", "", body, flags=re.DOTALL)
    view = re.search(r'viewBox="([^"]+)"', body)
    inside = body[body.index(">") + 1 :]

    def adapt(tag: re.Match[str]) -> str:
        text = re.sub(r'\bid="', f'id="{name}-', tag[0])
        text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
        text = text.replace("url(#", f"url(#{name}-")
        # Matplotlib before 3.11 writes the shorthand ``font: 10px 'Name', ...``.
        text = re.sub(r"(font-family:|font: [^;\"]*?px) [^;\"]+", r"\1 var(--sans)", text)
        return re.sub(r"#010[23]0[0-9a-f]", lambda colour: f"var(--{_ROLE_OF[colour[0]]})", text)

    # Only inside tags: the text between them is data, which the writer has escaped already.
    inside = re.sub(r"<[^>]+>", adapt, inside)
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-desc" viewBox="{view[1] if view else ""}">'
        f'<title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-desc">{html.escape(description)}</desc>'
        f"{inside}"
    )
