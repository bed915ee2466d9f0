"""Local step of FedNCF: many users of a host train as one batched tensor program.

Each user has its own copies of the rows that it touches and of the network.  An item that occurs several times in a
step (negatives are drawn with replacement) is computed once, with the multiplicity as weight.  Users whose steps are
padded to the same number of instances go through the program together; how far they are padded depends on the user
alone, so on the same kind of machine a user's update has the same bits whichever users share its batch.

All draws of a user in a round (negatives, order, rounding) come from one generator, whose key is the user's own
number, the run's seed and the round.  They depend neither on the host nor on the other users.

Where the package coterie-native is installed and agrees with this module, everything after a user's draws is computed
by a compiled kernel (`_by_kernel`), one user after the other.  Draws and layout are the same to the bit; values agree
to single precision, as sums run in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie import kernels
from coterie.errors import DataError
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedncf.mathematics import Private
from coterie.systems.fedncf.networks import borne, gradients
from coterie.systems.shared.optimisers import adam, add_proximal, corrected, next_control

if TYPE_CHECKING:
    from coterie.systems.fedncf.settings import FedNcfSettings

__all__ = ["UserUpdate", "compare_kernel", "contribute", "local_step"]

_LOCAL = 2
"""First element of the key of the draws; `coterie.systems.fedncf.mathematics` has 0 and 1."""

_INSTANCES = 2048
"""Most instances in one step of the program: their layers and derivatives fit into a core's cache."""

_AT_ONCE = 32
"""Most users in one call of the compiled kernel: what each call costs is shared, and memory stays small."""

_NOTHING = np.empty(0, np.int64)

_Place = int | slice | NDArray[np.int64]

_ROW_VALUES = 1 << 20
"""Most values of copied rows that the program holds at once."""


@dataclass(frozen=True, eq=False)
class UserUpdate:
    """Result of one user's local step: its contribution to a round, and the private arrays that it keeps.

    Parameters
    ----------
    index : int
        Position of the user.
    rows : ndarray of int32, shape (t,)
        Open items that the user touched, ascending.
    row_deltas : ndarray of float32, shape (t, width)
        Change of their rows, `I_i - I_i^t`.
    network_delta : ndarray of float32, shape (network_size,)
        Change of the network, `w - w^t`.
    instances : int
        `n_c`: interactions and negatives of one local epoch.
    loss : float
        Mean over the local steps of the mean loss; NaN without any.
    private : Private
        Arrays that the user keeps; one slot.
    control_delta : ndarray of float32, shape (network_size,) or (0,)
        Change of the user's control variate.
    rng : Generator
        Generator for the rounding of the contribution.
    """

    index: int
    rows: NDArray[np.int32]
    row_deltas: NDArray[np.float32]
    network_delta: NDArray[np.float32]
    instances: int
    loss: float
    private: Private
    control_delta: NDArray[np.float32]
    rng: np.random.Generator


def contribute(update: UserUpdate, contribution: Contribution, settings: FedNcfSettings) -> None:
    """Add a user's update to the contribution of its member: the user itself, or its host.

    Segments beyond those of `coterie.systems.fedncf.mathematics.layout` are the caller's, and so is
    `Contribution.count`.  They may use ``update.rng`` afterwards.

    Raises
    ------
    UnboundedValueError
        The local step diverged: a value is NaN or infinite.
    """
    rng = update.rng
    weighted = settings.aggregation != "simple"
    weight = min(update.instances, settings.n_cap) if weighted else 1
    row_weight = 1 if settings.aggregation == "mf-fedavg" else weight
    row_deltas = update.row_deltas * np.float32(row_weight)
    contribution.add("items", row_deltas, rng, rows=update.rows)
    if settings.aggregation == "mf-fedavg" and settings.touch == "exact":
        contribution.add("touched", np.ones(len(update.rows), np.float32), rng, rows=update.rows)
    contribution.add("network", update.network_delta * np.float32(weight), rng)
    contribution.add("instances" if weighted else "participants", np.array(weight, np.float32), rng)
    if settings.scaffold:
        contribution.add("control", update.control_delta, rng)


