"""Intakes of the COS behind a TCP balancer: real processes, one coordinator, PostgreSQL, and faults in the midst."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie.launch.authority import make_token
from coterie.launch.children import Child, free_port, toml
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.wire import versions

from .. import postgres
from ..volumes import fill, small_volume
from . import later_intake, lying_intake
from . import test_shielded as shielded
from .gate import Balancer, Cable
from .patience import ANOTHER_FORM
from .programs import ProgramChild
from .running import Running
from .test_fedncf_faults import feed_of, settings_of

COORDINATOR, STANDBY, INTAKES = "cos/cos", "cos/standby", ("cos/intake-0", "cos/intake-1")
BIG = "client/host-0"
"""Host of 18 of the 30 users."""
PASSES = 45
FEW = 6
REFUSALS = "is not the one of the round's plan", "does not have the declared SHA-256"
"""What a host says of a model that an intake has changed: one that came with a poll, or one that it fetched."""


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Spread(Running):
    """A federation whose COS is one coordinator and two intakes; all callers come through a balancer.

    Parameters
    ----------
    database : mapping
        Settings of the database.
    way : str, optional
        Where the coordinator finds the database, when not at its own address; it has a standby then.
    program : str, optional
        Module that serves the second intake, in place of the service itself.
    """

    def __init__(self, *arguments, database, way="", program="", **options):
        super().__init__(*arguments, **options)
        self.database, self.way, self.program = database, way, program
        self.second = f"127.0.0.1:{free_port()}"
        self.behind = f"127.0.0.1:{free_port()}"
        self.at = {party: f"127.0.0.1:{free_port()}" for party in INTAKES}
        self.balancer = Balancer(list(self.at.values()))

    def _configure(self):
        laid = super()._configure()
        coordinator = self.children[COORDINATOR]
        authority = self.children["thirdparty/directory"].state
        text = (coordinator.folder / "config.toml").read_text()
        standby = "standby = true\n" if self.way else ""
        others = [STANDBY] if self.way else []
        for party in (COORDINATOR, *others, *INTAKES):
            own, child, database = text, coordinator, dict(self.database)
            if party in INTAKES:
                at = json.dumps([self.behind, *([self.second] if self.way else [])])
                part, address = f"coordinator = {at}\n", self.at[party]
            else:
                part = f'part = "coordinator"\n{standby}'
                address = self.behind if party == COORDINATOR else self.second
            if party == COORDINATOR and self.way:
                database["url"] = re.sub(r"@127\.0\.0\.1:\d+/", f"@{self.way}/", database["url"])
            if party != COORDINATOR:
                folder = self.folder / party.partition("/")[2]
                child = (Intake if party in INTAKES else Child)("cos", "cos", folder)
                if party == INTAKES[1] and self.program:
                    child = OtherIntake("cos", "cos", folder, program=[self.program])
                make_token(authority, "cos", "cos", 0, child.folder / "token")
                self.metrics[party] = f"127.0.0.1:{free_port()}"
                own = own.replace(str(coordinator.folder), str(child.folder))
                own = own.replace(self.metrics[COORDINATOR], self.metrics[party])
            own = own.replace(self._addresses["cos"], address)
            (child.folder / "config.toml").write_text(f"{part}{own}\n[database]\n{toml(database)}")
            self.children[party] = child
        self._late += [self.children[party] for party in others]
        self._listening = asyncio.create_task(self.balancer.listen(self._addresses["cos"]))
        return laid

    async def start(self):
        """Start everybody, and the balancer with them."""
        await super().start()
        await self._listening

    async def stands_by(self):
        """Start the coordinator's standby, and wait until it waits."""
        self._late.clear()
        self.children[STANDBY].start()
        await self.becomes("NOT_SERVING", STANDBY)

    async def acknowledged(self, server, members):
        """Hold the big host back; wait until the others' contributions to a sum are acknowledged."""
        self.signal(BIG, signal.SIGSTOP)
        wanted = f"SELECT 1 FROM intake_senders GROUP BY round HAVING count(*) = {members}"
        await self.comes_true(lambda: self.sql(server, wanted), f"{members} contributions to a sum")

    def sql(self, server, statement):
        """Return what the coordinator's database answers."""
        return server.sql(statement, re.search(r"/(\w+)\?", self.database["url"])[1])

    async def stop(self):
        """Stop every process, and the balancer."""
        await super().stop()
        await self.balancer.close()


