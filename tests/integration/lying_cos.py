"""An orchestration server that lies: it stands between a real host and the real server, and plays a round of its own.

Registration and catalogue are the real server's, and population and model as well unless a lie makes them up.  The
first round is the liar's: the host is shown a plan and briefings that a lie may have changed, and what it answers goes
no further.  The other members are played, and follow the protocol as the round's plan says.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import time

import grpc
import numpy as np

from coterie.crypto.masking import RoundKey
from coterie.crypto.verified import Verified
from coterie.rounds import policy
from coterie.rounds.conductor import cohort_rule
from coterie.rounds.inputs import CATALOGUE, named_inputs
from coterie.rounds.plan_hash import keys_hash, plan_hash
from coterie.rounds.population import Population
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution
from coterie.secure_sum.graph import graph_fields
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import ClosedSteps, Declined, Step
from coterie.wire.chunks import Assembler, split
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorServicer, OrchestratorStub
from coterie.wire.v1.orchestrator_pb2_grpc import add_OrchestratorServicer_to_server as add_to

from .playing import STEPS

MOST_BYTES = 1 << 24
AHEAD = 1000
"""Added to the liar's own revisions: the host has seen some of the real server's."""


class Heedless(MaskedMember):
    """An accomplice: it takes part on whatever device the server says that it and others are."""

    def _require_device(self, bundle, member):
        pass


class Lie:
    """Lies of the server to the host; this base class tells the truth."""

    model = None
    """Payload of the model that the host is served; None: the real server's."""

    def __init__(self):
        self.strangers = None
        """The participants that the test plays, by place in the plan."""

    async def before(self):
        """Return once the host may be asked to take part."""

    async def fix(self, run, host, strangers):
        """Fix the population that the host is shown; parameters are those of `round`."""

    def round(self, run, host, strangers, layout):
        """Return the plan of a round that the real server knows nothing of; None: the real server's next round.

        Parameters
        ----------
        run : RunPlan
            As the host accepted it.
        host, strangers : Enrolled
            The host, and the members that the test plays.
        layout : callable
            Returns the layout of a purpose.
        """

    population = None
    """The population that the host is shown; None: what the real server says."""

    def plan(self, plan: SumPlan) -> SumPlan:
        """Return the plan that the host is shown."""
        return plan

    def briefing(self, step: Step, honest: bytes, plan: SumPlan) -> bytes:
        """Return what a member of the host is told for a step."""
        return honest

    def told_the_others(self, step: Step, honest: bytes) -> bytes:
        """Return what a played member is told for a step."""
        return honest


class SwappedKeys(Lie):
    """One member's keys of the round are the server's own."""

    def briefing(self, step, honest, plan):
        if step is not Step.SHARE:
            return honest
        adverts = rounds_pb2.Adverts.FromString(honest)
        one = next(advert for advert in adverts.adverts if advert.member in self.strangers)
        one.channel_public, one.mask_public = RoundKey().public, RoundKey().public
        return adverts.SerializeToString()


class SwappedParticipant(Lie):
    """One member's advertisement, keys and all, is another member's."""

    def briefing(self, step, honest, plan):
        if step is not Step.SHARE:
            return honest
        adverts = rounds_pb2.Adverts.FromString(honest)
        one, other = [advert for advert in adverts.adverts if advert.member in self.strangers][:2]
        one.bundle.CopyFrom(other.bundle)
        return adverts.SerializeToString()


class AnotherOrder(Lie):
    """The host sees two members at each other's place, and their advertisements as well."""

    def _swapped(self):
        return sorted(self.strangers)[:2]

    def plan(self, plan):
        one, other = self._swapped()
        members = list(plan.members)
        members[one], members[other] = members[other], members[one]
        return dataclasses.replace(plan, members=tuple(members))

    def briefing(self, step, honest, plan):
        if step is not Step.SHARE:
            return honest
        one, other = self._swapped()
        adverts = rounds_pb2.Adverts.FromString(honest).adverts
        for advert in adverts:
            advert.member = {one: other, other: one}.get(advert.member, advert.member)
        ordered = sorted(adverts, key=lambda advert: advert.member)
        return rounds_pb2.Adverts(adverts=ordered).SerializeToString()


class SmallerCohort(Lie):
    """The host sees a cohort without one of its members."""

    def plan(self, plan):
        gone = max(self.strangers)
        members = tuple(member for n, member in enumerate(plan.members) if n != gone)
        # The graph is the one that belongs to so many.
        degree, threshold = graph_fields(len(members))
        return dataclasses.replace(plan, members=members, degree=degree, threshold=threshold)


