"""Hosts of users that a test plays at the sockets of a real orchestration server, step by step, clear and masked."""

import asyncio
import hashlib
import itertools
import json
import time

import numpy as np

from coterie.parties.party import Registrant
from coterie.rounds.conductor import model_from_bytes
from coterie.rounds.training import Purpose
from coterie.secure_sum.clear import ClearMember
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Step
from coterie.systems.fedncf.purposes import layout_of
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.wire.chunks import split
from coterie.wire.refusal import Refusal, reason_name
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import ErrorReason, RoundRef, SlotRange
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

SOON_S = 60.0
ITEMS = [f"item-{n:02}" for n in range(12)]
USER = wire.ParticipantKind.PARTICIPANT_KIND_USER
OWNER = wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER
NUMBERS = itertools.count()
STEPS = {
    wire.RoundStep.ROUND_STEP_ADVERTISE: (Step.ADVERTISE, wire.SubmitKind.SUBMIT_KIND_ADVERT),
    wire.RoundStep.ROUND_STEP_SHARE: (Step.SHARE, wire.SubmitKind.SUBMIT_KIND_SHARES),
    wire.RoundStep.ROUND_STEP_SUBMIT: (Step.SUBMIT, wire.SubmitKind.SUBMIT_KIND_VECTOR),
    wire.RoundStep.ROUND_STEP_CONFIRM: (Step.CONFIRM, wire.SubmitKind.SUBMIT_KIND_CONFIRMATION),
    wire.RoundStep.ROUND_STEP_UNMASK: (Step.UNMASK, wire.SubmitKind.SUBMIT_KIND_UNMASKING),
}
SETTINGS = FedNcfSettings(model="gmf", dim=3, min_touch=1)


async def at_once(cases):
    """Await several cases that wait more than they work, by name; those that fail are all named.

    Parameters
    ----------
    cases : mapping of str to coroutine
    """
    outcomes = await asyncio.gather(*cases.values(), return_exceptions=True)
    failed = []
    for name, outcome in zip(cases, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            outcome.add_note(f"in the case: {name}")
            failed.append(outcome)
    if failed:
        raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} cases failed", failed)


class Host:
    """A client host whose contributions are chosen by the test: every user's item 0 moves by 0.1 times its slot."""

    def __init__(self, world, who):
        self.enrolled = world.people[who]
        self.world = world
        self.party = world.calls.party_at(world.cos, self.enrolled, world.run)
        self.stub = world.cos.channel(self.enrolled).stub(OrchestratorStub)
        self.halves = {}
        self.sent = {}
        self.drops = frozenset()
        """Steps at which this host falls silent."""
        self.clock = 0

    async def register(self):
        members = [
            Registrant(one, bundle, USER)
            for one, bundle in zip(self.enrolled.identities, self.enrolled.bundles, strict=True)
        ]
        await self.party.register(members)

    async def task(self, kind=None):
        """Return the next task, of any kind or of this one."""
        async with asyncio.timeout(SOON_S):
            while True:
                response = await self.stub.Poll(
                    wire.PollRequest(run_id=self.world.run, cursor=self.clock, hold_ms=2000)
                )
                self.clock = response.revision
                for task in response.tasks:
                    if kind is None or task.kind == kind:
                        self.clock = 0
                        return task

    async def plan(self, number):
        _, payload = await self.party.fetch(wire.FetchKind.FETCH_KIND_SUM_PLAN, version=number)
        return SumPlan.from_wire(rounds_pb2.SumPlan.FromString(payload))

    async def briefings(self, task):
        return await self.party.briefings(task.round.round, task.step)

    def slots_of(self, plan, member):
        """Return the slots that a member of this host covers: its own, or all of the host's in the cohort."""
        own = {one.participant_id: n for n, one in enumerate(self.enrolled.bundles)}
        if self.world.per_user:
            return [self.party.slots[own[plan.members[member].participant]]]
        return list(self.party.slots)

    def codes(self, plan, slots):
        settings = self.world.settings
        contribution = Contribution(layout_of(settings, Purpose(plan.purpose), len(ITEMS)))
        rng = np.random.default_rng(0)
        for slot in slots:
            if plan.purpose == "train":
                contribution.add(
                    "items", np.full((1, settings.width), 0.1 * (slot + 1)), rng, rows=np.array([0])
                )
                contribution.add("instances", np.array(2.0), rng)
            elif plan.purpose == "supports":
                contribution.add("supports", np.ones(3), rng, rows=np.arange(3))
            else:
                contribution.add("metrics", np.full(8, 0.5), rng)
                contribution.add("measured", np.ones(8), rng)
            contribution.count()
        return contribution.codes()

    def half(self, plan, member):
        if plan.secure_sum == "clear":
            return ClearMember()
        own = [one.participant_id for one in self.enrolled.bundles].index(plan.members[member].participant)
        return MaskedMember(
            plan,
            member,
            self.enrolled.identities[own],
            self.enrolled.bundles[own],
            self.enrolled.directory_key,
            int(time.time()),
        )

    async def answer(self, task):
        """Answer a task for all members that it asks; return the refusals."""
        step, kind = STEPS[task.step]
        if step in self.drops:
            return []
        plan = await self.plan(task.round.round)
        items = []
        for member, briefing in (await self.briefings(task)).items():
            slots = self.slots_of(plan, member)
            half = self.halves.setdefault((plan.round, member), self.half(plan, member))
            codes = self.codes(plan, slots) if step is Step.SUBMIT else None
            message = half.answer(step, briefing, codes)
            self.sent[plan.round, step, member] = message
            items.append((kind, plan.round, slots, message))
        return await self.submit(items)

    async def submit(self, items):
        """Submit items in one stream; return the reasons of those that are refused."""
        response = await self.stub.Submit(self.requests(items))
        return [reason_name(one.reason) for one in response.refused]

    async def requests(self, items):
        """Yield items in chunks."""
        for kind, number, slots, message in items:
            request = wire.SubmitRequest(
                round=RoundRef(run_id=self.world.run, round=number),
                kind=kind,
                slots=[SlotRange(first=slot, count=1) for slot in slots],
                sha256=hashlib.sha256(message).digest(),
            )
            for chunk in split(message):
                request.chunk.CopyFrom(chunk)
                yield request
                request = wire.SubmitRequest()

    async def play(self):
        """Answer every task until the run has ended; return why it ended."""
        while True:
            task = await self.task()
            if task.kind == wire.TaskKind.TASK_KIND_FINISH:
                return task
            if task.kind == wire.TaskKind.TASK_KIND_ROUND:
                if STEPS[task.step][0] in self.drops:
                    await asyncio.sleep(0.05)
                try:
                    await self.answer(task)
                except Refusal as refusal:
                    # The step's time may be over before the host comes to ask; the next task says what is open.
                    if refusal.reason != ErrorReason.ERROR_REASON_UNKNOWN_ROUND:
                        raise


