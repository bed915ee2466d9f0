"""Denoised sums over real processes: the numbers of FedMF without sampled items, and parties that fail or lie."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed

from .denoising_host import Failing

BASE: dict[str, Any] = {
    "system": "fedmf",
    "secure_sum": "denoised",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 100, "interactions": 1800}},
    "fedmf": {"samples": 1, "factors": 4, "min_touch": 2},
    "rounds": {
        "cohorts": "all",
        "passes": 4,
        "evaluate_every": 2,
        "party_per_user": True,
        "min_cohort": 7,
        "min_sum": 7,
    },
    "federation": {"hosts": 4},
}
HOST, COS = "client/host-1", "cos/cos"
_SAME = ("epoch", "version", "users", "metrics")


def numbers(known: Any) -> Any:
    return [{key: one[key] for key in _SAME} for one in known["history"]]


def alone(settings: Any, feed: Any) -> Any:
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known


def plain(small: Any) -> Any:
    return small(**{**BASE, "secure_sum": "clear", "fedmf": {**BASE["fedmf"], "samples": 0}})


def to_the_end(running: Any) -> Any:
    async def finish() -> Any:
        async with running:
            await running.start()
            return await running.finish()

    return asyncio.run(finish())


def failing(small: Any, folder: Path, programs: dict[str, list[str]], **changes: Any) -> Any:
    settings = small(**{**BASE, **changes})
    return Failing(settings, make_feed(settings, load(settings), 0), folder, programs)


def withdrawn(report: Any) -> set[str]:
    return {reason for one in report["rounds"] for reason in one["withdrawn"]}


@pytest.mark.parametrize("resample", [False, True])
def test_services_come_to_the_numbers_of_plain_fedmf_to_the_bit(
    small: Any, federation: Any, resample: bool
) -> None:
    fedmf = {**BASE["fedmf"], "resample": resample}
    settings = small(**{**BASE, "fedmf": fedmf, "federation": {"hosts": 3}})
    running = federation(settings)
    report = to_the_end(running)
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert all(one["left_out"] == 0 and not one["withdrawn"] for one in report["rounds"])
    for known in (alone(settings, running.feed), alone(plain(small), running.feed)):
        assert numbers(known) == numbers(report)
        assert (known["chosen"], known["closed_share"]) == (report["chosen"], report["closed_share"])
    noisy = small(**{**BASE, "secure_sum": "clear", "fedmf": fedmf})
    assert numbers(alone(noisy, running.feed)) != numbers(report)


def test_a_denoiser_that_lies_is_found_out_and_the_run_goes_on_without_its_group(
    small: Any, tmp_path: Path
) -> None:
    running = failing(small, tmp_path, {HOST: ["tests.processes.denoising_host", "lies"]})
    report = to_the_end(running)
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    sums = [one for one in report["rounds"] if one["purpose"] != "evaluate"]
    assert all(0 < one["left_out"] == 60 - one["summed"] for one in sums)
    assert all("gave different sums" in reason and HOST in reason for reason in withdrawn(report))
    assert all(len(one["withdrawn"]) == 1 for one in sums)
    # A user less is another model, and a wrong one would be far away.
    honest = numbers(alone(plain(small), running.feed))
    assert numbers(report) != honest
    errors = [one[-1]["metrics"]["rmse"] for one in (numbers(report), honest)]
    assert errors[0] == pytest.approx(errors[1], abs=0.1)


async def test_a_denoiser_that_dies_has_its_groups_withdrawn_until_it_is_back(
    small: Any, federation: Any
) -> None:
    rounds = {**BASE["rounds"], "passes": 400, "evaluate_every": 400}
    settings = small(
        **{**BASE, "rounds": rounds, "federation": {"hosts": 4, "party_timeout_s": 3.0, "most_abandoned": 50}}
    )
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", summed=60)
        running.children[HOST].kill()
        seen = len(running.events)

        def without(event: Any) -> bool:
            one = event.round
            return bool(
                running.events.index(event) >= seen
                and one.purpose == "train"
                and not one.reason
                and any(f"denoiser {HOST} said nothing" in reason for reason in one.withdrawn)
            )

        await running.until(without, "a round without the groups of the dead denoiser")
        (last, *_) = [event.round for event in running.events if without(event)]
        assert 7 <= last.summed < 45
        # The host may have died before its own users had submitted, or after some of them.
        assert 45 - last.summed <= last.left_out <= 60 - last.summed
        running.children[HOST].start()
        await running.a_round("a round of everybody again", reason="", summed=60)


def test_a_member_whose_noise_opens_for_nobody_is_withdrawn_alone(small: Any, tmp_path: Path) -> None:
    running = failing(small, tmp_path, {HOST: ["tests.processes.denoising_host", "garbles"]})
    report = to_the_end(running)
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    assert withdrawn(report) == {"1 user: their sealed noise does not open"}
    assert {one["left_out"] for one in report["rounds"] if one["purpose"] != "evaluate"} == {1}


def test_a_server_that_asks_for_the_noise_of_one_user_gets_none(small: Any, tmp_path: Path) -> None:
    federation = {"hosts": 4, "most_abandoned": 2, "give_up_s": 600.0}
    running = failing(small, tmp_path, {COS: ["tests.processes.denoised_cos", "one"]}, federation=federation)
    report = to_the_end(running)
    assert report["phase"] == "failed"
    assert report["version"] == 0
    assert all("the noise of 1 users of group" in one["reason"] for one in report["rounds"])
    assert all("the floor is 7" in one["reason"] for one in report["rounds"])


def test_a_server_that_asks_for_a_second_list_gets_none(small: Any, tmp_path: Path) -> None:
    federation = {"hosts": 4, "most_abandoned": 3, "give_up_s": 600.0}
    running = failing(
        small, tmp_path, {COS: ["tests.processes.denoised_cos", "twice"]}, federation=federation
    )
    report = to_the_end(running)
    assert report["phase"] == "failed"
    first, *others = report["rounds"]
    assert first["reason"] == "the server drops it"
    assert others
    assert all("was revealed already, over other members" in one["reason"] for one in others)
