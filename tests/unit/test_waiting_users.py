"""Users outside the population: the server looks at each of them once, and again only when there may be more."""

from __future__ import annotations

import pytest
from coterie_cos.participants import Registry
from coterie_cos.waiting_users import WaitingUsers

from coterie.wire.v1 import orchestrator_pb2 as wire


class _Counting(Registry):
    """A registry that counts how often participants are read."""

    reads = 0

    def registered(self, slot: int):  # type: ignore[no-untyped-def]
        self.reads += 1
        return super().registered(slot)


@pytest.fixture
def registry() -> _Counting:
    one = _Counting("run")
    owner = wire.Participant(kind=wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER, name="zoo")
    one.add("data-owner/zoo", [b"o" * 32], {0: owner})
    one.add("client/many", [n.to_bytes(32, "big") for n in range(1000)], {})
    return one


def nobody(_: bytes) -> bool:
    return False


def test_users_outside_the_population_are_found_who_are_present_and_not_revoked(registry: _Counting) -> None:
    waiting = WaitingUsers(registry, range(1, 1001))
    registry.add("client/b", [b"b" * 32, b"c" * 32], {})
    registry.add("key-holder/k", [b"k" * 32], {}, holders=True)
    registry.add("client/a", [b"a" * 32], {})
    registry.add("client/many", [b"m" * 32], {})
    slots = {name: registry.slot_of(name * 32) for name in (b"a", b"b", b"c", b"m")}
    assert waiting.present(lambda _: True, nobody) == sorted(slots.values())
    assert waiting.present("client/b".__eq__, nobody) == [slots[b"b"], slots[b"c"]]
    assert waiting.present("client/b".__eq__, (b"b" * 32).__eq__) == [slots[b"c"]]


def test_nobody_of_the_population_is_read_and_each_other_one_when_it_comes(registry: _Counting) -> None:
    waiting = WaitingUsers(registry, range(1, 1001))
    waiting.present(lambda _: True, nobody)
    registry.reads = 0
    registry.add("client/b", [b"b" * 32], {})
    assert len(waiting.present(lambda _: True, nobody)) == 1
    assert registry.reads <= 2


def test_it_is_settled_until_a_user_registers_or_a_party_with_users_outside_comes_back(
    registry: _Counting,
) -> None:
    waiting = WaitingUsers(registry, range(1, 1001))
    registry.add("client/b", [b"b" * 32], {})
    assert not waiting.settled
    waiting.present(lambda _: True, nobody)
    assert not waiting.settled
    waiting.settle()
    assert waiting.settled
    # All users of this one are in the population.
    waiting.came("client/many")
    assert waiting.settled
    waiting.came("client/b")
    assert not waiting.settled
    waiting.settle()
    registry.add("client/c", [b"c" * 32], {})
    assert not waiting.settled


def test_users_who_were_taken_in_wait_no_more_and_nobody_else_is_read_for_that(registry: _Counting) -> None:
    waiting = WaitingUsers(registry, range(1, 1001))
    registry.add("client/b", [b"b" * 32, b"c" * 32], {})
    found = waiting.present(lambda _: True, nobody)
    waiting.settle()
    registry.reads = 0
    # One of them, and one who was not looked at yet.
    registry.add("client/c", [b"d" * 32], {})
    late = registry.slot_of(b"d" * 32)
    assert late is not None
    waiting.took_in([found[0], late])
    assert not waiting.settled
    assert registry.reads <= 4
    assert waiting.present(lambda _: True, nobody) == found[1:]
