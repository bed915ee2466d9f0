"""A real host of one user under a server that chooses who else is in the masked sum: the sum is the user's items.

The host has the consent of a user who sets nothing, by which floors count devices, and the third party is a real one.
Attackers know what left the host, and the contributions of their accomplices, which are zeros.
"""

import asyncio
import contextlib
import csv
import dataclasses
import hashlib
from typing import NamedTuple

import grpc
import numpy as np
import pytest

from coterie.net.status import from_rpc_error
from coterie.parties.party import Registrant
from coterie.rounds.conductor import model_to_bytes
from coterie.rounds.training import Purpose
from coterie.secure_sum.protocol import Step
from coterie.systems.fedncf.purposes import layout_of, metrics_of
from coterie.systems.registry import server_side
from coterie.wire.chunks import split
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import client_pb2 as agent_wire
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import UserAgentStub
from coterie.wire.v1.thirdparty_pb2 import CommitPopulationRequest, LookupRequest, RevokeRequest

from .hosting import SETTINGS, SOON_S, World, change, query
from .lying_cos import InGoodTime, InventedPopulation, LyingCos

ITEMS = [f"item-{n:02}" for n in range(60)]
VICTIM = "victim"
HISTORY = {VICTIM: [ITEMS[n] for n in np.random.default_rng(3).permutation(len(ITEMS))[:15]]}
TRAINED = frozenset(HISTORY[VICTIM][:-2])
"""Items that a sum of SUPPORTS asks for: those that are neither for validation nor for the test."""
SEED = 5
"""Seed of a user whose metrics are not all 0 before training."""

FLOOR = 20
"""Floor of a cohort, in devices, and of a sum, in users: that of a consent in which nothing is set."""
MANY = 100
"""Users of the largest cohort whose masking graph is complete."""


class Accuracy(NamedTuple):
    """Precision and recall of an attacker's guess."""

    precision: float
    recall: float


LEARNT, NOTHING = Accuracy(1.0, 1.0), Accuracy(0.0, 0.0)


class Spied(NamedTuple):
    """The outcome of an attack: how well the attacker guesses, and the refusals on the victim's receipt.

    A sum that the victim refuses has the outcome ``Spied(NOTHING, [reason])``.
    """

    accuracy: Accuracy
    refused: list[str]


def sum_layout(purpose):
    return layout_of(SETTINGS, Purpose(purpose), len(ITEMS))


def first_model():
    """Return the payload of a model that the host can use."""
    side = server_side("fedncf", SETTINGS.to_json(), len(ITEMS), 7, 1)
    return model_to_bytes(side.model(side.initial()))


class Attack:
    """Rounds that a lying server plays with the victim and with accomplices."""

    def __init__(self, world, liar):
        self.world, self.liar = world, liar
        self.host = None

    async def over(self):
        """Wait until the sum is formed or the victim has refused; return the reasons on its receipt."""
        async with asyncio.timeout(SOON_S):
            while not (self.host.answers() and (self._formed or self._declined())):
                assert self.host.running, self.host.log.read_text()
                await asyncio.sleep(0.05)
        _, refused = await self.world.receipt(self.host, VICTIM)
        return [one.reason for one in refused]

    @property
    def _formed(self):
        return Step.UNMASK in self.liar.closed

    def _declined(self):
        return query(self.host, "SELECT reason FROM declined")

    async def items(self):
        """Return the outcome of a sum of SUPPORTS: the victim's items are guessed."""
        refused = await self.over()
        if not self._formed:
            return Spied(NOTHING, refused)
        supports = self.liar.total()["supports"]
        guessed = {item for item, users in zip(ITEMS, supports, strict=True) if users}
        right = len(guessed & TRAINED)
        return Spied(Accuracy(right / max(len(guessed), 1), right / len(TRAINED)), refused)

    async def metrics(self):
        """Return the outcome of a sum of EVALUATE: the victim's metrics are guessed."""
        refused = await self.over()
        if not self._formed:
            return Spied(NOTHING, refused)
        total = self.liar.total()
        guessed = dict(zip(metrics_of(Purpose.EVALUATE), total["metrics"], strict=True))
        with (self.host.state / "metrics.csv").open(newline="") as file:
            own = {row["metric"]: float(row["value"]) for row in csv.DictReader(file)}
        assert any(own.values())
        right = sum(guessed[name] == pytest.approx(value, abs=1e-4) for name, value in own.items())
        return Spied(Accuracy(right / len(guessed), right / len(own)), refused)


