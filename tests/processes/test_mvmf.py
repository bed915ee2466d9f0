"""FedMVMF over real processes: the numbers of the same run in one process, an item server that dies, new users."""

import asyncio
import contextlib
import itertools
import json
import sqlite3

import grpc
import numpy as np
import pytest

from coterie.evaluation.holdout import TRAIN
from coterie.launch import local_run
from coterie.launch.federation import run_federation
from coterie.launch.local_run import LocalRun
from coterie.studies import experiment
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.systems.registry import server_side
from coterie.wire.v1.client_pb2 import RecordInteractionRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

from .recorded import of_system

ROUNDS = {"cohort": 20, "group": 60, "passes": 4, "evaluate_every": 2}
MVMF = {
    "system": "fedmvmf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "mvmf": {"factors": 4, "ridge": 3.0},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
OWNER = "data-owner/catalogue"


KINDS = {
    "three item servers": {"mvmf": {"factors": 4, "ridge": 3.0, "item_servers": 3}},
    "new items, steps, clear": {
        "split": {"kind": "cold-items"},
        "mvmf": {"factors": 4, "update": "sgd", "private_rate": 1e-3},
    },
}


def test_three_item_servers_come_to_the_same_numbers_in_whatever_order_they_come(small, federation):
    settings = small(
        **{**MVMF, "mvmf": {**MVMF["mvmf"], "item_servers": 3}, "rounds": {**ROUNDS, "passes": 2}}
    )
    names = [f"data-owner/catalogue-{n}" for n in range(3)]

    async def to_the_end(order):
        async with federation(settings, hold=order[1:]) as running:
            await running.start()
            for before, name in itertools.pairwise(order):
                await running.until(
                    lambda event, before=before: event.party.party == before, f"{before} is there"
                )
                running.release(name)
            report = await running.finish()
        assert report["phase"] == "done"
        joined = [one["party"] for one in report["parties"] if one["party"] in names]
        assert joined == list(order)
        return [(one["version"], one["metrics"]) for one in report["history"]], report["chosen"]

    first = asyncio.run(to_the_end(names))
    assert len(first[0]) == 2
    assert asyncio.run(to_the_end(names[::-1])) == first


def same_numbers(report, alone):
    """Check a report against what one process makes of the same settings."""
    assert report["phase"] == "done"
    same = ("epoch", "version", "users", "metrics")
    assert [{key: one[key] for key in same} for one in report["history"]] == [
        {key: one[key] for key in same} for one in alone["history"]
    ]
    assert report["chosen"] == alone["chosen"]
    assert report["abandoned"] == 0
    assert [one["silent_owners"] for one in report["rounds"]] == [[]] * len(report["rounds"])
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_services_of_fedmvmf_and_one_process_come_to_equal_numbers(small, federation, kind):
    settings = small(**{**MVMF, **KINDS[kind]})

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            return running, await running.finish()

    running, report = asyncio.run(to_the_end())
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    assert same_numbers(report, alone.known)


@of_system("fedmvmf")
@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_a_recorded_run_of_fedmvmf_and_one_process_come_to_equal_numbers(recorded, secure_sum):
    report = recorded.run("fedmvmf", secure_sum).report
    assert same_numbers(report, recorded.alone("fedmvmf", secure_sum).known)


@of_system("fedmvmf")
@pytest.mark.parametrize("secure_sum", ["masked", "encrypted"])
def test_a_protected_sum_changes_no_number_of_fedmvmf(recorded, secure_sum):
    clear, protected = (recorded.run("fedmvmf", one).report for one in ("clear", secure_sum))
    assert [one["metrics"] for one in protected["history"]] == [one["metrics"] for one in clear["history"]]


async def test_without_its_item_server_a_run_goes_on_says_so_and_takes_it_back(small, federation):
    rounds = {**ROUNDS, "passes": 5000, "evaluate_every": 5000}
    settings = small(**{**MVMF, "rounds": rounds, "federation": {"hosts": 3, "party_timeout_s": 2.0}})

    def trained_with(names, after):
        def wanted(event):
            one = event.round
            return event.number > after and one.purpose == "train" and list(one.silent_owners) == names

        return wanted

    async with federation(settings) as running:
        await running.start()
        await running.until(trained_with([], 0), "a round with what is known of items")
        running.children[OWNER].kill()
        await running.until(trained_with(["catalogue"], 0), "a round without")
        running.children[OWNER].start()
        await running.change(OWNER, "returned")
        seen = max(event.number for event in running.events)
        await running.until(trained_with([], seen), "a round with it again")
        report = await running.report()
    assert report["abandoned"] == 0
    assert any(one["silent_owners"] == ["catalogue"] for one in report["rounds"])


async def test_a_rating_that_is_recorded_while_a_run_goes_on_is_kept_and_rounds_go_on(small, federation):
    rounds = {**ROUNDS, "passes": 5000, "evaluate_every": 5000}
    settings = small(**{**MVMF, "rounds": rounds, "mvmf": {"min_touch": 1}})

    def trained(after):
        return lambda event: event.number > after and event.round.purpose == "train"

    async with federation(settings) as running:
        await running.start()
        await running.until(trained(0), "a round of training")
        data, host = running.feed.hosted(0), "client/host-0"
        unseen = int(np.setdiff1d(np.arange(80), data.item[data.user == 0])[0])
        new = {"user": data.users[0], "item": data.items[unseen], "positive": True}
        channel = running.channel(host)
        try:
            agent = channel.stub(UserAgentStub)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await agent.RecordInteraction(RecordInteractionRequest(**new, rating=9.5))
            await agent.RecordInteraction(RecordInteractionRequest(**new, rating=4.5))
        finally:
            await channel.close()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        seen = max(event.number for event in running.events)
        await running.until(trained(seen), "the next round")
        await running.until(trained(seen + 1), "another one")
        report = await running.report()
    assert report["abandoned"] == 0
    with contextlib.closing(sqlite3.connect(running.children[host].state / "client.db")) as connection:
        kept = connection.execute("SELECT item, rating FROM history ORDER BY row DESC LIMIT 1").fetchall()
    assert kept == [(new["item"], 4.5)]


def test_server_and_item_server_that_are_killed_and_started_again_come_to_the_same_numbers(small, federation):
    # Factors of features that step, and do not follow from the model: the owner keeps them.
    mvmf = {"factors": 4, "update": "sgd", "private_rate": 1e-3, "feature_rate": 1e-3}
    settings = small(**{**MVMF, "mvmf": mvmf, "rounds": {**ROUNDS, "passes": 12, "evaluate_every": 12}})

    def trained(version):
        return lambda event: event.round.purpose == "train" and event.round.version >= version

    async def disturbed():
        async with federation(settings) as running:
            await running.start()
            await running.until(trained(2), "two rounds of training")
            running.kill_and_restart("cos/cos")
            await running.until(trained(4), "two more")
            running.kill_and_restart(OWNER)
            return running, await running.finish()

    running, report = asyncio.run(disturbed())
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    assert report["phase"] == "done"
    assert not any(one["silent_owners"] for one in report["rounds"])
    assert report["chosen"] == alone.known["chosen"]


def test_a_host_with_a_rating_out_of_range_says_so_and_ends(small, federation):
    settings = small(**MVMF)
    host = "client/host-1"
    private = "9357182046.5"  # no time and no port in the log has as many digits

    async def wrong():
        async with federation(settings, hold=[host]) as running:
            await running.start()
            child = running.children[host]
            path = child.folder / "histories.csv"
            head, first, *rest = path.read_text().splitlines()
            first = first.rpartition(",")[0] + f",{private}"
            path.write_text("\n".join([head, first, *rest]) + "\n")
            running.release(host)
            await running.comes_true(
                lambda: child.process is not None and child.process.poll() is not None, "the host has ended"
            )
            return child.process.poll(), child.log.read_text()

    status, log = asyncio.run(wrong())
    assert status != 0
    assert "ratings of this host out of range: 1; expected 0.5 to 5" in log
    assert private[:8] not in log


def test_a_user_who_has_rated_nothing_is_recommended_what_its_attributes_say(small, tmp_path):
    settings = small(
        **{**MVMF, "split": {"kind": "cold-users"}, "federation": {"hosts": 2}},
        output=tmp_path,
        reference=True,
    )
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    assert set(report.reference) == {"item_mean", "popularity", "random"}
    assert report.visibility["data-owner/catalogue"]["item_features"] == "may see"
    json.loads((folder / "report.json").read_text())
    assert "FedMVMF" in (folder / "report.html").read_text()

    feed = make_feed(settings, load(settings), 0)
    data = feed.dataset
    cold = np.setdiff1d(np.arange(60), data.user[feed.split.part == TRAIN])
    user = data.users[int(cold[0])]
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), user, 5))
    assert found.version == report.chosen.version
    passes = report.chosen.epoch
    rounds = settings.rounds.model_copy(update={"passes": passes, "evaluate_every": passes})
    again = settings.model_copy(update={"rounds": rounds})
    alone = train_in_process(again, feed, run_id="test", seed=0, see=lambda event: None)
    host = int(feed.host[cold[0]])
    position = list(feed.hosted(host).users).index(user)
    side = server_side(
        "fedmvmf",
        settings.own.for_plan(settings, feed.attribute_names),
        len(data.items),
        0,
        alone.known["groups"],
    )
    scores = alone.hosts[host].recommend(side.model(alone.trained.arrays), position)
    best = np.argsort(-scores, kind="stable")[:5]
    assert [one.item for one in found.suggestions] == [data.items[item] for item in best]
