"""FedIDCF over real processes: the numbers of the same run in one process, and a third party that is down."""

import pytest

from .one_process import assert_equal_to_one_process

ROUNDS = {"cohorts": "all", "passes": 8, "evaluate_every": 2}
BASE = {
    "system": "fedidcf",
    "split": {"kind": "random"},
    "data": {"synthetic": {"users": 60, "items": 60, "interactions": 1500}},
    "fedidcf": {
        "factors": 4,
        "local_epochs": 2,
        "factor_passes": 3,
        "latents": 20,
        "hidden": 4,
        "attention_rate": 0.5,
    },
    "rounds": ROUNDS,
    "encryption": {"bits": 1024, "comparison": True},
    "federation": {"hosts": 3},
}
KINDS = {
    "hosts, masked": {"secure_sum": "masked"},
    "users, clear": {"rounds": {**ROUNDS, "party_per_user": True}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_services_and_one_process_come_to_equal_numbers(small, federation, kind):
    report = assert_equal_to_one_process(small(**{**BASE, **KINDS[kind]}), federation)
    metrics = [one["metrics"] for one in report["history"]]
    assert ["with_latents" in one for one in metrics] == [False, False, False, True, True]
    assert metrics[-1]["with_latents"] == 1
    assert metrics[-1]["query_spread"] > 0
    # Steps of the attention changed the vectors of query users.
    assert abs(metrics[-1]["query_spread"] - metrics[-2]["query_spread"]) > 0.01
    # Errors are rounded as they are sent.
    assert metrics[-1]["key_rmse"] == pytest.approx(metrics[-2]["key_rmse"], abs=1e-5)


LONG = {
    **BASE,
    "fedidcf": {**BASE["fedidcf"], "factor_passes": 8},
    "rounds": {**ROUNDS, "passes": 14, "evaluate_every": 14},
}


async def test_without_the_third_party_between_the_phases_the_run_ends_with_biases_and_says_so(
    small, federation
):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass of the first phase", pass_number=3)
        running.children["thirdparty/directory"].kill()
        report = await running.finish()
    assert (report["phase"], report["abandoned"]) == ("done", 0)
    last = report["history"][-1]["metrics"]
    assert last["with_latents"] == 0
    # Errors are rounded as they are sent.
    assert last["query_rmse"] == pytest.approx(last["biases_query_rmse"], abs=1e-5)
    assert report["chosen"]["version"] == report["history"][-1]["version"]


async def test_a_third_party_that_comes_back_between_the_phases_combines_as_if_nothing_was(small, federation):
    async with federation(small(**LONG)) as running:
        await running.start()
        await running.a_round("a pass of the first phase", pass_number=3)
        running.kill_and_restart("thirdparty/directory")
        report = await running.finish()
    assert report["history"][-1]["metrics"]["with_latents"] == 1
