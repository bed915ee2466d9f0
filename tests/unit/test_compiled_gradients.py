"""The compiled kernel of neural collaborative filtering against the reference, its boundary, and its fallback."""

import os
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import kernels
from coterie.systems.fedncf import networks
from coterie.systems.fedncf.networks import Architecture, _by_kernel, _by_reference, _example, gradients

from ..native_options import SOURCES, options

native = pytest.importorskip("coterie_native", reason="coterie-native is not installed (make native)")

ROOT = Path(__file__).parents[2]
WAYS = native.ncf_ways()
NAMES = ("loss", "private", "rows", "network")


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Forget what was found out about the package, before and after; it is on, whatever the tests run with."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)

    def forget():
        kernels.package.cache_clear()
        kernels._left_out.clear()
        networks._compiled.cache_clear()

    forget()
    yield
    forget()


def architectures():
    layers = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple)
    return st.builds(
        Architecture,
        model=st.sampled_from(("gmf", "mlp", "neumf")),
        dim=st.integers(1, 17),
        mlp_embedding=st.integers(1, 17),
        layers=layers,
    )


def sizes_of(architecture):
    return (architecture.gmf_width, architecture.mlp_width, *(m for m, _ in architecture.matrices))


def test_every_processor_has_a_way():
    assert WAYS[-1] == "plain"


@pytest.mark.parametrize("way", WAYS)
@given(
    architectures(), st.integers(1, 4), st.sampled_from([1, 2, 15, 63, 64, 65, 512, 513, 700]), st.booleans()
)
@settings(deadline=None, max_examples=40)
def test_values_are_those_of_the_reference(way, architecture, users, n, own):
    asked = _example(architecture, users, n, own)
    # In double precision: the kernel may be further from the reference than either is from the truth.
    exact = _by_reference(
        *(one if isinstance(one, Architecture) else one.astype(np.float64) for one in asked)
    )
    found = _by_kernel(native, way, *asked)
    for name in NAMES:
        one, other = getattr(found, name), getattr(exact, name)
        assert one.shape == other.shape
        assert one.dtype == np.float32
        error, scale = np.abs(one - other), np.abs(other).max() + 1e-3
        # A unit whose sum is next to zero may be rectified by one and not by the other: few values, and not by much.
        assert np.quantile(error, 0.98) <= 2e-5 * scale, name
        assert error.max() <= 0.05 * scale, name


@pytest.mark.parametrize("way", WAYS)
def test_large_scores_neither_overflow_nor_vanish(way):
    architecture = Architecture("gmf", dim=1)
    scores = np.array(
        [0.0, -0.0, 1e-8, 5, -5, 20, -20, 87, -87, 88.5, -88.5, 3e4, -3e4, 1e30, -1e30], np.float32
    )
    n = len(scores)
    rows = np.ones((1, 2, n), np.float32)
    rows[0, 0] = scores
    network = np.array([1, 0], np.float32)
    for label in (0.0, 1.0):
        asked = np.ones((1, 1, 1), np.float32), rows, network, np.full((1, n), label, np.float32)
        for at in range(n):
            weight = np.zeros((1, n), np.float32)
            weight[0, at] = 1
            found = _by_kernel(native, way, architecture, *asked, weight)
            z = float(scores[at])
            loss = np.logaddexp(0, z) - label * z
            # Only a positive score with label 1 is a difference of two larger numbers.
            assert found.loss[0] == pytest.approx(
                loss, rel=1e-6, abs=2e-7 * z if label and 0 < z < 100 else 1e-37
            )
            chance = np.exp(min(z, 0)) / (1 + np.exp(-abs(z))) if z < 0 else 1 / (1 + np.exp(-z))
            assert found.network[0, 1] == pytest.approx(chance - label, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["private", "rows", "network", "weight"])
