"""Participants of a run, and the numbering of items."""

import gc
import hashlib
import tracemalloc

import numpy as np
import pytest
import sqlalchemy as sa
from coterie_cos.participants import Registry

from coterie.rounds.population import Ids
from coterie.store import cos as store
from coterie.store.engine import open_sqlite
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import SlotRange

HOLDINGS = {"films": ["z", "b", "c"], "books": ["c", "a"], "songs": ["d"]}


def registered(*names: str) -> Registry:
    registry = Registry("run")
    for name in names:
        owner = wire.Participant(kind=wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER, name=name)
        (slot,) = registry.add(f"data-owner/{name}", [name.encode().ljust(32)], {0: owner})
        registry.hold(slot, registry.add_items(HOLDINGS[name])[0])
    return registry


def held(registry: Registry) -> dict[str, list[str]]:
    owners = ((registry.by_slot[slot].owner, items) for slot, items in registry.held.items())
    return {owner.name: [registry.items[n] for n in items] for owner, items in owners if owner is not None}


def test_numbers_of_items_do_not_depend_on_which_owner_came_first() -> None:
    for order in (("films", "books", "songs"), ("songs", "films", "books"), ("books", "films", "songs")):
        registry = registered(*order)
        moved = registry.items != ["c", "a", "z", "b", "d"]
        assert registry.number_by_owner() is moved
        # Owners by name, the items of each in its own order.
        assert registry.items == ["c", "a", "z", "b", "d"]
        assert held(registry) == HOLDINGS
        # A registration that is repeated, as after a restart, gets the same numbers.
        again, fresh, _ = registry.add_items(["d", "z"])
        assert (again.tolist(), fresh) == ([4, 2], [])
        assert registry.number_by_owner() is False


def test_the_items_of_one_owner_keep_its_order() -> None:
    registry = registered("films")
    assert registry.number_by_owner() is False
    assert registry.items == HOLDINGS["films"]


def test_new_numbers_are_what_a_server_finds_after_a_restart(tmp_path) -> None:
    registry = registered("songs", "films", "books")
    engine = open_sqlite(tmp_path / "cos.db", "cos")
    with engine.begin() as connection:
        connection.execute(
            store.runs.insert(),
            {"run_id": "run", "request": b"", "plan_hash": b"", "state": "{}", "snapshot": 0},
        )
        for slot, one in enumerate(registry.by_slot):
            assert one.owner is not None
            message = one.owner.SerializeToString()
            store.save_participants(connection, "run", [(slot, one.participant, one.party, message)])
            store.save_holding(connection, "run", slot, registry.held[slot].astype("<u4").tobytes())
        store.save_items(connection, "run", registry.items, 0)
        assert registry.number_by_owner()
        indices = {slot: items.astype("<u4").tobytes() for slot, items in registry.held.items()}
        store.renumber_items(connection, "run", registry.items, indices)
    restored = Registry("run")
    with engine.connect() as connection:
        restored.restore(connection, 1)
        assert connection.execute(sa.select(sa.func.count()).select_from(store.items)).scalar() == 5
    engine.dispose()
    assert restored.items == registry.items
    assert held(restored) == HOLDINGS
    assert all(np.array_equal(restored.held[slot], items) for slot, items in registry.held.items())


# --- very many users --------------------------------------------------------------------------------------------------


def people(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(n.to_bytes(4)).digest() for n in range(first, first + count)]


