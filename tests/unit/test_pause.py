"""Pauses between messages of an intake and its coordinator."""

import pytest
from coterie_cos.pause import PAUSE, Pause


def test_a_pause_grows_with_what_a_message_carries_up_to_the_longest():
    pause = Pause(least_s=0.04, each_s=0.002, most_s=0.1)
    assert [pause.after(count) for count in (0, 1, 20, 30, 256)] == pytest.approx(
        [0.04, 0.042, 0.08, 0.1, 0.1]
    )


def test_a_few_polls_wait_little_longer_than_none():
    assert PAUSE.after(3) < 1.2 * PAUSE.after(0)