def test_what_is_no_number_is_seen_in_the_results(way, wrong, where):
    architecture, private, rows, network, label, weight = _example(Architecture(), 2, 70)
    arrays = {"private": private, "rows": rows, "network": network, "weight": weight}
    # The output's bias, so that no rectified unit hides it.
    arrays[where].reshape(-1)[-1 if where == "network" else 0] = wrong
    found = _by_kernel(native, way, architecture, private, rows, network, label, weight)
    assert not all(np.isfinite(getattr(found, name)).all() for name in NAMES)


@pytest.mark.parametrize("way", WAYS)
def test_a_users_values_do_not_depend_on_the_others(way):
    architecture, *arrays, label, weight = _example(Architecture(), 5, 90, own=True)
    private, rows, network = arrays
    together = _by_kernel(native, way, architecture, private, rows, network, label, weight)
    for user in range(5):
        one = slice(user, user + 1)
        alone = _by_kernel(
            native, way, architecture, private[one], rows[one], network[one], label[one], weight[one]
        )
        for name in NAMES:
            assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[user])


@pytest.mark.parametrize("way", WAYS)
def test_padding_has_no_influence(way):
    architecture, private, rows, network, label, weight = _example(Architecture(), 2, 100)
    weight[:, 60:] = 0
    whole = _by_kernel(native, way, architecture, private, rows, network, label, weight)
    short = _by_kernel(
        native, way, architecture, private, rows[:, :, :60], network, label[:, :60], weight[:, :60]
    )
    assert np.allclose(whole.network, short.network, rtol=1e-5, atol=1e-7)
    assert not whole.rows[:, :, 60:].any()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_products_and_sums_are_one_instruction_where_the_processor_has_it(machine, tmp_path):
    prefix = "" if platform.machine() == machine else f"{machine}-linux-gnu-"
    compiler, disassembler = shutil.which(f"{prefix}gcc"), shutil.which(f"{prefix}objdump")
    if compiler is None or disassembler is None:
        pytest.skip(f"no compiler and disassembler for {machine} here")
    made = tmp_path / "ncf.o"
    subprocess.run(
        [compiler, *options(), "-fPIC", "-c", str(ROOT / "native" / "c" / "ncf.c"), "-o", str(made)],
        check=True,
    )
    told = subprocess.run(
        [disassembler, "-d", "--no-show-raw-insn", str(made)], check=True, capture_output=True, text=True
    ).stdout
    fused = {}
    for block in told.split("\n\n"):
        if named := re.match(r"\s*[0-9a-f]+ <(product|outer)_(\w+?)(\.\w+)*>:", block):
            fused[named[1], named[2]] = len(re.findall(r"\b(?:vfn?m(?:add|sub)\w+ps|fmla)\b", block))
    expected = {"x86_64": ("avx2", "avx512"), "aarch64": ("plain",)}[machine]
    for way in expected:
        # At least one for each vector of a tile: the inner loop has no separate products.
        assert fused["product", way] >= 12, fused
        assert fused["outer", way] >= 12, fused


def changed(at, **how):
    """Arguments of the kernel with one array changed."""
    architecture, private, rows, network, label, weight = _example(Architecture(), 2, 9)
    given = {
        "sizes": sizes_of(architecture),
        "private": private[..., 0],
        "rows": rows,
        "network": network,
        "label": label,
        "weight": weight,
    }
    given[at] = how["to"](given[at])
    return given