class Intake(Child):
    """An intake, which the command line makes of a COS."""

    def start(self, *sets):
        super().start('part="intake"', *sets)


class OtherIntake(ProgramChild):
    """An intake that another program serves: one of a later release, or one that lies."""

    def start(self, *sets):
        super().start('part="intake"', *sets)


def settings_of_a_run(small, secure_sum="masked", passes=PASSES):
    settings = settings_of(small, party_per_user=True)
    rounds = settings.rounds.model_copy(update={"passes": passes, "evaluate_every": passes // 3})
    return settings.model_copy(update={"rounds": rounds, "secure_sum": secure_sum})


def patient(settings):
    """Return the settings with hosts that may be held back for a while, by a signal or a machine under load."""
    return settings.model_copy(
        update={"federation": settings.federation.model_copy(update={"party_timeout_s": 60.0})}
    )


@pytest.fixture
def spread(small, server, tmp_path):
    def make(secure_sum="masked", passes=PASSES, *, waits=False, **options):
        settings = settings_of_a_run(small, secure_sum, passes)
        settings = patient(settings) if waits else settings
        keys = server.keys(server.database(), timeout_s=5.0)
        return Spread(settings, feed_of(settings), tmp_path / "federation", database=keys, **options)

    return make


@pytest.fixture(scope="module")
def undisturbed(small, federation):
    """Return a function that runs the same in one process, without a fault, once; it returns the metrics."""
    found = {}

    async def metrics(secure_sum, passes):
        if (secure_sum, passes) not in found:
            settings = patient(settings_of_a_run(small, secure_sum, passes))
            async with federation(settings, feed=feed_of(settings)) as alone:
                await alone.start()
                report = await alone.finish()
            found[secure_sum, passes] = [one["metrics"] for one in report["history"]]
        return found[secure_sum, passes]

    return metrics


def summed_once(report, passes=PASSES):
    """Check that every version was made once, by a round that ended once, and none was lost."""
    assert (report["phase"], report["reason"]) == ("done", "")
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert [one["version"] for one in trained] == list(range(1, passes + 1))
    assert report["history"][-1]["metrics"]


BY_HOSTS_THAT_ARE_MOVED = pytest.mark.full(
    "hosts that a balancer moves come to the same numbers in clear, too"
)


@pytest.mark.long
@pytest.mark.parametrize("secure_sum", [pytest.param("clear", marks=BY_HOSTS_THAT_ARE_MOVED), "masked"])
async def test_a_run_through_two_intakes_gives_the_same_numbers_as_through_one_process(
    spread, undisturbed, secure_sum
):
    async with spread(secure_sum, FEW, waits=True) as running:
        await running.start()
        report = await running.finish()
    summed_once(report, FEW)
    assert not any(child.process.returncode for child in running.children.values())
    assert [one["metrics"] for one in report["history"]] == await undisturbed(secure_sum, FEW)


@pytest.mark.full("a measurement")
@pytest.mark.long
async def test_a_masked_round_through_intakes_costs_less_than_four_times_that_of_one_process(
    spread, federation, small
):
    """Print the CPU time of each process of the COS for a contribution, all steps of its rounds and start-up apart."""
    settings = settings_of_a_run(small)
    whole = {}
    for running in (federation(settings, feed=feed_of(settings)), spread()):
        async with running:
            await running.start()
            report = await running.finish()
        summed_once(report)
        accounts = {
            party: child.account()["cpu_seconds"]
            for party, child in running.children.items()
            if party.startswith("cos/")
        }
        each = {party: (one["total"] - one["start"]) / (30 * PASSES) for party, one in accounts.items()}
        print(", ".join(f"{party} {1e3 * spent:.2f}" for party, spent in each.items()), "CPU ms")
        whole[len(each)] = sum(each.values())
    assert whole[3] < 4 * whole[1]


@pytest.mark.long
async def test_a_run_outlives_kills_of_its_intakes_and_its_coordinator_and_a_balancer_that_moves_everybody(
    spread, undisturbed
):
    async with spread() as running:
        await running.start()
        await running.a_round("a round through both intakes", summed=30, dropped=0, reason="")
        first, second = (running.children[party] for party in INTAKES)
        first.kill()
        await running.a_round("a round through the other intake", summed=30, reason="")
        first.start()
        await running.becomes("SERVING", INTAKES[0])
        running.balancer.move()
        await running.a_round("a round after everybody was moved", summed=30, reason="")
        second.kill()
        second.start()
        since = time.monotonic()
        running.children[COORDINATOR].kill()
        await running.becomes("NOT_SERVING", INTAKES[0])
        running.children[COORDINATOR].start()
        await running.becomes("SERVING", COORDINATOR, *INTAKES)
        await running.a_round("a round of the next coordinator", summed=30, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after the coordinator was killed")
        report = await running.finish()

    summed_once(report)
    taken = [json.loads((child.state / "account.json").read_text()) for child in (first, second)]
    # Contributions were taken by intakes, not handed on; nobody was moved to the one that was started last.
    assert any(one["counts"].get("take contributions") for one in taken)
    # No poll was handed on alone, and plans and models went to each intake and not to each host.
    coordinator = json.loads((running.children[COORDINATOR].state / "account.json").read_text())["served"]
    assert not coordinator.get("Poll", {}).get("calls")
    assert coordinator["Hold"]["calls"]
    if report["abandoned"] or any(one["dropped"] for one in report["rounds"]):
        return
    assert [one["metrics"] for one in report["history"]] == await undisturbed("masked", PASSES)


KEY = {"bits": 1024, "comparison": True, "obfuscators": "short"}
KINDS = {
    "fedmvmf": {"system": "fedmvmf", "split": {"kind": "random"}, "mvmf": {"factors": 4, "min_touch": 2}},
    "fedncf": {"system": "fedncf", "split": {"kind": "leave-last-out"}},
    "fedmf, sparse": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "fedmf": {"factors": 8},
        "encryption": {**KEY, "sparse": True},
        "rounds": {"min_sum": 3},
    },
    "fedmf, shared key": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "fedmf": {"factors": 8},
        "secure_sum": "shared-key",
    },
    # Single contributions are kept until the end.
    "fedmf, denoised": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "fedmf": {"samples": 1, "factors": 4, "min_touch": 2},
        "secure_sum": "denoised",
        "rounds": {"min_cohort": 5, "min_sum": 5},
    },
    "fedncf, median": {
        "system": "fedncf",
        "split": {"kind": "leave-last-out"},
        "secure_sum": "clear",
        "rounds": {"aggregation": {"rule": "median"}},
    },
}
ALONE = {"fedmf, denoised": {"fedmf": {"samples": 0, "factors": 4, "min_touch": 2}}}
"""Settings of the run in clear in one process that comes to the same numbers, where they are others."""


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "fedmvmf" else ANOTHER_FORM) for kind in KINDS]
)
async def test_what_a_killed_intake_acknowledged_is_in_a_sum_of_any_kind_and_changes_no_number(
    small, server, tmp_path, kind
):
    cohort = {"cohort": 30, "group": 30, "passes": 12, "evaluate_every": 4, "party_per_user": True}
    own = {"secure_sum": "encrypted", "encryption": KEY, **KINDS[kind]}
    if own["secure_sum"] in ("denoised", "clear"):
        del own["encryption"]
    changes = {
        **own,
        "data": {"synthetic": {"users": 30, "items": 40, "interactions": 500}},
        "rounds": {**cohort, **own.get("rounds", {})},
        "federation": {"hosts": 3, "party_timeout_s": 60.0},
    }
    settings = small(**changes)
    keys = server.keys(server.database(), timeout_s=5.0)
    async with Spread(settings, feed_of(settings), tmp_path / "federation", database=keys) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        await running.acknowledged(server, 12)
        killed, other = (running.children[party] for party in INTAKES)
        killed.kill()
        running.signal(BIG, signal.SIGCONT)
        await running.a_round("a round over what both intakes took", summed=30, dropped=0, reason="")
        killed.start()
        report = await running.finish()
        versions = running.cos.state / "models" / "test"
        (kept,) = versions.glob(f"version-{report['chosen']['version']:010d}-*.safetensors")
        model = load_file(kept)
    assert (report["phase"], report["reason"], report["abandoned"]) == ("done", "", 0)
    taken = json.loads((other.state / "account.json").read_text())["counts"]["take contributions"]
    assert taken >= 30
    clear = small(**{**changes, "secure_sum": "clear", **ALONE.get(kind, {})})
    alone = train_in_process(clear, feed_of(clear), run_id="test", seed=0, see=lambda event: None)
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone.known["history"]]
    assert report["chosen"] == alone.known["chosen"]
    if settings.secure_sum == "encrypted":
        assert model.keys() == alone.trained.best.keys()
        assert all(np.array_equal(model[name], array) for name, array in alone.trained.best.items())


