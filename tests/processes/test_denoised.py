"""Denoised sums over real processes: the numbers of FedMF without sampled items, and denoisers that fail."""

import asyncio
from typing import Any

from coterie.studies.in_process import train_in_process

BASE: dict[str, Any] = {
    "system": "fedmf",
    "secure_sum": "denoised",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 100, "interactions": 1800}},
    "fedmf": {"samples": 1, "factors": 4, "min_touch": 2},
    "rounds": {
        "cohorts": "all",
        "passes": 4,
        "evaluate_every": 2,
        "party_per_user": True,
        "min_cohort": 10,
        "min_sum": 10,
    },
    "federation": {"hosts": 3},
}
_SAME = ("epoch", "version", "users", "metrics")


def numbers(known: Any) -> Any:
    return [{key: one[key] for key in _SAME} for one in known["history"]]


def test_services_come_to_the_numbers_of_plain_fedmf_to_the_bit(small: Any, federation: Any) -> None:
    settings = small(**BASE)

    async def to_the_end() -> Any:
        async with federation(settings) as running:
            await running.start()
            return running.feed, await running.finish()

    feed, report = asyncio.run(to_the_end())
    plain = small(**{**BASE, "secure_sum": "clear", "fedmf": {**BASE["fedmf"], "samples": 0}})
    for alone in (settings, plain):
        known = train_in_process(alone, feed, run_id="test", seed=0, see=lambda event: None).known
        assert numbers(known) == numbers(report)
        assert (known["chosen"], known["closed_share"]) == (report["chosen"], report["closed_share"])
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert all(one["left_out"] == 0 and not one["withdrawn"] for one in report["rounds"])
    sampled = small(**{**BASE, "secure_sum": "clear"})
    noisy = train_in_process(sampled, feed, run_id="test", seed=0, see=lambda event: None).known
    assert numbers(noisy) != numbers(report)
