"""Where a user goes on after a data owner refused its visit for its numbers."""

import pytest
from coterie_client.drift.visits import resumed

from coterie.errors import PeerError
from coterie.store.client import LastVisit

LAST = LastVisit(3, b"owner", number=5, epoch=2, durable=40, held=4, ran=2, loss=1.5)
QUEUED = 50


def test_an_owner_that_was_restored_gets_again_what_it_lost():
    found = resumed("zoo", LAST, QUEUED, 3, 20)
    assert found == LastVisit(3, b"owner", number=2, durable=20)
    assert resumed("zoo", LAST, QUEUED, 1, 0) == LastVisit(3, b"owner")


def test_records_that_do_not_follow_are_no_sign_that_this_host_is_behind():
    for durable in (30, 45, QUEUED):
        assert resumed("zoo", LAST, QUEUED, 6, durable) == LAST._replace(durable=durable)


@pytest.mark.parametrize(
    ("expected", "durable"),
    [(7, 40), (6, QUEUED + 1), (3, QUEUED + 1), (100, 0)],
    ids=["more visits", "more records", "fewer visits and more records", "many more visits"],
)
def test_visits_or_records_that_this_host_does_not_know_of_mean_that_it_was_restored(expected, durable):
    with pytest.raises(PeerError, match="OUTBOX_BEHIND: zoo"):
        resumed("zoo", LAST, QUEUED, expected, durable)


def test_an_owner_that_refuses_what_it_expects_is_not_asked_for_ever():
    with pytest.raises(PeerError, match="zoo refused visit 6 and 40 records, and expects the same"):
        resumed("zoo", LAST, QUEUED, 6, 40)


def test_an_owner_that_expects_no_visit_at_all_is_visited_from_the_first_one_on():
    assert resumed("zoo", LAST, QUEUED, 0, 0).number == 0
