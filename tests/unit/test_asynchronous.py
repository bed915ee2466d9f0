from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coterie.systems.drift import published_run
from coterie.systems.drift.published_run import (
    CatalogueChanged,
    Event,
    ExchangesLost,
    Measured,
    OwnerJoined,
    PartyLost,
    PartySeen,
    PassDone,
    PointOpened,
    PublishedPhase,
    RecordsDelivered,
    RunResumed,
    RunState,
    Stopped,
    Task,
    TaskKind,
    UsersJoined,
    delivered,
    host_tasks,
    lacking,
    next_epoch,
    owner_task,
    pass_complete,
    step,
    waiting_for,
)
from tests.transition_table import observed, printed, reached

EPOCHS = 3
ORDER = [PublishedPhase.GATHER, PublishedPhase.TRAIN, PublishedPhase.EVALUATE, PublishedPhase.DONE]


def start(*, epochs: int = EPOCHS, owners: int = 1, users: int = 1) -> RunState:
    return RunState(epochs=epochs, expect_owners=owners, expect_users=users)


def carried_out(state: RunState, *events: Event) -> RunState:
    """Return the state after events, as a server carries them out: a complete pass opens the next epoch."""
    for event in events:
        state = step(state, event)
        while state.phase is PublishedPhase.TRAIN and pass_complete(state):
            state = next_epoch(step(state, PointOpened(state.epoch, version=100 * state.epoch)))
    return state


def training(*extra: Event, epochs: int = EPOCHS) -> RunState:
    """Return a run in its first epoch with owner 0 and host "h", who has delivered."""
    begun = (OwnerJoined(0, "a"), CatalogueChanged(1), UsersJoined("h", 2), RecordsDelivered("h", 1))
    return carried_out(start(epochs=epochs), *begun, *extra)


def tasks_of(state: RunState) -> dict[object, list[Task]]:
    """Return everything that anybody is asked."""
    found: dict[object, list[Task]] = {name: list(host_tasks(state, name)) for name in state.hosts}
    for slot in state.owners:
        task = owner_task(state, slot)
        found[slot] = [task] if task is not None else []
    return found


def kinds(tasks: list[Task]) -> list[TaskKind]:
    return [task.kind for task in tasks]


# --- One after the other -----------------------------------------------------------------------------------------


def test_training_begins_when_everybody_expected_has_come_and_not_before() -> None:
    state = start(owners=2, users=3)
    events = [OwnerJoined(0, "a"), UsersJoined("h", 2), OwnerJoined(1, "b"), UsersJoined("h", 3)]
    phases = []
    for event in events:
        state = carried_out(state, event)
        phases.append(state.phase)
    assert phases == [PublishedPhase.GATHER] * 3 + [PublishedPhase.TRAIN]
    assert state.epoch == 1


def test_without_an_owner_there_is_nothing_to_train_on_even_when_none_is_expected() -> None:
    state = carried_out(start(owners=0, users=0), UsersJoined("h", 1))
    assert state.phase is PublishedPhase.GATHER
    assert carried_out(state, OwnerJoined(0, "a")).phase is PublishedPhase.TRAIN


def test_whoever_was_lost_while_gathering_is_waited_for_again() -> None:
    state = carried_out(start(), OwnerJoined(0, "a"), PartyLost("a"), UsersJoined("h", 1))
    assert state.phase is PublishedPhase.GATHER
    assert carried_out(state, PartySeen("a")).phase is PublishedPhase.TRAIN
    # Registering is being there.
    assert carried_out(state, OwnerJoined(0, "a")).phase is PublishedPhase.TRAIN
    state = carried_out(start(), UsersJoined("h", 1), PartyLost("h"), OwnerJoined(0, "a"))
    assert state.phase is PublishedPhase.GATHER
    assert carried_out(state, UsersJoined("h", 1)).phase is PublishedPhase.TRAIN


def test_an_owner_closes_its_trailing_blocks_once_every_host_has_delivered() -> None:
    state = carried_out(start(users=2), OwnerJoined(0, "a"), UsersJoined("h", 1), UsersJoined("i", 1))
    state = carried_out(state, CatalogueChanged(1), RecordsDelivered("h", 1))
    assert owner_task(state, 0) == Task(TaskKind.INTAKE, epoch=1, flush=False)
    assert owner_task(carried_out(state, RecordsDelivered("i", 1)), 0) == Task(
        TaskKind.INTAKE, epoch=1, flush=True
    )
    # A host that is away is not waited for.
    assert owner_task(carried_out(state, PartyLost("i")), 0) == Task(TaskKind.INTAKE, epoch=1, flush=True)


