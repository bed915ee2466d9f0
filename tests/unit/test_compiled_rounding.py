"""The compiled rounding of contributions against the reference, to the bit; its boundary, and its fallback."""

import shutil
import struct
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from coterie import kernels
from coterie.secure_sum import contribution as module
from coterie.secure_sum.contribution import (
    Contribution,
    Layout,
    Segment,
    UnboundedValueError,
    _by_kernel,
    _by_reference,
    rounded,
)

from ..native_options import ROOT, SOURCES, options

native = pytest.importorskip("coterie_native", reason="coterie-native is not installed (make native)")

WAYS = native.ncf_ways()


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Forget what was found out about the package, before and after; it is on, whatever the tests run with."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)

    def forget():
        kernels.package.cache_clear()
        kernels._left_out.clear()
        module._compiled.cache_clear()

    forget()
    yield
    forget()


@st.composite
def cases(draw):
    """A segment, values of one of both precisions, as they lie in memory, and draws."""
    bits, bound = draw(st.integers(2, 31)), draw(st.floats(1e-3, 1e3))
    segment = Segment("s", (), bound, bits, clip=draw(st.booleans()))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    kind = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 1.0, 1.2, 100.0]))
    values = np.asarray(rng.uniform(-bound * spread, bound * spread, shape)).astype(kind)
    if draw(st.booleans()):
        # Whole steps, and the numbers beside them.
        values = np.asarray(np.rint(values / segment.step) * segment.step).astype(kind)
        values = np.asarray(np.nextafter(values, kind(draw(st.sampled_from([-np.inf, 0, np.inf])))))
    if values.size and draw(st.booleans()):
        special = st.sampled_from([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, bound, -bound])
        values.reshape(-1)[draw(st.integers(0, values.size - 1))] = draw(special)
    values = laid(values, draw(st.sampled_from(["contiguous", "reversed", "spread", "Fortran", "unaligned"])))
    uniform = np.asarray(rng.random(shape, segment.precision))
    if uniform.size and draw(st.booleans()):
        uniform.reshape(-1)[::2] = draw(st.sampled_from([0.0, np.nextafter(segment.precision(1), 0)]))
    return segment, values, uniform


def laid(values, how):
    if how == "reversed" and values.ndim:
        return values[::-1].copy()[::-1]
    if how == "spread" and values.ndim:
        return np.repeat(values, 2, axis=0)[::2]
    if how == "Fortran" and values.ndim:
        return np.asfortranarray(values)
    if how == "unaligned":
        return np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(values.dtype).reshape(values.shape)
    return values


def outcome(work):
    try:
        steps, beyond = work()
    except UnboundedValueError as error:
        return str(error)
    return steps.dtype, steps.shape, steps.tobytes(), beyond


@given(cases())
@settings(deadline=None, max_examples=600)
def test_steps_and_errors_are_those_of_the_reference_to_the_bit(case):
    segment, values, uniform = case
    expected = outcome(lambda: _by_reference(values, segment, uniform))
    assert outcome(lambda: rounded(values, segment, uniform)) == expected
    for way in WAYS:
        found = _by_kernel(native, way, values, segment, uniform)
        assert (found is None) == isinstance(expected, str)
        if found is not None:
            assert outcome(lambda found=found: found) == expected


def many(bits):
    """A segment, many values, and draws: some at the very fraction, where only the reference's roundings decide so."""
    segment, rng = Segment("s", (), 0.3, bits), np.random.default_rng(1)
    values = rng.normal(0, 0.1, 100_001).astype(segment.precision)
    scaled = np.multiply(values, segment.levels / segment.bound, dtype=segment.precision)
    part = scaled - np.floor(scaled)
    below = np.maximum(np.nextafter(part, segment.precision(-1)), 0)
    return segment, values, (rng.random(values.shape, segment.precision), part, below)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [16, 24])
def test_many_values_are_those_of_the_reference(bits, way):
    """A fused product would differ in some of them."""
    segment, values, draws = many(bits)
    for uniform in draws:
        expected, beyond = _by_reference(values, segment, uniform)
        found = _by_kernel(native, way, values, segment, uniform)
        assert np.array_equal(found[0], expected)
        assert found[1] == beyond > 0


