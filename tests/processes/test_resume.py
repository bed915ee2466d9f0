"""A run that gave up is resumed by ``coterie resume``: it ends with the numbers of a run that nothing happened to."""

import asyncio
import json
import signal
import sys

import pytest

from coterie.launch.children import free_port, toml
from coterie.launch.order import Order
from coterie.launch.parties import OPERATOR_SIGNS
from coterie.studies.in_process import train_in_process
from coterie.studies.outcome import about
from coterie.wire.v1 import operator_pb2 as wire

from .patience import ANOTHER_FORM, PAUSE_S, WAIT_S

COS = "cos/cos"


def settings_of(small, secure_sum, system="fedncf"):
    # FedNCF's optimiser is its own, FedMF's that of the run: both keep moments from round to round.
    optimiser = {"server_optimiser": {"name": "fedadam", "rate": 0.05}} if system == "fedmf" else {}
    return small(
        system=system,
        secure_sum=secure_sum,
        split={"kind": "random" if system == "fedmf" else "leave-last-out"},
        data={"synthetic": {"users": 24, "items": 60, "interactions": 600}},
        rounds={
            "cohort": 24,
            "group": 24,
            "passes": 80,
            "evaluate_every": 40,
            "step_timeout_s": 600.0,
            **optimiser,
        },
        # No party is missed, and no step ends, before the run gives up: what is in progress then stays so.
        federation={"hosts": 2, "party_timeout_s": 600.0, "give_up_s": 20.0},
        encryption={"bits": 1024, "comparison": True},
    )


