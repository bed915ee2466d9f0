"""Events of a run at the COS: few of them are in memory, and watchers have all of them."""

import json

import pytest
from coterie_cos import told_events

from coterie.errors import StoreError
from coterie.store import cos as store
from coterie.wire.v1 import operator_pb2 as operator

from ..population_stand import Stand

JOINED = 40
WAITS = 12


@pytest.fixture
async def stand(tmp_path, monkeypatch):
    """Return a run of which five events are in memory, three are read at once, and four parties are listed."""
    monkeypatch.setattr(told_events, "_IN_MEMORY", 5)
    monkeypatch.setattr(told_events, "_PAGE", 3)
    monkeypatch.setattr(told_events, "_LISTED", 4)
    stand = Stand(tmp_path)
    yield stand
    await stand.run.drop()
    stand.writer.close()


def joined(number):
    party = operator.PartyEvent(party=f"client/late-{number}", change="joined")
    return operator.WatchRunResponse(party=party)


async def come(run, parties=range(JOINED)):
    for number in parties:
        await run.emit(joined(number))


async def numbered(run, first, last):
    """Return the numbers that a watcher is told from the first on, until the last."""
    found = []
    async for event in run.watch(first):
        if event.number:
            found.append(event.number)
        if event.number == last:
            return found
    return found


async def test_however_many_parties_join_few_events_are_in_memory(stand):
    await come(stand.run)
    assert stand.run._events.last >= JOINED
    assert len(list(stand.run._events)) == 5
    await stand.restart()
    assert stand.run._events.last >= JOINED
    assert len(list(stand.run._events)) == 5


async def test_a_watcher_has_every_event_from_any_number_on_also_after_a_restart(stand):
    await come(stand.run)
    last = stand.run._events.last
    for first in (0, 1, 2, last - 6, last - 5, last - 4, last):
        assert await numbered(stand.run, first, last) == list(range(max(first, 1), last + 1))
    await stand.restart()
    assert await numbered(stand.run, 1, last) == list(range(1, last + 1))


async def test_a_slow_watcher_misses_nothing_while_parties_join(stand):
    await come(stand.run)
    watching = stand.run.watch(1)
    seen = [(await anext(watching)).number]
    # Events leave the memory meanwhile.
    await come(stand.run, range(JOINED, 2 * JOINED))
    last = stand.run._events.last
    async for event in watching:
        if event.number:
            seen.append(event.number)
        if event.number == last:
            break
    assert seen == list(range(1, last + 1))
    await watching.aclose()


async def test_an_event_that_the_store_lost_ends_the_watching_and_not_the_waiting(stand):
    await come(stand.run)
    await stand.writer.run(
        lambda connection: connection.execute(store.events.delete().where(store.events.c.number == 2))
    )
    with pytest.raises(StoreError, match="the store has no event 2 of the run run"):
        await numbered(stand.run, 2, stand.run._events.last)


async def test_the_report_lists_the_last_changes_and_waits_and_counts_all_changes(stand):
    await come(stand.run)
    phase = operator.PhaseEvent(phase=operator.RunPhase.RUN_PHASE_ROUNDS)
    await stand.run.emit(operator.WatchRunResponse(phase=phase))
    for number in range(WAITS):
        await stand.run.emit(operator.WatchRunResponse(wait=operator.WaitEvent(reason=f"{number}")))
    for _ in range(2):
        report = json.loads(stand.run.report())
        assert [one["party"] for one in report["parties"]] == [
            f"client/late-{number}" for number in range(JOINED - 4, JOINED)
        ]
        assert report["party_changes"] == {"joined": JOINED}
        assert [one["reason"] for one in report["waits"]] == ["8", "9", "10", "11"]
        assert [one["phase"] for one in report["phases"]] == ["rounds"]
        await stand.restart()


# --- events that are counted only


@pytest.fixture
def bounded(monkeypatch):
    """Have the store keep six changes of parties, and drop earlier ones two at a time."""
    monkeypatch.setattr(told_events, "_STORED", 6)
    monkeypatch.setattr(told_events, "_BATCH", 2)
    monkeypatch.setattr(told_events, "_AT_ONCE", 5)


def rows(stand):
    with stand.engine.connect() as connection:
        return [
            operator.WatchRunResponse.FromString(message)
            for message in store.read_events(connection, "run", 1, 1_000)
        ]


async def test_the_store_keeps_the_last_changes_of_parties_and_counts_those_before(stand, bounded):
    phase = operator.PhaseEvent(phase=operator.RunPhase.RUN_PHASE_ROUNDS)
    lied = operator.PartyEvent(party="key-holder/k", change="lied")
    await stand.run.emit(operator.WatchRunResponse(phase=phase))
    await stand.run.emit(operator.WatchRunResponse(party=lied))
    for turn in range(2):
        await come(stand.run)
        kept = rows(stand)
        # One more is written with the write that drops two.
        assert len(kept) <= 2 + 6 + 2
        assert [one.WhichOneof("event") for one in kept[:2]] == ["phase", "party"]
        assert kept[-1].number == stand.run._events.last == 2 + (turn + 1) * JOINED
        for _ in range(2):
            report = json.loads(stand.run.report())
            assert report["party_changes"] == {"joined": (turn + 1) * JOINED, "lied": 1}
            assert [one["phase"] for one in report["phases"]] == ["rounds"]
            await stand.restart()


async def test_a_watcher_from_the_beginning_has_all_events_that_there_are(stand, bounded):
    await come(stand.run)
    for _ in range(2):
        kept = [one.number for one in rows(stand)]
        assert await numbered(stand.run, 1, kept[-1]) == kept
        assert await numbered(stand.run, kept[1], kept[-1]) == kept[1:]
        await stand.restart()
    # One that is missing behind those is an error as ever.
    late = kept[1]
    await stand.writer.run(
        lambda connection: connection.execute(store.events.delete().where(store.events.c.number == late))
    )
    with pytest.raises(StoreError, match=f"the store has no event {late} of the run run"):
        await numbered(stand.run, late, kept[-1])


async def test_a_store_of_an_earlier_release_loses_its_many_changes_a_few_at_a_time(stand, monkeypatch):
    await come(stand.run)
    assert len(rows(stand)) == JOINED
    monkeypatch.setattr(told_events, "_STORED", 6)
    monkeypatch.setattr(told_events, "_BATCH", 2)
    monkeypatch.setattr(told_events, "_AT_ONCE", 5)
    await stand.restart()
    sizes = []
    for number in range(JOINED, JOINED + 10):
        await come(stand.run, [number])
        sizes.append(len(rows(stand)))
    assert sizes[0] == JOINED + 1 - 5
    assert sizes[-1] <= 6 + 2
    await stand.restart()
    assert json.loads(stand.run.report())["party_changes"] == {"joined": JOINED + 10}
