"""Compiled kernels of Coterie.

Coterie computes everything without this package, with NumPy and the cryptography package as the reference; a kernel
here has the same result, to the bit where sums are concerned, and is faster.  Coterie compares each with the reference
once in a process before it uses it.

Every function checks lengths, types and layout of what it is given before the compiled code sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

import numpy as np
from numpy.typing import NDArray

from coterie_native._kernels import ffi, lib

__all__ = ["INTERFACE", "add_masks", "mask_ways", "ncf_gradients", "ncf_ways", "version"]

INTERFACE = 1
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


def _require_floats(array: Floats, shape: tuple[int, ...], name: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or not array.dtype.isnative:
        raise TypeError(f"{name} is no array of float32")
    if array.shape != shape or not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}, contiguous and aligned")


def _floats(array: Floats) -> object:
    return ffi.cast("float *", array.ctypes.data)
