"""DRIFT's shielded form at the orchestration server's sockets: the test plays owners and a host."""

import asyncio
import hashlib
import itertools

import numpy as np
import pytest

from coterie.parties.party import Item, Registrant
from coterie.rounds.conductor import model_from_bytes
from coterie.secure_sum.clear import ClearMember
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import Step
from coterie.systems.drift.mathematics import initial_item_rows
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded_run import add_measured, evaluation_layout
from coterie.wire.refusal import reason_name
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

DIM, RATE, WAIT_S = 4, 0.25, 60.0
NUMBERS = itertools.count()
OWNER = wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER
USER = wire.ParticipantKind.PARTICIPANT_KIND_USER
SETTINGS = DriftSettings(form="shielded", dim=DIM, window=10, window_s=3600.0, join_s=2.0)
ITEMS = [f"item-{n}" for n in range(6)]


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        return {
            "one": await shared_third_party.enrol("data-owner", "windows-one", 1),
            "two": await shared_third_party.enrol("data-owner", "windows-two", 1),
            "host": await shared_third_party.enrol("client", "windows-host", 2),
        }

    return asyncio.run(enrol())


class Run:
    """A run of two owners and a host, all played by the test."""

    def __init__(self, cos, people, calls, secure_sum="clear"):
        self.cos, self.people, self.calls = cos, people, calls
        self.run = f"windows-{next(NUMBERS)}"
        self.secure_sum = secure_sum

    async def begin(self, operator):
        rounds = wire.RoundsPlan(
            cohorts=wire.CohortKind.COHORT_KIND_ALL, min_cohort=1, min_sum=1, experiment=True,
            step_timeout_ms=30_000,
        )  # fmt: skip
        self.operating = self.calls.Operating(self.cos, operator)
        await self.operating.start(
            self.run, owners=2, users=2, form="shielded", secure_sum=self.secure_sum, epochs=1,
            settings=SETTINGS.for_plan(), rounds=rounds,
        )  # fmt: skip
        self.parties = {
            name: self.calls.party_at(self.cos, who, self.run) for name, who in self.people.items()
        }
        for name, who in self.people.items():
            await self.parties[name].register(
                [
                    Registrant(identity, bundle, USER)
                    if who.role == "client"
                    else Registrant(
                        identity, bundle, OWNER, name=name, address="127.0.0.1:1", tls_name="x", items=ITEMS
                    )
                    for identity, bundle in zip(who.identities, who.bundles, strict=True)
                ]
            )
        return self

    def stub(self, name):
        return self.cos.channel(self.people[name]).stub(OrchestratorStub)

    async def task(self, name, wanted):
        """Wait for a task."""
        async with asyncio.timeout(WAIT_S):
            while True:
                answer = await self.stub(name).Poll(wire.PollRequest(run_id=self.run, cursor=0))
                for task in answer.tasks:
                    if wanted(task):
                        return task
                await asyncio.sleep(0.05)

    async def round(self, name, number=None):
        return await self.task(
            name,
            lambda task: task.kind == wire.TaskKind.TASK_KIND_ROUND and number in (None, task.round.round),
        )

    async def receive(self, name, wanted):
        return await self.task(
            name, lambda task: task.kind == wire.TaskKind.TASK_KIND_RECEIVE and wanted(task)
        )

    async def submit(self, name, kind, message, *, round_=0, slots=None):
        """Submit an item; return the reason of its refusal, if any."""
        party = self.parties[name]
        item = Item(kind, party.slots if slots is None else slots, message.SerializeToString())
        refused = await party.submit_many(RoundRef(run_id=self.run, round=round_), [item])
        return [reason_name(one.reason) for one in refused]

    async def visits(self, name, visits, **changes):
        kind = wire.SubmitKind.SUBMIT_KIND_VISITS
        return await self.submit(name, kind, wire.VisitStatus(visits=visits, held=1), **changes)

    async def plan(self, name, number):
        _, payload = await self.parties[name].fetch(wire.FetchKind.FETCH_KIND_SUM_PLAN, version=number)
        return SumPlan.from_wire(rounds_pb2.SumPlan.FromString(payload))

    async def vector(self, name, number, codes):
        message = rounds_pb2.SummedVector.FromString(ClearMember().answer(Step.SUBMIT, b"", codes))
        return await self.submit(name, wire.SubmitKind.SUBMIT_KIND_VECTOR, message, round_=number)

    async def window(self, name, number, value):
        """Hand over a gradient of the first row."""
        contribution = Contribution(SETTINGS.window_layout(len(ITEMS)))
        gradient = np.full((1, DIM), value, np.float32)
        contribution.add("gradient", gradient, np.random.default_rng(0), rows=np.array([0]))
        contribution.count()
        return await self.vector(name, number, contribution.codes())

    async def delivered(self, epoch=1, catalogue=None):
        if catalogue is None:
            _, payload = await self.parties["host"].fetch(wire.FetchKind.FETCH_KIND_CATALOGUE)
            catalogue = wire.Catalogue.FromString(payload).version
        status = wire.DeliveryStatus(catalogue_version=catalogue, records=1)
        kind = wire.SubmitKind.SUBMIT_KIND_DELIVERED
        return await self.submit("host", kind, status, round_=epoch, slots=[])

    async def model(self, name="one"):
        version, payload = await self.parties[name].fetch(wire.FetchKind.FETCH_KIND_MODEL)
        return version, payload, model_from_bytes(payload)["items"]