@pytest.mark.parametrize(
    ("at", "to", "error"),
    [
        ("private", lambda a: a.astype(np.float64), TypeError),
        ("private", lambda a: a[:, :-1], ValueError),
        ("private", lambda a: a.T, ValueError),
        ("rows", lambda a: a[:, :-1], ValueError),
        ("rows", lambda a: a[:1], ValueError),
        ("rows", lambda a: a.transpose(0, 2, 1), ValueError),
        ("network", lambda a: a[:-1], ValueError),
        ("network", lambda a: np.stack([a] * 3), ValueError),
        ("label", lambda a: a[:, :5], ValueError),
        ("label", lambda a: a.astype(np.int32), TypeError),
        ("weight", lambda a: a.tolist(), TypeError),
        (
            "weight",
            lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(np.float32).reshape(a.shape),
            ValueError,
        ),
        ("sizes", lambda a: (12, 12), ValueError),
        ("sizes", lambda a: (0, 0), ValueError),
        ("sizes", lambda a: (-1, 25, 48, 24, 12, 6), ValueError),
        ("sizes", lambda a: (12, 12, 48, 0, 12, 6), ValueError),
        ("sizes", lambda a: (12, 12, *[3] * 17), ValueError),
        ("sizes", lambda a: (1 << 17, 0), ValueError),
    ],
)
def test_what_the_compiled_code_could_not_bear_is_refused_before_it(at, to, error):
    for way in WAYS:
        with pytest.raises(error):
            native.ncf_gradients(**changed(at, to=to), way=way)


BEYOND = 1 << 14, 1 << 16
"""Width of the MLP and units of its layer: the network has more than 2^31 values."""


def test_a_network_of_more_values_than_an_int_counts_has_its_whole_length():
    mlp, units = BEYOND
    private, rows = np.zeros((1, mlp), np.float32), np.zeros((1, mlp + 1, 1), np.float32)
    one = np.zeros((1, 1), np.float32)
    size = units * (2 * mlp + 1) + units + 1
    assert size > 1 << 31
    # What an int would have made of the length, and others near it.
    for wrong in (size - (1 << 31), size % (1 << 16), 1):
        with pytest.raises(ValueError, match=f"network has shape .* expected \\({size},\\)"):
            native.ncf_gradients(
                (0, mlp, units), private, rows, np.zeros(wrong, np.float32), one, one, WAYS[0]
            )


def test_the_gradients_for_arm64_are_those_of_the_reference(tmp_path):
    """Under an emulator, with fused products and sums."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("no compiler and emulator for arm64 here")
    driver = tmp_path / "driver"
    sources = [str(ROOT / "tests" / "native_gradients_driver.c"), *map(str, SOURCES)]
    flags = [*options(), "-Wall", "-Wextra", "-Werror", "-static", f"-I{ROOT / 'native' / 'c'}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(driver), "-lm"], check=True)
    for architecture, users, n in (
        (Architecture(), 2, 70),
        (Architecture("gmf", dim=5), 3, 600),
        (Architecture("mlp", mlp_embedding=7, layers=(9, 4)), 2, 130),
    ):
        given = _example(architecture, users, n, own=True)
        sizes = architecture.sizes
        head = np.array([len(sizes), users, n, architecture.network_size, *sizes], "<i4").tobytes()
        arrays = [np.ascontiguousarray(one).astype("<f4").tobytes() for one in given[1:]]
        done = subprocess.run(
            [emulator, str(driver)], input=head + b"".join(arrays), capture_output=True, check=True
        )
        found = np.frombuffer(done.stdout, "<f4")
        exact = _by_reference(
            *(one if isinstance(one, Architecture) else one.astype(np.float64) for one in given)
        )
        for name in NAMES:
            expected = getattr(exact, name)
            one, found = found[: expected.size].reshape(expected.shape), found[expected.size :]
            error, scale = np.abs(one - expected), np.abs(expected).max() + 1e-3
            assert np.quantile(error, 0.98) <= 2e-5 * scale, name
            assert error.max() <= 0.05 * scale, name
        assert not found.size


REPEATED = """
import ctypes, mmap, os, sys
import numpy as np
import coterie_native as native

