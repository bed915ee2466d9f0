"""Compiled kernels of Coterie.

Coterie computes everything without this package, with NumPy and the cryptography package as the reference; a kernel
here has the same result, to the bit where sums are concerned, and is faster.  Coterie compares each with the reference
once in a process before it uses it.

Every function checks lengths, types and layout of what it is given before the compiled code sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie_native._kernels import ffi, lib

__all__ = [
    "INTERFACE",
    "LaidOut",
    "LocalSteps",
    "add_masks",
    "lay_out",
    "mask_ways",
    "ncf_gradients",
    "ncf_local_steps",
    "ncf_ways",
    "round_steps",
    "version",
]

INTERFACE = 2
"""Changes when a function takes or returns something else; Coterie uses the package only if it knows the number."""

KEY_BYTES = 32
MOST_WORDS = (1 << 33) - 1

_WAYS = {
    "avx512": lib.WAY_AVX512,
    "avx2": lib.WAY_AVX2,
    "aesni": lib.WAY_AESNI,
    "armv8": lib.WAY_ARMV8,
}
"""Ways of computing masks by name, the fastest first: VAES with AVX-512 or AVX2, AES-NI; the extensions of ARMv8."""


_NCF_WAYS = {"avx512": lib.WAY_AVX512, "avx2": lib.WAY_AVX2, "plain": lib.WAY_PLAIN}


def version() -> str:
    """Return the version of the distribution."""
    return metadata.version("coterie-native")


def mask_ways() -> tuple[str, ...]:
    """Return the names of the ways of computing masks that this processor bears, the fastest first."""
    return tuple(name for name, way in _WAYS.items() if lib.coterie_has_way(way))


def add_masks(
    vector: NDArray[np.uint32],
    keys: Sequence[bytes],
    minus: Sequence[bool],
    mirrors: Sequence[NDArray[np.uint32] | None],
    way: str,
) -> None:
    """Add masks to a vector, modulo 2^32 and in place.

    A mask is the keystream of AES-256 (FIPS 197) in counter mode (SP 800-38A) whose first block is 12 zero bytes and
    the number 2 in 4 bytes, big-endian, read as little-endian words: what AES-256-GCM encrypts zeros to under the zero
    nonce.

    Parameters
    ----------
    vector : ndarray of uint32, shape (n,)
        Contiguous, aligned and writable; n below 2^33.
    keys : sequence of bytes
        32 bytes each.
    minus : sequence of bool
        For each key whether its mask is subtracted.
    mirrors : sequence of ndarray of uint32, shape (n,), or None
        For each key a vector that gets the mask with the opposite sign; it shares no memory with `vector`.
    way : str
        One of `mask_ways`.

    Raises
    ------
    TypeError
        A vector is no array of uint32.
    ValueError
        The sequences differ in length; a key has another size; a vector has another shape, is not contiguous, aligned
        or writable, or shares memory with `vector`; the processor lacks `way`.
    """
    if not len(keys) == len(minus) == len(mirrors):
        raise ValueError(
            f"{len(keys)} keys, {len(minus)} signs, {len(mirrors)} mirrors; expected one of each for a mask"
        )
    if any(not isinstance(key, bytes) or len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"a key is not {KEY_BYTES} bytes")
    if way not in _WAYS or not lib.coterie_has_way(_WAYS[way]):
        raise ValueError(f"this processor has no way {way!r}; expected one of {', '.join(mask_ways())}")
    _require(vector, "the vector")
    if len(vector) > MOST_WORDS:
        raise ValueError(f"the vector has {len(vector)} values; expected at most {MOST_WORDS}")
    for mirror in mirrors:
        if mirror is None:
            continue
        _require(mirror, "a mirror")
        if len(mirror) != len(vector):
            raise ValueError(f"a mirror has {len(mirror)} values; expected {len(vector)} as the vector")
        if np.may_share_memory(mirror, vector):
            raise ValueError("a mirror shares memory with the vector")
    if not len(vector) or not keys:
        return
    secret = bytearray().join(keys)
    pointers = [ffi.NULL if one is None else ffi.cast("uint32_t *", one.ctypes.data) for one in mirrors]
    try:
        done = lib.coterie_add_masks(
            _WAYS[way],
            ffi.cast("uint32_t *", vector.ctypes.data),
            len(vector),
            ffi.from_buffer("uint8_t[]", secret),
            bytes(map(bool, minus)),
            ffi.new("uint32_t *[]", pointers),
            len(keys),
        )
    finally:
        secret[:] = bytes(len(secret))
    if done:
        raise ValueError(f"this processor has no way {way!r}")


def _require(vector: NDArray[np.uint32], name: str) -> None:
    if not isinstance(vector, np.ndarray) or vector.dtype != np.uint32 or not vector.dtype.isnative:
        raise TypeError(f"{name} is no array of uint32")
    flags = vector.flags
    if vector.ndim != 1 or not (flags.c_contiguous and flags.aligned and flags.writeable):
        raise ValueError(
            f"{name} of shape {vector.shape}; expected one dimension, contiguous, aligned and writable"
        )


# --- neural collaborative filtering ------------------------------------------------------------------------------

Floats = NDArray[np.float32]
Wholes = NDArray[np.int64]

MOST_LEVELS, MOST_SINGLE_LEVELS = (1 << 30) - 1, 1 << 24
"""Most steps of a value that is rounded, in double and in single precision."""

MOST_ITEMS, MOST_INSTANCES, MOST_EPOCHS = 1 << 31, 1 << 30, 1 << 20
"""Most items of a catalogue; most instances and epochs of a user in one local step."""


def ncf_ways() -> tuple[str, ...]:
    """Return the names of the ways of computing `ncf_gradients` that this processor bears, the fastest first."""
    return tuple(name for name, way in _NCF_WAYS.items() if lib.coterie_has_ncf_way(way))


def ncf_gradients(
    sizes: Sequence[int],
    private: Floats,
    rows: Floats,
    network: Floats,
    label: Floats,
    weight: Floats,
    way: str,
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the loss of each user and its derivatives, as `coterie.systems.fedncf.networks.gradients` defines them.

    Sums run in another order than there, so values agree to single precision.  NaN and infinite inputs give results
    with NaN or infinite values, never others.

    Parameters
    ----------
    sizes : sequence of int
        Widths of an embedding's parts, GMF's and the MLP's, one of which may be 0, then the outputs of the hidden
        layers, at most 16; none without the MLP.
    private : ndarray of float32, shape (users, width)
    rows : ndarray of float32, shape (users, width + 1, instances)
        The last coordinate is taken to be 1.
    network : ndarray of float32, shape (size,) or (users, size)
    label, weight : ndarray of float32, shape (users, instances)
    way : str
        One of `ncf_ways`.

    Returns
    -------
    loss : ndarray of float32, shape (users,)
    private : ndarray of float32, shape (users, width)
    rows : ndarray of float32, shape (users, width, instances)
    network : ndarray of float32, shape (users, size)

    Raises
    ------
    TypeError
        An array is not of float32.
    ValueError
        An array has another shape or is not contiguous and aligned; the sizes are no network's; the processor lacks
        `way`.
    MemoryError
    """
    if way not in _NCF_WAYS or not lib.coterie_has_ncf_way(_NCF_WAYS[way]):
        raise ValueError(f"this processor has no way {way!r}; expected one of {', '.join(ncf_ways())}")
    size = _network_size(sizes)
    users, width, instances = len(private), sizes[0] + sizes[1], rows.shape[-1]
    own = network.ndim == 2
    for array, shape, name in (
        (private, (users, width), "private"),
        (rows, (users, width + 1, instances), "rows"),
        (network, (users, size) if own else (size,), "network"),
        (label, (users, instances), "label"),
        (weight, (users, instances), "weight"),
    ):
        _require_floats(array, shape, name)
    loss = np.empty(users, np.float32)
    d_private, d_rows = np.empty((users, width), np.float32), np.empty((users, width, instances), np.float32)
    d_network = np.empty((users, size), np.float32)
    done = lib.coterie_ncf_gradients(
        _NCF_WAYS[way],
        list(sizes),
        len(sizes),
        users,
        instances,
        *map(_floats, (private, rows, network)),
        own,
        *map(_floats, (label, weight, loss, d_private, d_rows, d_network)),
    )
    if done == -2:
        raise MemoryError("no memory for the rows of a network")
    if done:
        raise ValueError(f"{tuple(sizes)} are no sizes of a network")
    return loss, d_private, d_rows, d_network