def test_a_new_catalogue_has_to_be_delivered_again() -> None:
    state = training()
    assert not kinds(list(host_tasks(state, "h")))
    state = carried_out(state, OwnerJoined(1, "b"), CatalogueChanged(2))
    assert list(host_tasks(state, "h")) == [Task(TaskKind.DELIVER, epoch=1, version=2)]
    assert not delivered(state)


def test_no_owner_waits_for_another_within_an_epoch_and_all_wait_at_its_end() -> None:
    state = training(OwnerJoined(1, "b"), PassDone(0, 1))
    assert owner_task(state, 0) is None
    assert owner_task(state, 1) == Task(TaskKind.INTAKE, epoch=1, flush=True)
    state = carried_out(state, PassDone(1, 1))
    assert state.epoch == 2
    assert owner_task(state, 0) == owner_task(state, 1) == Task(TaskKind.EPOCH, epoch=2, flush=True)


def test_an_owner_that_joins_late_begins_with_an_intake_in_the_present_epoch() -> None:
    state = carried_out(training(PassDone(0, 1)), OwnerJoined(1, "b"))
    assert state.epoch == 2
    assert owner_task(state, 1) == Task(TaskKind.INTAKE, epoch=2, flush=True)
    assert owner_task(state, 0) == Task(TaskKind.EPOCH, epoch=2, flush=True)
    # Registering again, as after a restart, does not make it new.
    state = carried_out(state, PassDone(0, 2), PassDone(1, 2), OwnerJoined(1, "b"))
    assert owner_task(state, 1) == Task(TaskKind.EPOCH, epoch=3, flush=True)


def test_an_owner_that_is_lost_holds_nobody_up_and_goes_on_where_the_others_are() -> None:
    state = training(OwnerJoined(1, "b"), PassDone(0, 1))
    state = carried_out(state, PartyLost("b"))
    assert state.epoch == 2
    state = carried_out(state, PartySeen("b"))
    assert owner_task(state, 1) == Task(TaskKind.EPOCH, epoch=2, flush=True)


def test_while_every_owner_is_away_the_run_stands_still() -> None:
    state = training(PartyLost("a"))
    assert (state.phase, state.epoch) == (PublishedPhase.TRAIN, 1)
    assert waiting_for(state) == "no data owner is left"
    assert carried_out(state, PartySeen("a"), PassDone(0, 1)).epoch == 2


def test_evaluations_do_not_hold_up_training_and_are_answered_in_their_order() -> None:
    state = training(PassDone(0, 1), PassDone(0, 2))
    assert (state.epoch, [point.number for point in state.points]) == (3, [1, 2])
    assert list(host_tasks(state, "h")) == [Task(TaskKind.EVALUATE, epoch=1, version=100, point=1)]
    state = carried_out(state, Measured("h", 1))
    assert [point.number for point in state.points] == [2]
    assert list(host_tasks(state, "h")) == [Task(TaskKind.EVALUATE, epoch=2, version=200, point=2)]


def test_the_run_ends_when_the_last_evaluation_is_answered() -> None:
    state = training(PassDone(0, 1), epochs=1)
    assert state.phase is PublishedPhase.EVALUATE
    assert owner_task(state, 0) is None
    state = carried_out(state, Measured("h", 1))
    assert (state.phase, state.reason) == (PublishedPhase.DONE, "")
    assert tasks_of(state) == {0: [Task(TaskKind.FINISH)], "h": [Task(TaskKind.FINISH)]}


def test_a_host_that_comes_late_takes_no_part_in_evaluations_opened_before() -> None:
    state = training(PassDone(0, 1), UsersJoined("late", 5), RecordsDelivered("late", 1))
    assert list(host_tasks(state, "late")) == []
    state = carried_out(state, PassDone(0, 2))
    assert [task.point for task in host_tasks(state, "late")] == [2]


def test_a_host_that_is_lost_is_not_waited_for_and_answers_what_is_still_open_when_it_returns() -> None:
    state = training(UsersJoined("i", 1), RecordsDelivered("i", 1), PassDone(0, 1), PartyLost("i"))
    assert [point.number for point in state.points] == [1]
    assert [task.point for task in host_tasks(carried_out(state, PartySeen("i")), "i")] == [1]
    assert carried_out(state, Measured("h", 1)).points == ()


