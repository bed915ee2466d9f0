"""Keys of operators, who sign the plans of runs: parties take part in no run whose plan carries no such signature.

An operator's key is an Ed25519 key of its own, kept where runs are started.  Its public half is in the configuration of
every party.  During a change of keys, or with two operators, a party accepts several.  Assumption: Ed25519 signatures
cannot be forged under chosen messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.explicit import encode
from coterie.crypto.identity import check_signature
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["OperatorKeys", "public_text", "sign_run"]

_SIGNED = "run"
_KEY_BYTES = 32


def sign_run(key: Ed25519PrivateKey, run_id: str, plan_sha256: bytes) -> bytes:
    """Sign a run's plan, given by its hash (`coterie.rounds.plan_hash.plan_hash`); return 64 bytes."""
    return key.sign(encode(_SIGNED, run_id, plan_sha256))


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the public half of an operator's key as configurations have it, 64 hexadecimal digits."""
    return key.public_key().public_bytes_raw().hex()


@dataclass(frozen=True)
class OperatorKeys:
    """The public keys of the operators whose runs a party accepts.

    Parameters
    ----------
    keys : tuple of bytes
        Raw Ed25519 public keys, 32 bytes each.
    """

    keys: tuple[bytes, ...]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Self:
        """Read keys as configurations have them.

        Raises
        ------
        ValueError
            When a text is not 64 hexadecimal digits.
        """
        keys = tuple(bytes.fromhex(text) for text in texts)
        if any(len(key) != _KEY_BYTES for key in keys):
            raise ValueError(f"expected {2 * _KEY_BYTES} hexadecimal digits, an Ed25519 public key")
        return cls(keys)

    def verify(self, run_id: str, plan_sha256: bytes, signature: bytes) -> None:
        """Check that one of the operators signed a run's plan.

        Raises
        ------
        VerificationError
            BAD_SIGNATURE when the signature is missing, or of nobody whom the party accepts.
        """
        if not signature:
            raise VerificationError(Reason.BAD_SIGNATURE, "the run's plan carries no operator's signature")
        message = encode(_SIGNED, run_id, plan_sha256)
        for key in self.keys:
            try:
                check_signature(key, signature, message, "the run's plan", Reason.BAD_SIGNATURE)
            except VerificationError:
                continue
            return
        raise VerificationError(
            Reason.BAD_SIGNATURE,
            "the run's plan is not signed by an operator whom this party accepts",
            hint="compare `operator_keys` with the operator's public key",
        )
