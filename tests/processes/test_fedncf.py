"""FedNCF over real processes: the numbers of the same run in one process, in clear and masked."""

import asyncio
import dataclasses

import numpy as np
import pytest

from coterie.launch import local_run
from coterie.launch.federation import run_federation
from coterie.launch.local_run import LocalRun
from coterie.studies import experiment
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.wire.v1 import operator_pb2 as wire

from .recorded import of_system

ROUNDS = {"cohort": 20, "group": 20, "passes": 4, "evaluate_every": 2}
FEDNCF = {
    "system": "fedncf",
    "split": {"kind": "leave-last-out"},
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}


@pytest.fixture(scope="module")
def trained(small, federation, recorded):
    """Return what services and one process make of the same settings: running federation, its report, in process."""
    made = {}

    def make(name, **changes):
        if name in RECORDED:
            held = recorded.run("fedncf", *RECORDED[name])
            return held.running, held.report, recorded.alone("fedncf", *RECORDED[name])
        if name not in made:
            settings = small(**{**FEDNCF, **changes})

            async def to_the_end():
                async with federation(settings) as running:
                    await running.start()
                    return running, await running.finish()

            running, report = asyncio.run(to_the_end())
            alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
            made[name] = running, report, alone
        return made[name]

    return make


RECORDED = {
    "hosts, clear": ("clear", "hosts"),
    "hosts, masked": ("masked", "hosts"),
    "users, clear": ("clear", "users"),
}
"""Secure sum and form of runs that other tests read, too."""

KINDS = {
    "users, masked": {"rounds": {**ROUNDS, "party_per_user": True, "passes": 2}, "secure_sum": "masked"},
    "neumf with exact counts, clear": {"fedncf": {"model": "neumf", "touch": "exact"}},
}
EACH = pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(pytest.param(kind, {}, id=kind, marks=of_system("fedncf")) for kind in RECORDED),
        *(
            pytest.param(kind, changes, id=kind, marks=pytest.mark.xdist_group(kind))
            for kind, changes in KINDS.items()
        ),
    ],
)


