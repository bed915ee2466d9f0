"""A user's codes are the same to the bit whoever is beside it; what another kernel of BLAS does to them.

The cases are in `tests.user_codes`.
"""

import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .. import user_codes
from ..user_codes import CASES, USERS

SOON_S = 300.0
EVERYBODY = list(range(USERS))

MOST = {
    "fedncf": 1e-2,
    "fedmvmf": 1e-3,
    "fcf": 1e-3,
    "fedgnn": 1e-3,
    "fedidcf": 0.0,
    "fedmf": 0.0,
    "ials": 0.0,
    "fpl": 0.0,
}
"""Share of a system's codes that another kernel may change.  FedIDCF, FedMF, iALS and FPL ask BLAS for nothing.
FedMVMF, FCF and FedGNN form sums in float64 and change no code that was seen; FedNCF trains in float32, and 3 in
10,000 codes were seen to change."""


@cache
def alone(name):
    return user_codes.alone(name)


@st.composite
def batches(draw):
    """Draw some of the users, in any order, in batches of any size."""
    users = draw(st.lists(st.sampled_from(EVERYBODY), min_size=1, max_size=USERS, unique=True))
    ends = sorted(draw(st.sets(st.integers(1, len(users)), max_size=5)) | {len(users)})
    return [users[first:last] for first, last in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4)
@given(made=batches())
@example(made=[EVERYBODY])
@example(made=[EVERYBODY[::-1][:-1], EVERYBODY[:1]])
def test_codes_of_a_user_are_those_that_it_has_alone(name, made):
    for codes, expected in zip(user_codes.apart(name, made), alone(name), strict=True):
        assert sorted(codes) == sorted(user for batch in made for user in batch)
        for user, own in codes.items():
            np.testing.assert_array_equal(own, expected[user], err_msg=f"user {user}")


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4)
@given(made=batches())
@example(made=[EVERYBODY])
def test_hosts_add_up_to_the_codes_of_single_users(name, made):
    everybody = [user for batch in made for user in batch]
    for summed, expected in zip(user_codes.together(name, made), alone(name), strict=True):
        np.testing.assert_array_equal(summed, expected[everybody].sum(axis=0, dtype=np.uint32))


def test_every_case_has_something_to_round():
    for name in CASES:
        first, evaluated, later = alone(name)
        assert (first != first[0]).any(), name
        assert (evaluated != evaluated[0]).any(), name
        assert (first != later).any(), name


# --- Another kernel -----------------------------------------------------------------------------------------------


def under(kernel, folder):
    """Return the codes that a process comes to whose BLAS has the kernel for another processor."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"kernels of x86-64 on {platform.machine()}")
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    if "openblas" not in blas.lower():
        pytest.skip(f"NumPy multiplies with {blas}; only OpenBLAS takes the kernel from the environment")
    file = folder / "codes.npz"
    done = subprocess.run(
        [sys.executable, "-m", "tests.user_codes", str(file)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENBLAS_CORETYPE": kernel, "OPENBLAS_VERBOSE": "2"},
        capture_output=True,
        text=True,
        timeout=SOON_S,
    )
    assert done.returncode == 0, done.stderr
    if f"Core: {kernel}" not in done.stdout + done.stderr:
        pytest.skip(f"this processor, or this OpenBLAS, has no kernel {kernel}")
    with np.load(file) as made:
        return dict(made)


@pytest.mark.parametrize("kernel", ["Haswell", "Nehalem"])
def test_under_another_kernel_hosts_add_up_to_their_users_whose_codes_are_nearly_all_the_same(
    kernel, tmp_path
):
    elsewhere = under(kernel, tmp_path)
    for name, (system, _) in CASES.items():
        for at, codes in enumerate(alone(name)):
            there, summed = elsewhere[f"{name}/{at}"], elsewhere[f"{name}/{at}/sum"]
            np.testing.assert_array_equal(summed, there.sum(axis=0, dtype=np.uint32), err_msg=name)
            assert np.count_nonzero(there != codes) <= MOST[system] * codes.size, (name, at)
