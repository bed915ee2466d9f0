"""Item factors of data owners in a round, at the orchestration server: taken, refused, waited for, or not."""

import asyncio
from typing import Any

import numpy as np
import pytest
from coterie_cos.item_servers import ItemServers
from coterie_cos.participants import Registry

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef

K = 3
OWNER = wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER
PATIENCE_S = 600.0


class World:
    """Two owners of four items each, one shared, at two parties; round 7 trains version 5."""

    def __init__(self) -> None:
        self.registry = Registry("run")
        self.absent: set[str] = set()
        for number, name in enumerate(("books", "films")):
            message = wire.Participant(kind=OWNER, name=name)
            (slot,) = self.registry.add(f"data-owner/{name}", [bytes([number]) * 32], {0: message})
            indices, _, _ = self.registry.add_items([f"item-{n}" for n in range(3 * number, 3 * number + 4)])
            self.registry.hold(slot, indices)
        self.servers = ItemServers("run", self.registry, lambda party: party not in self.absent)
        self.servers.ask(7, 5, PATIENCE_S)

    def submit(
        self, slot: int, items: list[int], new: list[int] | None = None, *, round_: int = 7, **changes: Any
    ) -> None:
        new = [] if new is None else new
        message = wire.ItemFactors(
            **{
                "version": 5,
                "items": to_wire(np.array(items, np.uint32)),
                "pull": to_wire(np.full((len(items), K), slot + 1, np.float32)),
                "new_items": to_wire(np.array(new, np.uint32)),
                "rows": to_wire(np.full((len(new), K), slot + 10, np.float32)),
                **changes,
            }
        )
        head = wire.SubmitRequest(round=RoundRef(run_id="run", round=round_))
        self.servers.submitted(head, [slot], message.SerializeToString())


def answered(world: World) -> tuple[list[dict[str, Any]], list[str]]:
    return asyncio.run(world.servers.answers(K))


def test_each_party_is_asked_for_its_own_owners_until_they_have_answered() -> None:
    world = World()
    (task,) = world.servers.tasks([0])
    assert (task.kind, task.version, task.round.round) == (wire.TaskKind.TASK_KIND_ITEM_FACTORS, 5, 7)
    assert [(one.first, one.count) for one in task.slots] == [(0, 1)]
    world.submit(0, [0, 1, 2])
    assert world.servers.tasks([0]) == []
    assert len(world.servers.tasks([1])) == 1
    world.servers.ask(8, 6, PATIENCE_S)
    assert len(world.servers.tasks([0])) == 1


def test_what_all_told_is_there_at_once() -> None:
    world = World()
    world.submit(0, [0, 2, 3], [1])
    world.submit(1, [], [])
    told, silent = answered(world)
    assert silent == []
    assert told[0]["items"].tolist() == [0, 2, 3]
    assert told[0]["pull"].tolist() == [[1.0] * K] * 3
    assert told[0]["new_items"].tolist() == [1]
    assert told[0]["rows"].tolist() == [[10.0] * K]
    # One that knows nothing is no silent one.
    assert [one["pull"].shape for one in told] == [(3, K), (0, K)]


def test_an_owner_that_tells_again_is_believed_the_last_time() -> None:
    world = World()
    world.submit(0, [0, 1])
    world.submit(0, [2])
    world.submit(1, [])
    assert answered(world)[0][0]["items"].tolist() == [2]


def test_nobody_waits_for_an_owner_that_is_lost() -> None:
    world = World()
    world.submit(0, [0])
    world.absent.add("data-owner/films")
    told, silent = answered(world)
    assert (len(told), silent) == (1, ["films"])


def test_who_says_nothing_within_the_time_of_a_step_is_done_without() -> None:
    world = World()
    world.servers.ask(7, 5, 0.05)
    world.submit(1, [3])
    told, silent = answered(world)
    assert (len(told), silent) == (1, ["books"])


def test_an_answer_that_comes_while_it_is_waited_for_counts() -> None:
    world = World()
    world.submit(0, [0])

    async def late() -> tuple[list[dict[str, Any]], list[str]]:
        waiting = asyncio.create_task(world.servers.answers(K))
        await asyncio.sleep(0)
        assert not waiting.done()
        world.submit(1, [4])
        return await waiting

    told, silent = asyncio.run(late())
    assert (len(told), silent) == (2, [])


def test_rows_of_another_length_count_as_none() -> None:
    world = World()
    world.submit(0, [0], pull=to_wire(np.zeros((1, K + 1), np.float32)))
    world.submit(1, [])
    assert answered(world)[1] == ["books"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"items": [0], "round_": 6}, ErrorReason.ERROR_REASON_UNKNOWN_ROUND),
        ({"items": [0], "version": 4}, ErrorReason.ERROR_REASON_UNKNOWN_ROUND),
        ({"items": [4]}, ErrorReason.ERROR_REASON_UNKNOWN_ITEM),
        ({"items": [], "new": [4]}, ErrorReason.ERROR_REASON_UNKNOWN_ITEM),
        ({"items": [99]}, ErrorReason.ERROR_REASON_UNKNOWN_ITEM),
        ({"items": [1, 0]}, ErrorReason.ERROR_REASON_INVALID_FIELD),
        ({"items": [0, 1], "new": [1]}, ErrorReason.ERROR_REASON_INVALID_FIELD),
        (
            {"items": [0], "pull": to_wire(np.full((1, K), np.nan, np.float32))},
            ErrorReason.ERROR_REASON_NOT_FINITE,
        ),
        (
            {"items": [0], "pull": to_wire(np.zeros((2, K), np.float32))},
            ErrorReason.ERROR_REASON_WRONG_SHAPE,
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(given: dict[str, Any], reason: int) -> None:
    world = World()
    with pytest.raises(Refusal) as caught:
        world.submit(0, **given)
    assert caught.value.reason == reason
    assert len(world.servers.tasks([0])) == 1


def test_an_answer_is_of_one_owner_and_is_what_it_says() -> None:
    world = World()
    head = wire.SubmitRequest(round=RoundRef(run_id="run", round=7))
    message = wire.ItemFactors(version=5).SerializeToString()
    with pytest.raises(Refusal, match="item factors for 2 slots"):
        world.servers.submitted(head, [0, 1], message)
    with pytest.raises(Refusal, match="the payload is no ItemFactors"):
        world.servers.submitted(head, [0], b"\xff")
