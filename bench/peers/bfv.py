"""Time BFV (SEAL) for a packed vector, and show three forgeries against sums in it; imports nothing of Coterie.

Run by the interpreter of ``.venv-peers``.  ``times`` writes one JSON object, for `bench.bfv`; ``forgeries`` says in
words what each forgery got.  ``docs/bfv.md`` has what follows from them.

A ciphertext is a pair of polynomials modulo X^N + 1 and q, and decrypts to ``t / q (c0 + c1 s)``, rounded, modulo t;
``s`` is the secret key, whose coefficients are -1, 0 and 1.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import seal
from numpy.typing import NDArray

CODE_BITS = 16
HEADER_BYTES = 113
"""Bytes of a serialised ciphertext before its coefficients, in SEAL 4.4 without compression."""


class Bfv:
    """Keys and operations of one set of parameters.

    Parameters
    ----------
    degree : int
        Coefficients N of a polynomial.
    moduli : list of int
        Bits of the primes of q; the last of several is for key switching and carries no data.
    plain_bits : int
        Bits of the plaintext modulus t.
    """

    def __init__(self, degree: int, moduli: list[int], plain_bits: int) -> None:
        parameters = seal.EncryptionParameters(seal.scheme_type.bfv)
        parameters.set_poly_modulus_degree(degree)
        parameters.set_coeff_modulus(seal.CoeffModulus.Create(degree, moduli))
        plain = seal.PlainModulus.Batching(degree, plain_bits)
        parameters.set_plain_modulus(plain)
        # SEAL takes these only at 128 bits by the table of the homomorphic encryption standard.
        self.context = seal.SEALContext(parameters)
        if not self.context.parameters_set():
            raise ValueError(
                f"no parameters of 128 bits: N = {degree}, q of {moduli} bits, t of {plain_bits}"
            )
        keys = seal.KeyGenerator(self.context)
        self.encryptor = seal.Encryptor(self.context, keys.create_public_key())
        self.decryptor = seal.Decryptor(self.context, keys.secret_key())
        self.evaluator = seal.Evaluator(self.context)
        self.encoder = seal.BatchEncoder(self.context)
        self.degree, self.plain = degree, int(plain.value())
        data = self.context.first_context_data().parms().coeff_modulus()
        self.primes = [int(prime.value()) for prime in data]

    def encrypt_slots(self, values: NDArray[np.uint64]) -> Any:
        """Encrypt a value a slot: sums and products of plaintexts are slot by slot."""
        return self.encryptor.encrypt(self.encoder.encode(values))

    def decrypt_slots(self, ciphertext: Any) -> NDArray[np.uint64]:
        """Return the value of each slot."""
        return np.array(self.encoder.decode(self.decryptor.decrypt(ciphertext)), np.uint64)

    def encrypt_coefficients(self, values: NDArray[np.uint64]) -> Any:
        """Encrypt a value a coefficient."""
        terms = [
            f"{value:X}x^{power}" if power else f"{value:X}" for power, value in enumerate(values.tolist())
        ]
        return self.encryptor.encrypt(seal.Plaintext(" + ".join(reversed(terms))))

    def decrypt_coefficients(self, ciphertext: Any) -> NDArray[np.int64]:
        """Return the value of each coefficient, shape (degree,)."""
        found = np.zeros(self.degree, np.int64)
        for term in str(self.decryptor.decrypt(ciphertext).to_string()).split(" + "):
            value, _, power = term.partition("x^")
            found[int(power or 0)] = int(value, 16)
        return found

    def shifted(self, ciphertext: Any, polynomial: int, power: int, by: int) -> Any:
        """Return a ciphertext with a number added to one coefficient of c0 or c1, as anybody can."""
        content = bytes(ciphertext.to_string())
        numbers = np.frombuffer(content[HEADER_BYTES:], "<u8").reshape(2, -1, self.degree).copy()
        for row, prime in enumerate(self.primes):
            numbers[polynomial, row, power] = (int(numbers[polynomial, row, power]) + by) % prime
        found = seal.Ciphertext()
        found.load_bytes(self.context, content[:HEADER_BYTES] + numbers.tobytes())
        return found

    @property
    def step(self) -> int:
        """What 1 in a plaintext is in a ciphertext, floor(q / t)."""
        modulus = 1
        for prime in self.primes:
            modulus *= prime
        return modulus // self.plain


# --- times -----------------------------------------------------------------------------------------------------------


def times(bfv: Bfv, values: int, addends: int, rounds: int) -> dict[str, float]:
    """Return CPU seconds of encryption, addition and decryption of a vector, and bytes of one contribution."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 1 << CODE_BITS, bfv.degree, np.uint64) for _ in range(-(-values // bfv.degree))]
    encrypt, ciphertexts = _median(lambda: [bfv.encrypt_slots(row) for row in rows], rounds)

    def total() -> list[Any]:
        sums = [bfv.evaluator.add(one, one) for one in ciphertexts]
        for _ in range(addends - 2):
            for one, addend in zip(sums, ciphertexts, strict=True):
                bfv.evaluator.add_inplace(one, addend)
        return sums

    add, sums = _median(total, rounds)
    decrypt, found = _median(lambda: [bfv.decrypt_slots(one) for one in sums], rounds)
    if not all(np.array_equal(one, row * np.uint64(addends)) for one, row in zip(found, rows, strict=True)):
        raise RuntimeError("a sum is wrong")
    data_bits = sum(prime.bit_length() for prime in bfv.primes)
    return {
        "encrypt": encrypt,
        "aggregate": add,
        "decrypt": decrypt,
        # Two polynomials; SEAL's own form takes whole words of 64 bits, or about as much as this when compressed.
        "bytes": 2 * bfv.degree * data_bits / 8 * len(rows),
    }


