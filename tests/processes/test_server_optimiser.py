"""Server optimisers and corrected local steps: over services as in one process, and after services were killed."""

import asyncio

import pytest

from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed

from .one_process import assert_equal_to_one_process

COS = "cos/cos"
HOST = "client/host-1"


def settings_of(small, **more):
    return small(
        system=more.pop("system", "fedmf"),
        secure_sum=more.pop("secure_sum", "masked"),
        split=more.pop("split", {"kind": "random"}),
        data={"synthetic": {"users": 60, "items": 80, "interactions": 1500}},
        rounds={
            "cohort": 20,
            "group": 60,
            "passes": 6,
            "evaluate_every": 2,
            "step_timeout_s": 600.0,
            "server_optimiser": {"name": "fedadam", "rate": 0.05, "tau": 1e-3},
            **more.pop("rounds", {}),
        },
        federation={"hosts": 3},
        **more,
    )


def test_services_and_one_process_come_to_equal_numbers(small, federation):
    report = assert_equal_to_one_process(settings_of(small), federation)
    plain = assert_equal_to_one_process(
        settings_of(small, rounds={"server_optimiser": {"name": "none"}}), federation
    )
    ends = [one["history"][-1]["metrics"]["rmse"] for one in (report, plain)]
    assert abs(ends[0] - ends[1]) > 1e-3


@pytest.mark.parametrize(
    ("secure_sum", "way"),
    [
        ("clear", {"proximal": 0.5, "stragglers": 0.5}),
        ("masked", {"proximal": 0.5, "stragglers": 0.5}),
        ("clear", {"scaffold": True}),
        ("masked", {"scaffold": True}),
    ],
)
def test_corrected_local_steps_come_to_equal_numbers_over_services(secure_sum, way, small, federation):
    fedmf = {"local_epochs": 3, **way}
    corrected = settings_of(small, fedmf=fedmf, secure_sum=secure_sum, rounds={"passes": 2})
    report = assert_equal_to_one_process(corrected, federation)
    plain = settings_of(small, fedmf={"local_epochs": 3}, secure_sum=secure_sum, rounds={"passes": 2})
    feed = make_feed(plain, load(plain), 0)
    alone = train_in_process(plain, feed, run_id="test", seed=0, see=lambda event: None).known
    assert report["history"][-1]["metrics"] != alone["history"][-1]["metrics"]


@pytest.mark.long
def test_the_moments_outlive_an_orchestration_server_that_is_killed(small, federation):
    """Every number is that of a run that nothing happened to: a server that began with no moments would differ."""
    settings = settings_of(small, rounds={"passes": 20, "evaluate_every": 5})

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            for _ in range(2):
                await running.a_round("a round of training", reason="")
                running.kill_and_restart(COS)
                await running.up(COS)
            return running.feed, await running.finish()

    feed, report = asyncio.run(to_the_end())
    alone = train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone["history"]]
    assert report["chosen"] == alone["chosen"]


@pytest.mark.parametrize(("killed", "secure_sum"), [(HOST, "clear"), (COS, "masked")])
def test_control_variates_outlive_services_that_are_killed(killed, secure_sum, small, federation):
    """A host that forgot those of its users, or a server that forgot their mean, would come to other numbers.

    A host that is killed within a masked round leaves it, which may abandon the sum: so hosts are killed in clear.
    """
    settings = settings_of(
        small,
        fedmf={"local_epochs": 3, "scaffold": True},
        secure_sum=secure_sum,
        rounds={"server_optimiser": {"name": "none"}},
    )

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            await running.until(
                lambda event: event.HasField("round") and event.round.purpose == "train",
                "a round of training",
            )
            running.kill_and_restart(killed)
            return running.feed, await running.finish()

    feed, report = asyncio.run(to_the_end())
    alone = train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone["history"]]


@pytest.mark.parametrize(
    ("system", "split"),
    [("fedncf", "leave-last-out"), ("fedmvmf", "random"), ("fcf", "random"), ("fpl", "random")],
)
def test_an_optimiser_in_place_of_a_systems_own_comes_to_equal_numbers_over_services(
    system, split, small, federation
):
    settings = settings_of(small, system=system, split={"kind": split}, rounds={"passes": 2})
    report = assert_equal_to_one_process(settings, federation)
    assert report["phase"] == "done"
