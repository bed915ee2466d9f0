"""Packed Paillier (docs/spec/paillier.md), with Python's own integers."""

import hashlib
import math
import secrets

from . import explicit
from .primitives import Refused

ZERO_BITS = 96
HEADER = 44


def size(number, length):
    """Return a number in so many bytes."""
    return number.to_bytes(length, "big")


# --- keys --------------------------------------------------------------------------------------------------------


def key_id(record):
    """Return the id of a public key."""
    length = record["bits"] // 8
    base = size(record["base"], length) if record["base"] else b""
    fields = record["set_public"], record["bits"], record["created"], record["run_id"], base
    return explicit.digest("paillier-key", size(record["n"], length), *fields)


def check_record(record, least=2048):
    """Refuse a record by which nobody encrypts."""
    n, bits, base = record["n"], record["bits"], record["base"]
    if bits < least or bits % 16 or n % 2 == 0 or n.bit_length() != bits or len(record["set_public"]) != 32:
        raise Refused("a modulus of another length, or an even one")
    if any(n % factor == 0 for factor in range(3, 1 << 16, 2)):
        raise Refused("a modulus with a small factor")
    if base and not (0 < base < n and math.gcd(base * (base * base - 1), n) == 1):
        raise Refused("a base of small order")


def derived_base(n, bits):
    """Return h."""
    label = explicit.encode("paillier-base", size(n, bits // 8))
    x = int.from_bytes(hashlib.shake_256(label).digest(bits // 8 + 16), "big") % n
    return -x * x % n


def secret_key(record, content):
    """Return p, q, k_p, k_q from their bytes, checked."""
    bits, order_bits = record["bits"], 320 if record["base"] else 40
    lengths = [bits // 16] * 2 + [order_bits // 8] * 2
    if len(content) != sum(lengths):
        raise Refused("a secret key of another length")
    parts = []
    for length in lengths:
        parts.append(int.from_bytes(content[:length], "big"))
        content = content[length:]
    p, q, k, other = parts
    if p * q != record["n"] or p >= q or k == other:
        raise Refused("a secret key of another modulus")
    for prime, order in ((p, k), (q, other)):
        rest, nothing = divmod(prime - 1, 2 * order)
        if nothing or prime >> (bits // 2 - 3) != 7 or order.bit_length() != order_bits:
            raise Refused("a factor of another form")
        if not all(probably_prime(one) for one in (prime, order, rest)):
            raise Refused("a factor that is not prime")
        if record["base"] and (record["base"] % prime == 1 or pow(record["base"], order, prime) != 1):
            raise Refused("a base of another order")
    return p, q, k, other


def probably_prime(number):
    """Miller and Rabin, twenty times."""
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> twos
    for _ in range(20):
        found = pow(2 + secrets.randbelow(number - 3), odd, number)
        if found not in (1, number - 1) and not any(
            (found := found * found % number) == number - 1 for _ in range(twos - 1)
        ):
            return False
    return True


# --- packing -----------------------------------------------------------------------------------------------------


def shape(key_bits, code_bits, addends):
    """Return slot width and slots."""
    guard = math.ceil(math.log2(addends))
    width = code_bits + guard
    return width, (key_bits - 4 - ZERO_BITS - guard) // width


def pack(codes, rule):
    """Return plaintexts."""
    width, slots = shape(*rule)
    return [
        sum(code << (width * place) for place, code in enumerate(codes[first : first + slots]))
        for first in range(0, len(codes), slots)
    ]


def unpack(plaintexts, count, addends, rule):
    """Return codes; refuses what no sum of so many vectors is."""
    width, slots = shape(*rule)
    most, codes = addends * (2 ** rule[1] - 1), []
    for plaintext in plaintexts:
        if plaintext >> (width * slots):
            raise Refused("an impossible sum")
        codes += [plaintext >> (width * place) & ((1 << width) - 1) for place in range(slots)]
    if max(codes) > most or any(codes[count:]):
        raise Refused("an impossible sum")
    return codes[:count]


# --- ciphertexts -------------------------------------------------------------------------------------------------


def obfuscator(base, n, exponent):
    """Return a power of a base, modes B to D."""
    return pow(base, n * exponent, n * n)


def fresh_obfuscator(n):
    """Return r^n, mode A for who has no secret key."""
    return pow(1 + secrets.randbelow(n - 1), n, n * n)


def encrypt(plaintext, n, hidden):
    """Return a ciphertext."""
    return (1 + plaintext * n) * hidden % (n * n)


def add(one, other, n):
    """Return the ciphertexts of the sums."""
    return [a * b % (n * n) for a, b in zip(one, other, strict=True)]


def decrypt(ciphertext, p, q, orders=None):
    """Return a plaintext; ``orders`` are k_p and k_q for mode D."""
    halves = []
    for prime, other, exponent in (
        (p, q, orders[0] if orders else p - 1),
        (q, p, orders[1] if orders else q - 1),
    ):
        power = pow(ciphertext, exponent, prime * prime)
        if power % prime != 1:
            raise Refused("a ciphertext that is none, or not of the subgroup")
        halves.append((power - 1) // prime * pow(exponent * other, -1, prime) % prime)
    return halves[0] + p * ((halves[1] - halves[0]) * pow(p, -1, q) % q)


# --- on the wire -------------------------------------------------------------------------------------------------


def header(mode, rule, count, key):
    """Return the header of a vector."""
    width, _ = shape(*rule)
    small = bytes([1, mode, width, rule[1]])
    return small + size(rule[2], 4) + size(count, 4) + key


def write(mode, rule, count, record, ciphertexts):
    """Return a vector as it is sent."""
    n, length = record["n"], rule[0] // 8
    found = header(mode, rule, count, key_id(record))
    for one in ciphertexts:
        unit = one % n
        found += size(unit, length) + size(one // n * pow(unit, -1, n) % n, length)
    return found


def read(content, record, rule, count):
    """Return mode and ciphertexts, checked."""
    mode, length, n = content[1], rule[0] // 8, record["n"]
    if content[:HEADER] != header(mode, rule, count, key_id(record)) or not 1 <= mode <= 3 + bool(
        record["base"]
    ):
        raise Refused("a header that says something else")
    number = -(-count // shape(*rule)[1])
    if len(content) != HEADER + 2 * number * length:
        raise Refused("a vector of another length")
    starts = range(HEADER, len(content), length)
    parts = [int.from_bytes(content[start : start + length], "big") for start in starts]
    found = []
    for unit, shift in zip(parts[::2], parts[1::2], strict=True):
        if not (unit < n and shift < n and math.gcd(unit, n) == 1):
            raise Refused("a ciphertext that is none")
        found.append(unit * (1 + shift * n) % (n * n))
    return mode, found
