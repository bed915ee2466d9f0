"""Pads and proofs of the encrypted sum (docs/spec/encrypted-sum.md), with Python's own integers."""

import hashlib
import math

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from . import explicit
from .paillier import pack
from .primitives import Refused, hkdf, x25519


def pads(secret, public, run, key_id, participant, plan_hash, n, count):
    """Return a contributor's pads; ``secret`` and ``public`` are its own and the set key's, or the other way round."""
    key = hkdf(x25519(secret, public), explicit.encode("set-pad", run, key_id, participant))
    stream_key = hkdf(key, explicit.encode("pad-stream", plan_hash))
    cipher = Cipher(algorithms.AES(stream_key), modes.CTR(bytes(16))).encryptor()
    length = 4 * math.ceil(n.bit_length() / 32) + 16
    stream = cipher.update(bytes(length * count))
    return [int.from_bytes(stream[length * j : length * j + length], "big") % n for j in range(count)]


def pads_hash(plan_hash, first, sums, bits):
    """Return what a holder says of the sums of the pads of a part."""
    content = b"".join(one.to_bytes(bits // 8, "big") for one in sums)
    return explicit.digest("pad-sums", plan_hash, first, hashlib.sha256(content).digest())


def places(sent, count):
    """Return which ciphertexts a member sent, by their positions."""
    return bytes(sum(1 << bit for bit in range(8) if at + bit in sent) for at in range(0, count, 8))


def above_floor(sent, users, floor):
    """Return what of each member is added, given what each sent, and what is dropped."""
    behind = {}
    for own, count in zip(sent, users, strict=True):
        for place in own:
            behind.setdefault(place, []).append(count)
    kept = {place for place, counts in behind.items() if sum(counts) >= floor and len(counts) >= 2}
    return [sorted(kept.intersection(own)) for own in sent], sorted(behind.keys() - kept)


def zeros(bits, users, rule):
    """Return the plaintexts of so many users' contribution of zeros; ``bits`` are those of each value."""
    codes = [users << (each - 1) for each in bits]
    return pack(codes, rule)


def context(plan_hash, first):
    """Return what a proof is about beside numbers."""
    return explicit.encode("decryption", plan_hash, first)


def exponents(bits, key_id, about, units, shifts, plaintexts):
    """Return e_j."""
    size = bits // 8
    claimed = hashlib.sha256()
    for a, b, m in zip(units, shifts, plaintexts, strict=True):
        claimed.update(a.to_bytes(size, "big") + b.to_bytes(size, "big") + m.to_bytes(size, "big"))
    label = explicit.encode("decryption-proof", key_id, about, len(plaintexts), claimed.digest())
    drawn = hashlib.shake_256(label).digest(16 * len(plaintexts))
    return [int.from_bytes(drawn[16 * j : 16 * j + 16], "big") for j in range(len(plaintexts))]


def product(units, e, modulus):
    """Return the product of powers."""
    found = 1
    for a, exponent in zip(units, e, strict=True):
        found = found * pow(a, exponent, modulus) % modulus
    return found


def prove(p, q, e, units):
    """Return R."""
    n = p * q
    return pow(product(units, e, n), pow(n, -1, (p - 1) * (q - 1)), n)


def check(n, e, units, shifts, plaintexts, root):
    """Refuse plaintexts that are not those of the ciphertexts."""
    if not (0 < root < n and math.gcd(root, n) == 1 and all(0 <= m < n for m in plaintexts)):
        raise Refused("a proof or a plaintext out of range")
    shift = sum(x * (b - m) for x, b, m in zip(e, shifts, plaintexts, strict=True))
    if product(units, e, n * n) * (1 + shift * n) % (n * n) != pow(root, n, n * n):
        raise Refused("plaintexts of other ciphertexts")
