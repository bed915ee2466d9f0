"""A third party that stands still, and answers nobody, in the middle of runs: rounds are not held for long by it."""

import signal

import pytest

from .test_fedgnn import LONG as FEDGNN

THIRDPARTY = "thirdparty/directory"
HELD_S = 5.0
"""A round that takes longer was held: others take a fraction of a second, more on a machine under load."""


@pytest.mark.long
async def test_a_third_party_that_stands_still_holds_one_round_and_not_those_that_follow(small, federation):
    rounds = {**FEDGNN["rounds"], "passes": 12, "evaluate_every": 12}
    async with federation(small(**{**FEDGNN, "rounds": rounds})) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        running.signal(THIRDPARTY, signal.SIGSTOP)
        begun = max(event.number for event in running.events)
        report = await running.finish()
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    seconds = [
        sum(event.round.seconds)
        for event in running.events
        if event.number > begun and event.round.purpose == "train"
    ]
    # Users are due again in every round; only the first one waits for an answer that does not come.
    held = [one for one in seconds if one > HELD_S]
    assert len(seconds) > 4
    assert len(held) <= 2, seconds
    for host in running.parties("client"):
        said = [line for line in running.log(host) if line["event"] == "no new neighbours"]
        assert len(said) == 1, said