@dataclass(frozen=True, eq=False)
class _Work:
    """Instances of one user, laid out in steps; in each step every item at most once."""

    index: int
    rng: np.random.Generator
    instances: int
    touched: NDArray[np.int64]
    row: NDArray[np.int64]
    """Place of an instance's item in ``touched``."""
    step: NDArray[np.int64]
    place: NDArray[np.int64]
    """Place of an instance in its step."""
    label: NDArray[np.float32]
    weight: NDArray[np.float32]
    counts: NDArray[np.int64]
    """Number of instances of each step, repeated ones included."""
    width: int
    """Number of instances to which each step is padded."""


def local_step(
    model: Mapping[str, NDArray[np.float32]],
    private: Private,
    histories: Sequence[NDArray[np.integer]],
    settings: FedNcfSettings,
    keys: Sequence[int] | NDArray[np.integer],
    *,
    seed: int,
    round_: int,
    global_round: float = 0.0,
    allowed: NDArray[np.bool_] | None = None,
    balance: NDArray[np.float32] | None = None,
    epochs: Sequence[int] | NDArray[np.integer] | None = None,
) -> Iterator[UserUpdate]:
    """Run the local training of a round for some users, each on its own data.

    Parameters
    ----------
    model : mapping
        Version of the model that the users fetched.
    private : Private
        One slot for each user; not changed.
    histories : sequence of ndarray of int, shape (n_u,)
        Each user's training items, none twice.
    settings : FedNcfSettings
    keys : sequence of int
        Each user's own number, at least 0, which nobody else knows.
    seed, round_ : int
        Seed of the run, and number of the round; at least 0.
    global_round : float
        Global rounds before this round.
    allowed : ndarray of bool, shape (n_items,), optional
        Open items.  Changes of other rows are not sent: their instances train the user's embedding and the network
        only.  Users of different groups take separate calls.
    balance : ndarray of float32, shape (n_items,), optional
        Weight of a negative in the change of an item's row, `coterie.systems.fedncf.mathematics.balance`.
    epochs : sequence of int, optional
        Local epochs of each user, where they differ: slower devices do less work (FedProx).

    Yields
    ------
    UserUpdate
        One for each user, in no particular order: those of similar size come together.

    Raises
    ------
    DataError
        A history names an item that does not exist.
    """
    users = (
        (
            index,
            history,
            np.random.default_rng(np.random.SeedSequence(int(key), spawn_key=(_LOCAL, seed, round_))),
            settings.local_epochs if epochs is None else int(epochs[index]),
        )
        for index, (history, key) in enumerate(zip(histories, keys, strict=True))
    )
    shared = _Shared(model, private, settings, global_round, allowed, balance)
    native = _compiled() if borne(settings.architecture) else None
    if native is None:
        yield from _by_reference(users, shared)
    else:
        yield from _by_kernel(native, native.ncf_ways()[0], users, shared)


class _Shared(NamedTuple):
    """What the users of a call share; see `local_step`."""

    model: Mapping[str, NDArray[np.float32]]
    private: Private
    settings: FedNcfSettings
    global_round: float
    allowed: NDArray[np.bool_] | None
    balance: NDArray[np.float32] | None


_User = tuple[int, NDArray[np.integer], np.random.Generator, int]
"""Position, history, generator and epochs of a user."""


def _by_reference(users: Iterable[_User], shared: _Shared) -> Iterator[UserUpdate]:
    n_items, width = len(shared.model["items"]), shared.settings.architecture.width
    waiting: dict[tuple[int, bool], list[_Work]] = {}
    for index, history, rng, epochs in users:
        work = _draw(index, history, rng, shared.settings, n_items, epochs)
        # Stacks run as soon as they are full, so that a host's memory does not grow with the number of its users.
        shape = (work.width, len(work.counts) > 1)
        group = waiting.setdefault(shape, [])
        group.append(work)
        if len(group) >= _stack(work, width):
            yield from _train(waiting.pop(shape), *shared)
    for shape in sorted(waiting):
        yield from _train(waiting[shape], *shared)


