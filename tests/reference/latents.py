"""Meta-latents: records, codes, combinations in clear (docs/spec/latents.md)."""

from .explicit import encode
from .primitives import ed25519_sign


def record_signature(seed, record, opener):
    """Sign a record as its opener."""
    names = (
        "run_id",
        "epoch",
        "key_id",
        "dimension",
        "combinations",
        "least",
        "most",
        "bound",
        "members",
        "bits",
    )
    fields = [record[name] for name in (*names, "closes", "expiry")]
    return ed25519_sign(seed, encode("latent-record", *fields, opener))


def slots(key_bits, bits):
    """Return the width of a slot, and the number of slots of a plaintext."""
    return bits + 16, (key_bits - 4 - 96 - 16) // (bits + 16)


def weight_range(members):
    """Return the least and the largest weight."""
    return (65536 + 2 * members - 1) // (2 * members), 3 * 65536 // (2 * members)


def code(value, bound, bits):
    """Return the code of a value."""
    half, most = 2 ** (bits - 1), bound / 1000
    return round(max(-most, min(most, value)) * ((half - 1) / most)) + half


def combined(rows, weights):
    """Return the weighted sums of codes."""
    return [sum(a * c for a, c in zip(weights, column, strict=True)) for column in zip(*rows, strict=True)]


def value(total, bound, bits):
    """Return the value that a weighted sum of codes stands for."""
    half = 2 ** (bits - 1)
    return (total - half * 65536) / 65536 * (bound / 1000 / (half - 1))
