"""Compare packed Paillier with stock ``phe``, which works value by value: a FedNeuMF update at 3,072 bits, CPU seconds.

Both work on the same modulus, and ``phe`` uses gmpy2, too.  It encrypts a sample of the values, in turn with ours, and
its time is scaled up to all values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gmpy2 import mpz

from bench.rows import Ask, Row, cpu_seconds, in_turn, lower
from coterie.crypto.paillier import (
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
    pads,
    proof,
    to_bytes,
)
from coterie.crypto.paillier.stock import to_stock, to_stock_public, to_stock_secret


@dataclass(frozen=True)
class _Size:
    """Sizes of the measurement; by default those of an update of FedNeuMF on MovieLens 100K.

    Parameters
    ----------
    bits : int
        Length of the modulus.
    values : int
        Number of values of an update.
    addends : int
    encrypted, summed, decrypted : int
        Number of values of the sample for the other library.
    rounds : int
        Number of alternating measurements of both.
    """

    bits: int = 3072
    values: int = 44_824
    addends: int = 20
    encrypted: int = 12
    summed: int = 100
    decrypted: int = 50
    rounds: int = 5

    @property
    def packings(self) -> dict[str, Packing]:
        """Packings with slots of 21 and of 32 bits, by the suffix of their rows."""
        return {"": Packing(self.bits, 16, 32), ".w32": Packing(self.bits, 24, 256)}

    def key(self, *, subgroup: bool) -> SecretKey:
        """Draw a key; a key below 2,048 bits is marked as for comparison only."""
        short = self.bits < 2048
        return generate("bench", bytes(32), bits=self.bits, subgroup=subgroup, comparison=short)


_TARGETS = {
    "encrypt.key_holder": (2500, 1500),
    "encrypt.public": (2000, 1200),
    "encrypt.short": (8000, 5000),
    "aggregate": (450, 280),
    "decrypt": (130, 80),
    "decrypt.subgroup": (600, 380),
}


def rows(ask: Ask) -> Iterator[Row]:
    """Measure encryption, aggregation and decryption."""
    size = ask.size(_Size(), _Size(1024, 60, 2, 2, 2, 2, 1))
    key, subgroup = (size.key(subgroup=subgroup) for subgroup in (False, True))
    sources: dict[str, tuple[Obfuscators, float]] = {
        "key_holder": _timed(lambda: HolderObfuscators(key)),
        "public": _timed(lambda: PublicObfuscators(key.public)),
        "short": _timed(lambda: PublicObfuscators(key.public, Mode.SHORT)),
    }
    of_subgroup = HolderObfuscators(subgroup, Mode.SUBGROUP)
    for suffix, packing in size.packings.items():
        update = _Update(packing, size)
        for who, (source, once) in sources.items():
            yield _encrypt(f"encrypt.{who}", suffix, update, source, once)
        vectors = [update.encrypted(sources["short"][0]) for _ in range(size.addends)]
        yield _aggregate(size, key, vectors, suffix)
        yield _parts(size, key, vectors, suffix)
        yield _decrypt(size, "decrypt", key, vectors[0], suffix)
        yield _decrypt(size, "decrypt.subgroup", subgroup, update.encrypted(of_subgroup), suffix)
        yield from _prove(size, key, vectors[0], suffix)


class _Update:
    """Codes of an update to encrypt, drawn from a seed."""

    def __init__(self, packing: Packing, size: _Size) -> None:
        rng = np.random.default_rng(0)
        self.packing, self.size = packing, size
        self.codes = rng.integers(1, 2**packing.code_bits, size.values, dtype=np.uint32)
        self.ciphertexts = packing.ciphertexts(size.values)

    def encrypted(self, source: Obfuscators) -> EncryptedVector:
        own = pads.pads(bytes(32), bytes(32), source.public, self.ciphertexts)
        return encrypt(self.codes, self.packing, source, pads=own)


def _encrypt(name: str, suffix: str, update: _Update, source: Obfuscators, once: float) -> Row:
    stock = to_stock_public(source.public)
    some = [int(code) for code in update.codes[: update.size.encrypted]]
    pool = Pool(source)
    pool.fill(update.ciphertexts)
    online = cpu_seconds(lambda: update.encrypted(pool))
    return _row(
        update.size,
        name,
        suffix,
        lambda: update.encrypted(source),
        lambda: [stock.encrypt(code) for code in some],
        len(some),
        f"tables once {once:.2f} s; {online * 1e3:.1f} ms with a pool",
    )


def _aggregate(size: _Size, key: SecretKey, vectors: Sequence[EncryptedVector], suffix: str) -> Row:
    numbers = [to_stock(vector)[: size.summed] for vector in vectors]
    packing, content = vectors[0].packing, to_bytes(vectors[0])

    def ours() -> None:
        total = RunningSum(key.public, packing, size.values)
        for vector in vectors:
            total.add(vector)
        total.total()

    def theirs() -> None:
        for column in zip(*numbers, strict=True):
            total = column[0]
            for number in column[1:]:
                total = total + number

    reading = cpu_seconds(lambda: from_bytes(content, key.public, packing, size.values))
    each = len(content) / size.values
    note = f"{len(vectors)} vectors, {each:.2f} bytes a value; {reading * 1e3:.1f} ms to read and check one"
    return _row(size, "aggregate", suffix, ours, theirs, size.summed, note)


def _parts(size: _Size, key: SecretKey, vectors: Sequence[EncryptedVector], suffix: str) -> Row:
    """Time a coordinator that joins the sums of two intakes, against one process that reads and adds all vectors."""
    packing, content = vectors[0].packing, [to_bytes(vector) for vector in vectors]
    half = len(content) // 2

    def added(messages: Sequence[bytes], addends: int = 1) -> RunningSum:
        total = RunningSum(key.public, packing, size.values)
        for message in messages:
            total.add(from_bytes(message, key.public, packing, size.values, addends=addends))
        return total

    parts = [to_bytes(added(some).total()) for some in (content[:half], content[half:])]
    taking = cpu_seconds(lambda: to_bytes(added(content[:half]).total()))
    joined, alone = in_turn(lambda: added(parts, half).total(), lambda: added(content).total(), size.rounds)
    note = (
        f"sums of {half} vectors each, which take an intake {taking * 1e3:.0f} ms; theirs adds {len(content)}"
    )
    return lower(f"paillier.parts{suffix}", joined, alone, "s", note)


def _decrypt(size: _Size, name: str, key: SecretKey, vector: EncryptedVector, suffix: str) -> Row:
    stock, numbers = to_stock_secret(key), to_stock(vector)[: size.decrypted]

    def opened() -> object:
        own = pads.pads(bytes(32), bytes(32), key.public, len(vector.units))
        return decrypt_vector(vector, key, own)

    began = time.perf_counter()
    opened()
    wall = time.perf_counter() - began
    return _row(
        size,
        name,
        suffix,
        opened,
        # What is in a padded ciphertext is above the numbers that theirs decodes.
        lambda: [stock.raw_decrypt(number.ciphertext(be_secure=False)) for number in numbers],
        len(numbers),
        f"wall {wall:.2f} s, two threads",
    )


def _prove(size: _Size, key: SecretKey, vector: EncryptedVector, suffix: str) -> Iterator[Row]:
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
        own, whole = in_turn(one, decrypt, size.rounds)
        note = f"{own / whole:.1%} of the decryption; target 20%, or 5x"
        yield lower(f"paillier.{name}{suffix}", own, whole, "s", note)


def _row(
    size: _Size,
    name: str,
    suffix: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    sample: int,
    note: str,
) -> Row:
    """Time our whole update and their sample in turn, and return the row with theirs scaled up."""
    ours(), theirs()
    pairs = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(size.rounds)]
    own = statistics.median(one for one, _ in pairs)
    other = statistics.median(one for _, one in pairs) * size.values / sample
    remarks = f"{note}; theirs from {sample} values; target {_TARGETS[name][bool(suffix)]}x"
    return lower(f"paillier.{name}{suffix}", own, other, "s", remarks)


def _timed(build: Callable[[], Obfuscators]) -> tuple[Obfuscators, float]:
    """Return the result of a call, and its CPU seconds."""
    began = time.process_time()
    found = build()
    return found, time.process_time() - began