def a_window(running):
    """Return what is true of the event of a window of all owners that is still to come."""
    seen = max((event.number for event in running.events), default=0)
    return lambda event: event.number > seen and (event.round.purpose, event.round.summed) == ("window", 3)


@pytest.mark.long
@pytest.mark.parametrize("secure_sum", ["masked", pytest.param("clear", marks=ANOTHER_FORM)])
async def test_windows_of_owners_that_come_through_intakes_count_once_when_one_of_them_is_killed(
    small, server, tmp_path, monkeypatch, secure_sum
):
    settings = patient(shielded.settings_of(small, secure_sum, window=10, join_s=30.0))
    keys = server.keys(server.database(), timeout_s=5.0)
    feed = make_feed(settings, load(settings), 0)
    async with Spread(settings, feed, tmp_path / "federation", database=keys) as running:
        running.hold += [f"data-owner/{name}" for name in feed.partition.names]
        running.hold += [f"client/host-{number}" for number in range(settings.federation.hosts)]
        await shielded.begin(running)
        await running.until(a_window(running), "a window of all owners")
        intake = running.children[INTAKES[0]]
        intake.kill()
        await running.until(a_window(running), "a window through the other intake")
        intake.start()
        await running.becomes("SERVING", INTAKES[0])
        report = await running.finish()
    assert (report["phase"], report["reason"]) == ("done", "")
    # The coordinator's tables are not in a file.
    keys = running.sql(server, "SELECT key FROM items ORDER BY item").split()
    monkeypatch.setattr(running.stores, "item_keys", lambda: keys)
    assert shielded.counted_once(running)
    taken = json.loads((running.children[INTAKES[1]].state / "account.json").read_text())["counts"]
    assert taken["take contributions"] >= 3