def _network_size(sizes: Sequence[int]) -> int:
    gmf, mlp, *layers = sizes
    whole = [isinstance(one, int) and 0 < one <= 1 << 16 for one in layers]
    if not (0 <= gmf <= 1 << 16 and 0 <= mlp <= 1 << 16 and gmf + mlp and bool(mlp) == bool(layers)):
        whole = [False]
    if not all(whole) or len(layers) > 16:
        raise ValueError(f"{tuple(sizes)} are no sizes of a network")
    inputs = [2 * mlp, *layers]
    hidden = sum((above + 1) * units for above, units in zip(inputs[:-1], layers, strict=True))
    return hidden + gmf + (layers[-1] if layers else 0) + 1


class LaidOut(NamedTuple):
    """A user's instances in steps; arrays of int64 and float32, one value an instance unless said."""

    touched: Wholes
    """Items, ascending; each once."""
    row: Wholes
    """Place of an instance's item in `touched`."""
    step: Wholes
    place: Wholes
    """Place of an instance in its step."""
    label: Floats
    weight: Floats
    counts: Wholes
    """Instances of each step, repeated ones included."""
    widest: int
    """Most instances of a step, repeated ones once."""


def lay_out(positives: Wholes, negatives: Wholes, order: Wholes | None, batch: int, items: int) -> LaidOut:
    """Lay a user's instances out in steps, in each of them every item at most once.

    Equal to the bit to the reference, `coterie.systems.fedncf.local_step`.

    Parameters
    ----------
    positives : ndarray of int64, shape (n,)
        Items, ascending, none twice; at least one.
    negatives : ndarray of int64, shape (epochs, m)
        Numbers below ``items - n``: the k-th item outside `positives`.
    order : ndarray of int64, shape (epochs, n + m), optional
        Place of each instance in its epoch; None where `batch` holds an epoch.
    batch : int
        Instances of a step, at least 1.
    items : int
        Number of items, at most 2^31.

    Raises
    ------
    TypeError
        An array is not of int64.
    ValueError
        An array has another shape, or is not contiguous and aligned; a number is beyond its range.
    MemoryError
    """
    history, epochs, each = _require_draws(positives, negatives, order, batch, items)
    every = epochs * (history + each)
    steps = epochs * -(-(history + each) // batch)
    touched = np.empty(min(every, items), np.int64)
    row, step, place = (np.empty(every, np.int64) for _ in range(3))
    label, weight = np.empty(every, np.float32), np.empty(every, np.float32)
    counts, found = np.empty(steps, np.int64), ffi.new("size_t[3]")
    done = lib.coterie_lay_out(
        _whole(positives),
        history,
        _whole(negatives),
        each,
        epochs,
        ffi.NULL if order is None else _whole(order),
        batch,
        items,
        *map(_whole, (touched, row, step, place)),
        *map(_floats, (label, weight)),
        _whole(counts),
        found,
    )
    _require_done(done)
    n, met, widest = found
    return LaidOut(touched[:met], row[:n], step[:n], place[:n], label[:n], weight[:n], counts, widest)


class LocalSteps(NamedTuple):
    """Result of `ncf_local_steps`."""

    touched: NDArray[np.int32]
    """Items of all users, one user's after the other's; each user's ascend."""
    row_deltas: Floats
    """Changes of their rows, shape (touched, width)."""
    network_delta: Floats
    """Shape (users, size)."""
    loss: NDArray[np.float64]
    """Sum over the steps of each user."""
    counts: Wholes
    """Items touched by each user, and its steps; shape (users, 2)."""


def ncf_local_steps(
    sizes: Sequence[int],
    histories: Wholes,
    epochs: Wholes,
    ratio: int,
    batch: int,
    positives: Wholes,
    negatives: Wholes,
    order: Wholes,
    items: Floats,
    network: Floats,
    embedding: Floats,
    moments: tuple[Floats, Floats] | None,
    steps: NDArray[np.int32],
    way: str,
    *,
    rate: float,
    private_rate: float,
    adam: bool = False,
    proximal: float = 0.0,
    control: tuple[Floats, Floats] | None = None,
    balance: Floats | None = None,
) -> LocalSteps:
    """Take the local steps of some users of FedNCF, as `coterie.systems.fedncf.local_step` does.

    Sums run in another order than there, so values agree to single precision.  A user's bits do not depend on the
    others.

    Parameters
    ----------
    sizes : sequence of int
        As for `ncf_gradients`.
    histories, epochs : ndarray of int64, shape (users,)
        Length of each user's history, and epochs, each at least 1.
    ratio : int
        Negatives for each interaction, at least 1.
    batch : int
        Instances of a step; 0 for all of an epoch.
    positives, negatives, order : ndarray of int64, one dimension
        Draws as for `lay_out`, one user's after the other's; an order only of users whose epoch has more instances
        than a batch.
    items : ndarray of float32, shape (n_items, width)
    network : ndarray of float32, shape (size,)
    embedding : ndarray of float32, shape (users, width)
        Changed in place.
    moments : pair of ndarray of float32, shape (users, width), optional
        First and second moment of the embeddings' Adam, changed in place; SGD without.
    steps : ndarray of int32, shape (users,)
        Steps that the embeddings' optimiser took before; changed in place.
    way : str
        One of `ncf_ways`.
    rate, private_rate : float
    adam : bool
        Whether rows and network move by Adam, whose moments begin at zero; else by SGD.
    proximal : float
    control : pair of ndarray of float32, shapes (users, size) and (size,), optional
        The users' control variates and everybody's (SCAFFOLD).
    balance : ndarray of float32, shape (n_items,), optional
        Weight of a negative in the change of an item's row.

    Raises
    ------
    TypeError, ValueError
        As `lay_out` and `ncf_gradients`.  Where a number is beyond its range, users before it have moved.
    MemoryError
    """
    if way not in _NCF_WAYS or not lib.coterie_has_ncf_way(_NCF_WAYS[way]):
        raise ValueError(f"this processor has no way {way!r}; expected one of {', '.join(ncf_ways())}")
    size, width, users = _network_size(sizes), sizes[0] + sizes[1], len(histories)
    most = _require_all_draws(histories, epochs, ratio, batch, (positives, negatives, order), len(items))
    _require_floats(items, (len(items), width), "items")
    _require_floats(network, (size,), "network")
    moved = [(embedding, "embedding")]
    if moments is not None:
        moved += [(moments[0], "the first moment"), (moments[1], "the second moment")]
    for array, name in moved:
        _require_floats(array, (users, width), name)
    _require_array(steps, np.dtype(np.int32), (users,), "steps")
    for array, name in (*moved, (steps, "steps")):
        if not array.flags.writeable:
            raise ValueError(f"{name} is not writable")
    if control is not None:
        _require_floats(control[0], (users, size), "control")
        _require_floats(control[1], (size,), "the common control")
    if balance is not None:
        _require_floats(balance, (len(items),), "balance")
    touched, row_deltas = np.empty(most, np.int32), np.empty((most, width), np.float32)
    network_delta, loss = np.empty((users, size), np.float32), np.empty(users, np.float64)
    counts = np.empty((users, 2), np.int64)
    none = ffi.NULL
    done = lib.coterie_ncf_local_steps(
        _NCF_WAYS[way],
        list(sizes),
        len(sizes),
        users,
        *map(_whole, (histories, epochs)),
        ratio,
        batch,
        *map(_whole, (positives, negatives, order)),
        len(items),
        *map(_floats, (items, network)),
        *((none, none) if control is None else map(_floats, control)),
        none if balance is None else _floats(balance),
        rate,
        adam,
        proximal,
        private_rate,
        _floats(embedding),
        *((none, none) if moments is None else map(_floats, moments)),
        ffi.from_buffer("int32_t[]", steps),
        ffi.from_buffer("int32_t[]", touched),
        *map(_floats, (row_deltas, network_delta)),
        ffi.from_buffer("double[]", loss),
        _whole(counts),
    )
    _require_done(done)
    met = int(counts[:, 0].sum())
    return LocalSteps(touched[:met], row_deltas[:met], network_delta, loss, counts)


def _require_all_draws(
    histories: Wholes,
    epochs: Wholes,
    ratio: int,
    batch: int,
    draws: tuple[Wholes, Wholes, Wholes],
    items: int,
) -> int:
    """Check the draws of some users; return the most items that they touch."""
    users = len(histories)
    _require_array(histories, np.dtype(np.int64), (users,), "histories")
    _require_array(epochs, np.dtype(np.int64), (users,), "epochs")
    if not (1 <= ratio <= MOST_INSTANCES and 0 <= batch <= MOST_INSTANCES and 1 <= items <= MOST_ITEMS):
        raise ValueError(
            f"{ratio} negatives, batches of {batch}, {items} items; expected at least one negative and item, and at "
            f"most {MOST_ITEMS} items"
        )
    lengths, most = [0, 0, 0], 0
    # Python's numbers do not overflow.
    for history, passes in zip(histories.tolist(), epochs.tolist(), strict=True):
        size = history * (1 + ratio)
        if not (history >= 1 and 1 <= passes <= MOST_EPOCHS and passes * size <= MOST_INSTANCES):
            raise ValueError(
                f"a user has {passes} epochs of {history} interactions and {ratio} negatives for each; expected at "
                f"least one of each, at most {MOST_EPOCHS} epochs and {MOST_INSTANCES} instances"
            )
        lengths[0] += history
        lengths[1] += passes * history * ratio
        lengths[2] += passes * size if 0 < batch < size else 0
        most += min(passes * size, items)
    for array, length, name in zip(draws, lengths, ("positives", "negatives", "order"), strict=True):
        _require_array(array, np.dtype(np.int64), (length,), name)
    return most


# --- rounding ----------------------------------------------------------------------------------------------------


def round_steps(
    values: NDArray[np.floating],
    uniform: NDArray[np.floating],
    factor: float,
    levels: int,
    way: str,
    *,
    clips: bool = True,
    sums: Wholes | None = None,
    rows: Wholes | None = None,
) -> tuple[NDArray[np.int32], int] | None:
    """Round values to whole steps, up or down by uniform draws, as `coterie.secure_sum.contribution.rounded` does.

    Equal to the bit to the reference.

    Parameters
    ----------
    values, uniform : ndarray of float32 or float64, of the same shape and kind
    factor : float
        Steps in 1.
    levels : int
        Most steps, 1 to 2^30 - 1; at most 2^24 in single precision.
    way : str
        One of `ncf_ways`.
    clips : bool
        Whether values of more steps become `levels`.
    sums : ndarray of int64, shape (size,), optional
        Steps are added to it in place.
    rows : ndarray of int64, shape (n,), optional
        `values` are rows of `sums`, which are as long as a row of values: `n` of them, each at most once.

    Returns
    -------
    tuple of ndarray of int32, of the shape of values, and int, or None
        Steps, and the number of values of more than `levels`; None, and nothing is added, where a value is not finite,
        or beyond `levels` without `clips`.

    Raises
    ------
    TypeError
        An array has another type.
    ValueError
        An array has another shape, or is not contiguous, aligned, or writable; a number is beyond its range.
    """
    if way not in _NCF_WAYS or not lib.coterie_has_ncf_way(_NCF_WAYS[way]):
        raise ValueError(f"this processor has no way {way!r}; expected one of {', '.join(ncf_ways())}")
    kind = np.dtype(np.float64 if getattr(values, "dtype", None) == np.float64 else np.float32)
    wide = kind == np.float64
    if not 1 <= levels <= (MOST_LEVELS if wide else MOST_SINGLE_LEVELS):
        raise ValueError(f"{levels} levels of {kind}")
    _require_array(values, kind, np.shape(values), "values")
    _require_array(uniform, kind, values.shape, "uniform")
    width, length = 1, 0
    if sums is not None:
        length = values.size
        if rows is not None:
            _require_array(rows, np.dtype(np.int64), np.shape(values)[:1], "rows")
            width = max(values.size // max(len(rows), 1), 1)
            length = len(sums)
        _require_array(sums, np.dtype(np.int64), (length,), "sums")
        if not sums.flags.writeable or length % width:
            raise ValueError(f"sums of {length} values are not writable, or no rows of {width}")
    elif rows is not None:
        raise ValueError("rows without sums")
    steps, beyond = np.empty(values.shape, np.int32), ffi.new("int64_t *")
    type_ = "double[]" if wide else "float[]"
    done = lib.coterie_round(
        _NCF_WAYS[way],
        ffi.from_buffer(type_, values),
        ffi.from_buffer(type_, uniform),
        wide,
        factor,
        levels,
        clips,
        values.size,
        ffi.from_buffer("int32_t[]", steps),
        ffi.NULL if sums is None else _whole(sums),
        ffi.NULL if rows is None else _whole(rows),
        length // width,
        width,
        beyond,
    )
    if done == 1:
        return None
    if done:
        raise ValueError(f"a row is beyond the {length // width} of the sums")
    return steps, beyond[0]


def _require_draws(
    positives: Wholes, negatives: Wholes, order: Wholes | None, batch: int, items: int
) -> tuple[int, int, int]:
    """Check the draws of a user; return the length of the history, the epochs, and the negatives of each."""
    if negatives.ndim != 2:
        raise ValueError(f"negatives have {negatives.ndim} dimensions; expected epochs and numbers")
    (epochs, each), history = negatives.shape, len(positives)
    size = history + each
    if not (
        history
        and 1 <= epochs <= MOST_EPOCHS
        and batch >= 1
        and 1 <= items <= MOST_ITEMS
        and epochs * size <= MOST_INSTANCES
    ):
        raise ValueError(
            f"{epochs} epochs of {history} interactions and {each} negatives, batches of {batch}, {items} items; "
            f"expected at least one of each, at most {MOST_INSTANCES} instances and {MOST_ITEMS} items"
        )
    if order is None and batch < size:
        raise ValueError(f"{size} instances in batches of {batch} without their order")
    checked = [(positives, (history,), "positives"), (negatives, (epochs, each), "negatives")]
    if order is not None:
        checked.append((order, (epochs, size), "order"))
    for array, shape, name in checked:
        _require_array(array, np.dtype(np.int64), shape, name)
    return history, epochs, each


def _require_done(done: int) -> None:
    if done == -2:
        raise MemoryError("no memory for the instances of a user")
    if done == -3:
        raise ValueError(
            "an item, a negative or a place is beyond its range, places repeat, or the items do not ascend"
        )
    if done:
        raise ValueError("there is nothing to lay out, or the sizes are no network's")


def _require_floats(array: Floats, shape: tuple[int, ...], name: str) -> None:
    _require_array(array, np.dtype(np.float32), shape, name)


def _require_array(
    array: NDArray[np.generic], kind: np.dtype[Any], shape: tuple[int, ...], name: str
) -> None:
    # Types in the other order of bytes are not equal to the native ones.
    if not isinstance(array, np.ndarray) or array.dtype != kind:
        raise TypeError(f"{name} is no array of {kind}")
    if array.shape != shape or not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}, contiguous and aligned")


def _whole(array: Wholes) -> object:
    return ffi.from_buffer("int64_t[]", array)


def _floats(array: Floats) -> object:
    return ffi.from_buffer("float[]", array)
