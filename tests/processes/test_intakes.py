"""Intakes of the COS behind a TCP balancer: real processes, one coordinator, PostgreSQL, and faults in the midst."""

import asyncio
import json
import time

import pytest

from coterie.launch.authority import make_token
from coterie.launch.children import Child, free_port, toml

from .. import postgres
from .gate import Balancer
from .running import Running
from .test_fedncf_faults import feed_of, settings_of

COORDINATOR, INTAKES = "cos/cos", ("cos/intake-0", "cos/intake-1")
PASSES = 45
FEW = 6


@pytest.fixture(scope="module")
def server():
    with postgres.running() as one:
        yield one


class Spread(Running):
    """A federation whose COS is one coordinator and two intakes; all callers come through a balancer."""

    def __init__(self, *arguments, database, **options):
        super().__init__(*arguments, **options)
        self.database = database
        self.behind = f"127.0.0.1:{free_port()}"
        self.at = {party: f"127.0.0.1:{free_port()}" for party in INTAKES}
        self.balancer = Balancer(list(self.at.values()))

    def _configure(self):
        laid = super()._configure()
        coordinator = self.children[COORDINATOR]
        authority = self.children["thirdparty/directory"].state
        text = (coordinator.folder / "config.toml").read_text()
        shared = f"\n[database]\n{toml(self.database)}"
        for party in (COORDINATOR, *INTAKES):
            own, child = text, coordinator
            if party == COORDINATOR:
                part = 'part = "coordinator"\n'
                own = own.replace(self._addresses["cos"], self.behind)
            else:
                part = f'coordinator = ["{self.behind}"]\n'
                child = Intake("cos", "cos", self.folder / party.partition("/")[2])
                make_token(authority, "cos", "cos", 0, child.folder / "token")
                self.metrics[party] = f"127.0.0.1:{free_port()}"
                own = own.replace(str(coordinator.folder), str(child.folder))
                own = own.replace(self.metrics[COORDINATOR], self.metrics[party])
                own = own.replace(self._addresses["cos"], self.at[party])
            (child.folder / "config.toml").write_text(f"{part}{own}{shared}")
            self.children[party] = child
        self._listening = asyncio.create_task(self.balancer.listen(self._addresses["cos"]))
        return laid

    async def start(self):
        """Start everybody, and the balancer with them."""
        await super().start()
        await self._listening

    async def stop(self):
        """Stop every process, and the balancer."""
        await super().stop()
        await self.balancer.close()


class Intake(Child):
    """An intake, which the command line makes of a COS."""

    def start(self, *sets):
        super().start('part="intake"', *sets)


def settings_of_a_run(small, secure_sum="masked", passes=PASSES):
    settings = settings_of(small, party_per_user=True)
    rounds = settings.rounds.model_copy(update={"passes": passes, "evaluate_every": passes // 3})
    return settings.model_copy(update={"rounds": rounds, "secure_sum": secure_sum})


@pytest.fixture
def spread(small, server, tmp_path):
    def make(secure_sum="masked", passes=PASSES, **options):
        settings = settings_of_a_run(small, secure_sum, passes)
        keys = server.keys(server.database(), timeout_s=5.0)
        return Spread(settings, feed_of(settings), tmp_path / "federation", database=keys, **options)

    return make


def summed_once(report, passes=PASSES):
    """Check that every version was made once, by a round that ended once, and none was lost."""
    assert (report["phase"], report["reason"]) == ("done", "")
    trained = [one for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert [one["version"] for one in trained] == list(range(1, passes + 1))
    assert report["history"][-1]["metrics"]


@pytest.mark.long
@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
async def test_a_run_through_two_intakes_gives_the_same_numbers_as_through_one_process(
    spread, small, federation, secure_sum
):
    async with spread(secure_sum, FEW) as running:
        await running.start()
        report = await running.finish()
    summed_once(report, FEW)
    assert not any(child.process.returncode for child in running.children.values())
    settings = settings_of_a_run(small, secure_sum, FEW)
    async with federation(settings, feed=feed_of(settings)) as alone:
        await alone.start()
        undisturbed = await alone.finish()
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in undisturbed["history"]]


@pytest.mark.long
async def test_a_run_outlives_kills_of_its_intakes_and_its_coordinator_and_a_balancer_that_moves_everybody(
    spread, small, federation
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
    if report["abandoned"]:
        return
    settings = settings_of_a_run(small)
    async with federation(settings, feed=feed_of(settings)) as alone:
        await alone.start()
        undisturbed = await alone.finish()
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in undisturbed["history"]]