# --- faults in the middle of a sum ---------------------------------------------------------------------------------


@pytest.mark.long
async def test_what_intakes_acknowledged_counts_once_when_the_database_hangs_or_restarts_in_the_middle_of_a_sum(
    small, server, tmp_path, undisturbed
):
    settings = patient(settings_of_a_run(small, "clear", PASSES))
    keys = server.keys(server.database(), timeout_s=5.0)
    async with Spread(settings, feed_of(settings), tmp_path / "federation", database=keys) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        await running.acknowledged(server, 12)
        with server.hung():
            # Contributions come while the database hangs.
            running.signal(BIG, signal.SIGCONT)
            await running.becomes("NOT_SERVING", COORDINATOR, *INTAKES)
        await running.a_round("a round after the database hung", summed=30, dropped=0, reason="")
        await running.acknowledged(server, 12)
        server.stop()
        running.signal(BIG, signal.SIGCONT)
        server.start()
        await running.a_round("a round after the restart", summed=30, dropped=0, reason="")
        report = await running.finish()
    summed_once(report)
    assert not any(child.process.returncode for child in running.children.values())
    assert not report["abandoned"]
    assert [one["metrics"] for one in report["history"]] == await undisturbed("clear", PASSES)


@pytest.mark.long
async def test_what_intakes_acknowledged_counts_once_when_the_database_fills_up(small, tmp_path, undisturbed):
    settings = patient(settings_of_a_run(small, "clear", PASSES))
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(postgres.running())
        # Beside its tables: a log that cannot be written would end the server.
        volume = server.folder / "volume"
        stack.enter_context(small_volume(volume, "32m"))
        space = volume / "space"
        space.mkdir()
        for folder in (volume, space):
            shutil.chown(folder, server.account or os.geteuid())
        name = server.database(space=space)
        keys = server.keys(name, timeout_s=5.0)
        async with Spread(settings, feed_of(settings), tmp_path / "federation", database=keys) as running:
            await running.start()
            await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
            await running.acknowledged(server, 12)
            ballast = fill(volume)
            running.signal(BIG, signal.SIGCONT)

            def refused():
                return any('reason="STORE_FULL"' in running.page(party) for party in INTAKES)

            await running.comes_true(refused, "an intake refuses, because the database is full")
            ballast.unlink()
            await running.a_round("a round once there is room", summed=30, dropped=0, reason="")
            report = await running.finish()
    summed_once(report)
    assert not any(child.process.returncode for child in running.children.values())
    if not report["abandoned"]:
        assert [one["metrics"] for one in report["history"]] == await undisturbed("clear", PASSES)