class FewSubmitters(Lie):
    """The host is told that fewer submitted than the floor of the sum."""

    def briefing(self, step, honest, plan):
        if step is not Step.CONFIRM:
            return honest
        members = list(rounds_pb2.Submitters.FromString(honest).members)
        for member in sorted(self.strangers, reverse=True):
            if len(members) >= plan.min_sum:
                members.remove(member)
        return rounds_pb2.Submitters(members=members).SerializeToString()


class TwoLists(Lie):
    """The others confirm a list of submitters from which one of them is missing."""

    def told_the_others(self, step, honest):
        if step is not Step.CONFIRM:
            return honest
        members = list(rounds_pb2.Submitters.FromString(honest).members)
        members.remove(max(self.strangers))
        return rounds_pb2.Submitters(members=members).SerializeToString()


class InGoodTime(Lie):
    """Nothing is untrue; the host is asked only once something else is done.

    Parameters
    ----------
    first : callable
        Awaited before the host is asked; it may be called again after it was cancelled.
    """

    def __init__(self, first):
        super().__init__()
        self.before = first


async def made_up(run_id, population):
    """Return a beacon that nobody signed."""
    return bytes(32), bytes(64)


class InventedPopulation(Lie):
    """A host of one user is told that its run has many users; all others in the user's cohort are accomplices.

    The plan follows the rule of the run's plan for this population.  All users stand in the order of their ids.

    Parameters
    ----------
    model : bytes
        Payload of the model, version 0.
    users : int
        Users that the run is said to have; whoever is neither the host's user nor an accomplice does not exist.
    items : sequence of str
        Keys of the items, in the order of the real catalogue.
    device : callable, optional
        Returns the name of the connection that is said to speak for an accomplice, by its number; by default each has
        one of its own, which does not exist.
    number : int
        Number of the round.
    purpose : Purpose
        SUPPORTS or EVALUATE.
    beacon : callable, optional
        Returns beacon and signature for a run and a population, where the run's plan names no beacon; awaited.
    """

    def __init__(
        self,
        model,
        users,
        items,
        device=lambda number: f"client/nobody-{number}",
        number=1,
        purpose=Purpose.SUPPORTS,
        beacon=made_up,
    ):
        super().__init__()
        self.model, self._users, self._device, self._beacon = model, users, device, beacon
        self._items, self._number, self._purpose = items, number, purpose

    async def fix(self, run, host, strangers):
        found = {bundle.participant_id: self._device(n) for n, bundle in enumerate(strangers.bundles)}
        found[host.bundles[0].participant_id] = host.party
        real, beacon = sorted(found), run.rounds.beacon
        self.population = Population(*self._with_others(run, real, found, beacon or bytes(32)))
        if not beacon:
            drawn = await self._beacon(run.run_id, self.population)
            self.population = dataclasses.replace(
                self.population, beacon=bytes(drawn[0]), signature=bytes(drawn[1])
            )

    def _with_others(self, run, real, devices, beacon):
        """Return participants and devices of everybody; real ones are in one part of those drawn by a beacon."""
        places = self._parts(run, beacon)[0].tolist() if self._users > len(real) else range(len(real))
        at = dict(zip(places, real, strict=True))
        participants, last = [], int.from_bytes(real[0]) - self._users
        for place in range(self._users):
            last = int.from_bytes(at[place]) if place in at else last + 1
            participants.append(last.to_bytes(32))
        return participants, [devices.get(one, f"client/none-{n}") for n, one in enumerate(participants)]

    def _parts(self, run, beacon):
        rule = cohort_rule(run.rounds, beacon)
        drawn = policy.groups if self._purpose is Purpose.SUPPORTS else policy.everybody
        return drawn(rule, self._users, 0)

    def round(self, run, host, strangers, layout):
        beacon = self.population.drawn(run)
        members = [self.population.member([at]) for at in self._parts(run, beacon)[0].tolist()]
        degree, threshold = graph_fields(len(members))
        return SumPlan(
            run_id=run.run_id,
            round=self._number,
            purpose=self._purpose.value,
            secure_sum=run.secure_sum,
            run_plan_sha256=plan_hash(run),
            inputs=named_inputs((CATALOGUE,), {CATALOGUE: keys_hash(self._items)}),
            model_sha256=hashlib.sha256(self.model).digest(),
            layout_sha256=layout_hash(layout(self._purpose)),
            population_sha256=self.population.hash(run.run_id),
            beacon=beacon,
            members=tuple(members),
            degree=degree,
            threshold=threshold,
            min_sum=policy.min_sum(len(members), run.rounds.min_sum),
        )