def test_while_every_host_is_away_the_newest_evaluation_waits_and_training_goes_on() -> None:
    state = training(PartyLost("h"), PassDone(0, 1), PassDone(0, 2), epochs=2)
    assert state.phase is PublishedPhase.EVALUATE
    assert [point.number for point in state.points] == [2]
    assert lacking(state) == ("no client host is there", ("h",))
    state = carried_out(state, PartySeen("h"))
    assert lacking(state) == ("", ())
    assert [task.point for task in host_tasks(state, "h")] == [2]
    assert carried_out(state, Measured("h", 2)).phase is PublishedPhase.DONE


def test_owners_do_not_close_their_blocks_while_all_hosts_are_away_with_records() -> None:
    state = carried_out(start(users=2), OwnerJoined(0, "a"), CatalogueChanged(1), UsersJoined("h", 2))
    state = carried_out(state, PartyLost("h"))
    assert owner_task(state, 0) == Task(TaskKind.INTAKE, epoch=1, flush=False)
    assert lacking(state) == ("no client host is there", ("h",))
    # A host that has delivered is not missed before the end.
    assert lacking(training(PartyLost("h"))) == ("", ())


def test_a_run_lacks_owners_only_while_none_is_there() -> None:
    state = training(OwnerJoined(1, "b"), PartyLost("b"))
    assert lacking(state) == ("", ())
    state = carried_out(state, PartyLost("a"))
    assert lacking(state) == ("no data owner is there", ("a", "b"))
    assert lacking(carried_out(state, PartySeen("b"))) == ("", ())
    assert lacking(carried_out(start(), OwnerJoined(0, "a"), PartyLost("a"))) == ("", ())


def test_a_host_with_more_users_has_everything_to_deliver_again() -> None:
    assert not kinds(list(host_tasks(training(UsersJoined("h", 2)), "h")))
    assert kinds(list(host_tasks(training(UsersJoined("h", 3)), "h"))) == [TaskKind.DELIVER]


def test_a_report_that_comes_twice_or_late_changes_nothing() -> None:
    state = training(OwnerJoined(1, "b"), PassDone(0, 1), PassDone(1, 1), PassDone(0, 2))
    for late in (
        PassDone(0, 1),
        PassDone(0, 2),
        RecordsDelivered("h", 0),
        RecordsDelivered("h", 1),
        CatalogueChanged(0),
    ):
        assert carried_out(state, late) == state
    measured = carried_out(state, Measured("h", 1), Measured("h", 2))
    assert carried_out(measured, Measured("h", 1)) == measured


def test_stopping_ends_the_run_for_everybody_with_the_reason() -> None:
    state = training(Stopped("enough"))
    assert state.phase is PublishedPhase.FAILED
    assert tasks_of(state) == {key: [Task(TaskKind.FINISH, reason="enough")] for key in (0, "h")}


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([], "0 of 1 data owners and 0 of 1 users came"),
        ([OwnerJoined(0, "a")], "1 of 1 data owners and 0 of 1 users came"),
        ([OwnerJoined(0, "a"), UsersJoined("h", 1)], "a"),
        ([OwnerJoined(0, "a"), UsersJoined("h", 1), CatalogueChanged(1)], "a, h"),
        ([OwnerJoined(0, "a"), UsersJoined("h", 1), OwnerJoined(1, "b"), PassDone(0, 1)], "b"),
        ([OwnerJoined(0, "a"), OwnerJoined(1, "a"), UsersJoined("h", 1)], "a"),
    ],
)
def test_the_reason_of_a_timeout_names_whom_the_run_waits_for(events: list[Event], named: str) -> None:
    assert waiting_for(carried_out(start(), *events)) == named


# --- In any order ------------------------------------------------------------------------------------------------

SLOTS = st.integers(0, 3)
HOSTS = st.sampled_from(["h", "i", "j"])
# Owners 2 and 3 are of one process.
PARTY_OF = {0: "a", 1: "b", 2: "c", 3: "c"}
PARTIES = st.sampled_from(["a", "b", "c", "h", "i", "j"])

EVENTS = st.one_of(
    st.builds(lambda slot: OwnerJoined(slot, PARTY_OF[slot]), SLOTS),
    st.builds(UsersJoined, HOSTS, st.integers(1, 3)),
    st.builds(CatalogueChanged, st.integers(0, 9)),
    st.builds(PartyLost, PARTIES),
    st.builds(PartySeen, PARTIES),
    st.builds(PointOpened, st.integers(1, EPOCHS), st.integers(0, 99)),
    st.builds(Stopped, st.text(max_size=5), st.booleans()),
    st.just(RunResumed()),
)