@pytest.mark.long
async def test_hosts_that_a_balancer_moves_in_mid_stream_count_once(spread, undisturbed):
    # Numbers are compared of runs in which no host is taken for lost, however slow the machine is.
    async with spread("clear", FEW, waits=True) as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        # The least host sends 18 kB in each round, nearly all of it contributions.
        streams = running.balancer.cut_within(12_000)
        await running.comes_true(lambda: sum(one.done() for one in streams) >= 3, "all hosts are moved")
        report = await running.finish()
    summed_once(report, FEW)
    assert {one["dropped"] for one in report["rounds"]} == {0}
    assert [one["metrics"] for one in report["history"]] == await undisturbed("clear", FEW)


@pytest.mark.long
async def test_intakes_go_on_with_the_standby_of_a_coordinator_that_is_cut_off_from_the_database(
    spread, server
):
    async with Cable(f"127.0.0.1:{server.port}") as cable, spread(way=cable.address) as running:
        await running.start()
        await running.stands_by()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        since = time.monotonic()
        cable.cut()
        await running.becomes("SERVING", STANDBY, *INTAKES)
        await running.a_round("a round of the standby", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after the cut")
        assert await running.health(COORDINATOR) == "NOT_SERVING"
        cable.mend()
        log = running.children[COORDINATOR].log
        await running.comes_true(lambda: "waits as its standby" in log.read_text(), "the first one waits")
        report = await running.finish()
    summed_once(report)
    assert not any(child.process.returncode for child in running.children.values())


@pytest.mark.long
async def test_an_intake_of_a_later_release_is_refused_by_name_and_both_live(spread):
    first, second = INTAKES
    async with spread("clear", FEW, program=later_intake.__name__) as running:
        running.balancer.targets = [running.at[first]]
        await running.start()
        await running.becomes("NOT_SERVING", second)
        both = (later_intake.RELEASE, versions.own().release)
        for party in (second, COORDINATOR):
            log = running.children[party].log
            await running.comes_true(
                lambda log=log: any(
                    all(f"release {one}" in line for one in both) for line in log.read_text().splitlines()
                ),
                f"{party} names both releases",
            )
        assert await running.health(second) == "NOT_SERVING"
        report = await running.finish()
    summed_once(report, FEW)
    assert not any(child.process.returncode for child in running.children.values())


@pytest.mark.long
async def test_hosts_refuse_a_model_that_their_intake_has_changed_and_go_on_through_another_one(spread):
    first, second = INTAKES
    hosts = [f"client/host-{number}" for number in range(3)]
    async with spread("clear", program=lying_intake.__name__) as running:
        running.balancer.targets = [running.at[first]]
        await running.start()
        await running.a_round("a round through the true intake", summed=30, dropped=0, reason="")
        running.balancer.targets = [running.at[second]]
        running.balancer.move()

        def refused():
            logs = [running.children[host].log.read_text() for host in hosts if host in running.children]
            return logs and all(any(word in log for word in REFUSALS) for log in logs)

        await running.comes_true(refused, "every host refuses the model")
        running.balancer.targets = [running.at[first]]
        running.balancer.move()
        await running.a_round("a round through the true intake again", summed=30, dropped=0, reason="")
        assert not (await running.report())["reason"]