@pytest.fixture
async def run(shared_cos, people, certificates, calls):
    found = await Run(shared_cos, people, calls).begin(certificates["operator"])
    yield found
    await shared_cos.release()


def first_rows():
    return initial_item_rows(len(ITEMS), DriftSettings(dim=DIM), 7)


async def test_a_window_is_opened_after_enough_visits_and_steps_psi_by_the_sum_of_those_who_joined(run):
    assert await run.visits("one", 4) == await run.visits("two", 6) == []
    number = (await run.round("one")).round.round
    plan = await run.plan("one", number)
    version, payload, items = await run.model()
    assert (plan.purpose, len(plan.members), plan.users, plan.min_sum) == ("window", 2, 2, 1)
    assert plan.model_sha256 == hashlib.sha256(payload).digest()
    assert plan.layout_sha256 == layout_hash(SETTINGS.window_layout(len(ITEMS)))
    np.testing.assert_array_equal(items, first_rows())
    assert await run.window("one", number, 0.5) == await run.window("two", number, 0.25) == []
    for name in ("one", "two"):
        task = await run.receive(name, lambda task: task.closed == number)
        assert (task.summed, task.version) == (number, version + 1)
    expected = first_rows()
    expected[0] -= RATE * 0.75
    np.testing.assert_allclose((await run.model())[2], expected, atol=1e-4)


async def test_nobody_waits_for_an_owner_that_does_not_join_and_it_is_told_that_it_was_left_out(run):
    await run.visits("one", 10)
    number = (await run.round("one")).round.round
    assert await run.window("one", number, 0.5) == []
    task = await run.receive("two", lambda task: task.closed == number)
    assert (task.summed, task.version) == (0, 1)
    assert (await run.receive("one", lambda task: task.closed == number)).summed == number
    assert await run.window("two", number, 0.5) == ["UNKNOWN_ROUND"]


async def test_a_window_that_nobody_joins_is_abandoned_and_another_one_comes(run):
    await run.visits("one", 10)
    number = (await run.round("one")).round.round
    task = await run.receive("one", lambda task: task.closed == number)
    assert (task.summed, task.version) == (0, 0)
    later = (await run.task("one", lambda task: task.round.round > number and task.step)).round.round
    assert await run.window("one", later, 0.5) == await run.window("two", later, 0.0) == []
    assert (await run.receive("one", lambda task: task.closed == later)).summed == later