class Stand:
    """A run with the victim in it, accomplices, and a server that lies to the victim."""

    def __init__(self, calls, third_party, start_member, certificates, tmp_path, cos):
        self.calls, self.third_party, self.certificates = calls, third_party, certificates
        self.folder, self.cos = tmp_path, cos
        self.world = World(calls, third_party, start_member, certificates, tmp_path, cos, HISTORY, ITEMS)

    async def begin(self, cohort, users, *, experiment=False):
        """Begin a run to which a user who sets nothing has no objection.

        In an experiment the operator names the beacon, floors count users, and no third party signs the population:
        there hosts have to believe the server, as in every run before the third party did.
        """
        await self.world.begin(
            secure_sum="masked",
            per_user=True,
            users=users,
            cohorts=wire.CohortKind.COHORT_KIND_GROUPS,
            cohort=cohort,
            group=cohort,
            # Outside experiments the third party draws it.
            beacon=bytes(32) if experiment else b"",
            min_cohort=FLOOR,
            min_sum=FLOOR,
            experiment=experiment,
        )

    async def of_one_client(self, count):
        """Enrol accomplices as participants of one client, with one token."""
        return await self.third_party.enrol("client", f"others-{self.world.run}", count)

    async def clients_of_their_own(self, count):
        """Enrol accomplices as a client each, with a token each; return the clients, and all as one."""
        parties = [
            await self.third_party.enrol("client", f"other-{n}-{self.world.run}", 1) for n in range(count)
        ]
        together = dataclasses.replace(
            parties[0],
            identities=tuple(one.identities[0] for one in parties),
            bundles=tuple(one.bundles[0] for one in parties),
        )
        return parties, together

    @contextlib.asynccontextmanager
    async def lying(self, lie, accomplices, consent=None):
        """Start the victim's host under the server that lies."""
        liar = LyingCos(
            self.cos,
            self.third_party,
            self.folder / "liar",
            lambda: self.calls.Enrolled.of(attack.host),
            accomplices,
            sum_layout,
            lie,
        )
        attack = Attack(self.world, liar)
        async with liar.serving():
            there = {"address": liar.address, "name": liar.name}
            # Healthy only once it has joined, which the liar must answer for.
            attack.host = self.world.host(
                healthy=False, cos=there, consent=consent or {}, seed=SEED, per_user_metrics=True
            )
            yield attack
            await asyncio.to_thread(attack.host.stop)
        await self.world.operator.stub.StopRun(operating.StopRunRequest(run_id=self.world.run))


@pytest.fixture
def stand(calls, third_party, start_member, certificates, tmp_path, cos):
    return Stand(calls, third_party, start_member, certificates, tmp_path, cos)


# --- a population that is made up ----------------------------------------------------------------------------------


EXPERIMENT = {"experiment": True}


def invention(users, **how):
    return InventedPopulation(first_model(), users, ITEMS, **how)


async def invented(stand, *, experiment=False, **how):
    """Fill the victim's cohort with 99 participants of one client; return the outcome."""
    await stand.begin(MANY, users=1000, experiment=experiment)
    accomplices = await stand.of_one_client(MANY - 1)
    consent = EXPERIMENT if experiment else {}
    async with stand.lying(invention(1000, **how), accomplices, consent) as attack:
        return await attack.items()


async def told_twice(stand, *, forgets=False):
    """Say that the run has 1,000 users and, once the host has restarted, that it has 900; return both outcomes.

    The accomplices are clients of their own, so that only the numbers of users and the places are untrue.

    Parameters
    ----------
    forgets : bool
        Whether the host forgets the first population when it restarts.
    """
    await stand.begin(FLOOR, users=1000, experiment=True)
    parties, accomplices = await stand.clients_of_their_own(FLOOR - 1)
    device = [one.party for one in parties].__getitem__
    async with stand.lying(invention(1000, device=device), accomplices, EXPERIMENT) as attack:
        before = await attack.items()
        await asyncio.to_thread(attack.host.stop)
        if forgets:
            change(attack.host, "DELETE FROM populations")
        # Metrics: a host may have reasons of its own to refuse a second sum of its items.
        attack.liar.reset(invention(900, device=device, number=2, purpose=Purpose.EVALUATE))
        attack.host.start(healthy=False)
        after = await attack.metrics()
    return attack.liar.populations, before, after


def committing(stand):
    """Return a function that asks the third party for a beacon in the name of a server with a valid certificate."""
    directory = stand.third_party.directory(stand.third_party.issue(stand.folder / "asking", "cos", "asking"))

    async def commit(run_id, population):
        payload = population.to_wire().SerializeToString()
        requests = [
            CommitPopulationRequest(run_id=run_id, sha256=hashlib.sha256(payload).digest(), chunk=chunk)
            for chunk in split(payload)
        ]
        answer = await directory.CommitPopulation(requests)
        return answer.beacon, answer.signature

    return commit


async def test_a_server_whose_population_nobody_signs_invents_a_cohort_and_learns_its_only_users_items(stand):
    def of_one(number):
        return f"client/others-{stand.world.run}"

    assert await invented(stand, experiment=True, device=of_one) == Spied(LEARNT, [])


