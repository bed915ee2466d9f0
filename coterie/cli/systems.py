"""``coterie systems``: list the learning systems with the secure sums under which each runs."""

from __future__ import annotations

from coterie.cli.options import JsonOption
from coterie.cli.output import Output

__all__ = ["systems"]


def systems(json: JsonOption = False) -> None:
    """List learning systems and the secure sums that each can use.

    Also says why the other sums cannot be used. A run names them in its keys `system` and `secure_sum`.
    """
    output = Output("systems", as_json=json)
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from coterie.systems.registry import combinations, failures

    found = combinations()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("System", "Secure sum", "Runs", "Protection, or reason"):
        table.add_column(heading, no_wrap=heading != "Protection, or reason")
    for one in found:
        table.add_row(
            f"{one.system} {one.form}".rstrip(), one.secure_sum, "yes" if one.allowed else "no", one.why
        )
    output.say(table)
    for failure in failures():
        output.say(str(failure))
    output.finish({"systems": found, "left_out": failures()})
