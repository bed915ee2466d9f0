"""The compiled local step of FedNCF against the reference: layout to the bit, changes, its boundary, its fallback."""

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import kernels
from coterie.systems.fedncf import local_step as module
from coterie.systems.fedncf import networks
from coterie.systems.fedncf.local_step import (
    _by_kernel,
    _by_reference,
    _Drawn,
    _laid_out,
    _Shared,
    local_step,
)
from coterie.systems.fedncf.mathematics import initial, initial_private
from coterie.systems.fedncf.settings import FedNcfSettings

native = pytest.importorskip("coterie_native", reason="coterie-native is not installed (make native)")

WAYS = native.ncf_ways()
ITEMS = 60
HISTORIES = [np.array([4, 9, 17, 59, 0]), np.arange(0, 60, 3), np.array([33]), np.arange(59), np.arange(12)]


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Forget what was found out about the package, before and after; it is on, whatever the tests run with."""
    monkeypatch.delenv(kernels.SWITCH, raising=False)

    def forget():
        kernels.package.cache_clear()
        kernels._left_out.clear()
        networks._compiled.cache_clear()
        module._compiled.cache_clear()

    forget()
    yield
    forget()


@st.composite
def drawn(draw):
    """Draws of a user, and the number of items."""
    items = draw(st.one_of(st.integers(2, 40), st.integers(41, 2**31)))
    positives = draw(
        st.lists(st.integers(0, items - 1), min_size=1, max_size=min(items - 1, 30), unique=True)
    )
    n, ratio, epochs = len(positives), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = n * (1 + ratio)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch = draw(st.one_of(st.just(size), st.integers(1, size + 3)))
    order = None
    if batch < size:
        order = rng.permuted(np.tile(np.arange(size), (epochs, 1)), axis=1)
    negatives = rng.integers(0, items - n, (epochs, ratio * n))
    return _Drawn(np.sort(np.array(positives, np.int64)), negatives, order, batch, size), items


@given(drawn())
@settings(deadline=None, max_examples=300)
def test_the_layout_is_that_of_the_reference_to_the_bit(given):
    draws, items = given
    found, expected = native.lay_out(*draws[:4], items), _laid_out(draws, items)
    for name, value in expected._asdict().items():
        one = getattr(found, name)
        assert np.array_equal(one, value), name
        if name != "widest":
            assert one.dtype == value.dtype, name


def test_the_largest_user_of_a_large_catalogue_is_laid_out_as_by_the_reference():
    rng = np.random.default_rng(0)
    items, n = 3_000_000, 4000
    positives = np.sort(rng.choice(items, n, replace=False))
    order = rng.permuted(np.tile(np.arange(5 * n), (2, 1)), axis=1)
    draws = _Drawn(positives, rng.integers(0, items - n, (2, 4 * n)), order, 64, 5 * n)
    found = native.lay_out(*draws[:4], items)
    for name, value in _laid_out(draws, items)._asdict().items():
        assert np.array_equal(getattr(found, name), value), name


CASES = {
    "one step": {"model": "neumf"},
    "GMF": {"model": "gmf", "dim": 5},
    "MLP in batches": {"model": "mlp", "batch_size": 7, "local_rate": 0.05},
    "epochs": {"local_epochs": 3, "local_rate": 0.1, "private_optimiser": "sgd"},
    "batches": {"model": "neumf", "batch_size": 16, "local_epochs": 2, "local_rate": 0.05},
    "Adam": {"model": "neumf", "batch_size": 16, "local_optimiser": "adam", "local_rate": 0.002},
    "proximal": {"local_epochs": 3, "local_rate": 0.1, "proximal": 0.5},
    "proximal Adam": {"local_epochs": 2, "local_optimiser": "adam", "local_rate": 0.002, "proximal": 0.5},
    "SCAFFOLD": {
        "model": "neumf",
        "batch_size": 16,
        "local_rate": 0.05,
        "scaffold": True,
        "aggregation": "simple",
    },
}


def asked(case, balance=None, allowed=None):
    options = FedNcfSettings.model_validate(CASES[case])
    rng = np.random.default_rng(5)
    model, private = initial(options, ITEMS, 1), initial_private(options, range(len(HISTORIES)))
    if options.scaffold:
        model["control"] = rng.normal(0, 0.01, len(model["network"])).astype(np.float32)
        private.control[:] = rng.normal(0, 0.01, private.control.shape)
    return _Shared(model, private, options, 0.0, allowed, balance)


def users(shared):
    for index, history in enumerate(HISTORIES):
        yield index, history, np.random.default_rng(index), shared.settings.local_epochs


def without_kernels(shared, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(networks, "_compiled", lambda: None)
        return {one.index: one for one in _by_reference(users(shared), shared)}


def assert_close(found, expected, case):
    assert found.instances == expected.instances
    assert np.array_equal(found.rows, expected.rows)
    assert found.rows.dtype == expected.rows.dtype
    assert found.loss == pytest.approx(expected.loss, rel=1e-4)
    pairs = [(getattr(found, name), getattr(expected, name)) for name in ("row_deltas", "network_delta")]
    pairs += zip(found.private.arrays().values(), expected.private.arrays().values(), strict=True)
    pairs.append((found.control_delta, expected.control_delta))
    for one, other in pairs:
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        if one.size:
            error, scale = np.abs(one - other), np.abs(other).max() + 1e-6
            # A unit next to zero may be rectified by one and not by the other; Adam divides by what is next to zero.
            assert np.quantile(error, 0.97) <= 2e-4 * scale, case
            assert error.max() <= 0.1 * scale, case
    assert found.rng.random() == expected.rng.random()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_changes_are_those_of_numpy(case, way, monkeypatch):
    allowed = np.arange(ITEMS) % 3 > 0
    for options in ({}, {"balance": np.linspace(1, 3, ITEMS, dtype=np.float32)}, {"allowed": allowed}):
        shared = asked(case, **options)
        before = shared.private.take(range(len(HISTORIES)))
        expected = without_kernels(shared, monkeypatch)
        found = list(_by_kernel(native, way, users(shared), shared))
        assert {one.index for one in found} == set(expected)
        for one in found:
            assert_close(one, expected[one.index], case)
        for name, value in shared.private.arrays().items():
            assert np.array_equal(value, before.arrays()[name])


def test_the_rng_is_left_where_the_reference_leaves_it_and_groups_do_not_matter(monkeypatch):
    shared = asked("batches")
    together = list(_by_kernel(native, WAYS[0], users(shared), shared))
    monkeypatch.setattr(module, "_AT_ONCE", 2)
    for one, other in zip(together, _by_kernel(native, WAYS[0], users(shared), shared), strict=True):
        assert np.array_equal(one.row_deltas, other.row_deltas)
        assert np.array_equal(one.network_delta, other.network_delta)
        assert np.array_equal(one.private.embedding, other.private.embedding)


def arguments(case="batches", **changed):
    shared = asked(case)
    options = shared.settings
    group = [
        module._drawn(history, np.random.default_rng(0), options, ITEMS, options.local_epochs)
        for history in HISTORIES
    ]
    kept = shared.private.take(range(len(group)))
    orders = [one.order.reshape(-1) for one in group if one.order is not None]
    return {
        "sizes": options.architecture.sizes,
        "histories": np.array([len(one.positives) for one in group]),
        "epochs": np.array([len(one.negatives) for one in group]),
        "ratio": options.negatives,
        "batch": options.batch_size,
        "positives": np.concatenate([one.positives for one in group]),
        "negatives": np.concatenate([one.negatives.reshape(-1) for one in group]),
        "order": np.concatenate([np.empty(0, np.int64), *orders]),
        "items": shared.model["items"],
        "network": shared.model["network"],
        "embedding": kept.embedding,
        "moments": (kept.first, kept.second),
        "steps": kept.steps,
        "way": WAYS[0],
        "rate": 0.1,
        "private_rate": 0.1,
        **changed,
    }


def unaligned(array):
    return np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def frozen(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("at", "to", "error"),
    [
        ("positives", lambda a: a[:-1], ValueError),
        ("positives", lambda a: a[::-1], ValueError),
        ("positives", lambda a: np.ascontiguousarray(a[::-1]), ValueError),
        ("positives", lambda a: a.astype(np.int32), TypeError),
        ("positives", lambda a: a.astype(">i8"), TypeError),
        ("positives", lambda a: a + ITEMS, ValueError),
        ("positives", lambda a: a - 1, ValueError),
        ("positives", unaligned, ValueError),
        ("negatives", lambda a: a[:-1], ValueError),
        ("negatives", lambda a: a + ITEMS, ValueError),
        ("negatives", lambda a: a - ITEMS, ValueError),
        ("negatives", lambda a: a.astype(np.uint64), TypeError),
        ("order", lambda a: a[1:], ValueError),
        ("order", lambda a: a + 1000, ValueError),
        ("order", lambda a: a - 1000, ValueError),
        ("order", lambda a: a * 0, ValueError),
        ("histories", lambda a: a + 1, ValueError),
        ("histories", lambda a: a * 0, ValueError),
        ("histories", lambda a: a - 2**62, ValueError),
        ("histories", lambda a: a + 2**61, ValueError),
        ("epochs", lambda a: a * 0, ValueError),
        ("epochs", lambda a: a + 2**40, ValueError),
        ("epochs", lambda a: a[:-1], ValueError),
        ("ratio", lambda a: 0, ValueError),
        ("ratio", lambda a: a + 1, ValueError),
        ("batch", lambda a: -1, ValueError),
        ("batch", lambda a: 0, ValueError),
        ("items", lambda a: a[:40], ValueError),
        ("items", lambda a: a[:, :-1], ValueError),
        ("items", lambda a: a.astype(np.float64), TypeError),
        ("network", lambda a: a[:-1], ValueError),
        ("embedding", lambda a: a[:-1], ValueError),
        ("embedding", frozen, ValueError),
        ("steps", frozen, ValueError),
        ("steps", lambda a: a.astype(np.int64), TypeError),
        ("moments", lambda a: (a[0], a[1][:-1]), ValueError),
        ("moments", lambda a: (a[0].T, a[1]), ValueError),
        ("sizes", lambda a: a[:-1], ValueError),
        ("way", lambda a: "other", ValueError),
    ],
)
def test_what_the_compiled_code_could_not_bear_is_refused(at, to, error):
    given = arguments()
    native.ncf_local_steps(**given)
    with pytest.raises(error):
        native.ncf_local_steps(**arguments(**{at: to(given[at])}))


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"positives": np.array([3, 3])}, ValueError),
        ({"positives": np.array([4, 3])}, ValueError),
        ({"positives": np.array([-1, 3])}, ValueError),
        ({"positives": np.array([1, 9])}, ValueError),
        ({"positives": np.empty(0, np.int64)}, ValueError),
        ({"negatives": np.array([[0, 1, 2, 7]])}, ValueError),
        ({"negatives": np.array([[0, 1, 2, -1]])}, ValueError),
        ({"negatives": np.array([0, 1, 2, 3])}, ValueError),
        ({"negatives": np.empty((0, 4), np.int64)}, ValueError),
        ({"order": None}, ValueError),
        ({"order": np.array([[0, 1, 2, 3, 4, 6]])}, ValueError),
        ({"order": np.array([[0, 1, 2, 3, 3, 3]])}, ValueError),
        ({"order": np.array([[0, 1, 4, 4, 4, 5]])}, ValueError),
        ({"order": np.array([[0, 1, 2, 3, 4, -1]])}, ValueError),
        ({"order": np.arange(6)}, ValueError),
        ({"order": np.arange(12)[None, ::2]}, ValueError),
        ({"batch": 0}, ValueError),
        ({"items": 0}, ValueError),
        ({"items": 2**31 + 1}, ValueError),
        ({"negatives": np.zeros((1, 4))}, TypeError),
    ],
)
def test_a_layout_of_numbers_beyond_their_range_is_refused(changed, error):
    given = {
        "positives": np.array([1, 3]),
        "negatives": np.array([[0, 1, 2, 6]]),
        "order": np.arange(6)[None],
        "batch": 4,
        "items": 9,
    }
    native.lay_out(**given)
    with pytest.raises(error):
        native.lay_out(**{**given, **changed})


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", ["items", "network", "embedding"])
@pytest.mark.parametrize("case", ["one step", "batches", "Adam"])
def test_what_is_no_number_is_seen_in_the_changes(case, at, wrong):
    given = arguments(case)
    # The output's bias, so that no rectified unit hides it; a row that every user meets in most steps.
    given[at].reshape(-1)[-1 if at == "network" else 0] = wrong
    with np.errstate(all="ignore"):
        found = native.ncf_local_steps(**given)
    results = found.row_deltas, found.network_delta, found.loss, given["embedding"]
    assert not all(np.isfinite(one).all() for one in results)


# --- how Coterie uses it -----------------------------------------------------------------------------------------


def stand_in(monkeypatch, **differs):
    other = types.ModuleType("coterie_native")
    for name in ("INTERFACE", "lay_out", "ncf_gradients", "ncf_local_steps", "ncf_ways", "version"):
        setattr(other, name, differs.get(name, getattr(native, name)))
    monkeypatch.setitem(sys.modules, "coterie_native", other)


def stepped(shared):
    keys = range(len(HISTORIES))
    return {
        one.index: one
        for one in local_step(
            shared.model, shared.private, HISTORIES, shared.settings, keys, seed=0, round_=0
        )
    }


def test_it_is_used_where_it_agrees(monkeypatch, caplog):
    used = []

    def counted(*given, **named):
        used.append(given)
        return native.ncf_local_steps(*given, **named)

    stand_in(monkeypatch, ncf_local_steps=counted)
    stepped(asked("batches"))
    before = len(used)
    stepped(asked("batches"))
    assert len(used) == before + 1
    assert not caplog.records


def wrong_layout(*given):
    found = native.lay_out(*given)
    return found._replace(place=found.place[::-1])


def wrong_row(*given, **named):
    found = native.ncf_local_steps(*given, **named)
    found.row_deltas[-1] *= 1.5
    return found


def failing(*_given, **_named):
    raise ValueError("no such instruction")


@pytest.mark.parametrize(
    "differs", [{"lay_out": wrong_layout}, {"ncf_local_steps": wrong_row}, {"ncf_local_steps": failing}]
)
def test_one_with_other_values_is_left_out_with_one_warning(differs, monkeypatch, caplog):
    shared = asked("batches")
    stand_in(monkeypatch, **differs)
    used = [stepped(shared), stepped(shared)]
    said = [one.getMessage() for one in caplog.records if one.name == "coterie.kernels"]
    assert len(said) == 1
    assert "the compiled kernel of FedNCF's local step is not used" in said[0]
    with monkeypatch.context() as patched:
        patched.setattr(module, "_compiled", lambda: None)
        expected = stepped(shared)
    for found in used:
        for index, one in found.items():
            assert np.array_equal(one.row_deltas, expected[index].row_deltas)


# --- what the reference bears and the kernel does not -------------------------------------------------------------


def as_the_reference(shared, histories, monkeypatch):
    """Assert that the local steps of users are those of the reference, with the kernel and without."""

    def all_steps():
        keys = range(len(histories))
        found = local_step(
            shared.model,
            shared.private,
            histories,
            shared.settings,
            keys,
            seed=0,
            round_=0,
            balance=shared.balance,
        )
        return {one.index: one for one in found}

    found = all_steps()
    with monkeypatch.context() as patched:
        patched.setattr(module, "_compiled", lambda: None)
        patched.setattr(networks, "_compiled", lambda: None)
        expected = all_steps()
    assert set(found) == set(expected) == set(range(len(histories)))
    for index, one in found.items():
        assert_close(one, expected[index], index)


@pytest.mark.parametrize("layers", [(4,) * 17, (66_000, 2)])
def test_networks_that_the_kernel_does_not_bear_train_by_the_reference(layers, monkeypatch):
    options = FedNcfSettings.model_validate(
        {"model": "neumf", "dim": 2, "mlp_embedding": 2, "layers": layers}
    )
    shared = _Shared(initial(options, 30, 1), initial_private(options, range(2)), options, 0.0, None, None)
    as_the_reference(shared, [np.arange(5), np.arange(3, 9)], monkeypatch)


@pytest.mark.parametrize("case", ["one step", "batches"])
def test_a_history_that_has_an_item_twice_trains_by_the_reference(case, monkeypatch):
    histories = [np.array([3, 3, 7]), np.arange(12), np.array([5, 9, 9, 9, 30]), np.array([33])]
    as_the_reference(asked(case), histories, monkeypatch)


def test_arrays_may_lie_in_memory_as_they_like(monkeypatch):
    shared = asked("SCAFFOLD", balance=np.linspace(1, 3, 2 * ITEMS, dtype=np.float32)[::2])
    model = {
        "items": np.asfortranarray(shared.model["items"]),
        "network": np.repeat(shared.model["network"], 2)[::2],
        "control": unaligned(shared.model["control"]),
    }
    kept = shared.private
    private = replace(
        kept, embedding=np.asfortranarray(kept.embedding), control=np.asfortranarray(kept.control)
    )
    as_the_reference(
        shared._replace(model={**shared.model, **model}, private=private), HISTORIES, monkeypatch
    )