async def test_a_masked_window_of_two_owners_is_not_made_and_the_reason_is_said(
    shared_cos, people, certificates, calls
):
    run = await Run(shared_cos, people, calls, "masked").begin(certificates["operator"])
    await run.visits("one", 10)
    task = await run.receive("one", lambda task: task.closed)
    assert (task.summed, task.version) == (0, 0)
    report = await run.operating.stub.GetReport(operating.GetReportRequest(run_id=run.run))
    assert "2 data owners could join; a masked sum needs 3" in report.json
    await shared_cos.release()


async def test_an_epoch_ends_with_the_rest_and_an_evaluation_in_a_sum(run):
    await run.task("host", lambda task: task.kind == wire.TaskKind.TASK_KIND_VISIT)
    await run.visits("one", 3)
    assert await run.delivered() == []
    number = (await run.round("two")).round.round
    assert await run.window("one", number, 0.5) == await run.window("two", number, 0.5) == []
    evaluation = (await run.round("host")).round.round
    plan = await run.plan("host", evaluation)
    assert (plan.purpose, plan.users, plan.pass_number) == ("evaluate", 2, 1)
    contribution = Contribution(evaluation_layout())
    for value in (0.25, 0.75):
        add_measured(contribution, {"ndcg@10": value}, np.random.default_rng(0))
    assert await run.vector("host", evaluation, contribution.codes()) == []
    await run.task("host", lambda task: task.kind == wire.TaskKind.TASK_KIND_FINISH)
    state = await run.operating.state(run.run)
    assert (state.version, operating.RunPhase.Name(state.phase)) == (1, "RUN_PHASE_DONE")
    version, _, items = await run.model("host")
    assert version == 1
    np.testing.assert_allclose(items[0], first_rows()[0] - RATE, atol=1e-4)


async def test_what_belongs_to_the_published_form_or_to_others_is_refused(run):
    one, host = run.stub("one"), run.stub("host")
    exchange = wire.ExchangeRequest(run_id=run.run, owner=run.parties["one"].slots[0])
    recommend = wire.RecommendRequest(run_id=run.run, slot=run.parties["host"].slots[0], k=3)
    for call in (one.Exchange(exchange), host.Recommend(recommend)):
        assert (await run.calls.refused(call)).reason == "WRONG_SYSTEM"
    rows = wire.FetchRequest(run_id=run.run, kind=wire.FetchKind.FETCH_KIND_USER_ROWS)
    assert (await run.calls.refused(host.Fetch(rows))).reason == "INVALID_FIELD"
    assert await run.visits("one", 99, slots=run.parties["two"].slots) == ["UNKNOWN_PARTICIPANT"]
    assert await run.visits("one", 99, slots=[]) == ["INVALID_FIELD"]
    assert await run.delivered(epoch=2) == ["INVALID_FIELD"]
    assert await run.delivered(catalogue=99) == ["INVALID_FIELD"]
    state = await run.operating.state(run.run)
    assert (state.version, state.epoch) == (0, 1)


async def test_a_server_that_is_killed_within_a_window_forms_it_from_the_same_vectors(run):
    await run.visits("one", 10)
    number = (await run.round("one")).round.round
    assert await run.window("one", number, 0.5) == []
    await run.cos.release()
    run.cos.kill()
    run.cos.start()
    for name, party in run.parties.items():
        slots = party.slots
        run.parties[name] = run.calls.party_at(run.cos, run.people[name], run.run)
        run.parties[name].slots = slots
    assert (await run.round("one", number)).round.round == number
    # What was submitted to a step that was open is not durable: it is sent again.
    assert await run.window("one", number, 0.5) == await run.window("two", number, 0.5) == []
    assert (await run.receive("one", lambda task: task.closed == number)).summed == number
    np.testing.assert_allclose((await run.model())[2][0], first_rows()[0] - RATE, atol=1e-4)
