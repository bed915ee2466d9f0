"""Certificates of seconds: a federation whose processes renew theirs again and again learns what it always learns."""

import asyncio
import urllib.error
from collections import Counter

import numpy as np
import pytest

from coterie.launch.authority import make_token
from coterie.studies.in_process import train_in_process
from coterie.systems.drift.sequential import run_in_process

SECONDS = 1 / (24 * 3600)
VALID_S = 15
ROUNDS = {"cohort": 20, "group": 20, "passes": 4, "evaluate_every": 2}
FEDNCF = {
    "system": "fedncf",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
KINDS = {
    "masked": {"secure_sum": "masked"},
    "encrypted": {
        "secure_sum": "encrypted",
        "encryption": {"bits": 1024, "comparison": True},
        "rounds": {**ROUNDS, "passes": 2, "evaluate_every": 1},
    },
}
slow = pytest.mark.full("takes half a minute")


def renewals(running):
    """Return how often each party renewed its certificate."""
    log = running.log("thirdparty/directory")
    return Counter(line["party"] for line in log if line["event"] == "renewed a certificate")


async def without_the_third_party(running, party):
    """Let the third party go away until the certificate of a party has ended, and give everybody a new token then."""

    def says(status):
        try:
            return running.page(party, "/healthz") and status == 200
        except urllib.error.HTTPError as error:
            return error.code == status

    await running.comes_true(lambda: says(200), f"{party} is well")
    running.children["thirdparty/directory"].kill()
    await running.comes_true(lambda: says(503), f"the certificate of {party} has ended")
    assert 'coterie_certificate_renewals_total{outcome="failed"} 0.0' not in running.page(party)
    lines = running.log(party)
    (warned, *_) = (line for line in lines if line["event"] == "cannot renew the certificate yet")
    assert 0 < warned["left_s"] <= VALID_S / 3 + 1
    # It is said once the third party was asked for a renewal by the key, too.
    ended = "nobody takes it any more"
    await running.comes_true(lambda: any(ended in line["event"] for line in running.log(party)), "it is said")
    running.children["thirdparty/directory"].start()
    authority = running.children["thirdparty/directory"].state
    for child in running.children.values():
        # The certificates of others, with whom the party is well, may have ended as well.
        if child.role != "thirdparty":
            make_token(authority, child.role, child.name, 100, child.folder / "token")
    await running.comes_true(lambda: says(200), f"{party} has another certificate")


async def through_renewals(running, late, after=None):
    """Let a federation wait for one party until everybody has renewed its certificate, and come to its end."""
    await running.start()
    others = set(running.children) - {late, "thirdparty/directory"} | {"operator/operator"}
    await running.comes_true(lambda: others <= renewals(running).keys(), "everybody has renewed once")
    running.release(late)
    await running.ended()
    await running.comes_true(
        lambda: all(renewals(running)[party] >= 2 for party in others), "everybody has renewed twice"
    )
    report = await running.report()
    for party in others - {"operator/operator"}:
        said = [line for line in running.log(party) if line["level"] in ("warning", "error")]
        # Before the operator has started the run, the COS knows of none.
        assert [line for line in said if line.get("reason") != "UNKNOWN_ROUND"] == [], party
    if after is not None:
        await after()
    await running.stop()
    if after is None:
        assert running.ended_well()
    return report


@pytest.mark.long
@pytest.mark.parametrize("kind", ["masked", pytest.param("encrypted", marks=slow)])
def test_rounds_go_through_renewals_without_another_number(small, federation, kind):
    settings = small(**FEDNCF, **{key: value for key, value in KINDS[kind].items() if key not in FEDNCF})
    late = "client/host-2"

    async def to_the_end():
        keys = {"thirdparty": {"certificate_days": VALID_S * SECONDS}}
        async with federation(settings, hold=[late], keys=keys) as running:

            async def after():
                await without_the_third_party(running, "client/host-0")

            return running, await through_renewals(running, late, after if kind == "masked" else None)

    running, report = asyncio.run(to_the_end())
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    assert report["phase"] == "done"
    assert [(one["epoch"], one["metrics"]) for one in report["history"]] == [
        (one["epoch"], one["metrics"]) for one in alone.known["history"]
    ]


@slow
def test_drift_goes_through_renewals_without_another_number(small, federation):
    settings = small(drift={"theta": 3, "epochs": 5}, federation={"owners": 1, "hosts": 1})
    late = "client/host-0"

    async def to_the_end():
        keys = {"thirdparty": {"certificate_days": VALID_S * SECONDS}}
        async with federation(settings, hold=[late], keys=keys) as running:
            await through_renewals(running, late)
            return running

    running = asyncio.run(to_the_end())
    users, items = running.stores.final()
    (stream,) = running.stores.streams().values()
    expected = run_in_process(
        [stream], len(users), len(items), running.stores.learning(), epochs=5, seed=running.plan().seed
    )
    for found, factors in zip((users, items), expected, strict=True):
        np.testing.assert_allclose(found, factors, rtol=1e-5, atol=1e-6)
