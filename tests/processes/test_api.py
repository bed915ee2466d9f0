"""The Python interface over real services: inside a running loop, interrupted, beside the same run in one process."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie as ct
from coterie.cli.main import invoke
from coterie.errors import CoterieError

from ..interactions import ratings
from .command import descendants, gone
from .patience import ANOTHER_FORM, PAUSE_S, WAIT_S

pytestmark = pytest.mark.xdist_group("api")

ROUNDS = {"passes": 4, "evaluate_every": 1, "cohort": 30, "group": 30, "min_cohort": 10, "min_sum": 10}
INTERRUPTED = """
import sys
import coterie as ct
from tests.interactions import ratings

data = ct.load(ratings(), user="customer", item="sku", time="at")
model = ct.FedNCF(reference=False, rounds={rounds})
print("begun", flush=True)
try:
    model.fit(data.split(), output=sys.argv[1], in_process={in_process}, progress=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def split() -> ct.DataSplit:
    return ct.load(ratings(), user="customer", item="sku", time="at", name="shop").split()


def model(**keys: Any) -> ct.FederatedRecommender:
    made: ct.FederatedRecommender = ct.FedNCF(
        **{"model": "neumf", "secure_sum": "masked", "reference": False, "rounds": ROUNDS, **keys}
    )
    return made


@pytest.fixture(scope="module")
def served(split: ct.DataSplit, tmp_path_factory: pytest.TempPathFactory) -> ct.FederatedRun:
    """Return a run over services that was begun inside a running event loop, as in a notebook."""

    async def cell() -> ct.FederatedRun:
        return model(federation={"transcripts": True}).fit(
            split, hosts=2, output=tmp_path_factory.mktemp("served")
        )

    return asyncio.run(cell())


@pytest.fixture(scope="module")
def local(split: ct.DataSplit, tmp_path_factory: pytest.TempPathFactory) -> ct.FederatedRun:
    return model().fit(split, hosts=2, in_process=True, output=tmp_path_factory.mktemp("local"))


def test_a_run_over_services_has_the_numbers_of_one_in_process(
    served: ct.FederatedRun, local: ct.FederatedRun
) -> None:
    assert not served.in_process
    assert served.metrics.equals(local.metrics)
    assert served.history.equals(local.history)


def test_a_run_over_services_scores_and_recommends_as_one_in_process_and_nothing_is_started(
    served: ct.FederatedRun, local: ct.FederatedRun
) -> None:
    before = set(descendants(os.getpid()))
    users = ["u7", "u1", "u30"]
    np.testing.assert_array_equal(served.score(users), local.score(users))
    np.testing.assert_array_equal(served.score(users, ["i3", "i1"]), local.score(users, ["i3", "i1"]))
    assert served.recommend(users, 5).equals(local.recommend(users, 5))
    assert set(descendants(os.getpid())) == before


def test_recommendations_are_those_that_the_hosts_give(served: ct.FederatedRun) -> None:
    before = set(descendants(os.getpid()))
    users = ["u7", "u1", "u30"]
    assert served._asked(users, 5).equals(served.recommend(users, 5))
    assert gone(set(descendants(os.getpid())) - before, WAIT_S)


def test_the_model_is_that_of_the_run_in_process(served: ct.FederatedRun, local: ct.FederatedRun) -> None:
    one, other = served.model, local.model
    assert (one.items, one.version, one.settings) == (other.items, other.version, other.settings)
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, other.arrays[name])


def test_the_model_is_exported_by_the_command(
    served: ct.FederatedRun, local: ct.FederatedRun, tmp_path: Path
) -> None:
    at = ["--in", str(served.folder.parent)]
    assert invoke(["runs", "export", "newest", "--to", "model", "--out", str(tmp_path / "model"), *at]) == 0
    found = ct.load_model(tmp_path / "model")
    assert found.arrays.keys() == served.model.arrays.keys()
    # In one process there are no stores from which a command could read.
    at = ["--in", str(local.folder.parent)]
    assert invoke(["runs", "export", "newest", "--to", "model", "--out", str(tmp_path / "none"), *at]) == 60
    assert not (tmp_path / "none").exists()


def test_a_receipt_says_what_left_the_host(served: ct.FederatedRun) -> None:
    receipt = served.receipt("u1")
    sent = {row["kind"]: row for row in receipt.sent.to_dicts()}
    assert sent["model update (masked)"]["recipient"] == "cos"
    assert sent["model update (masked)"]["count"] > 0
    assert "u1" in str(receipt)
    assert "model update" in receipt._repr_html_()


