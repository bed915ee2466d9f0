"""Reproducible randomness of a user's noise: the same for a sum that is formed again, and unknown to everybody else."""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from coterie.crypto.explicit import encode
from coterie.secure_sum.discrete_noise import RandomBytes
from coterie.secure_sum.plan import SumPlan

__all__ = ["SEED_BYTES", "noise_stream"]

SEED_BYTES = 32
"""Bytes of a user's seed, from the operating system."""


def noise_stream(seed: bytes, plan: SumPlan, purpose: str, *more: bytes | int) -> RandomBytes:
    """Return a source of the random bytes from which noise for a sum is drawn.

    A server may say that a sum was abandoned, and ask for it again.  With noise drawn anew it would have several noisy
    sums of the same values, whose mean has less noise than any of them.  So the noise depends on a secret seed and on
    what the ledger lets a member reveal once (`coterie.rounds.ledger`): purpose, pass, part and inputs of the sum.

    The same noise must never meet two different contributions, whose difference would then have none: values that
    depend on more than that, such as the model and the round, are told apart by ``more``.

    The stream is AES-256 in counter mode under a key from HKDF-SHA256.  It assumes that AES is a pseudorandom
    permutation, so that noise is as good as noise of true randomness to anybody who cannot break AES.

    Parameters
    ----------
    seed : bytes
        One or more seeds of `SEED_BYTES`, one after the other: those of a member's users.
    plan : SumPlan
    purpose : str
        Use of the noise, the label of the key.
    more : bytes or int
        What else the values depend on to which the noise is added.
    """
    inputs = [field for one in plan.inputs for field in one]
    info = encode(
        purpose, plan.run_id, plan.purpose, plan.pass_number, plan.part, len(plan.inputs), *inputs, *more
    )
    key = HKDF(SHA256(), 32, None, info).derive(seed)
    # Each sum has a key of its own, so the counter begins at zero.
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    return lambda size: stream.update(bytes(size))
