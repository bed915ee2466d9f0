"""Where a user goes on after a data owner refused its visit for its numbers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from coterie_client.choice import Choice
from coterie_client.drift.visits import Visits, resumed

from coterie.errors import PeerError
from coterie.rounds.stance import changed_stance
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


async def test_a_call_that_is_repeated_leaves_out_users_whose_replies_came_before_it_failed(tmp_path):
    asked = []

    class Recipients:
        async def prekey(self, recipient):
            return b"prekey"

        def sessions(self, recipient, prekey, users):
            asked.append(list(users))
            raise ConnectionError("as far as this test goes")

    recipient: Any = SimpleNamespace(owner=b"owner", name="zoo")
    queued = {user: SimpleNamespace(rows=np.zeros(40, np.uint32)) for user in (1, 2, 3)}
    visits: Any = object.__new__(Visits)
    visits._choice = Choice(tmp_path)
    visits._recipients = Recipients()
    visits._host = SimpleNamespace(histories=SimpleNamespace(outboxes={b"owner": queued}))
    # The first was answered in this epoch; the second has been there in the last one, the third never.
    visits._last = {
        (1, b"owner"): LastVisit(1, b"owner", number=2, epoch=2, durable=40, held=4),
        (2, b"owner"): LastVisit(2, b"owner", number=1, epoch=1, durable=40, held=4),
    }
    with pytest.raises(ConnectionError):
        await visits._once(recipient, [1, 2, 3], 2, None)
    assert asked == [[2, 3]]
    await visits._once(recipient, [1], 2, None)
    assert asked == [[2, 3]]
    # Nobody visits once the person has left.
    changed_stance(tmp_path, left=True)
    await visits._once(recipient, [2, 3], 2, None)
    assert asked == [[2, 3]]