def test_slots_are_found_again_whether_they_were_sorted_in_or_not() -> None:
    registry = Registry("run")
    a, b, c = people(0, 20_000), people(20_000, 20_000), people(40_000, 3)
    assert registry.add("client/a", a, {}) == list(range(20_000))
    assert registry.add("client/b", b, {}) == list(range(20_000, 40_000))
    # Too few to be sorted in, one of them twice.
    assert registry.add("client/c", [*c, c[0]], {}) == [40_000, 40_001, 40_002, 40_000]
    everybody = [*a, *b, *c]
    assert [registry.slot_of(one) for one in everybody[::97]] == list(range(0, 40_003, 97))
    assert registry.add("client/a", a[::-1], {}) == list(range(20_000))[::-1]
    assert registry.slot_of(people(50_000, 1)[0]) is None
    assert registry.slot_of(a[0][:8] + bytes(24)) is None, "another id with the same beginning"
    assert registry.users() == len(registry.by_slot) == 40_003
    assert list(registry.slots_of("client/c")) == [40_000, 40_001, 40_002]
    assert registry.by_slot[20_000].participant == b[0]
    assert registry.by_slot[-1].party == "client/c"
    assert registry.people([40_001, 0]) == ([c[1], a[0]], ["client/c", "client/a"])
    assert np.array_equal(registry.roster()[40_002], np.frombuffer(c[2], np.uint8))


def test_ids_with_the_same_beginning_keep_their_own_slots() -> None:
    registry = Registry("run")
    alike = [b"beginnng" + n.to_bytes(24) for n in range(3)]
    registry.add("client/a", [*people(0, 20_000), *alike], {})
    assert [registry.slot_of(one) for one in alike] == [20_000, 20_001, 20_002]
    assert registry.slot_of(b"beginnng" + bytes([9] * 24)) is None


def test_nobody_registers_a_user_of_another_party_and_nothing_of_such_a_registration_is_kept() -> None:
    registry = Registry("run")
    users = people(0, 20_000)
    registry.add("client/a", users, {})
    registry.add("client/b", people(20_000, 1), {})
    for taken in (users[7], people(20_000, 1)[0]):
        with pytest.raises(Refusal, match="another party speaks") as refused:
            registry.add("client/c", [*people(30_000, 5), taken], {})
        assert refused.value.reason == ErrorReason.ERROR_REASON_CONFLICT
    assert len(registry.by_slot) == 20_001
    assert not registry.slots_of("client/c")


def test_a_party_speaks_for_its_own_slots_only() -> None:
    registry = Registry("run")
    registry.add("client/a", people(0, 5), {})
    registry.add("client/b", people(5, 5), {})
    ask = [SlotRange(first=5, count=3), SlotRange(first=9, count=1)]
    assert registry.own_slots("client/b", ask, owner=False) == [5, 6, 7, 9]
    for party, first, count, wrong in (
        ("client/b", 4, 3, 4),
        ("client/a", 3, 3, 5),
        ("client/b", 8, 3, 10),
        ("client/b", 4_000_000_000, 2, 4_000_000_000),
        ("client/c", 0, 1, 0),
    ):
        with pytest.raises(Refusal, match=f"slot {wrong} is not one") as refused:
            registry.own_slots(party, [SlotRange(first=first, count=count)], owner=False)
        assert refused.value.reason == ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT
        # An error that somebody still holds does not keep others from registering.
        registry.add("client/a", people(0, 5), {})
        registry.add("client/d", people(100 + first % 1000 + count, 1), {})
    with pytest.raises(Refusal):
        registry.own_slots("client/a", [SlotRange(first=0, count=1)], owner=True)
    with pytest.raises(Refusal):
        registered("songs").own_slots("data-owner/songs", [SlotRange(first=0, count=1)], owner=False)
    assert registered("songs").own_slot("data-owner/songs", 0, owner=True).is_owner


def test_a_hundred_thousand_users_take_less_than_a_hundred_bytes_each() -> None:
    registry = Registry("run")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for host in range(4):
            registry.add(f"client/{host}", Ids.of(people(25_000 * host, 25_000)), {})
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert registry.users() == 100_000
    assert taken < 100 * 100_000, f"{taken / 1e5:.0f} bytes a user"


def test_users_of_whom_one_has_another_party_here_are_given_no_slots() -> None:
    registry = Registry("run")
    registry.add("client/a", [b"a" * 32], {})
    with pytest.raises(Refusal) as refused:
        registry.expect([b"b" * 32, b"a" * 32], ["client/b", "client/b"])
    assert refused.value.reason == ErrorReason.ERROR_REASON_CONFLICT
    assert registry.size == 1
