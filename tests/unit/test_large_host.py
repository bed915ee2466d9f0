"""A host whose users are read from its files some at a time trains and measures as one that has all in memory."""

import numpy as np
import pytest
from coterie_client import history
from coterie_client.history import Catalogued, Histories, StoredNames

from coterie.evaluation.leave_one_out import RANKED
from coterie.store.client import Interaction
from coterie.store.engine import Writer, open_sqlite
from coterie.store.user_records import RecordFile
from coterie.systems.shared.host_data import HostData, LargeHostData

from .. import user_codes
from ..user_codes import USERS

OF_EACH_SYSTEM = [
    "fedncf neumf",
    "fedncf gmf batches",
    "ials odd",
    "fedmf",
    "fcf",
    "fpl",
    "fedgnn",
    "fedmvmf both",
]


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Return a function that gives the same data as a host of very many users has them."""
    monkeypatch.setattr(history, "IN_MEMORY", 3)
    monkeypatch.setattr(history, "USERS_AT_ONCE", 7)
    engine = open_sqlite(tmp_path / "client.db", "client")
    writer = Writer(engine)

    async def stored(data: HostData, *, shuffled: bool = False) -> LargeHostData:
        order = np.argsort(data.user, kind="stable")
        if shuffled:
            order = np.random.default_rng(1).permutation(len(data.user))
        rows = [
            Interaction(
                int(data.user[n]) + 1,
                data.items[data.item[n]],
                True,
                int(n),
                int(data.part[n]),
                None if np.isnan(data.rating[n]) else float(data.rating[n]),
            )
            for n in order
        ]
        held = Histories(engine, writer)
        await held.take(data.users, rows)
        assert held.in_blocks
        assert held._held is None, "histories of very many users stay in memory"
        catalogue = Catalogued(1, {key: n for n, key in enumerate(data.items)}, (), np.zeros((0, 0), bool))
        return LargeHostData(
            held.names,
            data.items,
            held.blocks(catalogue),
            lambda users, records: RecordFile.made(tmp_path / "users.records", bytes(32), users, records),
            data.attributes,
        )

    yield stored
    writer.close()
    engine.dispose()


@pytest.mark.parametrize("name", OF_EACH_SYSTEM)
async def test_codes_are_those_of_a_host_that_has_all_in_memory(large, monkeypatch, name):
    batches = [list(range(0, USERS, 2)), list(range(1, USERS, 2))]
    expected = user_codes.together(name, batches), user_codes.apart(name, batches)
    # The model is made of the data in memory.
    user_codes.model(name)
    data = await large(user_codes._data(name))
    monkeypatch.setattr(user_codes, "_data", lambda _: data)
    for found, own in zip(user_codes.together(name, batches), expected[0], strict=True):
        np.testing.assert_array_equal(found, own)
    for found, own in zip(user_codes.apart(name, batches), expected[1], strict=True):
        for user, codes in own.items():
            np.testing.assert_array_equal(found[user], codes)


@pytest.mark.parametrize("ranked", [False, True])
async def test_a_hold_out_does_not_depend_on_the_order_of_rows_in_the_store(large, ranked):
    data = user_codes._data("ials")
    if ranked:
        # Some users have more items to rank among than others.
        more = np.repeat(np.arange(USERS), np.arange(USERS) % 5)
        item = np.arange(len(more)) % len(data.items)
        parts = [*data.part, *[RANKED] * len(more)]
        data = HostData(
            data.users,
            data.items,
            np.append(data.user, more),
            np.append(data.item, item),
            np.array(parts),
            np.append(data.rating, np.full(len(more), np.nan)),
        )
    held = data.leave_one_out(3)
    records = (await large(data, shuffled=True)).leave_one_out(3)
    everybody = np.arange(USERS)
    found, expected = records.rows(everybody), held.rows(everybody)
    np.testing.assert_array_equal(found.test, expected.test)
    np.testing.assert_array_equal(found.validation, expected.validation)
    # Listed items come in the order of rows.
    np.testing.assert_array_equal(np.sort(found.negatives), np.sort(expected.negatives))
    for user in range(USERS):
        assert records.training()[user].tolist() == held.training()[user].tolist()
        assert sorted(found.interactions[user].tolist()) == sorted(expected.interactions[user].tolist())


async def test_names_are_read_from_the_store_as_they_are_in_memory(large):
    data = user_codes._data("ials")
    names = (await large(data)).users
    assert isinstance(names, StoredNames)
    assert list(names) == list(data.users)
    assert [names[n] for n in (0, USERS - 1, -1, 3)] == [data.users[n] for n in (0, USERS - 1, -1, 3)]
    assert names[2:9] == list(data.users[2:9])
    assert names[::-1] == list(data.users)[::-1]
    assert names[5:5] == []
    with pytest.raises(IndexError):
        names[USERS]