@given(st.lists(EVENTS, max_size=30))
def test_a_state_comes_back_from_the_store_as_it_was_and_asks_the_same(events: list[Event]) -> None:
    state = start(owners=2, users=2)
    for event in events:
        state = carried_out(state, event)
        restored = RunState.from_json(state.to_json())
        assert restored == state
        assert tasks_of(restored) == tasks_of(state)
        assert waiting_for(restored) == waiting_for(state)


@given(st.lists(EVENTS, max_size=20), st.lists(EVENTS, max_size=10))
def test_a_run_that_ended_for_good_does_not_change_any_more(before: list[Event], after: list[Event]) -> None:
    running = [event for event in before if not isinstance(event, Stopped)]
    ended = carried_out(start(), *running, Stopped("over"))
    assert ended.phase.ended
    assert carried_out(ended, *after) == ended


def test_a_run_that_may_be_resumed_notes_what_parties_did_since_and_goes_on_where_it_failed() -> None:
    training = carried_out(start(owners=2), OwnerJoined(0, "a"), OwnerJoined(1, "b"), UsersJoined("h", 1))
    failed = step(training, Stopped("nobody was there", may_pass=True))
    assert (failed.phase, failed.may_pass, failed.reason) == (PublishedPhase.FAILED, True, "nobody was there")
    assert tasks_of(failed) == tasks_of(step(training, Stopped("nobody was there")))
    meanwhile = carried_out(failed, PartyLost("b"), PassDone(0, 1), CatalogueChanged(7))
    assert meanwhile.phase is PublishedPhase.FAILED
    resumed = step(RunState.from_json(meanwhile.to_json()), RunResumed())
    assert (resumed.phase, resumed.epoch, resumed.reason) == (PublishedPhase.TRAIN, 1, "")
    assert (resumed.resumes, resumed.may_pass) == (1, False)
    assert resumed.owners[0].done_epoch == 1
    assert not resumed.owners[1].present
    assert resumed.catalogue == 7
    assert pass_complete(resumed)


@pytest.mark.parametrize("meanwhile", [Measured("second", 1), PartyLost("second")], ids=["late", "gone"])
def test_an_evaluation_that_ended_while_the_run_had_failed_is_open_until_its_figures_can_be_stored(
    meanwhile: Event,
) -> None:
    state = RunState(epochs=1, expect_owners=1, expect_users=2)
    for event in (
        OwnerJoined(0, "owner"),
        *(UsersJoined(host, 1) for host in ("first", "second")),
        CatalogueChanged(1),
        *(RecordsDelivered(host, 1) for host in ("first", "second")),
        PassDone(0, 1),
        PointOpened(1, 5),
    ):
        state = step(state, event)
    state = step(next_epoch(state), Measured("first", 1))
    failed = step(state, Stopped("it took too long", may_pass=True))
    resumed = step(step(failed, meanwhile), RunResumed())
    assert resumed.phase is PublishedPhase.EVALUATE
    assert [point.version for point in resumed.points] == [5]
    after = published_run.advanced(resumed)
    assert (after.phase, after.points) == (PublishedPhase.DONE, ())


def test_a_run_that_never_failed_is_stored_as_by_releases_that_resume_none() -> None:
    assert not {"may_pass", "failed_in", "resumes"} & json.loads(start().to_json()).keys()


@given(st.lists(EVENTS, max_size=30))
def test_events_make_new_states_and_leave_the_old_ones_alone(events: list[Event]) -> None:
    state = start()
    for event in events:
        kept = state.to_json()
        after = carried_out(state, event)
        assert state.to_json() == kept
        state = after


