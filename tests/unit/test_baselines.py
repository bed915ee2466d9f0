import builtins
import os
import subprocess
import sys
from importlib import util
from typing import Any

import numpy as np
import pytest

from coterie.errors import PreflightError
from coterie.evaluation import als, popularity, positive_share, random_scores

ITEM = np.array([0, 0, 0, 1, 1, 3], np.int32)
POSITIVE = np.array([1, 1, 0, 1, 1, 0], bool)


def test_random_scores_follow_the_seed() -> None:
    one = random_scores(3, 4, 7)
    assert one.dtype == np.float32
    assert one.shape == (3, 4)
    np.testing.assert_array_equal(one, random_scores(3, 4, 7))
    assert not np.array_equal(one, random_scores(3, 4, 8))


def test_popularity_counts_positive_interactions_of_every_item() -> None:
    assert popularity(ITEM, POSITIVE, 5).tolist() == [2, 2, 0, 0, 0]


def test_the_positive_share_is_drawn_towards_the_mean() -> None:
    score = positive_share(ITEM, POSITIVE, 5, strength=2)
    mean = 4 / 6
    np.testing.assert_allclose(
        score, [(2 + 2 * mean) / 5, (2 + 2 * mean) / 4, mean, 2 * mean / 3, mean], rtol=1e-6
    )


def test_an_item_without_interactions_has_the_overall_share() -> None:
    assert positive_share(ITEM, POSITIVE, 9)[8] == pytest.approx(4 / 6)


def test_no_training_data_gives_no_preference() -> None:
    none = np.array([], np.int32)
    assert positive_share(none, none.astype(bool), 3).tolist() == [0, 0, 0]
    assert popularity(none, none.astype(bool), 3).tolist() == [0, 0, 0]


def test_smoothing_must_be_positive() -> None:
    with pytest.raises(ValueError, match="strength is 0"):
        positive_share(ITEM, POSITIVE, 5, strength=0)


def test_als_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "implicit":
            raise ImportError(f"No module named {name!r}", name="implicit")
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(PreflightError, match=r"implicit is not installed.*coterie\[baselines\]"):
        als(ITEM, ITEM, 5, 5)


_FACTORISED = """
import hashlib, sys
import numpy as np
from threadpoolctl import threadpool_info
from coterie.evaluation.central import Als, Interactions

rng = np.random.default_rng(0)
pairs = np.unique(np.stack([rng.integers(0, 120, 5000), rng.zipf(1.6, 5000) % 200], axis=1), axis=0)
made = Als(iterations=15).fit(Interactions(120, 200, pairs[:, 0], pairs[:, 1]))
order = np.argsort(-made.score(np.arange(120)), axis=1, kind="stable")
kernels = {one["architecture"] for one in threadpool_info() if one["internal_api"] == "openblas"}
print(*sorted(kernels), hashlib.sha256(order.tobytes()).hexdigest())
"""


@pytest.mark.skipif(util.find_spec("implicit") is None, reason="needs the package implicit")
def test_als_ranks_alike_with_the_kernels_of_every_processor() -> None:
    found = set()
    for kernels in ("Nehalem", "Haswell"):
        made = subprocess.run(
            [sys.executable, "-c", _FACTORISED],
            env={**os.environ, "OPENBLAS_CORETYPE": kernels},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        *used, order = made.stdout.split()
        if used != [kernels]:
            pytest.skip(f"linear algebra has the kernels {used} here, not {kernels}")
        found.add(order)
    assert len(found) == 1
