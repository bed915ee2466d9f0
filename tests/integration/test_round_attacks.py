"""An attacker reads from a real server's transcript the sums that were really formed, whatever went wrong meanwhile.

The hosts are played, so that every contribution is known.  Messages are sent twice and with other bytes, a host leaves
a round in the middle, the server is stopped and started in a step; then its transcript is replayed.
"""

import asyncio
import time

import numpy as np
import pytest

from coterie.privacy.attacks.rounds_view import RoundView
from coterie.rounds.training import Purpose
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.protocol import Step
from coterie.systems.fedncf.purposes import layout_of
from coterie.systems.fedncf.study import attacks
from coterie.wire.refusal import Refusal
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

from . import playing
from .playing import ITEMS, SETTINGS, STEPS, Host

HOSTS = ("one", "two", "three", "four", "five")
"""Hosts of three users each; under masks one of five may be lost."""


@pytest.fixture(scope="module")
def people(shared_third_party):
    async def enrol():
        owner = await shared_third_party.enrol("data-owner", "replayed-owner", 1)
        return {"owner": owner} | {
            who: await shared_third_party.enrol("client", f"replayed-{who}", 3) for who in HOSTS
        }

    return asyncio.run(enrol())


class Stuttering(Host):
    """A host that repeats itself, contradicts itself, and leaves two rounds of training."""

    def __init__(self, world, who):
        super().__init__(world, who)
        self.restart = None
        """Called before the first SUBMIT of a round of training."""
        self.leaves = {}
        """At which step it is gone, by pass."""

    async def answer(self, task):
        plan, step = await self.plan(task.round.round), STEPS[task.step][0]
        if plan.purpose == "train":
            gone = self.leaves.get(plan.pass_number)
            if gone is not None and MaskedServer.steps.index(step) >= MaskedServer.steps.index(gone):
                if step is gone and (plan.round, "left") not in self.sent:
                    self.sent[plan.round, "left"] = b""
                    await self.party.leave()
                    await self.register()
                await asyncio.sleep(0.02)
                return []
            if step is Step.SUBMIT and self.restart is not None:
                restart, self.restart = self.restart, None
                await restart()
        refused = await super().answer(task)
        kind = STEPS[task.step][1]
        again = [
            (kind, number, self.slots_of(plan, member), message)
            for (number, when, member), message in self.spoken()
            if (number, when) == (plan.round, step)
        ]
        # The round may be over before these arrive; both are as good as unsaid.
        await self.submit(again)
        await self.submit(
            [(kind, number, slots, message + b"\x00") for kind, number, slots, message in again]
        )
        return refused

    def spoken(self):
        """Return what it has sent, by round, step and member."""
        return [(key, message) for key, message in self.sent.items() if len(key) == 3]

    async def connect(self):
        """Find the server again after its restart."""
        self.party = self.world.calls.party_at(self.world.cos, self.enrolled, self.world.run)
        self.stub = self.world.cos.channel(self.enrolled).stub(OrchestratorStub)
        await self.register()
        self.clock = 0


@pytest.mark.parametrize(
    ("secure_sum", "per_user"),
    [("clear", False), ("clear", True), ("masked", True)],
    ids=["clear-hosts", "clear-users", "masked-users"],
)
async def test_the_views_of_a_replayed_transcript_are_the_sums_that_were_formed(
    start_member, shared_third_party, certificates, people, calls, secure_sum, per_user
):
    cos = await asyncio.to_thread(
        start_member, "cos", f"replayed-{time.monotonic_ns()}", shared_third_party, transcript=True
    )
    operator = calls.Operating(cos, certificates["operator"])
    run = playing.World(cos, operator, people, calls, secure_sum=secure_sum, per_user=per_user)
    run.host, run.away = (lambda who: Stuttering(run, who)), False
    await run.begin(*HOSTS, passes=3, min_sum=8)
    run.hosts["four"].leaves = {1: Step.SUBMIT, 2: Step.UNMASK}

    async def restart():
        """Stop the server in a step; what it recorded is on disk then, as are the messages of closed steps."""
        run.away = True
        await asyncio.to_thread(cos.stop)
        await cos.release()
        await asyncio.to_thread(cos.start)
        run.operator = calls.Operating(cos, certificates["operator"])
        for host in run.hosts.values():
            await host.connect()
        run.away = False

    run.hosts["one"].restart = restart
    await asyncio.gather(*(persistent(host) for host in run.hosts.values()))
    report = await run.report()
    assert report["phase"] == "done"
    plan = next(iter(run.hosts.values())).party.plan
    await asyncio.to_thread(cos.stop)

    summed = {one["round"]: one for one in report["rounds"] if one["purpose"] != "evaluate"}
    assert not any(one["reason"] for one in summed.values())
    views = list(attacks.views(sorted(cos.state.glob("transcript*.bin")), plan, len(ITEMS)))
    # One host left a round before it submitted; another time it left afterwards, and is in the sum.
    assert [one["summed"] for one in summed.values()] == [15, 15, 12, 15]
    if secure_sum == "clear":
        each = 1 if per_user else 3
        assert [len(view.slots) for view in views] == [each] * (57 // each)
        views = gathered(views, summed.values())
    for view, one in zip(views, summed.values(), strict=True):
        assert len(view.slots) == one["summed"]
        expected = expected_sum(run, one["purpose"], view.slots)
        if one["purpose"] == "supports":
            assert np.array_equal(view.touched, expected["supports"])
        else:
            # A host rounds each of its users in turn, and not as the test does.
            off = 0 if per_user else len(view.slots) * 2 * view.noise
            # Rows are single precision: half a unit in the last place of a sum below 16 is 4.8e-7.
            assert np.abs(view.rows - expected["items"]).max() <= off + 1e-6
            assert view.rows[0].min() > 0.1
    assert sum(one["refused"] for one in report["rounds"]) > 0


async def persistent(host):
    """Play to the end, also while the server is away."""
    while True:
        try:
            return await host.play()
        except Exception as error:
            # A task may be over when the host gets to it: it has answered before the server went away.
            over = isinstance(error, Refusal) and error.name == "UNKNOWN_ROUND"
            if not host.world.away and not over:
                raise
        while host.world.away:
            await asyncio.sleep(0.02)


def gathered(views, rounds):
    """Add up the views of each round: one for each member.

    In double precision, so that the order in which messages came changes nothing that is seen here.
    """
    found, left = [], iter(views)
    for one in rounds:
        own = []
        while sum(len(view.slots) for view in own) < one["summed"]:
            own.append(next(left))
        supports = one["purpose"] == "supports"
        found.append(
            RoundView(
                own[0].version,
                np.concatenate([view.slots for view in own]),
                None if supports else sum(view.rows.astype(np.float64) for view in own),
                sum(view.touched for view in own) if supports else None,
                own[0].noise,
            )
        )
    return found


def expected_sum(run, purpose, slots):
    """Return what the played hosts contribute for some slots, summed and decoded."""
    host = next(iter(run.hosts.values()))
    codes = sum(host.codes(Purposed(purpose), [int(slot)]) for slot in slots).astype(np.uint32)
    return layout_of(SETTINGS, Purpose(purpose), len(ITEMS)).decode(codes, len(slots))


class Purposed:
    """As much of a plan as a played contribution depends on."""

    def __init__(self, purpose):
        self.purpose = purpose