PIECE = 1 << 23
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def repeated(values):
    # Zeros whose memory is one piece again and again: more than 2^31 values in 8 MiB.
    size = -(-4 * values // PIECE) * PIECE
    none, fixed = 0, 0x10
    start = library.mmap(None, size, none, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    piece = os.memfd_create("zeros")
    os.ftruncate(piece, PIECE)
    for at in range(start, start + size, PIECE):
        assert library.mmap(at, PIECE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, piece, 0) == at
    return np.frombuffer((ctypes.c_float * values).from_address(start), np.float32)


mlp, units = map(int, sys.argv[2:])
size = units * (2 * mlp + 1) + units + 1
network, written = repeated(size), repeated(size)
empty = np.empty
native.np.empty = lambda shape, kind: written.reshape(shape) if shape == (1, size) else empty(shape, kind)
private, rows = np.zeros((1, mlp), np.float32), np.ones((1, mlp + 1, 1), np.float32)
one = np.ones((1, 1), np.float32)
loss, *_ = native.ncf_gradients((0, mlp, units), private, rows, network, one, one, sys.argv[1])
print(loss[0])
"""


@pytest.mark.full("takes a minute")
@pytest.mark.parametrize("way", WAYS)
def test_places_in_a_network_beyond_2_to_the_31_do_not_wrap(way):
    if not hasattr(os, "memfd_create"):
        pytest.skip("memory is repeated on Linux only")
    done = subprocess.run(
        [sys.executable, "-c", REPEATED, way, *map(str, BEYOND)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(np.log(2))


def test_nobody_and_nothing_are_taken():
    for users, n in ((0, 5), (2, 0)):
        architecture, private, rows, network, label, weight = _example(Architecture(), 2, 5)
        found = native.ncf_gradients(
            sizes_of(architecture),
            private[:users, :, 0],
            np.ascontiguousarray(rows[:users, :, :n]),
            network,
            np.ascontiguousarray(label[:users, :n]),
            np.ascontiguousarray(weight[:users, :n]),
            WAYS[0],
        )
        assert [one.shape[0] for one in found] == [users] * 4
        assert not any(one.any() for one in found)


def stand_in(monkeypatch, **differs):
    other = types.ModuleType("coterie_native")
    for name in ("INTERFACE", "ncf_gradients", "ncf_ways", "version"):
        setattr(other, name, differs.get(name, getattr(native, name)))
    monkeypatch.setitem(sys.modules, "coterie_native", other)


def test_a_kernel_with_other_values_is_left_out_with_one_warning(monkeypatch, caplog):
    def wrong(*given, **named):
        loss, private, rows, network = native.ncf_gradients(*given, **named)
        return loss, private, rows, network * np.float32(1.001)

    stand_in(monkeypatch, ncf_gradients=wrong)
    asked = _example(Architecture(), 2, 30)
    for _ in range(2):
        found = gradients(*asked)
        assert np.array_equal(found.network, _by_reference(*asked).network)
    said = [one.getMessage() for one in caplog.records if one.name == "coterie.kernels"]
    assert len(said) == 1
    assert "neural collaborative filtering is not used" in said[0]


def test_the_kernel_is_used_where_it_agrees_however_long_it_takes(monkeypatch, caplog):
    """Its last bits are not the reference's, so that processes that measured otherwise would differ."""
    used = []

    def slow(*given, **named):
        used.append(given)
        for _ in range(50):
            np.ones(300_000).sum()
        return native.ncf_gradients(*given, **named)

    stand_in(monkeypatch, ncf_gradients=slow)
    asked = _example(Architecture(), 2, 30)
    gradients(*asked)
    before = len(used)
    found = gradients(*asked)
    assert len(used) == before + 1
    assert np.array_equal(found.network, _by_kernel(native, WAYS[0], *asked).network)
    # One embedding for each instance is not the kernel's.
    architecture, private, *rest = asked
    gradients(architecture, np.repeat(private, 30, axis=2), *rest)
    assert len(used) == before + 1
    assert not caplog.records


def test_the_slower_of_two_is_not_taken():
    def slow():
        np.ones(300_000).sum()

    assert kernels.faster(lambda: None, slow)
    assert not kernels.faster(slow, lambda: None)