@pytest.mark.parametrize("bits", [16, 24])
def test_many_values_are_those_of_the_reference_on_arm64(bits, tmp_path):
    """Under an emulator: there compilers fuse products wherever they may."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("no compiler and emulator for arm64 here")
    driver = tmp_path / "driver"
    sources = [str(ROOT / "tests" / "native_rounding_driver.c"), *map(str, SOURCES)]
    flags = [*options(), "-Wall", "-Wextra", "-Werror", "-static", f"-I{ROOT / 'native' / 'c'}"]
    subprocess.run([compiler, *flags, *sources, "-o", str(driver), "-lm"], check=True)
    segment, values, draws = many(bits)
    wide = segment.precision is np.float64
    head = struct.pack("<dqqq", segment.levels / segment.bound, segment.levels, wide, len(values))
    for uniform in draws:
        expected, beyond = _by_reference(values, segment, uniform)
        done = subprocess.run(
            [emulator, str(driver)],
            input=head + values.tobytes() + uniform.tobytes(),
            capture_output=True,
            check=True,
        )
        assert np.array_equal(np.frombuffer(done.stdout[:-8], "<i4"), expected)
        assert struct.unpack("<q", done.stdout[-8:]) == (beyond,)


def layout():
    return Layout(
        (
            Segment("rows", (50, 7), 1.0, 16, over="touch"),
            Segment.whole("touch", (50,), 30),
            Segment("fine", (11,), 2.0, 24, over="instances"),
            Segment.whole("instances", (), 500),
        )
    )


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_contributions_are_the_same_with_and_without_it(seed, users):
    codes = []
    for native_ in (native, None):
        rng = np.random.default_rng(seed)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "_compiled", lambda native_=native_: native_)
            found = Contribution(layout())
            for _ in range(users):
                rows = rng.permutation(50)[: rng.integers(0, 50)].astype(np.int32)
                found.add("rows", rng.normal(0, 0.7, (len(rows), 7)).astype(np.float32), rng, rows=rows)
                found.add("touch", np.ones(len(rows), np.float32), rng, rows=rows)
                found.add("fine", rng.normal(0, 2, (11, 2))[:, 0], rng)
                found.add("instances", np.array(7.0), rng, noise=bool(rng.integers(2)))
                found.count()
        codes.append((found.codes(), found.noise, found.clipped, rng.random()))
    for one, other in zip(*codes, strict=True):
        assert np.array_equal(one, other)


def test_nothing_is_added_of_values_that_are_refused():
    found = Contribution(layout())
    values = np.zeros((3000, 7), np.float32)
    values[-1, -1] = np.nan
    wide = Layout((Segment("rows", (3000, 7), 1.0, 16),))
    found = Contribution(wide)
    with pytest.raises(UnboundedValueError, match="not a finite number"):
        found.add("rows", values, np.random.default_rng(0))
    strict = Contribution(Layout((Segment("rows", (3000, 7), 1.0, 16, clip=False),)))
    values[-1, -1] = 1.5
    with pytest.raises(UnboundedValueError, match="1 values beyond"):
        strict.add("rows", values + np.float32(0.25), np.random.default_rng(0), rows=np.arange(3000))
    assert not found.steps.any()
    assert not strict.steps.any()


def read_only(array):
    array.flags.writeable = False
    return array


VALUES = np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"values": VALUES.astype(np.int32)}, TypeError),
        ({"values": VALUES.tolist()}, TypeError),
        ({"values": VALUES.astype(">f4")}, TypeError),
        ({"values": VALUES.astype(np.float64)}, TypeError),
        ({"values": np.zeros((4, 6), np.float32)[:, ::2]}, ValueError),
        ({"values": laid(VALUES, "unaligned")}, ValueError),
        ({"uniform": VALUES[:3]}, ValueError),
        ({"uniform": VALUES.astype(np.float64)}, TypeError),
        ({"levels": 0}, ValueError),
        ({"levels": (1 << 24) + 1}, ValueError),
        ({"way": "other"}, ValueError),
        ({"sums": np.zeros(9, np.int64)}, ValueError),
        ({"sums": np.zeros(31, np.int64)}, ValueError),
        ({"sums": np.zeros(30, np.int32)}, TypeError),
        ({"sums": np.zeros(60, np.int64)[::2]}, ValueError),
        ({"sums": read_only(np.zeros(30, np.int64))}, ValueError),
        ({"sums": None}, ValueError),
        ({"rows": None}, ValueError),
        ({"rows": np.arange(3)}, ValueError),
        ({"rows": np.arange(4, dtype=np.int32)}, TypeError),
        ({"rows": np.array([0, 1, 2, 10])}, ValueError),
        ({"rows": np.array([-1, 1, 2, 3])}, ValueError),
        ({"rows": np.array([0, 1, 2, 2**62])}, ValueError),
    ],
)
def test_what_the_compiled_code_could_not_bear_is_refused(changed, error):
    for way in WAYS:
        given = {
            "values": VALUES,
            "uniform": VALUES,
            "factor": 3.0,
            "levels": 7,
            "way": way,
            "sums": np.zeros(30, np.int64),
            "rows": np.arange(4),
        }
        native.round_steps(**given)
        with pytest.raises(error):
            native.round_steps(**{**given, **changed})


@pytest.mark.parametrize("wrong", ["steps", "sums"])
def test_one_with_other_steps_is_left_out_with_one_warning(wrong, monkeypatch, caplog):
    def differs(*given, sums=None, **named):
        found = native.round_steps(*given, sums=sums, **named)
        if found is not None and wrong == "steps":
            found[0].reshape(-1)[-1] += 1
        if sums is not None and wrong == "sums":
            sums[-1] += 1
        return found

    other = types.ModuleType("coterie_native")
    for name in ("INTERFACE", "ncf_ways", "version"):
        setattr(other, name, getattr(native, name))
    other.round_steps = differs
    monkeypatch.setitem(sys.modules, "coterie_native", other)
    segment = Segment("s", (3,), 1.0, 16)
    values, uniform = np.array([0.1, 0.2, 0.3], np.float32), np.zeros(3, np.float32)
    for _ in range(2):
        assert np.array_equal(
            rounded(values, segment, uniform)[0], _by_reference(values, segment, uniform)[0]
        )
    said = [one.getMessage() for one in caplog.records if one.name == "coterie.kernels"]
    assert len(said) == 1
    assert "the compiled kernel of rounding is not used" in said[0]
