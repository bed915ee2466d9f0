"""When a holder of a run's key makes another."""

import asyncio
from types import SimpleNamespace
from typing import Any

from coterie.parties.rotation import Rotation


class Keys:
    """What a rotation uses of a custody; a key is complete as soon as it is made."""

    def __init__(self) -> None:
        self.current = holding(1)
        self.made = 0

    async def rotate(self):
        self.made += 1
        self.current = holding(self.current.record.epoch + 1)
        return self.current

    def destroy_below(self, epoch):
        return []


def holding(epoch: int):
    return SimpleNamespace(record=SimpleNamespace(epoch=epoch))


async def serve(rotation: Any, key: int, *rounds: int) -> None:
    for number in rounds:
        plan = SimpleNamespace(key_id=bytes([key]), round=number)
        rotation.serving(plan, SimpleNamespace(epoch=key))
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_another_key_is_made_after_so_many_rounds_under_one():
    keys = Keys()
    rotation: Any = Rotation(keys, 3, lambda: True)  # type: ignore[arg-type]
    await serve(rotation, 1, 1, 2)
    assert keys.made == 0
    await serve(rotation, 1, 3)
    assert keys.made == 1
    await serve(rotation, 2, 4, 5)
    assert keys.made == 1
    await serve(rotation, 2, 6)
    assert keys.made == 2


async def test_a_round_that_was_planned_before_the_server_took_the_new_key_starts_no_second_rotation():
    keys = Keys()
    rotation: Any = Rotation(keys, 3, lambda: True)  # type: ignore[arg-type]
    await serve(rotation, 1, 1, 2, 3, 4, 5)
    assert keys.made == 1
    await serve(rotation, 2, 6, 7, 8)
    assert keys.made == 2


async def test_only_the_holder_whose_turn_it_is_makes_a_key():
    keys = Keys()
    rotation: Any = Rotation(keys, 1, lambda: False)  # type: ignore[arg-type]
    await serve(rotation, 1, 1, 2, 3)
    assert keys.made == 0