@EACH
def test_services_and_one_process_come_to_equal_numbers(trained, kind, changes):
    running, report, alone = trained(kind, **changes)
    assert report["phase"] == "done"
    for found, expected in zip(report["history"], alone.known["history"], strict=True):
        assert {key: found[key] for key in ("epoch", "version", "users", "metrics")} == {
            key: expected[key] for key in ("epoch", "version", "users", "metrics")
        }
    assert report["chosen"] == alone.known["chosen"]
    rounds = running.settings.rounds
    assert len(report["history"]) == 1 + rounds.passes // rounds.evaluate_every > 1


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A data set with a hold-out as the authors of NCF published theirs, and 15 items to rank each test item among."""
    folder = tmp_path_factory.mktemp("published")
    rng = np.random.default_rng(0)
    users, items = 60, 80
    histories = [rng.choice(items, rng.integers(15, 30), replace=False) for _ in range(users)]
    ratings = [f"{user + 1}::{item + 1}::5" for user, own in enumerate(histories) for item in own]
    (folder / "ratings_no_timestamp.dat").write_text("\n".join(ratings) + "\n")
    split = folder / "ncf-split"
    split.mkdir()
    (split / "item_index_to_movieid.tsv").write_text("".join(f"{n}\t{n + 1}\n" for n in range(items)))
    tests = [(user, own[-1]) for user, own in enumerate(histories)]
    (split / "ml-1m.test.rating").write_text("".join(f"{u}\t{i}\t5\t9\n" for u, i in tests))
    lines = []
    for user, item in tests:
        others = np.setdiff1d(np.arange(items), histories[user])
        # Some test items stand among their own negatives, as in the original; and some negatives stand there twice.
        listed = [*rng.choice(others, 14, replace=False), item if user % 9 == 0 else others[0]]
        lines.append("\t".join([f"({user},{item})", *map(str, listed)]))
    (split / "ml-1m.test.negative").write_text("\n".join(lines) + "\n")
    return folder


def test_hosts_rank_among_the_published_items_where_a_data_set_has_them(trained, published):
    changes = {"data": {"path": str(published)}, "split": {"kind": "published"}}
    running, report, alone = trained("published", **changes)
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone.known["history"]]
    # The same run with items that hosts draw themselves comes to other figures.
    drawn = dataclasses.replace(running.feed, negatives=None)
    other = train_in_process(running.settings, drawn, run_id="test", seed=0, see=lambda event: None)
    assert [one["metrics"] for one in other.known["history"]] != [one["metrics"] for one in report["history"]]


@of_system("fedncf")
def test_the_masked_sum_changes_no_number(trained):
    _, clear, _ = trained("hosts, clear")
    _, masked, _ = trained("hosts, masked")
    assert [one["metrics"] for one in masked["history"]] == [one["metrics"] for one in clear["history"]]


@EACH
def test_every_round_is_accounted_for_by_services_as_in_one_process(trained, kind, changes):
    _, report, alone = trained(kind, **changes)
    same = (
        "round",
        "purpose",
        "pass",
        "users",
        "members",
        "summed",
        "dropped",
        "refused",
        "reason",
        "version",
    )
    assert [{key: one[key] for key in same} for one in report["rounds"]] == [
        {key: one[key] for key in same} for one in alone.known["rounds"]
    ]
    assert report["abandoned"] == 0
    for one in report["rounds"]:
        assert one["bytes_in"] > 0
        assert "submit" in one["seconds"]
        assert ("share" in one["seconds"]) == ("masked" in kind)


@of_system("fedncf")
def test_watchers_see_groups_asked_then_rounds_then_the_end(trained):
    running, _, _ = trained("hosts, clear")
    phases = [wire.RunPhase.Name(event.phase.phase) for event in running.events if event.HasField("phase")]
    assert phases == ["RUN_PHASE_SUPPORTS", "RUN_PHASE_ROUNDS", "RUN_PHASE_DONE"]
    rounds = [event.round.round for event in running.events if event.HasField("round")]
    assert rounds == list(range(1, len(rounds) + 1))
    assert [event.metrics.epoch for event in running.events if event.HasField("metrics")] == [0, 2, 4]


def test_users_go_back_to_what_they_had_at_the_version_that_counts(small, federation):
    """The version that is chosen is rarely the last one: what is recommended belongs to it on both sides."""
    settings = small(**{**FEDNCF, "rounds": {**ROUNDS, "passes": 3, "evaluate_every": 1}})

    def gone_back(child, version):
        private = child.state / "private"
        chosen = private / f"evaluated-{version:010d}-embedding.npy"
        return chosen.exists() and np.array_equal(np.load(private / "embedding.npy"), np.load(chosen))

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            await running.until(
                lambda event: event.HasField("metrics") and event.metrics.epoch == 3, "the last evaluation"
            )
            version = (await running.report())["chosen"]["version"]
            hosts = [child for name, child in running.children.items() if name.startswith("client/")]
            await running.comes_true(
                lambda: all(gone_back(child, version) for child in hosts), "users have gone back"
            )
            return len(hosts)

    assert asyncio.run(to_the_end()) == 3


def test_a_host_that_is_killed_and_started_again_loses_nothing(small, federation):
    settings = small(**FEDNCF)

    async def disturbed():
        async with federation(settings) as running:
            await running.start()
            await running.until(
                lambda event: event.HasField("round") and event.round.purpose == "train",
                "a round of training",
            )
            running.kill_and_restart("client/host-1")
            return running, await running.finish()

    running, report = asyncio.run(disturbed())
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    assert report["phase"] == "done"
    assert report["abandoned"] == 0
    assert report["chosen"] == alone.known["chosen"]


def test_the_server_that_is_killed_and_started_again_comes_to_the_same_numbers(small, federation):
    settings = small(**FEDNCF, secure_sum="masked")

    async def disturbed():
        async with federation(settings) as running:
            await running.start()
            await running.until(
                lambda event: event.HasField("round") and event.round.purpose == "train",
                "a round of training",
            )
            running.kill_and_restart("cos/cos")
            return running, await running.finish()

    running, report = asyncio.run(disturbed())
    alone = train_in_process(settings, running.feed, run_id="test", seed=0, see=lambda event: None)
    assert report["phase"] == "done"
    assert report["chosen"]["version"] == alone.known["chosen"]["version"]
    assert report["chosen"]["metrics"] == pytest.approx(alone.known["chosen"]["metrics"], abs=1e-3)


def test_a_whole_experiment_leaves_a_report_of_its_rounds(small, tmp_path):
    settings = small(**FEDNCF, output=tmp_path, reference=True)
    report, folder = asyncio.run(experiment.run(settings, "test", lambda seed, event: None, run_federation))
    assert report.metrics["hit_ratio@10"].mean == report.chosen.metrics["hit_ratio@10"]
    assert {"ncf", "popularity", "random"} <= report.reference.keys()
    assert report.protection.sum == "clear"
    assert report.visibility["cos/cos"]
    assert "Submit" in report.traffic
    assert (folder / "report.html").is_file()

    # Afterwards a user's host recommends by the version that counts, and says what has left it.
    feed = make_feed(settings, load(settings), 0)
    user = feed.dataset.users[0]
    found = asyncio.run(local_run.recommend(LocalRun.at(folder), user, 5))
    assert found.version == report.chosen.version
    own = feed.dataset.item[feed.dataset.user == 0]
    assert not {one.item for one in found.suggestions} & {feed.dataset.items[item] for item in own}
    assert len(found.suggestions) == 5
    left = asyncio.run(local_run.receipt(LocalRun.at(folder), user))
    assert any(one.recipient == "cos" for one in left.disclosures), left
    assert not left.declined