class LyingCos(OrchestratorServicer):
    """The server that the host is connected to.

    Parameters
    ----------
    real : Member
        The real server.
    third_party : ThirdParty
        Signs the liar's certificate as that of a COS: it is one.
    folder : Path
        For its TLS files.
    host : callable
        Returns the host as a party, once it has enrolled: the liar speaks in its name to the real server.
    others : Enrolled
        The members that the test plays.
    layout : callable
        Returns the layout of a purpose.
    lie : Lie
    """

    name = "liar"

    def __init__(self, real, third_party, folder, host, others, layout, lie):
        self._real, self._host, self._others, self._layout = real, host, others, layout
        self._tls = third_party.issue(folder, "cos", self.name)
        self._server_half = MaskedServer()
        self._revision = 0
        self._news = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._stub = None
        self._run, self._host_slots = None, ()
        self.populations = []
        """Users of the run, as the host was told each time that it asked for the population."""
        self.reset(lie)

    def reset(self, lie):
        """Forget the round; the next one is this lie's."""
        self.lie = lie
        self.plan = None
        self.shown = None
        self.step = None
        self.closed = ClosedSteps()
        self.running = None
        self.received = {step: {} for step in MaskedServer.steps}
        """Messages that the host sent, by step and member."""

    @contextlib.asynccontextmanager
    async def serving(self):
        """Serve on a port of its own."""
        server = grpc.aio.server()
        add_to(self, server)
        port = server.add_secure_port("127.0.0.1:0", self._tls.server_credentials())
        self.address = f"127.0.0.1:{port}"
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)

    @property
    def sent(self):
        """Steps for which anything has left the host."""
        return [step for step in MaskedServer.steps if self.received[step]]

    def _forward(self):
        if self._stub is None:
            self._stub = self._real.channel(self._host()).stub(OrchestratorStub)
        return self._stub

    # --- what the host asks ------------------------------------------------------------------------------------

    async def Register(self, request_iterator, context):  # noqa: N802
        response = await self._forward().Register(request_iterator)
        self._run = response.plan
        self._host_slots = [
            slot for part in response.slots for slot in range(part.first, part.first + part.count)
        ]
        return response

    async def Poll(self, request, context):  # noqa: N802
        async with self._turn:
            answer = await self._begin(request) if self.plan is None else None
        if answer is not None:
            return answer
        async with self._news:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(request.hold_ms / 1e3):
                    await self._news.wait_for(lambda: request.cursor < AHEAD + self._revision)
        return wire.PollResponse(revision=AHEAD + self._revision, tasks=[self._task()])

    async def Fetch(self, request, context):  # noqa: N802
        match request.kind:
            case wire.FetchKind.FETCH_KIND_SUM_PLAN:
                payload = self.shown.to_wire().SerializeToString(deterministic=True)
                yield whole(self.plan.round, payload)
            case wire.FetchKind.FETCH_KIND_BRIEFINGS:
                payload = self._briefings().SerializeToString()
                yield whole(self.plan.round, payload)
            case wire.FetchKind.FETCH_KIND_MODEL if self.lie.model is not None:
                yield whole(self._version, self.lie.model)
            case wire.FetchKind.FETCH_KIND_POPULATION if self.lie.population is not None:
                self.populations.append(len(self.lie.population))
                yield whole(0, self.lie.population.to_wire().SerializeToString())
            case _:
                async for response in self._forward().Fetch(request):
                    yield response

    async def Submit(self, request_iterator, context):  # noqa: N802
        accepted, head = 0, None
        async for request in request_iterator:
            if head is None:
                head, assembler = request, Assembler(MOST_BYTES)
            assembler.add(request.chunk)
            if assembler.complete:
                step = next((step for step, kind in STEPS.values() if kind == head.kind), None)
                # A host that declines says so, without a message.
                if step is not None:
                    self.received[step][self._member_of[head.slots[0].first]] = assembler.payload(head.sha256)
                accepted, head = accepted + 1, None
        async with self._turn:
            mine = self.received[self.step]
            if len(mine) == len(self._member_of) and self.step not in self.closed:
                await asyncio.to_thread(self._close)
                await self._go_on()
        return wire.SubmitResponse(accepted=accepted)

    # --- the round ---------------------------------------------------------------------------------------------

    async def _begin(self, request):
        """Begin the lie's round or the real server's; while that has none, return what it answers to a poll."""
        await self.lie.fix(self._run, self._host(), self._others)
        plan = self.lie.round(self._run, self._host(), self._others, self._layout)
        if plan is not None:
            slots = [SlotRange(first=slot, count=1) for slot in self._host_slots]
            await self._open(plan, 0, slots)
            return None
        response = await self._forward().Poll(request)
        task = next((task for task in response.tasks if task.kind == wire.TaskKind.TASK_KIND_ROUND), None)
        if task is None:
            return response
        fetch = wire.FetchRequest(
            run_id=task.round.run_id, kind=wire.FetchKind.FETCH_KIND_SUM_PLAN, version=task.round.round
        )
        chunks = [response.chunk.data async for response in self._forward().Fetch(fetch)]
        plan = SumPlan.from_wire(rounds_pb2.SumPlan.FromString(b"".join(chunks)))
        await self._open(plan, task.version, task.slots)
        return None

    async def _open(self, plan, version, asked):
        places = {bundle.participant_id: n for n, bundle in enumerate(self._others.bundles)}
        self.lie.strangers = {
            member: places[one.participant]
            for member, one in enumerate(plan.members)
            if one.participant in places
        }
        await self.lie.before()
        self.shown = self.lie.plan(plan)
        own = [member for member in range(len(plan.members)) if member not in self.lie.strangers]
        slots = [slot for part in asked for slot in range(part.first, part.first + part.count)]
        self._member_of, self._slots = dict(zip(slots, own, strict=True)), asked
        self._round, self._version = RoundRef(run_id=plan.run_id, round=plan.round), version
        # They are of one process, and do once what is the same for several.
        verified = Verified()
        self._others_halves = {
            member: Heedless(
                plan,
                member,
                self._others.identities[place],
                self._others.bundles[place],
                self._others.directory_key,
                int(time.time()),
                verified,
            )
            for member, place in self.lie.strangers.items()
        }
        self.plan, self.step = plan, Step.ADVERTISE

    def _task(self):
        step = next(number for number, (step, _) in STEPS.items() if step is self.step)
        return wire.Task(
            kind=wire.TaskKind.TASK_KIND_ROUND,
            round=self._round,
            version=self._version,
            slots=self._slots,
            step=step,
        )

    def _briefings(self):
        told = wire.Briefings()
        for member in self._member_of.values():
            honest = self._server_half.pieces(self.plan, self.closed, self.step, member).whole
            told.briefings.add(member=member, payload=self.lie.briefing(self.step, honest, self.shown))
        return told

    def _close(self):
        """Close the step: everybody of the host has answered."""
        layout = self._layout(self.plan.purpose)
        messages = dict(self.received[self.step])
        for member, half in self._others_halves.items():
            honest = self._server_half.pieces(self.plan, self.closed, self.step, member).whole
            briefing = self.lie.told_the_others(self.step, honest)
            codes = Contribution(layout, users=1).codes() if self.step is Step.SUBMIT else None
            # Who is lied to leaves as well; the round goes on without it.
            with contextlib.suppress(Declined):
                messages[member] = half.answer(self.step, briefing, codes)
        if self.step is Step.SUBMIT:
            self.running = np.zeros(layout.size, np.uint32)
            notes = {}
            for member, message in messages.items():
                vector = self._server_half.vector(self.plan, self.closed, notes, member, message, layout)
                self.running += vector.addend
                notes[member] = vector.note
            messages = notes
        self.closed = self.closed.with_step(self.step, messages)

    async def _go_on(self):
        """Ask for the next step."""
        steps = list(MaskedServer.steps)
        if self.step is not steps[-1]:
            self.step = steps[steps.index(self.step) + 1]
            self._revision += 1
            async with self._news:
                self._news.notify_all()

    def total(self):
        """Return the sum of the round, decoded."""
        codes = self._server_half.unmask(self.plan, self.closed, self.running).codes
        return self._layout(self.plan.purpose).decode(codes, len(self.plan.members))


def whole(version, payload):
    """Return the answer that carries a payload in one chunk."""
    (chunk,) = split(payload)
    sha256 = hashlib.sha256(payload).digest()
    return wire.FetchResponse(version=version, sha256=sha256, total_bytes=len(payload), chunk=chunk)
