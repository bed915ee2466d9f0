"""Sums under a key that the participants share, over real processes: the server never has the model."""

import asyncio

import pytest

from coterie.launch.feed import load, make_feed
from coterie.launch.in_process import train_in_process

# Short keys, drawn quickly.  What long ones take, the benchmarks show.
KEY = {"bits": 1024, "comparison": True}
ROUNDS = {"cohort": 20, "group": 20, "passes": 2, "evaluate_every": 1}
BASE = {
    "system": "fedncf",
    "secure_sum": "shared-key",
    "split": {"kind": "leave-last-out"},
    "encryption": KEY,
    "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
KINDS = {
    "hosts": {},
    "users": {"rounds": {**ROUNDS, "party_per_user": True, "passes": 1}},
    "exact counts": {"fedncf": {"touch": "exact", "model": "neumf"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_participants_share_changes_no_number(small, federation, kind):
    settings = small(**{**BASE, **KINDS[kind]})

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            return await running.finish()

    report = asyncio.run(to_the_end())
    assert report["phase"] == "done", report["reason"]
    clear = settings.model_copy(update={"secure_sum": "clear"})
    feed = make_feed(clear, load(clear), 0)
    alone = train_in_process(clear, feed, run_id="test", seed=0, see=lambda event: None)
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone.known["history"]]
    assert report["chosen"] == alone.known["chosen"]
    assert all(one["reason"] == "" and one["liars"] == 0 for one in report["rounds"])
    assert {"submit", "confirm", "decrypt", "compare models"} <= set(report["rounds"][-1]["seconds"])