async def test_a_host_shares_nothing_with_accomplices_on_devices_that_did_not_enrol_them(stand):
    accuracy, (reason,) = await invented(stand, experiment=True)
    assert accuracy == NOTHING
    assert f"is of 'client/others-{stand.world.run}', expected 'client/nobody-" in reason


async def test_a_host_refuses_a_population_that_the_third_party_did_not_sign(stand):
    accuracy, (reason,) = await invented(stand)
    assert accuracy == NOTHING
    assert reason.startswith("the third party did not sign the population of the run")


@pytest.mark.parametrize(
    ("users", "device", "strange"),
    [(1000, None, 999), (MANY, None, MANY - 1), (MANY, "client/victims", MANY - 1)],
    ids=["invented users", "invented devices", "a device that is not theirs"],
)
async def test_the_third_party_draws_no_beacon_for_users_or_devices_that_a_server_invents(
    stand, calls, users, device, strange
):
    host = await stand.third_party.enrol("client", "victims", 1)
    accomplices = await stand.of_one_client(MANY - 1)
    how = {} if device is None else {"device": lambda number: device}
    lie = invention(users, beacon=committing(stand), **how)
    rounds = wire.RoundsPlan(cohorts=wire.CohortKind.COHORT_KIND_GROUPS, cohort=MANY, group=MANY)
    run = wire.RunPlan(run_id=stand.world.run, rounds=rounds)
    refused = await calls.refused(lambda: lie.fix(run, host, accomplices))
    assert refused.reason == "UNKNOWN_PARTICIPANT"
    assert f"{strange} users are not enrolled" in refused.text


async def test_a_host_refuses_a_cohort_of_accomplices_on_the_one_device_with_which_they_enrolled(stand):
    await stand.begin(MANY, users=MANY)
    accomplices = await stand.of_one_client(MANY - 1)
    lie = invention(MANY, device=lambda number: accomplices.party, beacon=committing(stand))
    async with stand.lying(lie, accomplices) as attack:
        spied = await attack.items()
    assert spied == Spied(NOTHING, [f"a cohort of 2 devices; the plan's floor is {FLOOR}"])


async def test_a_restarted_host_that_keeps_no_population_takes_part_in_two_of_one_run(stand):
    populations, before, after = await told_twice(stand, forgets=True)
    assert populations == [1000, 900]
    assert before == after == Spied(LEARNT, [])


async def test_a_restarted_host_takes_no_part_where_its_run_is_said_to_have_other_users_than_before(stand):
    populations, before, after = await told_twice(stand)
    assert populations == [1000]
    assert before == Spied(LEARNT, [])
    reason = "the sum is over another population than the one that was fixed for the run"
    assert after == Spied(NOTHING, [reason])


# --- a cohort of revoked participants ------------------------------------------------------------------------------


async def refuses(host, caller):
    """Return whether a host refuses a caller as revoked."""
    agent = host.channel(caller).stub(UserAgentStub)
    try:
        await agent.DisclosureReceipt(agent_wire.DisclosureReceiptRequest(user=VICTIM))
    except grpc.aio.AioRpcError as error:
        refusal = from_rpc_error(error, "the host")
        return isinstance(refusal, Refusal) and refusal.reason == ErrorReason.ERROR_REASON_REVOKED
    return False


async def with_revoked(stand):
    """Revoke all of the victim's cohort but the victim, whose host hears of it before the sum; return the outcome.

    Nothing else is untrue: the accomplices are clients of their own, in a cohort that the real server drew.
    """
    await stand.begin(FLOOR, users=FLOOR)
    parties, accomplices = await stand.clients_of_their_own(FLOOR - 1)
    for one in parties:
        member = Registrant(one.identities[0], one.bundles[0], wire.ParticipantKind.PARTICIPANT_KIND_USER)
        await stand.calls.party_at(stand.cos, one, stand.world.run).register([member])
    participants = [bundle.participant_id for bundle in accomplices.bundles]
    # Revoked in the same call: a host that refuses this caller has the list with the accomplices.
    caller = stand.third_party.issue(stand.folder / "caller", "operator", "caller")
    certificates = [caller.identity().fingerprint, *(one.fingerprint for one in parties)]

    async def revoke():
        directory = stand.third_party.directory(stand.certificates["operator"])
        await directory.Revoke(RevokeRequest(participants=participants, certificates=certificates))
        while not await refuses(attack.host, caller):
            await asyncio.sleep(0.05)

    async with stand.lying(InGoodTime(revoke), accomplices) as attack:
        spied = await attack.items()
    directory = stand.third_party.directory(stand.certificates["client"])
    found = await directory.Lookup(LookupRequest(participants=participants))
    assert [entry.revoked for entry in found.entries] == [True] * len(participants)
    return spied


async def test_a_host_takes_no_part_in_a_cohort_whose_other_participants_are_revoked(stand):
    reason = "the cohort has 1 devices without 19 members that are revoked; accepted is 20 or more"
    assert await with_revoked(stand) == Spied(NOTHING, [reason])
