"""The layout of a side is kept from one sum to the next of the same purpose."""

from __future__ import annotations

from coterie.rounds.last_layout import LastLayout
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.plan import layout_hash


def test_a_layout_is_made_again_for_another_purpose_only() -> None:
    asked: list[Purpose] = []

    def made(purpose: Purpose) -> Layout:
        asked.append(purpose)
        return Layout((Segment(purpose.value, (3,), 1.0, 8),))

    layouts = LastLayout(made)
    first = layouts.layout(Purpose.TRAIN)
    assert layouts.layout(Purpose.TRAIN) is first
    assert layouts.sha256(Purpose.TRAIN) == layout_hash(first)
    other = layouts.layout(Purpose.EVALUATE)
    assert other.segments[0].name == "evaluate"
    assert layouts.sha256(Purpose.EVALUATE) == layout_hash(other) != layout_hash(first)
    assert layouts.layout(Purpose.TRAIN) == first
    assert asked == [Purpose.TRAIN, Purpose.EVALUATE, Purpose.TRAIN]
