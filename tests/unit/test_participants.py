"""Participants of a run, and the numbering of items."""

import numpy as np
import sqlalchemy as sa
from coterie_cos.participants import Registry

from coterie.store import cos as store
from coterie.store.engine import open_sqlite
from coterie.wire.v1 import orchestrator_pb2 as wire

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
