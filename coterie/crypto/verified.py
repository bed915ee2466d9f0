"""Signatures that are checked once, however many members of one host need them checked.

The members of one host are one trust domain: what one of them has verified, the others may rely on.  Only successes are
remembered, under the SHA-256 of key, signature and message together, so a memory holds no way to another outcome.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Validity
from coterie.crypto.verification import Reason, VerificationError

__all__ = ["Verified"]

_MOST = 1 << 17


class Verified:
    """Remembers which signatures were right.  Safe to share between threads.

    Parameters
    ----------
    most : int
        How many are remembered; then all are forgotten and checked again.
    """

    __slots__ = ("_known", "_most")

    def __init__(self, most: int = _MOST) -> None:
        self._known: set[bytes] = set()
        self._most = most

    def bundle(self, bundle: Bundle, directory_key: bytes, now: int) -> None:
        """Check a bundle as ``Bundle.verify`` does; the validity is compared with the clock each time.

        Raises
        ------
        VerificationError
            As ``Bundle.verify``.
        """
        signatures = bundle.signature, bundle.countersignature
        parts = encode("verified-bundle", directory_key, *bundle.signed_fields(), *signatures)
        key = hashlib.sha256(parts).digest()
        if key in self._known:
            Validity(bundle.not_before, bundle.not_after).check("the key bundle", now)
            return
        bundle.verify(directory_key, now)
        self._remember(key)

    def signature(
        self, what: str, signing_public: bytes, signature: bytes, purpose: str, *fields: bytes | str | int
    ) -> None:
        """Check an Ed25519 signature over explicit bytes.

        Parameters
        ----------
        what : str
            What is signed, for the message of the error.
        signing_public : bytes
            Raw public key, 32 bytes.

        Raises
        ------
        VerificationError
            BAD_SIGNATURE.
        """
        message = encode(purpose, *fields)
        # Of fixed lengths, or never remembered: so the parts cannot be cut otherwise.
        key = hashlib.sha256(signing_public + signature + message).digest()
        if key in self._known and len(signing_public) == 32 and len(signature) == 64:
            return
        try:
            Ed25519PublicKey.from_public_bytes(signing_public).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise VerificationError(
                Reason.BAD_SIGNATURE, f"{what} does not carry a signature of {signing_public.hex()[:16]}"
            ) from None
        self._remember(key)

    def _remember(self, key: bytes) -> None:
        if len(self._known) >= self._most:
            self._known.clear()
        self._known.add(key)
