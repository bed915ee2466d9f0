"""FedGNN over real processes: the numbers of the same run in one process, under every sum and in both forms."""

import asyncio
import contextlib
import json
import sqlite3

import pytest
from typer.testing import CliRunner

from coterie.cli.certs import app
from coterie.cli.main import invoke
from coterie.parties.neighbourhood import ASKED, PUBLISHED
from coterie.studies.recorded_run import attack
from coterie.studies.run_graph import graph_of_run
from coterie.studies.services_run import FinishedRun
from coterie.wire.v1.client_pb2 import DisclosureReceiptRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

from .one_process import assert_equal_to_one_process

ROUNDS = {"cohort": 20, "group": 60, "passes": 4, "evaluate_every": 2}
BASE = {
    "system": "fedgnn",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "fedgnn": {"factors": 4, "local_epochs": 2},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
KINDS = {
    "hosts, clear": {},
    "hosts, neighbours, masked": {
        "secure_sum": "masked",
        "fedgnn": {"factors": 4, "local_epochs": 2, "neighbours": 12, "refresh": 2, "tags": 10},
        "rounds": {**ROUNDS, "passes": 6},
    },
    "hosts, neighbours, a key that is replaced twice, clear": {
        "fedgnn": {
            "factors": 4,
            "local_epochs": 2,
            "neighbours": 12,
            "refresh": 2,
            "rotate_every": 2,
            "tags": 10,
        },
        "rounds": {**ROUNDS, "passes": 6},
    },
    "users, neighbours, clear": {
        "fedgnn": {"factors": 4, "local_epochs": 2, "neighbours": 12, "tags": 10, "bucket_users": 10},
        "rounds": {**ROUNDS, "party_per_user": True},
    },
    "users, masked, pseudo-interacted items": {
        "secure_sum": "masked",
        "fedgnn": {"factors": 4, "local_epochs": 2, "samples": 1},
        "rounds": {**ROUNDS, "party_per_user": True, "passes": 2},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_services_and_one_process_come_to_equal_numbers(small, federation, kind):
    report = assert_equal_to_one_process(small(**{**BASE, **KINDS[kind]}), federation)
    assert report["history"][0]["metrics"] != report["history"][-1]["metrics"]
    if "neighbours" in kind:
        found = [one["metrics"]["with_neighbours"] for one in report["history"]]
        assert found[0] == 0
        assert found[-1] > 0.9
        assert report["history"][-1]["metrics"]["neighbours_current"] == 1
        asked = report["third_party"]["expansion"]
        assert (asked["counters"]["uploads"], asked["refused"]) == (60, {})
        assert set(asked["hosts"]) == {f"client/host-{n}" for n in range(3)}
        # The third party's counters are those of the newest graph, the server's of the whole run.
        answered = sum(one["answered"]["ask"] for one in asked["hosts"].values())
        if "replaced" in kind:
            assert answered > asked["counters"]["questions"]
        else:
            assert answered == asked["counters"]["questions"] > 0
    else:
        assert report["third_party"] == {}


async def test_users_receipts_and_the_report_count_the_same_requests_to_the_third_party(small, federation):
    sent = {}
    async with federation(small(**{**BASE, **KINDS["hosts, neighbours, masked"]})) as running:
        await running.start()
        await running.ended()
        for host in (f"client/host-{n}" for n in range(3)):
            channel = running.channel(host)
            receipt = await channel.stub(UserAgentStub).DisclosureReceipt(DisclosureReceiptRequest())
            await channel.close()
            left = [one for one in receipt.disclosures if one.recipient == "thirdparty"]
            assert all("sealed to the third party" in one.protection for one in left)
            sent[host] = {one.kind: one.count for one in left}
        report = await running.finish()
    asked = report["third_party"]["expansion"]["hosts"]
    assert sent == {
        host: {PUBLISHED: one["answered"]["publish"], ASKED: one["answered"]["ask"]}
        for host, one in asked.items()
    }
    assert min(count for one in sent.values() for count in one.values()) >= 13


LONG = {
    **BASE,
    "fedgnn": {
        "factors": 4,
        "local_epochs": 2,
        "neighbours": 12,
        "neighbours_after": 1,
        "refresh": 2,
        "tags": 10,
    },
    "rounds": {**ROUNDS, "passes": 12, "evaluate_every": 3},
}


async def test_without_the_third_party_training_goes_on_with_the_neighbours_that_users_have_and_says_so(
    small, federation
):
    settings = small(**{**LONG, "rounds": {**LONG["rounds"], "passes": 8, "evaluate_every": 4}})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        running.children["thirdparty/directory"].kill()
        report = await running.finish()
    assert report["phase"] == "done"
    assert report["abandoned"] == 0
    assert report["history"][1]["metrics"]["with_neighbours"] == 1
    last = report["history"][-1]["metrics"]
    assert last["with_neighbours"] == 1
    assert last["neighbours_current"] < 1
    asked = report["third_party"]["expansion"]
    assert "counters" not in asked, "the third party is gone"
    assert sum(one["answered"]["ask"] for one in asked["hosts"].values()) > 0


async def test_without_the_third_party_before_anybody_published_training_ends_without_neighbours(
    small, federation
):
    learning = {**LONG["fedgnn"], "neighbours_after": 3}
    rounds = {**ROUNDS, "cohort": 60, "passes": 5, "evaluate_every": 5}
    async with federation(small(**{**LONG, "fedgnn": learning, "rounds": rounds})) as running:
        await running.start()
        await running.a_round("a pass before publications", pass_number=0)
        running.children["thirdparty/directory"].kill()
        report = await running.finish()
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    first, last = (report["history"][at]["metrics"] for at in (0, -1))
    assert (last["with_neighbours"], last["neighbours_current"]) == (0, 0)
    assert last["train_rmse"] < first["train_rmse"]


async def test_a_third_party_that_is_restarted_in_mid_run_has_lost_no_graph(small, federation):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        running.kill_and_restart("thirdparty/directory")
        report = await running.finish()
    assert report["phase"] == "done"
    last = report["history"][-1]["metrics"]
    assert (last["with_neighbours"], last["neighbours_current"]) == (1, 1)


async def test_keys_are_replaced_in_mid_run_also_while_the_third_party_restarts(small, federation):
    settings = small(**{**LONG, "fedgnn": {**LONG["fedgnn"], "rotate_every": 4}})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        running.kill_and_restart("thirdparty/directory")
        report = await running.finish()
        store = running.children["thirdparty/directory"].state / "expansion.db"
        with contextlib.closing(sqlite3.connect(store)) as connection:
            epochs = [epoch for (epoch,) in connection.execute("SELECT epoch FROM graphs ORDER BY epoch")]
            own = connection.execute(
                "SELECT epoch, count(*) FROM graph_uploads JOIN graphs USING (graph) GROUP BY epoch"
            ).fetchall()
    assert report["phase"] == "done"
    # Publications are in passes 0, 2, 4 and so on to 10: the third epoch begins with that of pass 8.
    assert epochs == [2, 3]
    assert own == [(2, 60), (3, 60)]
    last = report["history"][-1]["metrics"]
    assert (last["with_neighbours"], last["neighbours_current"]) == (1, 1)


async def test_an_operator_has_the_key_replaced_in_mid_run_by_a_command(small, federation):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        command = [
            "rotate-graph",
            running.plan().run_id,
            "--tls",
            str(running.folder / "operator" / "tls"),
        ]
        where = ["--address", running.address("thirdparty/directory"), "--json"]
        said = await asyncio.to_thread(CliRunner().invoke, app, [*command, *where], catch_exceptions=False)
        assert said.exit_code == 0, said.output
        assert json.loads(said.stdout)["result"]["epoch"] == 2
        report = await running.finish()
        store = running.children["thirdparty/directory"].state / "expansion.db"
        with contextlib.closing(sqlite3.connect(store)) as connection:
            own = connection.execute(
                "SELECT epoch, count(*) FROM graph_uploads JOIN graphs USING (graph) GROUP BY epoch"
            ).fetchall()
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert own == [(1, 60), (2, 60)]
    assert report["third_party"]["expansion"]["counters"]["epoch"] == 2
    last = report["history"][-1]["metrics"]
    assert (last["with_neighbours"], last["neighbours_current"]) == (1, 1)


async def test_who_leaves_has_its_uploads_deleted_at_the_third_party_and_the_run_goes_on(small, federation):
    rounds = {**LONG["rounds"], "passes": 60, "evaluate_every": 20, "min_cohort": 5, "min_sum": 5}
    async with federation(small(**{**LONG, "rounds": rounds})) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        leaving = running.children["client/host-0"]
        config = leaving.folder / "config.toml"
        asked = await asyncio.to_thread(invoke, ["participate", "--config", str(config), "--leave"])
        assert asked == 0
        store = running.children["thirdparty/directory"].state / "expansion.db"
        before = uploads(store)
        assert before == 60
        await leave(leaving)
        channel = running.channel("client/host-0")
        report = await running.ended()
        receipt = await channel.stub(UserAgentStub).DisclosureReceipt(DisclosureReceiptRequest())
        await channel.close()
        report = await running.finish()
        own = len(running.feed.hosted(0).users)
        assert uploads(store) == 60 - own
        kept = [json.loads(one.read_bytes()) for one in (leaving.state / "graph").glob("*.user-*")]
    assert len(kept) == own
    assert not any(one["secret"] or one["tags"] for one in kept)
    assert "the user has left the run" in {one.reason for one in receipt.declined}
    assert report["phase"] == "done"
    assert len(report["history"]) == 4


async def test_who_leaves_while_its_host_is_down_or_after_the_run_is_forgotten_but_for_a_file_that_is_damaged(
    small, federation
):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass with neighbours", pass_number=3)
        store = running.children["thirdparty/directory"].state / "expansion.db"
        leaving = running.children["client/host-0"]
        leaving.kill()
        file = sorted((leaving.state / "graph").glob("*.user-*"))[1]
        whole = file.read_bytes()
        file.write_text("{")
        await leave(leaving)
        leaving.start()
        own = len(running.feed.hosted(0).users)
        # One user whose upload nobody knows any more keeps no other from it, and has its turn once the file is back.
        await running.comes_true(lambda: uploads(store) == 60 - own + 1, "all uploads but one are deleted")
        file.write_bytes(whole)
        await running.comes_true(lambda: uploads(store) == 60 - own, "the last upload is deleted")
        await running.ended()
        await leave(running.children["client/host-1"])
        more = len(running.feed.hosted(1).users)
        await running.comes_true(
            lambda: uploads(store) == 60 - own - more, "uploads are deleted after the run"
        )
        await running.finish()


async def leave(host):
    """Leave the run by the command, as the person of a host does."""
    command = ["participate", "--config", str(host.folder / "config.toml"), "--leave", "--yes"]
    assert await asyncio.to_thread(invoke, command) == 0


def uploads(store):
    """Return how many users' tags the third party holds; of a deleted upload it keeps the id, so that it stays gone."""
    with contextlib.closing(sqlite3.connect(store)) as connection:
        # Of one moment, though others are being deleted.
        connection.execute("BEGIN")
        held, gone, left = connection.execute(
            "SELECT count(*) FILTER (WHERE NOT forgotten), count(*) FILTER (WHERE forgotten), "
            "count(*) FILTER (WHERE forgotten AND (length(tags) OR length(embedding))) FROM graph_uploads"
        ).fetchone()
        tagged = connection.execute("SELECT count(DISTINCT upload) FROM graph_tags").fetchone()[0]
    assert held + gone == 60
    assert left == 0
    assert tagged == held
    return held


async def test_the_report_says_how_many_tags_of_the_run_somebody_with_public_ratings_names(small, federation):
    settings = small(
        **{
            **BASE,
            "data": {"synthetic": {"users": 120, "items": 60, "interactions": 3600}},
            "fedgnn": {"factors": 4, "local_epochs": 1, "neighbours": 12, "tags": 8, "bucket_users": 5},
            "rounds": {**ROUNDS, "cohort": 60, "passes": 3, "evaluate_every": 3},
            "federation": {"hosts": 3, "transcripts": True},
        }
    )
    async with federation(settings) as running:
        await running.start()
        report = await running.finish()
        assert report["phase"] == "done"
        feed, states = running.feed, {party: child.state for party, child in running.children.items()}
        finished = FinishedRun(running.plan(), report, 0.0, {}, states)
    found = attack(settings, finished, feed)["tag_matching"]
    graph, _ = graph_of_run(states, finished.plan.run_id, feed.dataset, feed.split.train)
    assert found["users"] == 120
    # Tags in the store are those that hosts computed, a few for each item.
    assert found["tags"] == len(graph.item_of_tag) > 60
    assert found["client_tags_named"] == 1.0
    assert found["client_uploads_named"] > 0.9
    assert found["tags_named"] < found["unsplit_named"]
    assert found["chance"] < 0.1
    assert (
        graph_of_run({"client/host-0": states["client/host-0"]}, "test", feed.dataset, feed.split.train)
        is None
    )