class Operator:
    """An operator of a running federation, at a shell of its own.

    Parameters
    ----------
    running : Running
    run_id : str, optional
        The run of its order.
    cos : str, optional
        Where the COS listens, as its configuration says.
    """

    def __init__(self, running, run_id="test", cos=None):
        self.folder = running.folder / f"at-a-shell-{run_id}"
        self.folder.mkdir(exist_ok=True)
        feed = running.feed
        users = sum(feed.users_of_hosts())
        Order(
            run_id,
            0,
            running.settings,
            owners=1,
            users=users,
            dataset=about(feed.dataset),
            split_sha256=feed.split.sha256(feed.dataset),
            reference={},
        ).save(self.folder / "order.json")
        self.config = self.folder / "config.toml"
        self.config.write_text(
            toml(
                {
                    "state": running.folder / "operator",
                    "cos": {"address": cos or running.address(COS), "name": "cos"},
                    "order": self.folder / "order.json",
                    "signs": running.folder / "operator" / OPERATOR_SIGNS,
                    "output": self.folder / "report",
                }
            )
        )

    async def resume(self, run):
        """Type ``coterie resume`` and return the process."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "coterie", "resume", run, "--config", str(self.config), "--json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def refused(self, run="test"):
        """Return exit status and message of a command that resumes nothing."""
        process = await self.resume(run)
        status, answer = await ended(process)
        return status, answer["error"]["message"]


async def ended(process):
    """Return the exit status of a command, and its envelope."""
    async with asyncio.timeout(3 * WAIT_S):
        out, err = await process.communicate()
    assert out, err.decode()
    return process.returncode, json.loads(out)


def same_numbers(settings, feed, report):
    """Check a report against what one process makes of sums in clear."""
    clear = settings.model_copy(update={"secure_sum": "clear"})
    alone = train_in_process(clear, feed, run_id="test", seed=0, see=lambda event: None).known
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone["history"]]
    assert report["chosen"] == alone["chosen"]
    assert all(one["reason"] == "" for one in report["rounds"])
    return True


@pytest.mark.long
@pytest.mark.parametrize(
    ("secure_sum", "system"),
    [("masked", "fedncf"), ("encrypted", "fedncf"), pytest.param("masked", "fedmf", marks=ANOTHER_FORM)],
)
async def test_a_run_that_gave_up_is_resumed_and_ends_as_if_nothing_had_happened(
    small, federation, secure_sum, system
):
    settings = settings_of(small, secure_sum, system)
    async with federation(settings) as running:
        await running.start()
        operator = Operator(running)
        hosts = running.parties("client")
        await running.a_round("a round of everybody", reason="")
        # A masked sum is lost with its members' secrets: those hosts only fall silent.
        for host in hosts:
            if secure_sum == "masked":
                running.signal(host, signal.SIGSTOP)
            else:
                running.children[host].kill()
        await running.ended()
        state = await running.run_state()
        assert (state.phase, state.resumable) == (wire.RunPhase.RUN_PHASE_FAILED, True)
        assert state.reason.startswith("no sum was formed for 20 s")
        page = running.page(COS)
        assert "coterie_runs_in_progress 0.0" in page
        assert "coterie_runs_resumable 1.0" in page
        for host in hosts:
            if secure_sum == "masked":
                running.signal(host, signal.SIGCONT)
            else:
                running.children[host].start()

        process = await operator.resume("test")
        async with asyncio.timeout(WAIT_S):
            while not (await running.run_state()).resumes:
                await asyncio.sleep(PAUSE_S)
        if secure_sum == "masked":
            # The orchestration server dies with the run that it has just taken up.
            running.kill_and_restart(COS)
        running.follow_again()
        status, answer = await ended(process)
        assert status == 0, (answer, running.last_words())
        (resumed,) = answer["result"]["report"]["resumes"]
        assert resumed["failure"].startswith("no sum was formed for 20 s")
        await running.ended()
        report = await running.report()
        assert (await operator.refused())[1] == "the run is done"
        assert (await operator.refused("other"))[0] == 10
        status, message = await Operator(running, "other").refused("other")
        assert (status, message) == (50, "no such run")
        await running.stop()
    assert report["phase"] == "done"
    assert same_numbers(settings, running.feed, report)


@pytest.mark.long
async def test_an_orchestration_server_that_cannot_be_reached_is_named(small, federation):
    settings = settings_of(small, "masked")
    async with federation(settings) as running:
        await running.start()
        nobody = Operator(running, cos=f"127.0.0.1:{free_port()}")
        status, message = await nobody.refused()
        assert (status, "cos/cos" in message) == (50, True), message
        await running.stop()


# --- DRIFT -------------------------------------------------------------------------------------------------------

EPOCHS = 12


def settings_of_drift(small, form, secure_sum):
    shielded = {"form": "shielded", "k_min": 3, "window": 40} if form == "shielded" else {}
    return small(
        secure_sum=secure_sum,
        drift={"epochs": EPOCHS, **shielded},
        federation={
            "owners": 3,
            "hosts": 3,
            "party_timeout_s": 3.0,
            "give_up_s": 5.0,
            "min_users": 10,
        },
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "secure_sum", "role"),
    [
        pytest.param("published", "clear", "data-owner", marks=ANOTHER_FORM),
        pytest.param("published", "clear", "client", marks=ANOTHER_FORM),
        ("shielded", "clear", "client"),
        ("shielded", "masked", "data-owner"),
    ],
)
async def test_a_run_of_drift_that_gave_up_is_resumed_and_goes_to_its_end_without_a_gap(
    small, federation, form, secure_sum, role
):
    async with federation(settings_of_drift(small, form, secure_sum)) as running:
        await running.start()
        operator = Operator(running)
        await running.phase(*(("epoch", 2) if form == "published" else ("visit", 2)))
        away = running.parties(role)
        for party in away:
            running.children[party].kill()
        await running.ended()
        state = await running.run_state()
        assert (state.phase, state.resumable) == (wire.RunPhase.RUN_PHASE_FAILED, True)
        assert all(party in state.reason for party in away), state.reason
        assert "coterie_runs_resumable 1.0" in running.page(COS)
        # Those that are still there keep asking.
        others = [party for party in running.children if party not in away]
        assert all(running.children[party].alive for party in others)

        process = await operator.resume("test")
        async with asyncio.timeout(WAIT_S):
            while not (await running.run_state()).resumes:
                await asyncio.sleep(PAUSE_S)
        running.follow_again()
        # It is resumed before they are back, and its server dies with it.
        running.kill_and_restart(COS)
        for party in away:
            running.children[party].start()
        status, answer = await ended(process)
        assert status == 0, (answer, running.last_words())
        (resumed,) = answer["result"]["report"]["resumes"]
        assert resumed["failure"] == state.reason
        report = await running.finish()
    assert (report["phase"], report["reason"]) == ("done", "")
    assert [one["epoch"] for one in report["history"]][-1] == EPOCHS
    if form == "published":
        assert running.stores.counted_once(away=True)
    else:
        versions = [
            one["version"] for one in report["rounds"] if one["purpose"] == "window" and not one["reason"]
        ]
        assert versions == list(range(1, len(versions) + 1))