def _by_kernel(native: Any, way: str, users: Iterable[_User], shared: _Shared) -> Iterator[UserUpdate]:
    """Take local steps by the compiled kernel, those of some users in each call."""
    n_items, settings = len(shared.model["items"]), shared.settings
    shared = shared._replace(
        model={name: _in_order(value) for name, value in shared.model.items()},
        balance=None if shared.balance is None else _in_order(shared.balance),
    )
    group: list[_Ready] = []
    for index, history, rng, epochs in users:
        drawn = _drawn(history, rng, settings, n_items, epochs)
        if drawn is None:
            yield _nothing(index, rng, shared)
            continue
        if np.any(drawn.positives[1:] == drawn.positives[:-1]):
            # The kernel bears no item twice.
            yield from _train([_work(index, rng, drawn, n_items)], *shared)
            continue
        group.append(_Ready(index, rng, drawn))
        if len(group) == _AT_ONCE:
            yield from _moved(native, way, group, shared)
            group = []
    if group:
        yield from _moved(native, way, group, shared)


def _in_order(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return an array as it is or, where it does not lie in memory as the kernel needs it, a copy that does."""
    return np.require(array, requirements=("C", "A"))


class _Ready(NamedTuple):
    """A user whose draws are made."""

    slot: int
    rng: np.random.Generator
    drawn: _Drawn


def _moved(native: Any, way: str, group: list[_Ready], shared: _Shared) -> Iterator[UserUpdate]:
    model, private, settings, global_round, allowed, balance = shared
    kept = private.take([one.slot for one in group])
    found = native.ncf_local_steps(
        settings.architecture.sizes,
        np.array([len(one.drawn.positives) for one in group]),
        np.array([len(one.drawn.negatives) for one in group]),
        settings.negatives,
        settings.batch_size,
        np.concatenate([one.drawn.positives for one in group]),
        np.concatenate([one.drawn.negatives.reshape(-1) for one in group]),
        np.concatenate(
            [_NOTHING, *(one.drawn.order.reshape(-1) for one in group if one.drawn.order is not None)]
        ),
        model["items"],
        model["network"],
        kept.embedding,
        (kept.first, kept.second) if settings.private_optimiser == "adam" else None,
        kept.steps,
        way,
        rate=settings.local_rate,
        private_rate=settings.private_rate * settings.rate_factor(global_round),
        adam=settings.local_optimiser == "adam",
        proximal=settings.proximal,
        control=(kept.control, model["control"]) if settings.scaffold else None,
        balance=balance,
    )
    steps = found.counts[:, 1]
    control_deltas = np.zeros_like(kept.control)
    if settings.scaffold:
        travelled = (steps[:, None] * settings.local_rate).astype(np.float32)
        control = next_control(kept.control, model["control"], found.network_delta, travelled)
        control_deltas = control - kept.control
        kept.control[:] = control
    losses = (found.loss / steps).tolist()
    start = 0
    for k, (one, count) in enumerate(zip(group, found.counts[:, 0].tolist(), strict=True)):
        stop = start + count
        touched, deltas = found.touched[start:stop], found.row_deltas[start:stop]
        start = stop
        if allowed is not None:
            sent = allowed[touched]
            touched, deltas = touched[sent], deltas[sent]
        own = slice(k, k + 1)
        yield UserUpdate(
            one.slot,
            touched,
            deltas,
            found.network_delta[k],
            one.drawn.size,
            losses[k],
            Private(
                kept.embedding[own], kept.first[own], kept.second[own], kept.steps[own], kept.control[own]
            ),
            control_deltas[k],
            one.rng,
        )


def _nothing(index: int, rng: np.random.Generator, shared: _Shared) -> UserUpdate:
    """Return the update of a user that has nothing to learn from."""
    kept, width = shared.private.take([index]), shared.settings.architecture.width
    return UserUpdate(
        index,
        np.empty(0, np.int32),
        np.empty((0, width), np.float32),
        np.zeros_like(shared.model["network"]),
        0,
        math.nan,
        kept,
        np.zeros_like(kept.control[0]),
        rng,
    )


@cache
def _compiled() -> Any | None:
    """Return the package with the compiled kernel if it agrees with the reference here; None otherwise."""
    return kernels.agreed("the compiled kernel of FedNCF's local step", _agrees)


def compare_kernel() -> None:
    """Compare the compiled kernel with the reference, as before its first use; see `coterie.kernels.left_out`."""
    _compiled()


def _agrees(native: Any) -> bool:
    """Return whether the kernel has the layout of the reference to the bit, and its changes to single precision."""
    from coterie.systems.fedncf.mathematics import initial, initial_private
    from coterie.systems.fedncf.settings import FedNcfSettings

    n_items, histories = 90, [np.arange(3, 90, 7), np.array([5]), np.arange(40)]
    for ways in (
        {"model": "neumf"},
        {"model": "gmf", "batch_size": 16, "local_epochs": 2, "private_optimiser": "sgd"},
        {"model": "mlp", "batch_size": 30, "local_optimiser": "adam", "local_rate": 0.001, "proximal": 0.1},
    ):
        settings = FedNcfSettings.model_validate(ways)
        model, private = initial(settings, n_items, 0), initial_private(settings, range(len(histories)))
        shared = _Shared(model, private, settings, 0.0, None, np.linspace(1, 2, n_items, dtype=np.float32))
        for history in histories:
            drawn = _drawn(history, np.random.default_rng(1), settings, n_items, settings.local_epochs)
            if drawn is None or not _same_layout(
                native.lay_out(*drawn[:4], n_items), _laid_out(drawn, n_items)
            ):
                return False

        def users(settings: FedNcfSettings = settings) -> Iterator[_User]:
            for index, history in enumerate(histories):
                yield index, history, np.random.default_rng(index), settings.local_epochs

        expected = {one.index: one for one in _by_reference(users(), shared)}
        for way in native.ncf_ways():
            if not all(_close(one, expected[one.index]) for one in _by_kernel(native, way, users(), shared)):
                return False
    return True


def _same_layout(found: Any, expected: _LaidOut) -> bool:
    return all(np.array_equal(getattr(found, name), value) for name, value in expected._asdict().items())


def _close(found: UserUpdate, expected: UserUpdate) -> bool:
    """Return whether an update is another's to single precision.

    Adam divides by the root of its second moment, so that where a derivative is next to zero, its rounding is not.
    """
    pairs = [
        (getattr(found, name), getattr(expected, name)) for name in ("row_deltas", "network_delta", "loss")
    ]
    pairs += zip(found.private.arrays().values(), expected.private.arrays().values(), strict=True)
    if not np.array_equal(found.rows, expected.rows):
        return False
    for one, other in pairs:
        if not np.size(other):
            continue
        error, scale = np.abs(np.subtract(one, other)), float(np.abs(other).max(initial=1e-6))
        if not np.quantile(error, 0.95) <= 1e-4 * scale or not error.max() <= 0.05 * scale:
            return False
    return True


def _stack(work: _Work, width: int) -> int:
    """Return the number of users of this size that go through the program together."""
    values = len(work.touched) * width
    return max(1, min(_INSTANCES // max(work.width, 1), _ROW_VALUES // max(values, 1)))


def _padded(n: int) -> int:
    """Return ``n`` rounded up to four significant bits, at least 8: padding costs at most an eighth."""
    grain = max(8, 1 << max(n.bit_length() - 4, 0))
    return -(-n // grain) * grain


def _draw(
    index: int,
    history: NDArray[np.integer],
    rng: np.random.Generator,
    settings: FedNcfSettings,
    n_items: int,
    epochs: int,
) -> _Work:
    """Draw a user's negatives and order, and lay its instances out in steps."""
    drawn = _drawn(history, rng, settings, n_items, epochs)
    if drawn is None:
        none = np.empty(0, np.int64)
        nothing = np.empty(0, np.float32)
        return _Work(index, rng, 0, none, none, none, none, nothing, nothing, none, 0)
    return _work(index, rng, drawn, n_items)


def _work(index: int, rng: np.random.Generator, drawn: _Drawn, n_items: int) -> _Work:
    """Lay the instances of a user's draws out in steps."""
    laid = _laid_out(drawn, n_items)
    return _Work(
        index,
        rng,
        drawn.size,
        laid.touched,
        laid.row,
        laid.step,
        laid.place,
        laid.label,
        laid.weight,
        laid.counts,
        _padded(laid.widest),
    )


class _Drawn(NamedTuple):
    """Draws of one user in one round."""

    positives: NDArray[np.int64]
    """Items of the history, ascending."""
    negatives: NDArray[np.int64]
    """Numbers of items outside the history, (epochs, negatives)."""
    order: NDArray[np.int64] | None
    """Place of each instance in its epoch, (epochs, size); None where an epoch is one step."""
    batch: int
    size: int
    """Instances of one epoch."""


def _drawn(
    history: NDArray[np.integer],
    rng: np.random.Generator,
    settings: FedNcfSettings,
    n_items: int,
    epochs: int,
) -> _Drawn | None:
    """Draw a user's negatives and order; None where there is nothing to learn from."""
    positives = np.sort(history).astype(np.int64)
    if len(positives) and not 0 <= positives[0] <= positives[-1] < n_items:
        raise DataError(f"a history names an item beyond the {n_items} of the model")
    n, others = len(positives), n_items - len(positives)
    if not n or not others or not epochs:
        return None
    negatives = rng.integers(0, others, (epochs, settings.negatives * n))
    size = n * (1 + settings.negatives)
    batch = settings.batch_size or size
    order = None
    if batch < size:
        order = np.tile(np.arange(size), (epochs, 1))
        rng.permuted(order, axis=1, out=order)
    return _Drawn(positives, negatives, order, batch, size)


class _LaidOut(NamedTuple):
    """Instances of one user in steps; see `_Work`."""

    touched: NDArray[np.int64]
    row: NDArray[np.int64]
    step: NDArray[np.int64]
    place: NDArray[np.int64]
    label: NDArray[np.float32]
    weight: NDArray[np.float32]
    counts: NDArray[np.int64]
    widest: int


def _laid_out(drawn: _Drawn, n_items: int) -> _LaidOut:
    """Lay instances out in steps, in each of them every item at most once."""
    positives, negatives, order, batch, size = drawn
    n, epochs = len(positives), len(negatives)
    # The k-th item outside the history is found among its gaps, so that a large catalogue costs nothing.
    outside = negatives + np.searchsorted(positives - np.arange(n), negatives, "right")
    each = -(-size // batch)
    # One number holds step, item and label; equal numbers are one instance.
    numbers = np.empty((epochs, size), np.int64)
    numbers[:, :n] = 2 * positives + 1
    numbers[:, n:] = 2 * outside
    if order is not None:
        numbers += 2 * n_items * (order // batch)
    if each * epochs > 1:
        numbers += 2 * n_items * each * np.arange(epochs)[:, None]
    flat = numbers.reshape(-1)
    flat.sort()
    last = np.empty(len(flat), np.bool_)
    last[-1] = True
    np.not_equal(flat[1:], flat[:-1], out=last[:-1])
    ends = np.flatnonzero(last)
    times = ends.copy()
    times[0] += 1
    times[1:] -= ends[:-1]
    flat = flat[ends]
    label = (flat & 1).astype(np.float32)
    flat >>= 1
    if each * epochs == 1:
        touched, step = flat, np.zeros(len(flat), np.int64)
        row = place = np.arange(len(touched))
        counts = np.array([size])
        widest = len(touched)
    else:
        counts = np.tile(np.minimum(batch, size - batch * np.arange(each)), epochs)
        step, item = np.divmod(flat, n_items)
        touched, row = np.unique(item, return_inverse=True)
        first = np.searchsorted(step, np.arange(len(counts)))
        place = np.arange(len(step)) - first[step]
        widest = int(place.max()) + 1
    weight = (times / counts[step]).astype(np.float32)
    return _LaidOut(touched, row, step, place, label, weight, counts, widest)


def _train(
    group: list[_Work],
    model: Mapping[str, NDArray[np.float32]],
    private: Private,
    settings: FedNcfSettings,
    global_round: float,
    allowed: NDArray[np.bool_] | None,
    balance: NDArray[np.float32] | None,
) -> Iterator[UserUpdate]:
    """Run the local steps of users whose steps have the same width."""
    # Users with the most steps come first, so that unfinished users are always the first ones.
    group = sorted(group, key=lambda work: -len(work.counts))
    kept = private.take([work.index for work in group])
    steps = np.array([len(work.counts) for work in group])
    private_rate = settings.private_rate * settings.rate_factor(global_round)
    plain = settings.local_optimiser == "sgd" and not settings.proximal
    train = _one_step if plain and steps[0] <= 1 else _many_steps
    row_deltas, network_deltas, loss = train(group, steps, model, kept, settings, private_rate, balance)
    control_deltas = np.zeros_like(kept.control)
    if settings.scaffold:
        trained = steps > 0
        travelled = (steps[trained, None] * settings.local_rate).astype(np.float32)
        control = next_control(kept.control[trained], model["control"], network_deltas[trained], travelled)
        control_deltas[trained] = control - kept.control[trained]
        kept.control[trained] = control
    for k, work in enumerate(group):
        one = slice(k, k + 1)
        touched, deltas = work.touched, row_deltas[k, : len(work.touched)]
        if allowed is not None:
            sent = allowed[touched]
            touched, deltas = touched[sent], deltas[sent]
        yield UserUpdate(
            work.index,
            touched.astype(np.int32),
            deltas,
            network_deltas[k],
            work.instances,
            float(loss[k] / steps[k]) if steps[k] else float("nan"),
            Private(
                kept.embedding[one], kept.first[one], kept.second[one], kept.steps[one], kept.control[one]
            ),
            control_deltas[k],
            work.rng,
        )


_Trained = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.floating]]
"""Changes of rows (users, touched, width) and network (users, network_size); sums of the steps' losses (users,)."""


def _one_step(
    group: list[_Work],
    steps: NDArray[np.int64],
    model: Mapping[str, NDArray[np.float32]],
    kept: Private,
    settings: FedNcfSettings,
    private_rate: float,
    balance: NDArray[np.float32] | None,
) -> _Trained:
    """Take one SGD step on all local data, without copies of rows and network."""
    users, n = len(group), group[0].width
    items, rate = model["items"], np.float32(settings.local_rate)
    touched = np.zeros((users, n), np.int64)
    label = np.zeros((users, n), np.float32)
    weight = np.zeros((users, n), np.float32)
    for k, work in enumerate(group):
        m = len(work.touched)
        touched[k, :m] = work.touched
        label[k, :m] = work.label
        weight[k, :m] = work.weight
    rows = np.ones((users, items.shape[1] + 1, n), np.float32)
    rows[:, :-1] = items.take(touched, axis=0).transpose(0, 2, 1)
    found = gradients(
        settings.architecture, kept.embedding[:, :, None], rows, model["network"], label, weight
    )
    sizes = np.array([work.instances for work in group], np.float32)
    if balance is not None:
        found.rows[:] *= np.where(label > 0, np.float32(1), balance[touched])[:, None]
    row_deltas = np.empty((users, n, items.shape[1]), np.float32)
    np.multiply(found.rows.transpose(0, 2, 1), -rate * sizes[:, None, None], out=row_deltas)
    push = found.network
    if settings.scaffold:
        push = corrected(push, kept.control, model["control"])
    push *= -rate
    if not steps[0]:
        push[:] = 0
    _move_private(kept, int(np.count_nonzero(steps)), found.private, settings, private_rate)
    return row_deltas, push, found.loss


def _many_steps(
    group: list[_Work],
    steps: NDArray[np.int64],
    model: Mapping[str, NDArray[np.float32]],
    kept: Private,
    settings: FedNcfSettings,
    private_rate: float,
    balance: NDArray[np.float32] | None,
) -> _Trained:
    """Take several steps, on copies of the rows and of the network."""
    architecture, proximal = settings.architecture, settings.proximal
    users, width = len(group), architecture.width
    start, where, label, weight, counts = _stacked(group, model["items"])
    copied = np.ones(start.shape[:2], np.float32)
    if balance is not None:
        for k, work in enumerate(group):
            copied[k, : len(work.touched)] = balance[work.touched]
    weights = copied.reshape(-1)
    rows = start.copy()
    flat = rows.reshape(-1, width)
    network: NDArray[np.float32] = model["network"]
    own = np.repeat(network[None], users, axis=0)
    adaptive = settings.local_optimiser == "adam"
    # All but plain SGD also move rows that are not in the step.
    dense = adaptive or proximal > 0
    moments = [np.zeros_like(value) for value in (rows, rows, own, own)] if adaptive else []
    rate = np.float32(settings.local_rate)
    loss = np.zeros(users)
    for s in range(len(where)):
        active = int(np.count_nonzero(steps > s))
        at = where[s, :active]
        met = flat.take(at, axis=0)
        stacked = np.ones((active, width + 1, at.shape[1]), np.float32)
        stacked[:, :-1] = met.transpose(0, 2, 1)
        found = gradients(
            architecture,
            kept.embedding[:active, :, None],
            stacked,
            network if s == 0 else own[:active],
            label[s, :active],
            weight[s, :active],
        )
        loss[:active] += found.loss
        pull, push = found.rows, found.network
        if balance is not None:
            pull *= np.where(label[s, :active] > 0, np.float32(1), weights[at])[:, None]
        if not adaptive:
            pull *= counts[s, :active, None, None]
        pull = pull.transpose(0, 2, 1)
        if dense:
            every = np.zeros_like(rows[:active])
            every.reshape(-1, width)[at] = pull
            pull = every
        if proximal > 0:
            add_proximal(pull, rows[:active], start[:active], proximal)
            add_proximal(push, own[:active], network, proximal)
        if settings.scaffold:
            push = corrected(push, kept.control[:active], model["control"])
        if adaptive:
            for value, gradient, first, second in (
                (rows, pull, moments[0], moments[1]),
                (own, push, moments[2], moments[3]),
            ):
                adam(value[:active], gradient, first[:active], second[:active], s + 1, settings.local_rate)
        else:
            push *= rate
            own[:active] -= push
            pull *= rate
            if dense:
                rows[:active] -= pull
            else:
                met -= pull
                flat[at] = met
        _move_private(kept, active, found.private, settings, private_rate)
    rows -= start
    own -= network
    return rows, own, loss


def _move_private(
    kept: Private, active: int, gradient: NDArray[np.float32], settings: FedNcfSettings, rate: float
) -> None:
    """Take one step of the private optimiser for the embeddings of the first ``active`` users."""
    if not active:
        return
    embedding, gradient = kept.embedding[:active], gradient[:active, :, 0]
    kept.steps[:active] += 1
    if settings.private_optimiser == "adam":
        adam(embedding, gradient, kept.first[:active], kept.second[:active], kept.steps[:active], rate)
    else:
        embedding -= np.float32(rate) * gradient


def _stacked(
    group: list[_Work], items: NDArray[np.float32]
) -> tuple[
    NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]
]:
    """Return the copied rows, and for each step and user its instances: places in the copies, labels, weights, counts.

    The last copied row of each user belongs to no item; padding points at it.
    """
    users, width = len(group), group[0].width
    touched = max(len(work.touched) for work in group) + 1
    longest = len(group[0].counts)
    start = np.zeros((users, touched, items.shape[1]), np.float32)
    where = np.full((longest, users, width), touched - 1)
    label = np.zeros((longest, users, width), np.float32)
    weight = np.zeros((longest, users, width), np.float32)
    counts = np.ones((longest, users), np.float32)
    for k, work in enumerate(group):
        start[k, : len(work.touched)] = items[work.touched]
        if longest == 1:
            here: tuple[_Place, int, _Place] = (0, k, slice(len(work.row)))
        else:
            here = (work.step, k, work.place)
        where[here] = work.row
        label[here] = work.label
        weight[here] = work.weight
        counts[: len(work.counts), k] = work.counts
    where += touched * np.arange(users)[:, None]
    return start, where, label, weight, counts
