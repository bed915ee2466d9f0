"""Whole hosts lost from masked rounds over real processes: recovered or abandoned, as the thresholds say."""

import dataclasses

import numpy as np
import pytest

from coterie.studies.run_data import load, make_feed

USERS_AT = (18, 6, 6)
"""Users of each host.  Of thirty members each needs 21 of its neighbours: six may be lost, and eighteen not."""

BIG, SMALL = "client/host-0", "client/host-1"


def settings_of(small, give_up_s=600.0, **rounds):
    users = sum(USERS_AT)
    return small(
        system="fedncf",
        secure_sum="masked",
        split={"kind": "leave-last-out"},
        data={"synthetic": {"users": users, "items": 60, "interactions": 600}},
        # More passes than anybody waits for.
        rounds={"cohort": users, "group": users, "passes": 5000, "evaluate_every": 5000, **rounds},
        federation={"hosts": len(USERS_AT), "party_timeout_s": 3.0, "give_up_s": give_up_s},
    )


def feed_of(settings):
    feed = make_feed(settings, load(settings), 0)
    return dataclasses.replace(feed, host=np.repeat(np.arange(len(USERS_AT)), USERS_AT))


@pytest.mark.long
async def test_a_host_that_is_lost_is_done_without_until_it_is_back_and_for_too_many_the_run_waits(
    small, federation
):
    settings = settings_of(small, party_per_user=True, channel_rounds=1000, give_up_s=20.0)
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
        await running.waits("the plan's floor is 20", f"missing: {BIG}")
        running.children[BIG].start()
        await running.a_round("a round over everybody once more", summed=30, dropped=0, reason="")

        running.children[BIG].kill()
        report = await running.finish()

    assert report["phase"] == "failed"
    assert report["reason"].startswith("no sum was formed for 20 s; ")
    assert report["reason"].endswith(f"missing: {BIG}")
    # While it waits no round is opened: at most two are abandoned, in which nobody knew yet that the host is gone.
    assert report["abandoned"] <= 2
    assert [bool(one["reason"]) for one in report["waits"]] == [True, False, True]
    changes = {
        party: [one["change"] for one in report["parties"] if one["party"] == party] for party in (BIG, SMALL)
    }
    assert changes == {BIG: ["joined", "lost", "returned", "lost"], SMALL: ["joined", "lost", "returned"]}
    # The version is that of the last round that was formed.
    formed = [one["version"] for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert report["version"] == formed[-1] == len(formed)


@pytest.mark.long
async def test_a_run_waits_for_any_of_three_hosts_that_are_parties_and_goes_on_when_it_is_back(
    small, federation
):
    settings = settings_of(small)
    settings = settings.model_copy(update={"rounds": settings.rounds.model_copy(update={"passes": 40})})
    async with federation(settings, feed=feed_of(settings)) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, members=3, dropped=0, reason="")
        running.children[SMALL].kill()
        await running.waits("neighbours of theirs", f"missing: {SMALL}")
        running.children[SMALL].start()
        await running.a_round("a round over everybody again", summed=30, members=3, dropped=0, reason="")
        report = await running.finish()

    assert report["phase"] == "done"
    assert report["abandoned"] <= 1
    reasons = {one["reason"] for one in report["rounds"] if one["reason"]}
    assert all("neighbours left" in reason for reason in reasons), reasons
