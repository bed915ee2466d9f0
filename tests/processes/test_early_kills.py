"""An orchestration server that is killed again and again while it starts is soon back in rounds."""

import asyncio

import pytest

from .patience import ANOTHER_FORM

COS = "cos/cos"
MOMENTS_S = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
"""Times after the beginning of a start at which the server is killed, seconds."""


@pytest.mark.long
@pytest.mark.parametrize("secure_sum", ["masked", pytest.param("encrypted", marks=ANOTHER_FORM)])
async def test_a_server_killed_while_it_starts_is_back_before_any_party_counts_as_lost(
    small, federation, secure_sum
):
    settings = small(
        system="fedncf",
        secure_sum=secure_sum,
        encryption={"bits": 1024, "comparison": True},
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": 24, "items": 60, "interactions": 600}},
        rounds={"cohort": 24, "group": 24, "passes": 5000, "evaluate_every": 5000},
        # Whoever is not heard for so long after the server's start is lost.
        federation={"hosts": 3, "party_timeout_s": 15.0},
    )
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        server = running.children[COS]
        for moment in MOMENTS_S:
            before = (await running.run_state()).version
            server.kill()
            server.start()
            await asyncio.sleep(moment)
            server.kill()
            server.start()
            await running.becomes("SERVING", COS)
            await running.until(
                lambda event, before=before: event.round.version > before + 1, "rounds after the start"
            )
        report = await running.report()
        await running.stop()
    assert running.ended_well()
    assert not [one for one in report["parties"] if one["change"] == "lost"]
    formed = [one["version"] for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert formed == list(range(1, len(formed) + 1))