class World:
    """A run with a data owner of twelve items and hosts of three users each."""

    def __init__(self, cos, operator, people, calls, *, secure_sum="clear", per_user=False):
        self.run = f"rounds-{next(NUMBERS)}-{time.monotonic_ns()}"
        self.cos, self.operator, self.people, self.calls = cos, operator, people, calls
        self.secure_sum, self.per_user = secure_sum, per_user
        self.settings = SETTINGS
        self.owner = calls.party_at(cos, people["owner"], self.run)
        self.hosts = {}

    def host(self, who):
        """Make a host that the test plays."""
        return Host(self, who)

    async def begin(
        self,
        *who,
        users=None,
        passes=1,
        party_s=3600.0,
        phase_s=3600.0,
        limits=None,
        system="fedncf",
        settings=SETTINGS,
        **rounds,
    ):
        self.settings = settings
        usual = {
            "cohorts": wire.CohortKind.COHORT_KIND_ALL,
            "cohort": 1,
            "group": 1000,
            "beacon": bytes(32),
            "party_per_user": self.per_user,
            "min_cohort": 1,
            "min_sum": 1,
            "experiment": True,
            "passes": passes,
            "evaluate_every": 1,
            "choose_by": "validation_hit_ratio@10",
            "step_timeout_ms": 3_600_000,
        }
        await self.operator.start(
            self.run,
            owners=1,
            users=users or 3 * len(who),
            party_s=party_s,
            phase_s=phase_s,
            limits=limits or {},
            system=system,
            form="users" if self.per_user else "hosts",
            secure_sum=self.secure_sum,
            settings=settings.to_json(),
            rounds=wire.RoundsPlan(**{**usual, **rounds}),
        )
        bundle, identity = self.people["owner"].bundles[0], self.people["owner"].identities[0]
        owner = Registrant(
            identity,
            bundle,
            OWNER,
            name="zoo",
            address="127.0.0.1:1",
            tls_name="zoo.data-owner.coterie.internal",
            items=ITEMS,
        )
        await self.owner.register([owner])
        for one in who:
            self.hosts[one] = self.host(one)
            await self.hosts[one].register()
        return self

    async def report(self):
        response = await self.operator.stub.GetReport(operating.GetReportRequest(run_id=self.run))
        return json.loads(response.json)

    async def model(self, version=0):
        host = next(iter(self.hosts.values()))
        _, payload = await host.party.fetch(wire.FetchKind.FETCH_KIND_MODEL, version=version)
        return model_from_bytes(payload)
