"""The compiled kernel of masks: published and independent values, its boundary, and what happens where it is wrong."""

import json
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import kernels
from coterie.crypto import masking

from ..native_options import SOURCES, options

ROOT = Path(__file__).parents[2]

native = pytest.importorskip("coterie_native", reason="coterie-native is not installed (make native)")

WAYS = native.mask_ways()
LENGTHS = [1, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 8191, 8192, 8193, 16_500]

keys = st.binary(min_size=32, max_size=32)


def keystream(key: bytes, words: int) -> np.ndarray:
    """The keystream block by block, from AES alone."""
    count = -(-words // 4)
    blocks = b"".join(bytes(12) + number.to_bytes(4) for number in range(2, 2 + count))
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks), "<u4")[:words]


def summed(vector: np.ndarray, minus: list[bool], masks: list[bytes]) -> np.ndarray:
    for key, negative in zip(masks, minus, strict=True):
        stream = keystream(key, len(vector))
        vector = vector - stream if negative else vector + stream
    return vector


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Forget what was found out about the package, before and after; it is on, whatever the tests run with."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)

    def forget():
        kernels.package.cache_clear()
        kernels._left_out.clear()
        masking._faster.cache_clear()

    forget()
    yield
    forget()


def test_some_way_is_there_on_common_processors():
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if " aes " not in flags:
        pytest.skip("the processor has no instructions for AES")
    assert WAYS


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_begins_with_the_published_block_of_aes_256_gcm(way):
    # Test case 14 of the specification of GCM (McGrew and Viega): zero key, zero nonce, one block of zeros.
    vector = np.zeros(4, np.uint32)
    native.add_masks(vector, [bytes(32)], [False], [None], way)
    assert vector.astype("<u4").tobytes().hex() == "cea7403d4d606b6e074ec5d3baf39d18"