class Schedule(RuleBasedStateMachine):
    """A run whose parties come, work, fall silent, return and join in any order; the server restarts at any time.

    Parties report what they are asked, late ones also what they were asked before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = start(owners=2, users=2)
        self.asked: list[Event] = []

    def take(self, event: Event) -> None:
        """Carry out an event, and check what may change and what may not."""
        before, self.state = self.state, carried_out(self.state, event)
        after = self.state
        if PublishedPhase.FAILED not in (before.phase, after.phase):
            assert ORDER.index(after.phase) >= ORDER.index(before.phase)
        assert before.epoch <= after.epoch <= EPOCHS
        assert after.epoch - before.epoch <= 1
        if after.epoch > before.epoch and before.epoch:
            # Only who is present counts; of those everybody has done the epoch that ended.
            assert all(o.done_epoch >= before.epoch for o in after.owners.values() if o.present)
            assert any(o.present for o in after.owners.values())
        assert after.catalogue >= before.catalogue
        assert after.points_opened >= before.points_opened
        for point in before.points:
            if point not in after.points and not after.phase.ended:
                assert all(h.reported >= point.number for h in after.hosts.values() if h.present)
        for slot, owner in before.owners.items():
            assert after.owners[slot].joined_epoch == owner.joined_epoch
            assert after.owners[slot].done_epoch >= owner.done_epoch

    # --- what may happen -----------------------------------------------------------------------------------------

    @rule(slot=SLOTS)
    def an_owner_registers(self, slot: int) -> None:
        known = self.state.owners.get(slot)
        self.take(OwnerJoined(slot, PARTY_OF[slot]))
        if known is None and not self.state.phase.ended:
            self.take(CatalogueChanged(self.state.catalogue + 1))

    @rule(host=HOSTS, users=st.integers(1, 3))
    def a_host_registers(self, host: str, users: int) -> None:
        self.take(UsersJoined(host, users))

    @rule(party=PARTIES)
    def a_party_is_lost(self, party: str) -> None:
        self.take(PartyLost(party))

    @rule(party=PARTIES)
    def a_party_is_heard_again(self, party: str) -> None:
        self.take(PartySeen(party))

    @rule(data=st.data())
    def somebody_does_what_it_is_asked(self, data: st.DataObject) -> None:
        self.asked += open_reports(self.state)
        if self.asked:
            self.take(data.draw(st.sampled_from(self.asked)))

    @precondition(lambda self: self.state.phase is PublishedPhase.TRAIN)
    @rule()
    def an_evaluation_is_opened_within_an_epoch(self) -> None:
        self.take(PointOpened(self.state.epoch, version=100 * self.state.epoch + 1))

    @rule()
    def the_server_restarts(self) -> None:
        self.state = RunState.from_json(self.state.to_json())

    # --- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def points_are_numbered_in_the_order_in_which_they_were_opened(self) -> None:
        numbers = [point.number for point in self.state.points]
        assert numbers == sorted(set(numbers))
        assert all(number <= self.state.points_opened for number in numbers)

    @invariant()
    def nobody_has_done_what_has_not_begun(self) -> None:
        for owner in self.state.owners.values():
            assert owner.done_epoch <= self.state.epoch
            assert 1 <= owner.joined_epoch <= max(self.state.epoch, 1)
        for host in self.state.hosts.values():
            assert host.delivered <= self.state.catalogue
            assert host.reported <= self.state.points_opened

    @invariant()
    def an_owner_is_asked_for_the_present_epoch_only_and_for_its_intake_first(self) -> None:
        for slot, owner in self.state.owners.items():
            task = owner_task(self.state, slot)
            if task is None or task.kind is TaskKind.FINISH:
                assert self.state.phase is not PublishedPhase.TRAIN or owner.done_epoch == self.state.epoch
                continue
            assert (self.state.phase, task.epoch) == (PublishedPhase.TRAIN, self.state.epoch)
            assert owner.done_epoch < task.epoch
            assert (task.kind is TaskKind.INTAKE) == (owner.joined_epoch == task.epoch)
            assert task.flush == delivered(self.state)

    @invariant()
    def a_host_delivers_to_the_newest_catalogue_and_answers_one_evaluation_at_a_time(self) -> None:
        for name, host in self.state.hosts.items():
            tasks = list(host_tasks(self.state, name))
            assert len(kinds(tasks)) == len(set(kinds(tasks)))
            for task in tasks:
                if task.kind is TaskKind.DELIVER:
                    assert host.delivered < task.version == self.state.catalogue
                if task.kind is TaskKind.EVALUATE:
                    waiting = [p.number for p in self.state.points if p.number > host.reported]
                    assert task.point == min(waiting)

    @invariant()
    def a_run_that_has_not_ended_says_for_whom_it_waits(self) -> None:
        assert waiting_for(self.state)

    def teardown(self) -> None:
        """From wherever the run has come to, it ends as soon as those who are there do what they are asked."""
        state = to_the_end(self.state)
        assert state.phase is PublishedPhase.DONE
        assert state.epoch == EPOCHS
        assert not state.points


def open_reports(state: RunState) -> list[Event]:
    """Return what those who are present would report if they did everything that they are asked now."""
    if state.phase.ended:
        return []
    found: list[Event] = []
    for slot, owner in state.owners.items():
        task = owner_task(state, slot)
        # An intake ends when everything is delivered.
        if owner.present and task is not None and (task.kind is TaskKind.EPOCH or task.flush):
            found.append(PassDone(slot, task.epoch))
    for name, host in state.hosts.items():
        for task in host_tasks(state, name) if host.present else ():
            if task.kind is TaskKind.DELIVER:
                found.append(RecordsDelivered(name, task.version))
            else:
                found.append(Measured(name, task.point))
    return found


def to_the_end(state: RunState) -> RunState:
    """Let everybody come and work until nothing is asked any more."""
    for slot, party in PARTY_OF.items():
        state = carried_out(state, OwnerJoined(slot, party))
    state = carried_out(state, UsersJoined("h", 2), PartySeen("h"))
    # Each round ends an epoch or closes a point at the latest after the deliveries.
    for _ in range(10 * EPOCHS + 3 * len(state.points) + 10):
        reports = open_reports(state)
        if not reports:
            break
        state = carried_out(state, *reports)
    return state


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.permutations(range(4)), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_owners_may_work_in_any_order_and_the_epochs_pass_all_the_same(
    order: list[int], random: object
) -> None:
    state = start(owners=4, users=1)
    state = carried_out(state, *[OwnerJoined(slot, PARTY_OF[slot]) for slot in order], UsersJoined("h", 1))
    done: dict[int, list[int]] = {slot: [] for slot in order}
    choose: Callable[[list[Event]], Event] = random.choice  # type: ignore[attr-defined]
    while reports := open_reports(state):
        report = choose(reports)
        if isinstance(report, PassDone):
            done[report.slot].append(report.epoch)
        state = carried_out(state, report)
    assert state.phase is PublishedPhase.DONE
    # Each owner goes over its blocks exactly once in each epoch.
    assert done == {slot: list(range(1, EPOCHS + 1)) for slot in order}


# --- the printed table -------------------------------------------------------------------------------------------


def moves(state):
    """Yield what may come in a state and lead to another phase, now or later."""
    yield OwnerJoined(0, "owner")
    yield from (UsersJoined(host, 1) for host in ("first", "second"))
    yield from (Measured(host, point.number) for host in state.hosts for point in state.points)
    yield from (PassDone(slot, state.epoch) for slot in state.owners)
    for party in ("owner", "first", "second"):
        yield PartyLost(party)
        yield PartySeen(party)


def others(state):
    """Yield what else may come."""
    yield from (RecordsDelivered(host, 1) for host in state.hosts)
    yield from (ExchangesLost(slot, 1, 2) for slot in state.owners)
    yield CatalogueChanged(1)
    yield PointOpened(state.epoch, 0)
    yield Stopped("no more")
    yield RunResumed()


def passed(state):
    """Return a state after its complete pass, as the server makes it; None where the pass goes on."""
    if state.phase is not PublishedPhase.TRAIN or not pass_complete(state):
        return None
    return next_epoch(step(state, PointOpened(state.epoch, 0)))


def test_the_printed_table_is_what_step_does_in_every_phase_with_every_event():
    def onward(state):
        if state.phase.ended:
            return []
        after = passed(state)
        return [step(state, event) for event in moves(state)] if after is None else [after]

    def seen():
        first = RunState(epochs=2, expect_owners=1, expect_users=2)
        for state in reached(first, onward, repr):
            for event in (*moves(state), *others(state)):
                name = type(event).__name__
                yield name, state.phase, step(state, event).phase
                for ended in (PublishedPhase.DONE, PublishedPhase.FAILED):
                    yield name, ended, step(replace(state, phase=ended), event).phase
                failed = step(state, Stopped("no more", may_pass=True))
                yield name, failed.phase, step(failed, event).phase
            if passed(state) is not None:
                yield "(pass complete)", state.phase, passed(state).phase

    table = printed(published_run.__doc__)
    assert {name for name, _ in table} == {one.__name__ for one in get_args(Event)} | {"(pass complete)"}
    assert {phase for _, phase in table} == {phase.value for phase in PublishedPhase}
    assert table.pop(("RunResumed", "failed")) == {"(back)"}
    found = observed(seen())
    assert found.pop(("RunResumed", "failed")) == {"gather", "train", "evaluate", "failed"}
    assert {pair: phases for pair, phases in table.items() if phases} == found
