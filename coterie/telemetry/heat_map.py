"""Heat maps as self-contained SVG: a table of coloured cells with numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

__all__ = ["heat_map"]

_CELL_W, _CELL_H, _LETTER = 88, 34, 7.2


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], float], unit: str
) -> str:
    """Return a heat map as SVG; darker cells have larger numbers, on a logarithmic scale.

    Parameters
    ----------
    title : str
        Title, which says what the numbers are.
    rows, columns : sequence of str
        Names of rows and columns, in order.
    cells : mapping
        Numbers by row and column; a cell without a number stays empty.
    unit : str
        Unit of the numbers.
    """
    left = 24 + _LETTER * max(map(len, rows), default=0)
    top = 84
    width = max(left + _CELL_W * len(columns) + 24, 24 + _LETTER * len(title))
    height = top + _CELL_H * len(rows) + 24
    known = [value for value in cells.values() if value > 0]
    least, most = (min(known), max(known)) if known else (1.0, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="15" fill="#111111">{html.escape(title)}</text>',
    ]
    for number, name in enumerate(columns):
        x = left + _CELL_W * (number + 0.5)
        # Long names are cut and set in two lines; the full name is shown as a tooltip.
        role, _, rest = name.rpartition("/")
        lines = "".join(
            f'<tspan x="{x:g}" y="{top - 24 + 15 * line}">{_short(text)}</tspan>'
            for line, text in enumerate((role, rest))
        )
        parts.append(
            f'<text text-anchor="middle" fill="#333333"><title>{html.escape(name)}</title>{lines}</text>'
        )
    for place, row in enumerate(rows):
        y = top + _CELL_H * place
        parts.append(
            f'<text x="{left - 10:g}" y="{y + 22}" text-anchor="end" fill="#333333">{html.escape(row)}</text>'
        )
        for number, column in enumerate(columns):
            value = cells.get((row, column))
            x = left + _CELL_W * number
            share = 0.0 if value is None else _share(value, least, most)
            fill = "#f3f3f3" if value is None else _colour(share)
            parts.append(
                f'<rect x="{x:g}" y="{y}" width="{_CELL_W - 2}" height="{_CELL_H - 2}" fill="{fill}"/>'
            )
            if value is not None:
                ink = "#ffffff" if share > 0.55 else "#111111"
                parts.append(
                    f'<text x="{x + _CELL_W / 2 - 1:g}" y="{y + 21}" text-anchor="middle" fill="{ink}">'
                    f"{value:.3g} {html.escape(unit)}</text>"
                )
    return "\n".join([*parts, "</svg>", ""])


def _short(name: str) -> str:
    return html.escape(name if len(name) <= 13 else f"{name[:12]}…")


def _share(value: float, least: float, most: float) -> float:
    if value <= 0 or most <= least:
        return 0.0
    return math.log(value / least) / math.log(most / least)


def _colour(share: float) -> str:
    light, dark = (0xE8, 0xF1, 0xFA), (0x0B, 0x3C, 0x6F)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(light, dark, strict=True))
