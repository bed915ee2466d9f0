"""A run that waits for parties that come and go gives up after the time that it may wait in all."""

from coterie_cos.drift.patience import Patience


def test_only_the_time_without_parties_counts_as_waiting_and_only_that_with_them_as_the_phase() -> None:
    patience = Patience(100.0)
    patience.tick(160.0, waiting=False)
    patience.tick(460.0, waiting=True)
    patience.tick(465.0, waiting=False)
    assert (patience.lasted, patience.waited) == (65.0, 300.0)
    patience.went_on()
    patience.tick(466.0, waiting=True)
    assert (patience.lasted, patience.waited) == (0.0, 1.0)


def test_an_owner_that_is_there_for_ten_seconds_in_five_minutes_ends_neither_time() -> None:
    patience, now = Patience(0.0), 0.0
    while patience.waited < 3600 and now < 10 * 86_400:
        now += 5
        patience.tick(now, waiting=now % 300 >= 10)
    assert 3600 <= now < 3900
    assert patience.lasted > 60
