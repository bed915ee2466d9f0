"""FedIDCF over real processes: the numbers of the same run in one process, and a third party that is down."""

import asyncio
import contextlib
import dataclasses
import sqlite3

import numpy as np
import pytest

from coterie.cli.main import invoke
from coterie.crypto.authority import logical_name
from coterie.crypto.latent_terms import LatentTerms
from coterie.data.keyed_order import key_hash
from coterie.evaluation.holdout import TRAIN
from coterie.net.channel import connect
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import identities, saved_bundles
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.parties.kept_latents import KeptLatents
from coterie.parties.latents import LatentCalls, LatentUpload
from coterie.studies.in_process import train_in_process
from coterie.systems.fedidcf.host import FedIdcfHost
from coterie.systems.fedidcf.server import FedIdcfServer
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.wire.v1.client_pb2 import RecordInteractionRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

from .one_process import assert_equal_to_one_process
from .planted import ask, names_at

ROUNDS = {"cohorts": "all", "passes": 8, "evaluate_every": 2}
BASE = {
    "system": "fedidcf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 60, "interactions": 1500}},
    "fedidcf": {
        "factors": 4,
        "local_epochs": 2,
        "factor_passes": 3,
        "latents": 20,
        "hidden": 4,
        "attention_rate": 0.5,
    },
    "rounds": ROUNDS,
    "encryption": {"bits": 1024, "comparison": True},
    "federation": {"hosts": 3},
}
KINDS = {
    "hosts, masked": {"secure_sum": "masked"},
    "users, clear": {"rounds": {**ROUNDS, "party_per_user": True}},
    "evaluated right after publishing": {"fedidcf": {**BASE["fedidcf"], "factor_passes": 4}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_services_and_one_process_come_to_equal_numbers(small, federation, kind):
    report = assert_equal_to_one_process(small(**{**BASE, **KINDS[kind]}), federation)
    metrics = [one["metrics"] for one in report["history"]]
    assert ["with_latents" in one for one in metrics] == [False, False, False, True, True]
    assert metrics[-1]["with_latents"] == 1
    assert metrics[-1]["query_spread"] > 0
    # Steps of the attention changed the vectors of query users.
    assert abs(metrics[-1]["query_spread"] - metrics[-2]["query_spread"]) > 0.01
    # Errors are rounded as they are sent.
    assert metrics[-1]["key_rmse"] == pytest.approx(metrics[-2]["key_rmse"], abs=1e-5)


async def test_hosts_that_share_the_key_of_sums_read_combinations_under_it(small, federation):
    settings = small(**{**BASE, "secure_sum": "shared-key"})
    async with federation(settings) as running:
        await running.start()
        report = await running.finish()
    clear = settings.model_copy(update={"secure_sum": "clear"})
    alone = train_in_process(clear, running.feed, run_id="test", seed=0, see=lambda event: None).known
    assert report["history"][-1]["metrics"]["with_latents"] == 1
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone["history"]]


LONG = {
    **BASE,
    "fedidcf": {**BASE["fedidcf"], "factor_passes": 8},
    "rounds": {**ROUNDS, "passes": 14, "evaluate_every": 14},
}


async def test_without_the_third_party_between_the_phases_the_run_ends_with_biases_and_says_so(
    small, federation
):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass of the first phase", pass_number=3)
        running.children["thirdparty/directory"].kill()
        report = await running.finish()
    # On a busy machine a sum may be given up while hosts still wait for the third party; the next ones do not wait.
    assert report["phase"] == "done"
    assert report["abandoned"] <= 2
    last = report["history"][-1]["metrics"]
    assert last["with_latents"] == 0
    # Errors are rounded as they are sent.
    assert last["query_rmse"] == pytest.approx(last["biases_query_rmse"], abs=1e-5)
    assert report["chosen"]["version"] == report["history"][-1]["version"]


async def test_a_third_party_that_comes_back_between_the_phases_combines_as_if_nothing_was(small, federation):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass of the first phase", pass_number=3)
        running.kill_and_restart("thirdparty/directory")
        report = await running.finish()
    assert report["history"][-1]["metrics"]["with_latents"] == 1


async def rates(running, host, user, item, rating):
    """Record a rating in place of a user's own application."""
    channel = running.channel(host)
    try:
        request = RecordInteractionRequest(user=user, item=item, positive=True, rating=rating)
        await channel.stub(UserAgentStub).RecordInteraction(request)
    finally:
        await channel.close()


async def test_a_query_user_who_rates_after_the_factors_are_fixed_is_served_by_the_attention_at_once(
    small, federation
):
    settings = small(**{**BASE, "rounds": {**ROUNDS, "evaluate_every": 8}})
    alone = None
    async with federation(settings) as running:
        await running.start()
        await running.ended()
        alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
        side, host, data = alone.hosts[0], "client/host-0", running.feed.hosted(0)
        position = int(np.flatnonzero(~side.trains)[0])
        user = data.users[position]
        server = FedIdcfServer(settings.table(FedIdcfSettings), len(data.items), 0, 1)
        model = server.model(alone.trained.best)
        before = await ask(running, host, user)
        # A host that begins anew after the run has what it had: nobody sends it combinations any more.
        running.kill_and_restart(host)
        again = await Retry(limit_s=60.0)(lambda: ask(running, host, user))
        assert again.scores == before.scores
        worst = data.items[int(np.setdiff1d(np.arange(60), data.item[data.user == position])[0])]
        await rates(running, host, user, worst, 1.0)
        after = await ask(running, host, user)
        await running.finish()
    one = data.items.index(worst)
    later = dataclasses.replace(
        data,
        user=np.append(data.user, position),
        item=np.append(data.item, one),
        part=np.append(data.part, TRAIN),
        rating=np.append(data.rating, np.float32(1.0)),
    )
    learning = settings.table(FedIdcfSettings)
    asked = [data.items.index(item) for item in after.items]

    def served(latents):
        """Return the scores of the same items where the host knows these combinations."""
        one = FedIdcfHost(learning, later, key_hash(data.users, 0), 0, lambda private: dict(side.private))
        if latents is not None:
            one.take_latents(latents)
        return one.recommend(model, position)[asked]

    wanted = served(side.latents)
    assert list(after.scores) == pytest.approx(wanted.tolist(), rel=1e-6)
    assert np.abs(wanted - served(None)).max() > 1e-4
    assert worst not in after.items
    assert list(after.scores) != list(before.scores)


async def forget(running, host):
    """Have the vector of a host's first key user deleted, by what the host keeps, while its process is down."""
    state, run = running.children[host].state, running.plan().run_id
    position, path = min((int(path.suffix[6:]), path) for path in state.glob(f"latents/{run}.user-*"))
    bundles = saved_bundles(state)
    with sqlite3.connect(running.children["cos/cos"].state / "cos.db") as connection:
        query = "SELECT slot FROM participants WHERE participant = ?"
        (slot,) = connection.execute(query, [bundles[position].participant_id]).fetchone()
    upload, tls = LatentUpload(path, slot), TlsFiles(state / "tls").channel_credentials()
    assert upload.published
    channels = [
        connect(
            running.address(party),
            tls,
            tls_name=logical_name(*party.split("/")),
            peer=party,
            meter=Meter(),
        )
        for party in ("cos/cos", "thirdparty/directory")
    ]
    terms = LatentTerms(dimension=4, combinations=20, least=20, most=60, bound=1)
    key = (state / "directory.key").read_bytes()
    own = identities(state, len(bundles))[position]
    await LatentCalls(*channels, key, own, terms).forget(upload, run)
    for channel in channels:
        await channel.close()
    assert LatentUpload(path, slot).forgotten


async def test_after_a_key_user_was_forgotten_its_host_and_the_others_go_on_with_what_is_combined_without_it(
    small, federation
):
    # Long enough for a key, vectors and combinations of the second epoch.
    settings = small(**{**BASE, "rounds": {**ROUNDS, "passes": 300, "evaluate_every": 300}})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a pass of the attention", pass_number=6)
        host = running.children["client/host-0"]
        host.kill()
        await forget(running, "client/host-0")
        host.start()
        hosts = [KeptLatents(running.children[one].state, "test") for one in running.parties("client")]

        def read():
            return [one.load().epoch for one in hosts] == [2, 2, 2]

        await running.comes_true(read, "all hosts have read the combinations of the second epoch")
        known = [one.load().latents for one in hosts]
        assert all(np.array_equal(one, known[0]) for one in known)
        report = await running.finish()
        store = running.children["thirdparty/directory"].state / "expansion.db"
        with contextlib.closing(sqlite3.connect(store)) as connection:
            kept = connection.execute(
                "SELECT epoch, key_users, (SELECT count(*) FROM latent_combinations AS one"
                " WHERE one.number = latent_sets.number) FROM latent_sets ORDER BY epoch"
            ).fetchall()
    assert (report["phase"], report["chosen"]["version"] > 0) == ("done", True)
    (_, key_users, gone), (_, left, combined) = kept
    # A set that is void has no combinations, and a count without the one who was forgotten.
    assert gone == 0
    assert key_users == left >= 20
    assert combined == 20
    assert [epoch for epoch, _, _ in kept] == [1, 2]
    assert report["history"][-1]["metrics"]["with_latents"] == 1
    assert report["third_party"]["latents"]["counters"] == {
        "epoch": 2,
        "key_users": left,
        "combinations": 20,
    }


async def test_who_leaves_has_its_vectors_deleted_and_the_others_combine_without_them(small, federation):
    floors = {"min_cohort": 5, "min_sum": 5}
    settings = small(**{**BASE, "rounds": {**ROUNDS, **floors, "passes": 300, "evaluate_every": 300}})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a pass of the attention", pass_number=6)
        leaving = running.children["client/host-0"]
        command = ["participate", "--config", str(leaving.folder / "config.toml"), "--leave", "--yes"]
        assert await asyncio.to_thread(invoke, command) == 0
        store = running.children["thirdparty/directory"].state / "expansion.db"
        own = list(leaving.state.glob("latents/test.user-*"))

        def gone():
            return all(LatentUpload(one, 0).forgotten for one in own)

        await running.comes_true(gone, "the host has had its vectors deleted")
        others = [KeptLatents(running.children[one].state, "test") for one in running.parties("client")[1:]]
        await running.comes_true(
            lambda: {one.load().epoch for one in others} == {2},
            "the others have read combinations without it",
        )
        report = await running.finish()
    query = (
        "SELECT epoch, forgotten, count(*), sum(length(vector)) FROM latent_uploads JOIN latent_sets USING (number)"
        " GROUP BY epoch, forgotten ORDER BY epoch, forgotten"
    )
    with contextlib.closing(sqlite3.connect(store)) as connection:
        found = connection.execute(query).fetchall()
    assert report["phase"] == "done"
    # The first set keeps no vector of anybody, and the second, which was combined, knows who left by ids alone.
    assert [(epoch, gone, left) for epoch, gone, _, left in found] == [
        (1, 0, 0),
        (1, 1, 0),
        (2, 0, 0),
        (2, 1, 0),
    ]
    (kept, forgotten), (again, counted) = (
        (one[2], other[2]) for one, other in zip(found[::2], found[1::2], strict=True)
    )
    assert again == kept >= 20
    assert counted == forgotten == len(own) > 0
    combined = "SELECT count(*) FROM latent_combinations JOIN latent_sets USING (number) WHERE epoch = 2"
    with contextlib.closing(sqlite3.connect(store)) as connection:
        assert connection.execute(combined).fetchone() == (20,)


async def test_after_the_run_a_query_user_is_served_by_the_attention(small, federation):
    settings = small(**{**BASE, "rounds": {**ROUNDS, "evaluate_every": 8}})
    async with federation(settings) as running:
        await running.start()
        await running.ended()
        asked = {}
        for host in running.parties("client"):
            for user in names_at(running.feed, host):
                asked[user] = await ask(running, host, user)
        await running.finish()
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    server = FedIdcfServer(settings.table(FedIdcfSettings), len(running.feed.dataset.items), 0, 1)
    model, items = server.model(alone.trained.best), list(running.feed.dataset.items)
    queries = 0
    for number, side in enumerate(alone.hosts):
        for position, user in enumerate(names_at(running.feed, f"client/host-{number}")):
            scores = side.recommend(model, position)
            expected = [scores[items.index(item)] for item in asked[user].items]
            assert list(asked[user].scores) == pytest.approx(expected, rel=1e-6), user
            queries += not side.trains[position]
            assert np.any(side.private["factors"][position, 2:])
    assert queries > 5
