"""FPL over real processes: the numbers of one process, recommendations, and the attacks on what users send."""

import asyncio
import json

import grpc
import numpy as np
import pytest

from coterie.evaluation.holdout import TRAIN
from coterie.launch import local_run
from coterie.launch.federation import run_federation
from coterie.launch.local_run import LocalRun
from coterie.privacy.attacks.rounds_view import view_of_sum
from coterie.studies import experiment
from coterie.studies.recorded_run import numbering, transcripts
from coterie.studies.replay import Replay
from coterie.studies.run_data import load, make_feed
from coterie.systems.fpl.server import layouts
from coterie.systems.fpl.settings import FplSettings
from coterie.wire.v1.client_pb2 import PreferenceChange, SetPreferencesRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

from .one_process import assert_equal_to_one_process
from .planted import names_at

BASE = {
    "system": "fpl",
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": {"passes": 4, "evaluate_every": 2},
    "fpl": {"factors": 4, "pi": 0.6, "pi_spread": 0.2},
    "federation": {"hosts": 3},
}


@pytest.mark.parametrize(("secure_sum", "users"), [("clear", False), ("masked", False), ("masked", True)])
def test_services_and_one_process_come_to_equal_numbers(small, federation, secure_sum, users):
    rounds = {**BASE["rounds"], "party_per_user": users}
    settings = small(**{**BASE, "rounds": rounds}, secure_sum=secure_sum)
    assert_equal_to_one_process(settings, federation)


def test_a_run_has_a_report_and_a_user_is_recommended_what_it_has_not(small, tmp_path):
    settings = small(**BASE, output=tmp_path, reference=True)
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    assert {"item_knn", "ease_central", "popularity", "random"} <= set(report.reference)
    json.loads((folder / "report.json").read_text())
    assert "pFPL+" in (folder / "report.html").read_text()
    assert ("Share pi", "drawn by each user, uniformly from 0.4 to 0.8") in report.facts()

    data = (feed := make_feed(settings, load(settings), 0)).dataset
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), data.users[3], 5))
    had = data.item[(data.user == 3) & (feed.split.part == TRAIN)]
    suggested = [one.item for one in found.suggestions]
    assert len(set(suggested)) == 5
    assert not set(suggested) & {data.items[item] for item in had}
    scores = [one.score for one in found.suggestions]
    assert scores == sorted(scores, reverse=True)
    assert np.isfinite(scores).all()

    # The host is started again for each request, and keeps what its user has set.
    asyncio.run(local_run.preferences(LocalRun.at(folder), data.users[3], {"pi": 0.25}))
    (kept,) = asyncio.run(local_run.preferences(LocalRun.at(folder), data.users[3]))
    assert (kept.name, kept.value) == ("pi", 0.25)
    (none,) = asyncio.run(local_run.preferences(LocalRun.at(folder), data.users[4]))
    assert not none.HasField("value")


@pytest.fixture(scope="module")
def attacked(small, tmp_path_factory):
    """Return a function that runs a federation of single users to its end and returns the attacks of its report."""

    def run(secure_sum, passes, **options):
        settings = small(
            **{
                **BASE,
                "rounds": {"passes": passes, "evaluate_every": passes, "party_per_user": True},
                "fpl": {"factors": 4, "min_touch": 1, **options},
                "federation": {"hosts": 2, "attacks": True},
                "secure_sum": secure_sum,
                "output": tmp_path_factory.mktemp("attacked"),
            }
        )
        report, _ = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
        return report.content()["attacks"]

    return run


def test_in_clear_signs_are_the_items_of_users_that_send_everything(attacked):
    found = attacked("clear", 1, pi=1.0)["signs"]
    assert found["auc"] > 0.999
    assert (found["precision"], found["recall"]) == (1, 1)


def test_in_clear_a_share_of_0_hides_items_from_signs_but_not_from_absence_over_rounds(attacked):
    found = attacked("clear", 12, pi=0.0)
    assert found["signs"]["recall"] == 0
    assert found["absence"]["rounds"] == 12
    assert found["absence"]["auc"] > found["absence"]["popularity_auc"] + 0.1
    assert found["absence"]["auc"] > 0.95


