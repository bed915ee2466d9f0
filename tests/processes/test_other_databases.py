"""A database that fails over to its replica, or is restored to an older state, in the middle of a run.

Processes are real, and each test has servers of PostgreSQL of its own; a replica streams from the first one.
"""

import json
import re
import signal
import time

import pytest

from .. import postgres
from .patience import ANOTHER_FORM
from .test_fedncf_faults import feed_of, settings_of
from .test_intakes import BIG, COORDINATOR, INTAKES, Spread, patient
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


async def nothing_lost(running, report, metrics, secure_sum="masked"):
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
        assert [one["metrics"] for one in report["history"]] == await metrics(secure_sum)


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
        # Either may be in office now; the other one takes over on the replica, too.
        office = running.children[(FIRST, SECOND)[serving.index("SERVING")]]
        office.kill()
        await running.a_round("a round of the other one", summed=30, dropped=0, reason="")
        office.start()
        report = await running.finish()
    await nothing_lost(running, report, undisturbed)


@pytest.mark.long
@pytest.mark.full("takes most of a minute")
async def test_an_old_primary_without_its_synchronous_replica_gets_nothing_from_the_cos_that_still_reaches_it(
    federated, server, replica, undisturbed
):
    """Two servers take writes, and each COS reaches one of them: the first one's commits wait for ever."""
    server.waits_for_replica()
    database = server.database()
    keys = replica.keys(database, timeout_s=5.0)
    async with federated(Doubled, database=keys, way=f"127.0.0.1:{server.port}") as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        # The standby waits with a server that takes no writes yet.
        assert await running.first_health(SECOND) == "NOT_SERVING"
        replica.promote()
        await running.becomes("SERVING", SECOND)
        await running.becomes("NOT_SERVING", FIRST)
        newest = "SELECT max(version) FROM model_versions"
        before = int(server.sql(newest, database))
        await running.a_round("a round on the promoted replica", summed=30, dropped=0, reason="")
        server.kill()
        server.start()
        await running.a_round("a round after the old primary came back", summed=30, dropped=0, reason="")
        assert await running.health(FIRST) == "NOT_SERVING"
        # One commit may have been waiting for the replica when the server was killed; nothing was written since.
        assert int(server.sql(newest, database)) <= before + 1
        # The first COS need not wait for a commit when it ends.
        server.kill()
        report = await running.finish()
    await nothing_lost(running, report, undisturbed)


@pytest.mark.long
async def test_a_cos_goes_on_with_a_replica_that_lacks_the_last_rounds_and_says_what_was_lost(
    federated, server, replica
):
    keys = postgres.keys_of_both(server, replica, server.database(), timeout_s=5.0)
    async with federated(Doubled, database=keys) as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        replica.falls_behind()
        for number in range(3):
            await running.a_round(f"round {number} that the replica lacks", summed=30, dropped=0, reason="")
        server.kill()
        replica.promote()
        report = await running.finish()
    says_what_was_lost(report, *(running.children[party].log for party in (FIRST, SECOND)))


@pytest.mark.long
async def test_what_intakes_acknowledged_counts_once_on_the_replica_of_a_database_that_was_killed(
    federated, server, replica, undisturbed
):
    server.waits_for_replica()
    keys = postgres.keys_of_both(server, replica, server.database(), timeout_s=5.0)
    async with federated(Spread, "clear", database=keys) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        await running.acknowledged(server, 12)
        server.kill()
        running.signal(BIG, signal.SIGCONT)
        await running.becomes("NOT_SERVING", COORDINATOR, *INTAKES)
        replica.promote()
        await running.a_round("a round on the replica", summed=30, dropped=0, reason="")
        report = await running.finish()
    assert not report["abandoned"]
    await nothing_lost(running, report, undisturbed, "clear")


@pytest.mark.long
@ANOTHER_FORM
async def test_an_intake_goes_on_with_a_replica_that_lacks_what_it_acknowledged(federated, server, replica):
    keys = postgres.keys_of_both(server, replica, server.database(), timeout_s=5.0)
    async with federated(Spread, "clear", database=keys) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        replica.falls_behind()
        await running.a_round("a round that the replica lacks", summed=30, dropped=0, reason="")
        await running.acknowledged(server, 12)
        server.kill()
        running.signal(BIG, signal.SIGCONT)
        replica.promote()
        report = await running.finish()
    says_what_was_lost(report, running.children[COORDINATOR].log)


# --- restored -------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_cos_and_its_standby_go_on_with_a_database_that_was_restored_and_say_what_was_lost(
    federated, server
):
    database = server.database()
    async with federated(Doubled, database=server.keys(database, timeout_s=5.0)) as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        dump = server.dump(database)
        for number in range(3):
            await running.a_round(f"round {number} after the dump", summed=30, dropped=0, reason="")
        # Both run meanwhile.
        server.restored(database, dump)
        await running.a_round("a round after the restore", summed=30, dropped=0, reason="")
        for party in (FIRST, SECOND):
            running.children[party].kill()
        server.restored(database, dump)
        for party in (SECOND, FIRST):
            running.children[party].start()
        report = await running.finish()
    says_what_was_lost(report, *(running.children[party].log for party in (FIRST, SECOND)))


@pytest.mark.long
async def test_a_coordinator_and_its_intakes_go_on_with_a_database_that_lacks_what_was_acknowledged(
    federated, server, tmp_path
):
    """The whole server is put back, while the coordinator and its intakes run, in the middle of a sum."""
    async with federated(Spread, "clear", database=server.keys(server.database(), timeout_s=5.0)) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        server.stop()
        server.copy(tmp_path / "data")
        server.start()
        for number in range(2):
            await running.a_round(f"round {number} after the copy", summed=30, dropped=0, reason="")
        await running.acknowledged(server, 12)
        server.stop()
        server.put_back(tmp_path / "data")
        running.signal(BIG, signal.SIGCONT)
        server.start()
        report = await running.finish()
    says_what_was_lost(report, running.children[COORDINATOR].log)


@pytest.mark.long
async def test_a_database_without_the_files_of_its_versions_is_refused_by_name(federated, server):
    """The versions are files, as without a standby, and none of the time of the dump is kept any more."""
    database = server.database()
    async with federated(Spread, "clear", database=server.keys(database, timeout_s=5.0)) as running:
        await running.start()
        await running.a_round("a round before the dump", summed=30, dropped=0, reason="")
        dump = server.dump(database)
        for number in range(5):
            await running.a_round(f"round {number} after the dump", summed=30, dropped=0, reason="")
        server.restored(database, dump)
        cos = running.children[COORDINATOR]
        await running.comes_true(lambda: not cos.alive, "the coordinator ends")
        assert cos.process.returncode == 40
        said = cos.last_words()
        assert "names the version of the model that round " in said, said
        assert re.search(r"which is not in .*models/test", said), said
        assert "folder and the database back to one time" in cos.log.read_text()
