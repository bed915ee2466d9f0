"""A real host under the masked sum of a server that lies: it leaves the round, says why, and sends no more."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from coterie.parties.party import Registrant
from coterie.rounds.training import Purpose
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.protocol import Step
from coterie.systems.fedncf.purposes import layout_of
from coterie.wire.v1 import operator_pb2 as operating
from coterie.wire.v1 import orchestrator_pb2 as wire

from .hosting import HISTORY, ITEMS, NAMES, SETTINGS, SOON_S, World, query
from .lying_cos import (
    AnotherOrder,
    FewSubmitters,
    Lie,
    LyingCos,
    SmallerCohort,
    SwappedKeys,
    SwappedParticipant,
    TwoLists,
)

OTHERS = 5

LIES = [
    (SmallerCohort, [], "a cohort of 9 users; by the plan's rule it has 10"),
    (AnotherOrder, [], "is not the one whom the run's population has there"),
    (SwappedKeys, [Step.ADVERTISE], "for this plan"),
    (SwappedParticipant, [Step.ADVERTISE], "was advertised with another participant's keys"),
    (
        FewSubmitters,
        [Step.ADVERTISE, Step.SHARE, Step.SUBMIT],
        "the list of submitters covers 6 users, the plan's floor is 7",
    ),
    (TwoLists, [Step.ADVERTISE, Step.SHARE, Step.SUBMIT, Step.CONFIRM], "for the same list"),
]
"""Lies that the host is told, the steps in which it sends anything all the same, and the entry on users' receipts."""


def sum_layout(purpose):
    return layout_of(SETTINGS, Purpose(purpose), len(ITEMS))


@pytest.fixture
def under_a_liar(calls, third_party, start_member, certificates, tmp_path, cos):
    """Return a function that lets a real host take part in a round of a lying server."""

    async def play(lie, until):
        world = World(calls, third_party, start_member, certificates, tmp_path, cos)
        await world.begin(secure_sum="masked", per_user=True, users=len(NAMES) + OTHERS)
        others = await third_party.enrol("client", f"others-{world.run}", OTHERS)
        members = [
            Registrant(identity, bundle, wire.ParticipantKind.PARTICIPANT_KIND_USER)
            for identity, bundle in zip(others.identities, others.bundles, strict=True)
        ]
        await calls.party_at(cos, others, world.run).register(members)
        started = []
        liar = LyingCos(
            cos,
            third_party,
            tmp_path / "liar",
            lambda: calls.Enrolled.of(started[0]),
            others,
            sum_layout,
            lie,
        )
        async with liar.serving():
            there = {"address": liar.address, "name": liar.name}
            # Healthy only once it has joined, which the liar must answer for.
            started.append(world.host(healthy=False, cos=there))
            host = started[0]
            async with asyncio.timeout(SOON_S):
                while not (host.answers() and until(liar, host)):
                    assert host.running, host.log.read_text()
                    await asyncio.sleep(0.05)
            receipts = [await world.receipt(host, name) for name in NAMES]
            await asyncio.to_thread(host.stop)
        await world.operator.stub.StopRun(operating.StopRunRequest(run_id=world.run))
        return liar, receipts

    return play


def declined(host):
    """Users who have a refusal on their receipt."""
    rows = query(host, "SELECT DISTINCT user FROM declined")
    return {user for (user,) in rows}


async def test_a_host_goes_through_the_round_of_a_server_that_tells_the_truth(under_a_liar):
    liar, receipts = await under_a_liar(Lie(), lambda liar, host: Step.UNMASK in liar.closed)
    assert liar.sent == list(MaskedServer.steps)
    counted = Counter(item for items in HISTORY.values() for item in items[:4])
    assert np.array_equal(liar.total()["supports"], [counted[item] for item in ITEMS])
    for sent, refused in receipts:
        assert refused == []
        assert sent["items of the history (masked)"].count == 1


@pytest.mark.parametrize(("lie", "left", "reason"), LIES, ids=[lie.__name__ for lie, _, _ in LIES])
async def test_a_host_sits_out_when_the_server_lies_and_every_user_is_told_why(
    under_a_liar, lie, left, reason
):
    # What all users are told is on one receipt.
    liar, receipts = await under_a_liar(
        lie(), lambda liar, host: declined(host) in ({0}, set(range(1, len(NAMES) + 1)))
    )
    assert liar.sent == left
    for sent, refused in receipts:
        assert [reason in one.reason for one in refused] == [True], refused
        assert ("items of the history (masked)" in sent) == (Step.SUBMIT in left)
        assert ("revealed shares" in sent) is False
