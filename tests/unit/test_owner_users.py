from dataclasses import replace

import numpy as np
from coterie_data_owner.drift.users import Users
from structlog.testing import capture_logs

from coterie.crypto.identity import Identity
from coterie.wire.tensor import to_wire

EMPTY = bytes(32)
ANNE, BEN, CLEO = (bytes([number]) * 32 for number in (1, 2, 3))


class Server:
    """A COS of which only the roster is asked."""

    def __init__(self, *roster):
        self.roster = roster

    async def fetch(self, kind):
        rows = np.frombuffer(b"".join(self.roster), np.uint8).reshape(-1, 32)
        return 0, to_wire(rows).SerializeToString()


class KeyDirectory:
    """A directory in which a client host enrolled Anne, and a data owner Ben."""

    async def bundles(self, participants):
        parties = {ANNE: "client/host-0", BEN: "data-owner/comedy"}
        bundle = Identity.generate().bundle(1, (0, 2**40))
        return {one: replace(bundle, party=parties[one]) for one in participants}


async def test_only_participants_of_client_hosts_are_users():
    users = Users(Server(EMPTY, ANNE, BEN), KeyDirectory(), lambda user: False)
    assert list(await users.bundles([ANNE, BEN])) == [ANNE]


async def test_slots_of_new_users_are_added():
    server = Server(EMPTY, ANNE)
    users = Users(server, None, lambda user: False)
    await users.refresh()
    server.roster = (EMPTY, ANNE, BEN)
    await users.refresh()
    assert users.slots == {ANNE: 1, BEN: 2}


async def test_a_user_that_a_roster_moves_or_names_twice_keeps_its_first_slot():
    server = Server(EMPTY, ANNE, BEN)
    users = Users(server, None, lambda user: False)
    with capture_logs() as logs:
        await users.refresh()
        assert logs == []
        # Anne would count as two users, and so would whoever has a slot that was another's.
        server.roster = (EMPTY, CLEO, BEN, ANNE, BEN)
        await users.refresh()
        await users.refresh()
    assert users.slots == {ANNE: 1, BEN: 2}
    (line,) = logs
    assert line["entries"] == 3
    server.roster = (EMPTY, ANNE, BEN, CLEO)
    await users.refresh()
    assert users.slots == {ANNE: 1, BEN: 2, CLEO: 3}
