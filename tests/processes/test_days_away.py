"""Parties of each role that are away for three days come back, and the run in which they are goes on.

All clocks of a federation are set forward while a party is away: to the others three days pass.  Ten minutes without
the third party are twelve seconds here, and pass as well.
"""

import pytest

from coterie.studies.run_data import load, make_feed

from .short_ages import Calendar
from .test_clocks import FAKETIME
from .test_fedgnn import LONG as FEDGNN
from .test_fedidcf import BASE as FEDIDCF

pytestmark = [
    pytest.mark.skipif(
        FAKETIME is None,
        reason="needs libfaketime (Debian's package libfaketime), which gives a process its own clock",
    ),
    pytest.mark.long,
]

DAYS = 3
FULL = pytest.mark.full("another role or system; each takes half a minute")
HOST, COS, THIRD_PARTY, HOLDER = "client/host-1", "cos/cos", "thirdparty/directory", "decrypting-client/key-1"
OWNER = "data-owner"
"""The first of the run's data owners, whose names are the data's."""
USERS = 24
FEDNCF = {
    "system": "fedncf",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": USERS, "items": 60, "interactions": 700}},
    "rounds": {
        "cohort": USERS,
        "group": USERS,
        "min_cohort": 5,
        "min_sum": 5,
        "passes": 5_000,
        "evaluate_every": 5_000,
    },
    "encryption": {"bits": 1024, "comparison": True},
    "federation": {"hosts": 3, "party_timeout_s": 5.0},
}
DRIFT = {
    "drift": {"dim": 8, "epochs": 500},
    "federation": {"owners": 3, "hosts": 3, "party_timeout_s": 5.0, "min_users": 10},
}
LONG = {"passes": 120, "evaluate_every": 120}
KINDS = {
    "masked": {**FEDNCF, "secure_sum": "masked"},
    "encrypted": {**FEDNCF, "secure_sum": "encrypted"},
    "drift": DRIFT,
    "drift, shielded, masked": {
        **DRIFT,
        "secure_sum": "masked",
        "drift": {"form": "shielded", "dim": 8, "epochs": 500, "k_min": 3, "window": 40},
    },
    "fedgnn": {**FEDGNN, "rounds": {**FEDGNN["rounds"], **LONG}, "federation": FEDNCF["federation"]},
    "fedidcf": {**FEDIDCF, "rounds": {**FEDIDCF["rounds"], **LONG}, "federation": FEDNCF["federation"]},
}
"""Runs that are longer than a test."""

CASES = [
    ("masked", HOST),
    *(pytest.param("masked", party, marks=FULL) for party in (COS, THIRD_PARTY, OWNER)),
    *(pytest.param("encrypted", party, marks=FULL) for party in (HOST, COS, HOLDER)),
    *(pytest.param("drift", party, marks=FULL) for party in (HOST, COS, THIRD_PARTY, OWNER)),
    *(
        pytest.param("drift, shielded, masked", party, marks=FULL)
        for party in (HOST, COS, THIRD_PARTY, OWNER)
    ),
    *(pytest.param(kind, THIRD_PARTY, marks=FULL) for kind in ("fedgnn", "fedidcf")),
]


@pytest.mark.parametrize(("kind", "party"), CASES)
async def test_a_party_that_was_away_for_three_days_comes_back_and_the_run_goes_on(
    small, tmp_path, kind, party
):
    settings = small(**KINDS[kind])
    async with Calendar(settings, make_feed(settings, load(settings), 0), tmp_path) as running:
        await running.start()
        if party == OWNER:
            party = running.parties(OWNER)[0]
        await goes_on(running)
        running.children[party].kill()
        if party == THIRD_PARTY:
            await running.comes_true(
                lambda: 'coterie_condition{condition="directory"} 0.0' in running.page(COS),
                "the COS trusts nobody any more",
            )
        elif party != COS:
            await running.change(party, "lost")
        running.days_pass(DAYS)
        running.children[party].start()
        await running.up(party)
        if party not in (THIRD_PARTY, COS):
            await running.change(party, "returned")
        await goes_on(running)
        await goes_on(running)
        await running.stop()
    assert running.ended_well()


async def goes_on(running):
    """Wait for a sum of training, in DRIFT for updates, of which everybody who is there is part."""
    if running.settings.system == "drift":
        # A masked window is one update, and takes a busy machine seconds.
        await running.updates(20 if running.settings.secure_sum == "clear" else 2)
    else:
        await running.a_round("a round", reason="")