@pytest.mark.parametrize("way", WAYS)
@given(
    st.lists(st.tuples(keys, st.booleans(), st.booleans()), max_size=70),
    st.one_of(st.sampled_from(LENGTHS), st.integers(0, 600)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=40)
def test_sums_are_those_of_aes_and_nothing_beyond_the_ends_is_written(way, masks, length, value, before):
    guarded = np.full(length + before + 70, value, np.uint32)
    mirrored = guarded.copy()
    vector, mirror = guarded[before : before + length], mirrored[before : before + length]
    native.add_masks(
        vector,
        [key for key, _, _ in masks],
        [negative for _, negative, _ in masks],
        [mirror if marked else None for _, _, marked in masks],
        way,
    )
    start = np.full(length, value, np.uint32)
    minus, found = [negative for _, negative, _ in masks], [key for key, _, _ in masks]
    assert np.array_equal(vector, summed(start, minus, found))
    turned = [(not negative, key) for key, negative, marked in masks if marked]
    assert np.array_equal(
        mirror, summed(start, [negative for negative, _ in turned], [key for _, key in turned])
    )
    for one in (guarded, mirrored):
        assert np.all(one[:before] == value)
        assert np.all(one[before + length :] == value)


@pytest.mark.parametrize("way", WAYS)
def test_keys_are_not_changed(way):
    key = bytes(range(32))
    native.add_masks(np.zeros(100, np.uint32), [key], [False], [None], way)
    assert key == bytes(range(32))


def frozen():
    vector = np.zeros(8, np.uint32)
    vector.flags.writeable = False
    return vector


SHARED = np.zeros(16, np.uint32)


@pytest.mark.parametrize(
    ("vector", "masks", "minus", "mirrors", "error", "said"),
    [
        ([0, 0], [bytes(32)], [False], [None], TypeError, "no array of uint32"),
        (np.zeros(4, np.int32), [bytes(32)], [False], [None], TypeError, "no array of uint32"),
        (np.zeros(4, ">u4"), [bytes(32)], [False], [None], TypeError, "no array of uint32"),
        (np.zeros(4, np.uint64), [bytes(32)], [False], [None], TypeError, "no array of uint32"),
        (np.zeros((2, 2), np.uint32), [bytes(32)], [False], [None], ValueError, "one dimension"),
        (np.zeros(8, np.uint32)[::2], [bytes(32)], [False], [None], ValueError, "contiguous"),
        (frozen(), [bytes(32)], [False], [None], ValueError, "writable"),
        (
            np.frombuffer(bytearray(17), np.uint8)[1:].view(np.uint32),
            [bytes(32)],
            [False],
            [None],
            ValueError,
            "aligned",
        ),
        (np.zeros(4, np.uint32), [bytes(31)], [False], [None], ValueError, "32 bytes"),
        (np.zeros(4, np.uint32), [bytes(33)], [False], [None], ValueError, "32 bytes"),
        (np.zeros(4, np.uint32), [bytes(32)], [], [None], ValueError, "1 keys, 0 signs"),
        (np.zeros(4, np.uint32), [bytes(32)], [False], [], ValueError, "0 mirrors"),
        (np.zeros(4, np.uint32), [bytes(32)], [False], [np.zeros(3, np.uint32)], ValueError, "3 values"),
        (np.zeros(4, np.uint32), [bytes(32)], [False], [np.zeros(4)], TypeError, "no array of uint32"),
        (SHARED[:8], [bytes(32)], [False], [SHARED[4:12]], ValueError, "shares memory"),
    ],
)
def test_what_the_compiled_code_could_not_bear_is_refused_before_it(
    vector, masks, minus, mirrors, error, said
):
    for way in WAYS:
        with pytest.raises(error, match=said):
            native.add_masks(vector, masks, minus, mirrors, way)


def test_a_way_that_the_processor_lacks_is_refused():
    for way in ({"avx512", "avx2", "aesni", "armv8"} - set(WAYS)) | {"other", ""}:
        with pytest.raises(ValueError, match="no way"):
            native.add_masks(np.zeros(4, np.uint32), [bytes(32)], [False], [None], way)


# --- how Coterie uses it -----------------------------------------------------------------------------------------


def stand_in(monkeypatch, **differs):
    """Put a package in the place of the installed one that differs from it."""
    other = types.ModuleType("coterie_native")
    for name in ("INTERFACE", "add_masks", "mask_ways", "version"):
        setattr(other, name, differs.get(name, getattr(native, name)))
    monkeypatch.setitem(sys.modules, "coterie_native", other)


def warnings_of(caplog):
    return [one.getMessage() for one in caplog.records if one.name == "coterie.kernels"]


def assert_masks_are_right():
    vector = np.zeros(1000, np.uint32)
    masking.add_masks(vector, [bytes(32)], [bytes([1]) * 32])
    assert np.array_equal(
        vector, summed(np.zeros(1000, np.uint32), [False, True], [bytes(32), bytes([1]) * 32])
    )


def test_it_is_used_where_it_agrees_and_is_faster(monkeypatch, caplog):
    used = []

    def counted(*given, **named):
        used.append(len(given[0]))
        native.add_masks(*given, **named)

    def slow(*given, **named):
        for _ in range(200):
            reference(*given, **named)

    reference = masking._add_by_reference
    stand_in(monkeypatch, add_masks=counted)
    # The comparison of speeds must not hang on the processor: the reference is made slow after the check of results.
    assert masking._agrees(kernels.package())
    monkeypatch.setattr(masking, "_agrees", lambda package: True)
    monkeypatch.setattr(masking, "_add_by_reference", slow)
    used.clear()
    assert_masks_are_right()
    assert 1000 in used
    assert not warnings_of(caplog)


def test_it_is_left_out_where_it_is_slower(monkeypatch, caplog):
    used = []

    def slow(*given, **named):
        used.append(len(given[0]))
        for _ in range(2000):
            np.zeros(20_000).sum()
        native.add_masks(*given, **named)

    stand_in(monkeypatch, add_masks=slow)
    assert_masks_are_right()
    assert 1000 not in used
    assert not warnings_of(caplog)


def wrong_at_the_end(vector, masks, minus, mirrors, way):
    native.add_masks(vector, masks, minus, mirrors, way)
    if len(vector) > 8192:
        vector[-1] ^= 1


def wrong_in_a_mirror(vector, masks, minus, mirrors, way):
    native.add_masks(vector, masks, minus, [None] * len(masks), way)


def failing(*_given, **_named):
    raise ValueError("no such instruction")


@pytest.mark.parametrize("kernel", [wrong_at_the_end, wrong_in_a_mirror, failing])
def test_a_kernel_that_computes_something_else_is_left_out_with_one_warning(kernel, monkeypatch, caplog):
    stand_in(monkeypatch, add_masks=kernel)
    for _ in range(3):
        assert_masks_are_right()
    assert len(warnings_of(caplog)) == 1
    assert "the compiled kernel of masks is not used" in warnings_of(caplog)[0]


def test_a_package_with_another_interface_is_left_out(monkeypatch, caplog):
    stand_in(monkeypatch, INTERFACE=99, add_masks=failing)
    assert_masks_are_right()
    assert warnings_of(caplog) == ["coterie-native is not used: it has interface 99; this release takes 2"]
    assert "interface 99" in kernels.state()


def test_it_can_be_switched_off(monkeypatch, caplog):
    stand_in(monkeypatch, add_masks=failing)
    monkeypatch.setenv(kernels.SWITCH, "off")
    assert_masks_are_right()
    assert not warnings_of(caplog)


def test_a_wheel_for_another_processor_is_passed_over_with_a_word(tmp_path):
    package = tmp_path / "coterie_native"
    shutil.copytree(Path(native.__file__).parent, package)
    (library,) = package.glob("_kernels*.so")
    # An ELF file for a processor of another kind: its machine is at byte 18.
    content = bytearray(library.read_bytes())
    content[18:20] = struct.pack("<H", 8)
    library.write_bytes(content)
    program = (
        "import logging; logging.basicConfig(); import numpy as np\n"
        "from coterie import kernels; from coterie.crypto import masking\n"
        "vector = np.zeros(4, np.uint32)\n"
        "masking.add_masks(vector, [bytes(32)]); masking.add_masks(np.zeros(4, np.uint32), [bytes(32)])\n"
        "print(vector.astype('<u4').tobytes().hex(), kernels.state())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("cea7403d4d606b6e074ec5d3baf39d18 cannot be loaded here")
    assert done.stderr.count("coterie-native is not used") == 1


def version_with(folder, program=""):
    """Return what `coterie version` prints where a folder comes first on the path, in words and as JSON."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    program += "\nimport sys; from coterie.cli.main import main; sys.argv[0] = 'coterie'; sys.exit(main())"
    told = [
        subprocess.run(
            [sys.executable, "-c", program, "version", *options],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        for options in ([], ["--json"])
    ]
    assert not told[0].stderr
    return told[0].stdout, json.loads(told[1].stdout)["result"]


def test_version_says_which_kernel_was_left_out_and_why():
    wrong = (
        "import coterie_native as native\n"
        "def add_masks(vector, *given, **named): vector += 1\n"
        "native.add_masks = add_masks"
    )
    said, found = version_with("", wrong)
    why = "computes something else than the reference on this processor"
    assert f"the compiled kernel of masks is not used: it {why}\n" in said
    assert found["left_out"] == {"the compiled kernel of masks": why}
    assert found["kernels"].startswith(native.version())


def test_version_says_when_a_kernel_of_masks_is_slower_or_has_no_way(monkeypatch, caplog):
    stand_in(monkeypatch, mask_ways=tuple)
    masking.compare_kernel()
    assert kernels.left_out() == {
        "the compiled kernel of masks": "has no way of computing them on this processor"
    }
    kernels._left_out.clear()
    masking._faster.cache_clear()
    kernels.package.cache_clear()
    stand_in(monkeypatch)
    monkeypatch.setattr(masking, "faster", lambda kernel, reference: False)
    masking.compare_kernel()
    assert kernels.left_out() == {"the compiled kernel of masks": "is slower than the reference here"}
    assert_masks_are_right()
    assert not warnings_of(caplog)


def test_version_has_its_own_words_for_a_missing_cffi():
    said, found = version_with("", "import sys; sys.modules['_cffi_backend'] = None")
    assert found["kernels"] == "needs the package cffi, which is not installed: python -m pip install cffi"
    assert f"kernels {found['kernels']}\n" in said


def test_version_has_its_own_words_for_a_package_without_its_compiled_part(tmp_path):
    (tmp_path / "coterie_native").mkdir()
    shutil.copy(native.__file__, tmp_path / "coterie_native")
    _, found = version_with(tmp_path)
    assert found["kernels"].startswith("has no compiled part (coterie_native._kernels)")


@pytest.mark.parametrize("package", [True, False])
def test_version_has_its_own_words_for_a_folder_of_the_name(package, tmp_path):
    (tmp_path / "coterie_native").mkdir()
    if package:
        (tmp_path / "coterie_native" / "__init__.py").touch()
    # An installed package would come before a folder without __init__.py.
    first = (
        "import importlib.machinery, sys\n"
        "class First:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'coterie_native':\n"
        f"            return importlib.machinery.PathFinder.find_spec(name, [{str(tmp_path)!r}])\n"
        "sys.meta_path.insert(0, First())"
    )
    _, found = version_with("", first)
    assert found["kernels"].startswith("is not what Python finds under the name coterie_native")
    assert str(tmp_path / "coterie_native") in found["kernels"]


def test_version_says_that_kernels_are_switched_off(monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "off")
    _, found = version_with("")
    assert found["kernels"] == "switched off (COTERIE_NATIVE)"
    assert found["left_out"] == {}


# --- under other tools -------------------------------------------------------------------------------------------


def test_the_kernel_for_arm64_has_the_sums_of_aes(tmp_path):
    """Under an emulator: Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("no compiler and emulator for arm64 here")
    driver = tmp_path / "driver"
    sources = [ROOT / "tests" / "native_driver.c", *SOURCES]
    flags = [*options(), "-Wall", "-Wextra", "-Werror", "-static", f"-I{ROOT / 'native' / 'c'}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(driver), "-lm"], check=True)
    rng = np.random.default_rng(0)
    for length in (1, 31, 32, 33, 129, 8192, 8200):
        masks = [rng.bytes(32) for _ in range(35)]
        minus = [bool(one) for one in rng.integers(0, 2, 35)]
        marked = [bool(one) for one in rng.integers(0, 2, 35)]
        vector = rng.integers(0, 2**32, length, dtype=np.uint32)
        asked = struct.pack("<QQ", length, 35) + bytes(minus) + bytes(marked) + b"".join(masks)
        done = subprocess.run(
            [emulator, str(driver)],
            input=asked + vector.astype("<u4").tobytes(),
            capture_output=True,
            check=True,
        )
        found = np.frombuffer(done.stdout, "<u4")
        assert np.array_equal(found[:length], summed(vector, minus, masks))
        turned = [(not negative, key) for key, negative, one in zip(masks, minus, marked, strict=True) if one]
        expected = summed(
            np.zeros(length, np.uint32), [negative for negative, _ in turned], [key for _, key in turned]
        )
        assert np.array_equal(found[length:], expected)


FUZZ = """
import random, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import coterie_native as native
assert native.__file__.startswith(sys.argv[1]), native.__file__
draw = random.Random(int(sys.argv[2]))
for _ in range(300):
    length = draw.choice([0, 1, 2, 31, 33, 127, 129, draw.randrange(700), draw.randrange(8000, 17000)])
    count = draw.choice([0, 1, 2, 31, 32, 33, draw.randrange(70)])
    # Arrays of their own size from the C library, so that one word too far is seen.
    vector, mirror = np.zeros(length, np.uint32), np.zeros(length, np.uint32)
    native.add_masks(
        vector,
        [draw.randbytes(32) for _ in range(count)],
        [draw.random() < 0.5 for _ in range(count)],
        [draw.choice([None, mirror]) for _ in range(count)],
        draw.choice(native.mask_ways()),
    )
for _ in range(300):
    users, n = draw.randrange(4), draw.choice([0, 1, 63, 64, 65, 511, 512, 513, draw.randrange(1100)])
    gmf, mlp = draw.choice([(draw.randrange(1, 30), 0), (0, draw.randrange(1, 30)), (draw.randrange(1, 30),) * 2])
    layers = [draw.randrange(1, 50) for _ in range(draw.randrange(1, 6))] if mlp else []
    units = [2 * mlp, *layers]
    size = sum((k + 1) * m for k, m in zip(units, layers)) + gmf + (layers[-1] if layers else 0) + 1
    network = draw.choice([(size,), (users, size)])
    shapes = [(users, gmf + mlp), (users, gmf + mlp + 1, n), network, (users, n), (users, n)]
    values = draw.choice([0.1, 1.0, 1e30, float("nan"), float("inf")])
    arrays = [np.full(shape, values, np.float32) for shape in shapes]
    native.ncf_gradients((gmf, mlp, *layers), *arrays, draw.choice(native.ncf_ways()))
for _ in range(300):
    rng = np.random.default_rng(draw.randrange(2**32))
    users, ratio, items = draw.randrange(4), draw.randrange(1, 5), draw.choice([2, 3, 40, 700])
    histories = [draw.randrange(1, min(items, 60)) for _ in range(users)]
    epochs, batch = [draw.randrange(1, 4) for _ in range(users)], draw.choice([0, 1, 7, 64])
    positives = [np.sort(rng.choice(items, n, replace=False)) for n in histories]
    negatives = [rng.integers(0, items - n, (e, ratio * n)) for n, e in zip(histories, epochs)]
    orders = [
        rng.permuted(np.tile(np.arange(n * (1 + ratio)), (e, 1)), axis=1) if 0 < batch < n * (1 + ratio) else None
        for n, e in zip(histories, epochs)
    ]
    wrong = draw.random() < 0.3
    if wrong and draw.random() < 0.3:
        for array in orders:
            if array is not None:
                array[:] = 0
    elif wrong and users:
        one = draw.choice([positives, negatives, [o for o in orders if o is not None]])
        for array in one:
            array.reshape(-1)[draw.randrange(array.size)] = draw.choice([-1, 2**40, -(2**63), 2**63 - 1, items, 0])
    gmf, mlp = draw.choice([(draw.randrange(1, 20), 0), (0, draw.randrange(1, 20)), (draw.randrange(1, 20),) * 2])
    layers = [draw.randrange(1, 30) for _ in range(draw.randrange(1, 4))] if mlp else []
    units = [2 * mlp, *layers]
    size = sum((k + 1) * m for k, m in zip(units, layers)) + gmf + (layers[-1] if layers else 0) + 1
    values = draw.choice([0.1, 1e30, float("nan"), float("inf")])
    full = lambda *shape: np.full(shape, values, np.float32)
    flat = lambda arrays: np.concatenate([np.empty(0, np.int64), *(a.reshape(-1) for a in arrays if a is not None)])
    try:
        for n, e, p, d, o in zip(histories, epochs, positives, negatives, orders):
            native.lay_out(p, d, o, batch or n * (1 + ratio), items)
        native.ncf_local_steps(
            (gmf, mlp, *layers),
            np.array(histories, np.int64),
            np.array(epochs, np.int64),
            ratio,
            batch,
            flat(positives),
            flat(negatives),
            flat(orders),
            full(items, gmf + mlp),
            full(size),
            full(users, gmf + mlp),
            draw.choice([None, (full(users, gmf + mlp), full(users, gmf + mlp))]),
            np.zeros(users, np.int32),
            draw.choice(native.ncf_ways()),
            rate=0.1,
            private_rate=0.1,
            adam=draw.random() < 0.5,
            proximal=draw.choice([0.0, 0.1]),
            control=draw.choice([None, (full(users, size), full(size))]),
            balance=draw.choice([None, full(items)]),
        )
    except ValueError:
        assert wrong
for _ in range(500):
    kind = draw.choice([np.float32, np.float64])
    rows, width = draw.randrange(60), draw.choice([1, 2, 7, 24, 40])
    rng = np.random.default_rng(draw.randrange(2**32))
    values = (rng.normal(0, 1, (rows, width)) * draw.choice([1, 1e30, 1e-30])).astype(kind)
    if rows and draw.random() < 0.3:
        values[draw.randrange(rows), -1] = draw.choice([np.nan, np.inf, -np.inf, 3e38])
    size, places = rows + 3, rng.permutation(rows + 3)[:rows]
    wrong = rows and draw.random() < 0.2
    if wrong:
        places[draw.randrange(rows)] = draw.choice([-1, size, 2**62, -(2**63)])
    sums = np.zeros(size * width, np.int64)
    options = draw.choice([{}, {"sums": np.zeros(rows * width, np.int64).reshape(-1)}, {"sums": sums, "rows": places}])
    if "rows" not in options:
        values = values if not options else values.reshape(-1)
    try:
        native.round_steps(
            values,
            np.zeros(values.shape, kind),
            draw.choice([1.0, 32767.0, 1e300]),
            draw.choice([1, 32767, 1 << 24]),
            draw.choice(native.ncf_ways()),
            clips=draw.random() < 0.5,
            **options,
        )
    except ValueError:
        assert wrong and "rows" in options
print("fuzzed")
"""


def test_the_address_sanitiser_finds_nothing(tmp_path):
    """Built with -fsanitize=address,undefined, called with 300 drawn inputs."""
    compiler = shutil.which("gcc")
    found = (
        compiler
        and subprocess.run(
            [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True
        ).stdout.strip()
    )
    if not found or not Path(found).is_absolute() or not WAYS:
        pytest.skip("no gcc with the address sanitiser here")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("Python's headers are not here")
    source = tmp_path / "native"
    shutil.copytree(ROOT / "native", source, ignore=shutil.ignore_patterns("build", "*.so", "*.egg-info"))
    sanitise = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    environment = {
        **os.environ,
        "CC": str(compiler),
        "COTERIE_NATIVE_CFLAGS": f"{sanitise} -g -O1",
        "COTERIE_NATIVE_LDFLAGS": sanitise,
    }
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=source,
        env=environment,
        check=True,
        capture_output=True,
    )
    environment |= {
        "LD_PRELOAD": str(Path(found).resolve()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(source), "5"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fuzzed" in done.stdout
