"""Whole hosts lost from masked rounds over real processes: recovered or abandoned, as the thresholds say."""

import dataclasses

import numpy as np
import pytest

from coterie.studies.run_data import load, make_feed

USERS_AT = (18, 6, 6)
"""Users of each host.  Of thirty members each needs 21 of its neighbours: six may be lost, and eighteen not."""

BIG, SMALL = "client/host-0", "client/host-1"


def settings_of(small, **rounds):
    users = sum(USERS_AT)
    return small(
        system="fedncf",
        secure_sum="masked",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": users, "items": 60, "interactions": 600}},
        # More passes than anybody waits for.
        rounds={"cohort": users, "group": users, "passes": 5000, "evaluate_every": 5000, **rounds},
        federation={"hosts": len(USERS_AT), "party_timeout_s": 3.0},
    )


def feed_of(settings):
    feed = make_feed(settings, load(settings), 0)
    return dataclasses.replace(feed, host=np.repeat(np.arange(len(USERS_AT)), USERS_AT))


@pytest.mark.long
async def test_a_host_that_is_lost_is_done_without_until_it_is_back_and_too_many_end_the_run(
    small, federation
):
    settings = settings_of(small, party_per_user=True)
    async with federation(settings, feed=feed_of(settings)) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        running.children[SMALL].kill()
        await running.change(SMALL, "lost")
        await running.a_round("a round without the host", summed=24, dropped=6, reason="")
        running.children[SMALL].start()
        await running.change(SMALL, "returned")
        await running.a_round("a round over everybody again", summed=30, dropped=0, reason="")

        running.children[BIG].kill()
        report = await running.finish()

    assert report["phase"] == "failed"
    assert "rounds in a row were abandoned" in report["reason"]
    assert "users have enough neighbours left, the plan's floor is 20" in report["reason"]
    assert report["abandoned"] == 5
    changes = {
        party: [one["change"] for one in report["parties"] if one["party"] == party] for party in (BIG, SMALL)
    }
    assert changes == {BIG: ["joined", "lost"], SMALL: ["joined", "lost", "returned"]}
    # The version is that of the last round that was formed.
    formed = [one["version"] for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert report["version"] == formed[-1] == len(formed)


@pytest.mark.long
async def test_of_three_hosts_that_are_parties_none_may_be_lost(small, federation):
    settings = settings_of(small)
    async with federation(settings, feed=feed_of(settings)) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, members=3, dropped=0, reason="")
        running.children[SMALL].kill()
        report = await running.finish()

    assert report["phase"] == "failed"
    assert report["abandoned"] == 5
    reasons = {one["reason"] for one in report["rounds"] if one["reason"]}
    assert all("neighbours left" in reason for reason in reasons), reasons