def test_recorded_messages_are_attacked(served: ct.FederatedRun) -> None:
    found = {row["attack"]: row for row in served.attack().to_dicts()}
    assert 0 < found["disaggregate"]["auc"] < 1


@pytest.mark.parametrize(
    ("name", "keys", "kind"),
    [
        pytest.param(
            "FedMF", {"factors": 4, "rounds": {**ROUNDS, "passes": 3}}, "random", marks=ANOTHER_FORM
        ),
        ("FedEASE", {"secure_sum": "masked"}, "leave-last-out"),
        ("FedGNN", {"factors": 4, "neighbours": 5, "rounds": {**ROUNDS, "passes": 4}}, "random"),
        ("FedIDCF", {"factors": 4, "rounds": {**ROUNDS, "passes": 6}}, "random"),
    ],
)
def test_hosts_of_any_system_score_as_in_process(
    name: str, keys: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    rated = ct.load(ratings(), user="customer", item="sku", rating="stars", time="at", name="shop")
    recommender = getattr(ct, name)(reference=False, **keys)
    over, within = (
        recommender.fit(rated.split(kind), hosts=2, in_process=in_process, output=tmp_path / str(in_process))
        for in_process in (False, True)
    )
    users = rated.dataset.users[:40]
    np.testing.assert_array_equal(over.score(users), within.score(users))
    assert np.ptp(over.score(users)) > 0


def test_under_noise_scores_are_those_of_the_hosts(split: ct.DataSplit, tmp_path: Path) -> None:
    noisy = {**ROUNDS, "passes": 2, "privacy": {"place": "distributed", "noise": 0.5, "clip": 0.5}}
    run = ct.FedMF(factors=4, secure_sum="masked", reference=False, rounds=noisy).fit(
        ct.load(ratings(), user="customer", item="sku", rating="stars", time="at").split("random"),
        hosts=2,
        output=tmp_path,
    )
    assert run._asked(["u7", "u1"], 5).equals(run.recommend(["u7", "u1"], 5))


def test_a_folder_that_is_not_whole_gives_no_scores(served: ct.FederatedRun, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(served.folder, tmp_path / "moved"))
    other = ct.FederatedRun(served.settings, served.split, served._report, folder, served._ended)
    np.testing.assert_array_equal(other.score(["u1", "u7"]), served.score(["u1", "u7"]))
    for file in (folder / "host-0" / "state" / "private").glob("*.npy"):
        file.write_bytes(file.read_bytes()[:100])
    again = ct.FederatedRun(served.settings, served.split, served._report, folder, served._ended)
    with pytest.raises(CoterieError, match="cannot read the private state"):
        again.score(["u1", "u7"])


def test_a_model_that_is_not_of_rounds_gives_no_scores_and_its_hosts_recommend(
    split: ct.DataSplit, tmp_path: Path
) -> None:
    run = ct.DRIFT(epochs=1, reference=False).fit(split, hosts=2, output=tmp_path)
    with pytest.raises(CoterieError, match="is not one of rounds"):
        run.score(["u1"])
    assert len(run.recommend(["u1"], 3)) == 3


@pytest.mark.parametrize("in_process", [False, True])
def test_an_interrupt_stops_the_federation_and_leaves_no_process(in_process: bool, tmp_path: Path) -> None:
    rounds = {**ROUNDS, "passes": 100_000, "patience": 0}
    program = INTERRUPTED.format(rounds=rounds, in_process=in_process)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "runs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
        # A shell lets what it starts in the background ignore Ctrl-C, and the tests may run there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "begun\n"
            while "pass 2" not in (line := process.stderr.readline()):
                assert line, "the run ended"
            children = descendants(process.pid)
            assert in_process or len(children) >= 6  # fork server, third party, COS, owner, hosts
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            # The program goes on, as a notebook's kernel does, and of the federation nothing runs: only the fork
            # server, which has no service left.
            deadline = time.monotonic() + WAIT_S
            while len(descendants(process.pid)) > 1 and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            assert len(descendants(process.pid)) <= 1
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            assert process.wait(WAIT_S) == 0
            assert gone(children, WAIT_S)
        finally:
            process.kill()
