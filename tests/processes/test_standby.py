"""A standby of the COS takes a run over real processes over: after a kill, a pause, and a restart of the database."""

import json
import re
import signal
import time

import pytest

from coterie.config.base import CosPeer
from coterie.launch.authority import make_token
from coterie.launch.children import Child, free_port, toml
from coterie.studies.run_data import load, make_feed

from .. import postgres
from .gate import Cable
from .running import Running
from .test_fedncf_faults import feed_of, settings_of

FIRST, SECOND = "cos/cos", "cos/standby"
WAITS, OFFICE = "another COS serves: this one waits as its standby", "this COS is in office"
PASSES = 60
TAKEN_OVER_S = 10.0
"""Longest time from a fault to a standby that serves, seconds."""


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Doubled(Running):
    """A federation whose COS has a standby; both are of the same name and database, with the same ``extra`` keys."""

    def __init__(self, *arguments, database, way="", extra="", **options):
        self.second = f"127.0.0.1:{free_port()}"
        keys = {role: {"cos": {"standbys": [self.second]}} for role in ("client", "data-owner")}
        super().__init__(*arguments, keys=keys, **options)
        self.database, self.extra = database, extra
        # Where the first COS finds the database, when not at its own address.
        self.way = way

    def _configure(self):
        laid = super()._configure()
        first = self.children[FIRST]
        state = self.children["thirdparty/directory"].state
        second = Child("cos", "cos", self.folder / "standby")
        make_token(state, "cos", "cos", 0, second.folder / "token")
        text = (first.folder / "config.toml").read_text()
        for child in (first, second):
            own = text.replace(str(first.folder), str(child.folder))
            if child is second:
                self.metrics[SECOND] = f"127.0.0.1:{free_port()}"
                own = own.replace(self.metrics[FIRST], self.metrics[SECOND])
                own = own.replace(self._addresses["cos"], self.second)
            database = dict(self.database)
            if child is first and self.way:
                database["url"] = re.sub(r"@127\.0\.0\.1:\d+/", f"@{self.way}/", database["url"])
            shared = f"standby = true\n{self.extra}\n{own}\n[database]\n{toml(database)}"
            (child.folder / "config.toml").write_text(shared)
        self.children[SECOND] = second
        self._late.append(second)
        return laid

    async def start(self):
        """Start the first COS and all parties, and the standby once the run has begun."""
        await super().start()
        self._late.clear()
        self.children[SECOND].start()

    def cos_peer(self):
        return CosPeer(address=self._addresses["cos"], name="cos", standbys=(self.second,))

    async def said(self, party, event):
        """Wait until the log of a process has an event."""
        log = self.children[party].log
        await self.comes_true(lambda: json.dumps(event) in log.read_text(), f"{party}: {event}")

    async def serves(self, party, since):
        """Wait until a COS serves; return the time since then, seconds."""
        await self.becomes("SERVING", party)
        return time.monotonic() - since


def settings_of_a_run(small):
    settings = settings_of(small, party_per_user=True)
    rounds = settings.rounds.model_copy(update={"passes": PASSES, "evaluate_every": 20})
    return settings.model_copy(update={"rounds": rounds})


@pytest.fixture
def doubled(small, server, tmp_path):
    settings = settings_of_a_run(small)

    def make(**options):
        keys = server.keys(server.database(), timeout_s=5.0)
        return Doubled(settings, feed_of(settings), tmp_path / "federation", database=keys, **options)

    return make


def summed_once(report):
    """Check that every version was made once, by a round that ended once, and none was lost."""
    assert (report["phase"], report["reason"]) == ("done", "")
    numbers = [one["round"] for one in report["rounds"]]
    assert numbers == sorted(set(numbers))
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert [one["version"] for one in trained] == list(range(1, PASSES + 1))
    assert report["version"] == PASSES
    assert report["history"][-1]["metrics"]


