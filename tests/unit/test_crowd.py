"""A run with very many devices: what comes, goes or happens costs the server nothing that grows with all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from coterie_cos.rounds_run import RoundsRun

from coterie.wire.v1 import orchestrator_pb2 as wire
from tests.population_stand import HOSTS, SOON_S, Stand


class _Unread(list[Any]):
    """A list that nobody may go through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all participants were gone through")


class _Unlisted(dict[str, Any]):
    """A mapping that nobody may go through."""

    def items(self) -> Any:
        raise AssertionError("all parties were gone through")


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RoundsRun]:
    stand = Stand(tmp_path)
    stand.request.expect_users = 1000
    stand.run = stand._new()
    await stand.come()
    yield stand.run
    await stand.run.drop()
    stand.writer.close()


async def _join(run: RoundsRun, name: str, users: int = 1) -> None:
    run.registry.add(name, [name.encode().ljust(31, b"-") + bytes([n]) for n in range(users)], {})
    await run.joined(name, catalogue=False, more=True)


async def _polling(run: RoundsRun, party: str) -> asyncio.Task[wire.PollResponse]:
    """Return a poll that is held."""
    poll = asyncio.create_task(run.poll(party, (await run.poll(party, 0, 0)).revision, 20))
    async with asyncio.timeout(SOON_S):
        while party not in run._polling:
            await asyncio.sleep(0)
    return poll


async def test_a_device_that_comes_goes_or_returns_has_nobody_go_through_all_participants(
    run: RoundsRun,
) -> None:
    run.registry.by_slot = _Unread(run.registry.by_slot)
    await _join(run, "client/c")
    run._heard.pop("client/c").lost = True
    assert run.heard("client/c")
    await run.returned("client/c")
    await run.left("client/c")
    assert run.summary().hosts_alive == 2


async def test_hosts_and_users_that_are_present_are_counted_as_they_come_and_go(run: RoundsRun) -> None:
    assert (run.hosts_alive(), run.users_present) == (2, 4)
    await _join(run, "client/c", 3)
    assert (run.hosts_alive(), run.users_present) == (3, 7)
    # The same host comes again, with one user more.
    await _join(run, "client/c", 4)
    assert (run.hosts_alive(), run.users_present) == (3, 8)
    run._heard["client/c"].heard -= 3601
    run._heard.move_to_end("client/c", last=False)
    await run.tick()
    assert (run.hosts_alive(), run.users_present) == (2, 4)
    assert run.heard("client/c")
    assert (run.hosts_alive(), run.users_present) == (3, 8)
    await run.left("client/a")
    assert (run.hosts_alive(), run.users_present) == (2, 6)
    run.take_up_parties({"client/b": True, "client/c": False, "data-owner/zoo": True})
    assert (run.hosts_alive(), run.users_present) == (1, 2)


async def test_silent_parties_are_found_without_a_look_at_those_that_were_heard(run: RoundsRun) -> None:
    await _join(run, "client/c")
    run._parties = _Unlisted(run._parties)
    # The owner came first, and only it and client/a are heard again.
    for presence in run._heard.values():
        presence.heard -= 3601
    assert not run.heard("data-owner/zoo")
    assert not run.heard("client/a")
    await run.tick()
    assert {party for party in (*HOSTS, "client/c", "data-owner/zoo") if run.present(party)} == {
        "client/a",
        "data-owner/zoo",
    }


async def test_a_device_that_comes_wakes_no_other_one(run: RoundsRun) -> None:
    poll = await _polling(run, "client/a")
    held = run._polling["client/a"]
    await _join(run, "client/c")
    assert not held.is_set()
    run.touch()
    assert held.is_set()
    poll.cancel()


async def test_a_step_of_a_sum_wakes_its_members_those_of_the_step_before_and_nobody_else(
    run: RoundsRun,
) -> None:
    polls = [await _polling(run, party) for party in ("client/a", "client/b")]
    a, b = run._polling["client/a"], run._polling["client/b"]
    run.touch(["client/a"])
    assert (a.is_set(), b.is_set()) == (True, False)
    polls.append(await _polling(run, "client/a"))
    # All are woken in between, while the first one still has its task.
    run.touch()
    polls += [await _polling(run, party) for party in ("client/a", "client/b")]
    again, b = run._polling["client/a"], run._polling["client/b"]
    # The task of the first one may be gone with this step.
    run.touch(["client/b"])
    assert again.is_set()
    assert b.is_set()
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