def test_a_masked_sum_tells_no_more_than_popularity(attacked):
    found = attacked("masked", 4, pi=1.0)
    for name in ("signs", "absence"):
        assert found[name]["users"] == 60
        assert found[name]["auc"] < found[name]["popularity_auc"] + 0.02
        assert found[name]["precision"] < 0.6


# --- Users' own shares -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_shares(small, tmp_path_factory):
    """Settings of a run in clear in which some users have set a share of 0 in a file, and the data of the run."""
    settings = small(**{**BASE, "fpl": {"factors": 4, "min_touch": 1}})
    users = load(settings).users
    path = tmp_path_factory.mktemp("own") / "shares.csv"
    path.write_text("user,pi\n" + "".join(f"{user},0\n" for user in users[::3]))
    return small(**{**BASE, "fpl": {"factors": 4, "pi": 0.6, "min_touch": 1, "preferences": path}})


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
def test_users_own_shares_of_a_file_give_the_numbers_of_one_process(own_shares, federation, secure_sum):
    settings = own_shares.model_copy(update={"secure_sum": secure_sum})
    report = assert_equal_to_one_process(settings, federation)
    plan = json.dumps(report, default=str)
    assert "preferences" not in plan


def raised(running, user):
    """Return how many of a user's own items each of its contributions raised, by round, and those of its own."""
    plan, feed = running.plan(), running.feed
    slots, items = numbering({party: child.state for party, child in running.children.items()})
    data = feed.dataset
    mine = (data.user == data.users.index(user)) & (feed.split.part == TRAIN)
    own = np.array([items[data.items[item]] for item in data.item[mine]])
    layout = layouts(FplSettings.from_json(plan.settings), len(items)).layout
    found = {}
    for one in Replay(transcripts({"cos/cos": running.cos.state})["cos/cos"], plan).received(layout):
        if one.plan.purpose == "train" and one.slots == (slots[user],):
            moved = view_of_sum(one.layout, one.codes, one.slots, one.version, touched="supports").rows[:, 0]
            found[one.plan.round] = int((moved[own] > 0).sum())
    return found, len(own)


async def set_share(running, user, share):
    """Set a user's share by a call of its application, and return what the host then says of it."""
    host = f"client/host-{running.feed.host[running.feed.dataset.users.index(user)]}"
    channel = running.channel(host)
    try:
        changes = [PreferenceChange(name="pi", value=share)]
        answer = await channel.stub(UserAgentStub).SetPreferences(
            SetPreferencesRequest(user=user, changes=changes)
        )
        return host, [one.value for one in answer.preferences]
    finally:
        await channel.close()


def test_a_share_that_a_user_sets_during_a_run_holds_from_then_on_and_over_a_crash_of_its_host(
    small, federation
):
    settings = small(
        **{
            **BASE,
            "secure_sum": "clear",
            "rounds": {"passes": 40, "evaluate_every": 40, "party_per_user": True},
            "fpl": {"factors": 4, "min_touch": 1},
            "federation": {"hosts": 2, "transcripts": True},
        }
    )

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            changed, other = names_at(running.feed, "client/host-0")[:2]
            await running.a_round("a round of all", summed=60)
            until = max(event.round.round for event in running.events)
            host, shown = await set_share(running, changed, 0.0)
            assert (host, shown) == ("client/host-0", [0.0])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await set_share(running, other, 1.5)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            since = max(event.round.round for event in running.events)
            running.kill_and_restart(host)
            await running.up(host)
            await running.a_round("a round of all after the crash", summed=60)
            await running.finish()
            return running, changed, other, until, since

    running, changed, other, until, since = asyncio.run(to_the_end())
    assert running.ended_well()
    found, own = raised(running, changed)
    # The round that was under way when the share was set may have been trained before.
    after = [count for round_, count in found.items() if round_ > since + 1]
    before = [count for round_, count in found.items() if round_ <= until]
    assert len(after) > 10
    assert set(after) == {0}
    assert before
    assert min(before) > 0.8 * own
    found, own = raised(running, other)
    assert min(found.values()) > 0.8 * own
