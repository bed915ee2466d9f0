"""Packed Paillier against stock ``phe``, element by element: one update of FedNeuMF at 3,072 bits, CPU seconds.

Both work on the same modulus, and ``phe`` with gmpy2, too.  It is asked for a sample of the values, in turn with ours,
and its time is scaled up to all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from gmpy2 import mpz

from bench.rows import Row, cpu_seconds, in_turn, lower
from coterie.crypto.paillier import (
    TAG_BITS,
    EncryptedVector,
    HolderObfuscators,
    Mode,
    Obfuscators,
    Packing,
    Pool,
    PublicObfuscators,
    RunningSum,
    SecretKey,
    decrypt_vector,
    decryption,
    encrypt,
    from_bytes,
    generate,
    proof,
    to_bytes,
)
from coterie.crypto.paillier.stock import to_stock, to_stock_public, to_stock_secret

_BITS = 3072
_VALUES = 44_824
"""Values of an update of FedNeuMF on MovieLens 100K."""
_ADDENDS = 20
_ENCRYPTED, _SUMMED, _DECRYPTED = 12, 100, 50
"""Values of the sample."""
_ROUNDS = 5

_PACKINGS = {"": Packing(_BITS, 16, 32), ".w32": Packing(_BITS, 24, 256)}
"""By the suffix of the rows: slots of 21 and of 32 bits."""
_TARGETS = {
    "encrypt.key_holder": (2500, 1500),
    "encrypt.public": (2000, 1200),
    "encrypt.short": (8000, 5000),
    "aggregate": (450, 280),
    "decrypt": (130, 80),
    "decrypt.subgroup": (600, 380),
}


def rows() -> Iterator[Row]:
    """Measure encryption, aggregation and decryption."""
    key, subgroup = (generate("bench", bytes(32), subgroup=subgroup) for subgroup in (False, True))
    sources: dict[str, tuple[Obfuscators, float]] = {
        "key_holder": _timed(lambda: HolderObfuscators(key)),
        "public": _timed(lambda: PublicObfuscators(key.public)),
        "short": _timed(lambda: PublicObfuscators(key.public, Mode.SHORT)),
    }
    of_subgroup = HolderObfuscators(subgroup, Mode.SUBGROUP)
    for suffix, packing in _PACKINGS.items():
        update = _Update(packing)
        for who, (source, once) in sources.items():
            yield _encrypt(f"encrypt.{who}", suffix, update, source, once)
        vectors = [update.encrypted(sources["short"][0]) for _ in range(_ADDENDS)]
        yield _aggregate(key, vectors, suffix)
        yield _decrypt("decrypt", key, vectors[0], suffix)
        yield _decrypt("decrypt.subgroup", subgroup, update.encrypted(of_subgroup), suffix)
        yield from _prove(key, vectors[0], suffix)


class _Update:
    """Codes and tags, drawn from a seed."""

    def __init__(self, packing: Packing) -> None:
        rng = np.random.default_rng(0)
        self.packing = packing
        self.codes = rng.integers(1, 2**packing.code_bits, _VALUES, dtype=np.uint32)
        self.tags = [int.from_bytes(rng.bytes(TAG_BITS // 8)) for _ in range(packing.ciphertexts(_VALUES))]

    def encrypted(self, source: Obfuscators) -> EncryptedVector:
        return encrypt(self.codes, self.tags, self.packing, source)


def _encrypt(name: str, suffix: str, update: _Update, source: Obfuscators, once: float) -> Row:
    stock = to_stock_public(source.public)
    some = [int(code) for code in update.codes[:_ENCRYPTED]]
    pool = Pool(source)
    pool.fill(len(update.tags))
    online = cpu_seconds(lambda: update.encrypted(pool))
    return _row(
        name,
        suffix,
        lambda: update.encrypted(source),
        lambda: [stock.encrypt(code) for code in some],
        len(some),
        f"tables once {once:.2f} s; {online * 1e3:.1f} ms with a pool",
    )


def _aggregate(key: SecretKey, vectors: Sequence[EncryptedVector], suffix: str) -> Row:
    numbers = [to_stock(vector)[:_SUMMED] for vector in vectors]
    packing, content = vectors[0].packing, to_bytes(vectors[0])

    def ours() -> None:
        total = RunningSum(key.public, packing, _VALUES)
        for vector in vectors:
            total.add(vector)
        total.total()

    def theirs() -> None:
        for column in zip(*numbers, strict=True):
            total = column[0]
            for number in column[1:]:
                total = total + number

    reading = cpu_seconds(lambda: from_bytes(content, key.public, packing, _VALUES))
    size = len(content) / _VALUES
    note = f"{len(vectors)} vectors, {size:.2f} bytes a value; {reading * 1e3:.1f} ms to read and check one"
    return _row("aggregate", suffix, ours, theirs, _SUMMED, note)


def _decrypt(name: str, key: SecretKey, vector: EncryptedVector, suffix: str) -> Row:
    stock, numbers = to_stock_secret(key), to_stock(vector)[:_DECRYPTED]
    began = time.perf_counter()
    decrypt_vector(vector, key)
    wall = time.perf_counter() - began
    return _row(
        name,
        suffix,
        lambda: decrypt_vector(vector, key),
        lambda: [stock.decrypt(number) for number in numbers],
        len(numbers),
        f"wall {wall:.2f} s, two threads",
    )


def _prove(key: SecretKey, vector: EncryptedVector, suffix: str) -> Iterator[Row]:
    """Time the proof of a decryption, and its check, against the decryption."""
    units, shifts = vector.units, vector.shifts

    def decrypt() -> list[mpz]:
        return decryption.decrypt(key, units, shifts, vector.mode)

    plaintexts = decrypt()
    shown = proof.prove(key, b"bench", units, shifts, plaintexts)
    work: dict[str, Callable[[], object]] = {
        "prove": lambda: proof.prove(key, b"bench", units, shifts, plaintexts),
        "verify": lambda: proof.check(key.public, b"bench", units, shifts, plaintexts, shown),
    }
    for name, one in work.items():
        own, whole = in_turn(one, decrypt, _ROUNDS)
        note = f"{own / whole:.1%} of the decryption; target 20%, or 5x"
        yield lower(f"paillier.{name}{suffix}", own, whole, "s", note)


def _row(
    name: str, suffix: str, ours: Callable[[], object], theirs: Callable[[], object], sample: int, note: str
) -> Row:
    """Time an update of ours, and a sample of theirs scaled up, in turn."""
    ours(), theirs()
    pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(_ROUNDS)]
    own = statistics.median(one for one, _ in pairs)
    other = statistics.median(one for _, one in pairs) * _VALUES / sample
    remarks = f"{note}; theirs from {sample} values; target {_TARGETS[name][bool(suffix)]}x"
    return lower(f"paillier.{name}{suffix}", own, other, "s", remarks)


def _timed(build: Callable[[], Obfuscators]) -> tuple[Obfuscators, float]:
    """Return what is built, and the CPU seconds that it took."""
    began = time.process_time()
    found = build()
    return found, time.process_time() - began
