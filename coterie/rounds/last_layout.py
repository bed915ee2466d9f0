"""The layout of a side's contributions, kept from one sum to the next."""

from __future__ import annotations

from collections.abc import Callable

from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import layout_hash

__all__ = ["LastLayout"]


class LastLayout:
    """The layout of one side's contributions with its hash, made again only for a sum of another purpose.

    Only the last one is kept: what a layout computes for all its values may be as large as a contribution.

    Parameters
    ----------
    layout : callable
        Returns the side's layout for a purpose; the same one each time.
    """

    def __init__(self, layout: Callable[[Purpose], Layout]) -> None:
        self._layout = layout
        self._last: tuple[Purpose, Layout, bytes] | None = None

    def layout(self, purpose: Purpose) -> Layout:
        """Return the layout of a contribution to a sum of a purpose."""
        return self._of(purpose)[1]

    def sha256(self, purpose: Purpose) -> bytes:
        """Return the hash of that layout, as `layout_hash`."""
        return self._of(purpose)[2]

    def _of(self, purpose: Purpose) -> tuple[Purpose, Layout, bytes]:
        last = self._last
        if last is None or last[0] is not purpose:
            layout = self._layout(purpose)
            # Other threads may ask for another purpose meanwhile: what is returned is this one's.
            last = self._last = purpose, layout, layout_hash(layout)
        return last
