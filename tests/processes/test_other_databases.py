"""A database that fails over to its replica, or is restored to an older state, in the middle of a run over real processes.

Each test has servers of PostgreSQL of its own: a replica streams from the first one (`pg_basebackup`).
"""

import json
import re
import time

import pytest

from .. import postgres
from .test_fedncf_faults import feed_of, settings_of
from .test_intakes import COORDINATOR, INTAKES, Spread, patient
from .test_standby import FIRST, SECOND, Doubled

PASSES = 30
BEHIND = "this server is behind its parties, as after a restore"


@pytest.fixture
def server():
    with postgres.running() as one:
        yield one


@pytest.fixture
def replica(server):
    with postgres.running(source=server) as one:
        yield one


def settings_of_a_run(small, secure_sum="masked"):
    settings = patient(settings_of(small, party_per_user=True))
    rounds = settings.rounds.model_copy(update={"passes": PASSES, "evaluate_every": PASSES // 3})
    return settings.model_copy(update={"rounds": rounds, "secure_sum": secure_sum})


@pytest.fixture
def federated(small, tmp_path):
    def make(kind, secure_sum="masked", **options):
        settings = settings_of_a_run(small, secure_sum)
        return kind(settings, feed_of(settings), tmp_path / "federation", **options)

    return make


@pytest.fixture(scope="module")
def undisturbed(small, federation):
    """Return a function that runs the same in one process, without a fault, once; it returns the metrics."""
    found = {}

    async def metrics(secure_sum="masked"):
        if secure_sum not in found:
            settings = settings_of_a_run(small, secure_sum)
            async with federation(settings, feed=feed_of(settings)) as alone:
                await alone.start()
                report = await alone.finish()
            found[secure_sum] = [one["metrics"] for one in report["history"]]
        return found[secure_sum]

    return metrics


async def nothing_lost(running, report, metrics, *, abandoned=False):
    """Check that every version was made once and none was lost, with the numbers of one process."""
    assert (report["phase"], report["reason"]) == ("done", "")
    assert not any(child.process.returncode for child in running.children.values() if child.process)
    numbers = [one["round"] for one in report["rounds"]]
    assert numbers == sorted(set(numbers))
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert [one["version"] for one in trained] == list(range(1, PASSES + 1))
    assert {one["summed"] for one in trained} == {30}
    assert not [one for one in report["rounds"] if BEHIND in one["reason"]]
    if not report["abandoned"]:
        assert [one["metrics"] for one in report["history"]] == await metrics()


def says_what_was_lost(report, *logs):
    """Check that a run went on behind its parties, and that report and log name what was lost."""
    assert (report["phase"], report["reason"]) == ("done", "")
    reasons = [one["reason"] for one in report["rounds"] if BEHIND in one["reason"]]
    assert reasons
    assert all(re.search(r"versions of the model after \d+ are lost", one) for one in reasons)
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    said = [line for line in lines if line["event"].startswith(BEHIND)]
    assert len(said) == len(reasons)
    assert all(line["goes_on_after_round"] and "versions_lost_after" in line for line in said)
    # None of the rounds that count comes twice.
    numbers = [one["round"] for one in report["rounds"] if not one["reason"]]
    assert numbers == sorted(set(numbers))
    assert report["history"][-1]["metrics"]


# --- fail-over ------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_cos_and_its_standby_go_on_with_the_replica_of_a_database_that_was_killed(
    federated, server, replica, undisturbed
):
    server.waits_for_replica()
    keys = postgres.keys_of_both(server, replica, server.database(), timeout_s=5.0)
    async with federated(Doubled, database=keys) as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        server.kill()
        await running.becomes("NOT_SERVING", FIRST, SECOND)
        since = time.monotonic()
        replica.promote()
        await running.a_round("a round on the replica", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after the replica was promoted")
        serving = [await running.health(party) for party in (FIRST, SECOND)]
        assert sorted(serving) == ["NOT_SERVING", "SERVING"]
        # Both may have lost their sessions; whoever is in office is followed.
        running.children[(FIRST, SECOND)[serving.index("SERVING")]].kill()
        await running.a_round("a round of the other one", summed=30, dropped=0, reason="")
        running.children[(FIRST, SECOND)[serving.index("SERVING")]].start()
        report = await running.finish()
    await nothing_lost(running, report, undisturbed)