@pytest.mark.long
async def test_a_standby_takes_the_run_over_when_the_cos_is_killed_or_paused_and_nothing_is_lost(
    doubled, small, federation
):
    async with doubled() as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        assert 'coterie_condition{condition="office"} 0.0' in running.page(SECOND)
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")

        since = time.monotonic()
        running.children[FIRST].kill()
        took = await running.serves(SECOND, since)
        print(f"taken over {took:.1f} s after kill -9")
        assert took < TAKEN_OVER_S
        await running.a_round("a round of the standby", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after kill -9")

        # The first one comes back, and is the standby now.
        running.children[FIRST].start()
        await running.becomes("NOT_SERVING", FIRST)
        since = time.monotonic()
        running.signal(SECOND, signal.SIGSTOP)
        took = await running.serves(FIRST, since)
        print(f"taken over {took:.1f} s after SIGSTOP")
        assert took < TAKEN_OVER_S
        await running.a_round("a round of the first one again", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after SIGSTOP")
        running.signal(SECOND, signal.SIGCONT)
        await running.becomes("NOT_SERVING", SECOND)
        report = await running.finish()

    summed_once(report)
    settings = settings_of_a_run(small)
    async with federation(settings, feed=feed_of(settings)) as alone:
        await alone.start()
        undisturbed = await alone.finish()
    # A sum in progress is taken up.  On a busy machine one may be abandoned after all, and made under another number.
    if not report["abandoned"]:
        assert [one["metrics"] for one in report["history"]] == [
            one["metrics"] for one in undisturbed["history"]
        ]
    # The second one waited, was in office, noticed after its pause that it is not any more, and waited again.
    said = [line["event"] for line in map(json.loads, running.children[SECOND].log.read_text().splitlines())]
    assert [one for one in said if one in (WAITS, OFFICE)] == [WAITS, OFFICE, WAITS]
    assert not any(child.process.returncode for child in running.children.values())


@pytest.mark.long
async def test_a_standby_takes_a_run_of_drift_over_in_an_epoch_and_in_an_evaluation(small, server, tmp_path):
    epochs = 6
    settings = small(drift={"epochs": epochs}, federation={"hosts": 1})
    keys = server.keys(server.database(), timeout_s=5.0)
    feed = make_feed(settings, load(settings), 0)
    folder = tmp_path / "federation"
    async with Doubled(settings, feed, folder, database=keys, extra="snapshot_every = 20") as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        await running.epochs(1)
        before = (await running.run_state()).version
        running.children[FIRST].kill()
        await running.serves(SECOND, time.monotonic())
        # No acknowledged update is lost.
        assert (await running.run_state()).version >= before
        await running.updates(5)

        # The last evaluation is held open by a host that stands still, and the first COS finds its version.
        running.children[FIRST].start()
        await running.becomes("NOT_SERVING", FIRST)
        await running.phase("epoch", epochs)
        running.signal("client/host-0", signal.SIGSTOP)
        await running.phase("evaluate")
        running.children[SECOND].kill()
        await running.serves(FIRST, time.monotonic())
        running.signal("client/host-0", signal.SIGCONT)
        report = await running.finish()
    assert (report["phase"], report["reason"]) == ("done", "")
    assert [one["epoch"] for one in report["history"]] == list(range(1, epochs + 1))
    assert all(one["metrics"] for one in report["history"])
    for party in (FIRST, SECOND):
        assert not list((running.children[party].folder / "state").rglob("*.safetensors"))


@pytest.mark.long
async def test_a_cos_that_is_cut_off_from_the_database_stops_to_serve_and_its_standby_takes_over(
    doubled, server
):
    async with Cable(f"127.0.0.1:{server.port}") as cable, doubled(way=cable.address) as running:
        await running.start()
        await running.becomes("NOT_SERVING", SECOND)
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        since = time.monotonic()
        cable.cut()
        took = await running.serves(SECOND, since)
        print(f"taken over {took:.1f} s after the COS was cut off from its database")
        assert took < TAKEN_OVER_S
        # It lives, and knows that it must not serve.
        assert await running.health(FIRST) == "NOT_SERVING"
        await running.a_round("a round of the standby", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after the cut")
        cable.mend()
        await running.said(FIRST, WAITS)
        report = await running.finish()

    summed_once(report)
    assert not any(child.process.returncode for child in running.children.values())


@pytest.mark.long
@pytest.mark.full("takes a minute")
async def test_a_run_with_a_standby_outlives_a_restart_of_the_database_and_one_that_hangs(doubled, server):
    async with doubled() as running:
        await running.start()
        await running.a_round("a round over everybody", summed=30, dropped=0, reason="")
        server.stop()
        await running.becomes("NOT_SERVING", FIRST, SECOND)
        server.start()
        since = time.monotonic()
        await running.a_round("a round after the restart", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after the database was back")
        serving = [await running.health(party) for party in (FIRST, SECOND)]
        assert sorted(serving) == ["NOT_SERVING", "SERVING"]

        with server.hung():
            await running.becomes("NOT_SERVING", FIRST, SECOND)
        since = time.monotonic()
        await running.a_round("a round after the database hung", summed=30, dropped=0, reason="")
        print(f"a round over everybody {time.monotonic() - since:.1f} s after the database went on")
        report = await running.finish()

    summed_once(report)
    assert not any(child.process.returncode for child in running.children.values())