def _median(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    seconds, found = [], None
    for _ in range(rounds):
        before = time.process_time()
        found = work()
        seconds.append(time.process_time() - before)
    return statistics.median(seconds), found


# --- forgeries -------------------------------------------------------------------------------------------------------

_SLOT_BITS = 21
"""Bits of a sum of 20 codes of 16 bits."""


def chosen_slots() -> str:
    """Tags in spare slots: take the tags of all members and the codes of one."""
    # At N = 2048 the noise leaves no room for these products; `key_in_the_sum` needs none.
    bfv, members = Bfv(4096, [36, 36, 37], 22), 20
    tag_slots = 8
    rng = np.random.default_rng()
    vectors = rng.integers(0, 1 << CODE_BITS, (members, bfv.degree), np.uint64)
    contributions = [bfv.encrypt_slots(vector) for vector in vectors]
    total = contributions[0]
    for one in contributions[1:]:
        total = bfv.evaluator.add(total, one)
    tags = np.arange(bfv.degree) < tag_slots
    forged = bfv.evaluator.add(
        bfv.evaluator.multiply_plain(total, bfv.encoder.encode(tags.astype(np.uint64))),
        bfv.evaluator.multiply_plain(contributions[0], bfv.encoder.encode((~tags).astype(np.uint64))),
    )
    found = bfv.decrypt_slots(forged)
    accepted = np.array_equal(found[tags], vectors.sum(axis=0)[tags])
    read = int((found[~tags] == vectors[0][~tags]).sum())
    return (
        f"tags in spare slots: accepted {accepted}, {read} of {int((~tags).sum())} codes of one member read"
    )


def key_in_the_sum() -> str:
    """Tags above the code of each coefficient: one request whose answer has the secret key in it."""
    bfv, tag_bits = Bfv(4096, [36, 36, 37], 48), 24
    rng = np.random.default_rng()
    # Codes that are known, as those of values that nobody changed are; the tags are not.
    codes = np.full(bfv.degree, 20 << (CODE_BITS - 1), np.uint64)
    tags = rng.integers(0, 1 << tag_bits, bfv.degree, np.uint64)
    total = bfv.encrypt_coefficients(codes + (tags << np.uint64(_SLOT_BITS)))
    found = bfv.decrypt_coefficients(bfv.shifted(total, 1, 0, bfv.step))
    accepted = np.array_equal(found >> _SLOT_BITS, tags.astype(np.int64))
    key = (found & ((1 << _SLOT_BITS) - 1)) - codes.astype(np.int64)
    # Read a contribution with the key that was found, by hand: the product is modulo X^N + 1 and q.
    secret = rng.integers(0, 1 << CODE_BITS, bfv.degree, np.uint64)
    read = _by_hand(bfv, bfv.encrypt_coefficients(secret), key)
    same = int((read == secret.astype(np.int64)).sum())
    return (
        f"tags above each coefficient: accepted {accepted}, coefficients of the key "
        f"{sorted(set(key.tolist()))}, {same} of {bfv.degree} codes of another contribution read with it"
    )


def _by_hand(bfv: Bfv, ciphertext: Any, key: NDArray[np.int64]) -> NDArray[np.int64]:
    content = bytes(ciphertext.to_string())
    rows = np.frombuffer(content[HEADER_BYTES:], "<u8").reshape(2, len(bfv.primes), bfv.degree)
    modulus = 1
    for prime in bfv.primes:
        modulus *= prime
    sums = []
    for row, prime in enumerate(bfv.primes):
        total = [int(number) for number in rows[0, row]]
        second = [int(number) for number in rows[1, row]]
        for power in np.flatnonzero(key).tolist():
            sign = int(key[power])
            turned = [-number for number in second[bfv.degree - power :]] + second[: bfv.degree - power]
            total = [a + sign * b for a, b in zip(total, turned, strict=True)]
        sums.append([number % prime for number in total])
    weights = [modulus // prime * pow(modulus // prime, -1, prime) for prime in bfv.primes]
    found = []
    for numbers in zip(*sums, strict=True):
        number = sum(weight * one for weight, one in zip(weights, numbers, strict=True)) % modulus
        found.append((number * bfv.plain + modulus // 2) // modulus % bfv.plain)
    return np.array(found, np.int64)


def bits_by_refusals(asked: int = 64) -> str:
    """Tags above the code of every slot: whether a holder accepts says what a coefficient of the key is."""
    bfv, tag_bits = Bfv(8192, [55, 55, 56], 60), 34
    rng = np.random.default_rng()
    tags = rng.integers(0, 1 << tag_bits, bfv.degree, np.uint64)
    codes = rng.integers(0, 1 << _SLOT_BITS, bfv.degree, np.uint64)
    total = bfv.encrypt_slots(codes + (tags << np.uint64(_SLOT_BITS)))

    def accepts(ciphertext: Any) -> bool:
        return np.array_equal(bfv.decrypt_slots(ciphertext) >> np.uint64(_SLOT_BITS), tags)

    # The key itself, to compare with: the answer of the request that `key_in_the_sum` makes, tags aside.
    zeros = bfv.encrypt_coefficients(np.ones(bfv.degree, np.uint64))
    key = bfv.decrypt_coefficients(bfv.shifted(zeros, 1, 0, bfv.step)) - 1
    right = sum(
        # Noise of .3 of a step with the key's sign everywhere, and .3 more at one place: over half a step if it is 1.
        (not accepts(bfv.shifted(bfv.shifted(total, 1, 0, part), 0, place, part))) == (key[place] == 1)
        for part in (bfv.step * 3 // 10,)
        for place in (secrets.randbelow(bfv.degree) for _ in range(asked))
    )
    return f"tags above each slot: {right} of {asked} refusals told whether a coefficient of the key is 1"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("times", "forgeries"))
    parser.add_argument("--values", type=int, default=44_824)
    parser.add_argument("--addends", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.what == "forgeries":
        for forgery in (chosen_slots, key_in_the_sum, bits_by_refusals):
            print(forgery(), flush=True)
        return
    small, wide = Bfv(2048, [54], 22), Bfv(8192, [55, 55, 56], 60)
    found = {
        name: times(bfv, asked.values, asked.addends, asked.rounds)
        for name, bfv in (("n2048", small), ("n8192", wide))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
