"""Keys of operators, who sign the plans of runs: parties take part in no run whose plan carries no such signature.

An operator's key is an Ed25519 key of its own, kept where runs are started.  Its public half is in the configuration of
every party, in a file of one or more PEM blocks: during a change of keys, or with two operators, a party accepts each.
Assumption: Ed25519 signatures cannot be forged under chosen messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from coterie.crypto.explicit import encode
from coterie.crypto.identity import check_signature
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CertificateError

__all__ = ["OperatorKeys", "save_operator_keys", "sign_run"]

_SIGNED = "run"
_END = "-----END PUBLIC KEY-----"


def sign_run(key: Ed25519PrivateKey, run_id: str, plan_sha256: bytes) -> bytes:
    """Sign a run's plan, given by its hash (`coterie.rounds.plan_hash.signed_hash`); return 64 bytes."""
    return key.sign(encode(_SIGNED, run_id, plan_sha256))


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
    def load(cls, path: Path) -> Self:
        """Read a file of one or more Ed25519 public keys in PEM.

        Raises
        ------
        CertificateError
            The file cannot be read, or holds anything else.
        """
        try:
            text = path.read_text(encoding="ascii")
        except OSError as error:
            raise CertificateError(
                f"cannot read the operators' public keys, {path}: {error.strerror}",
                hint="the operator gives the file `operator.pub` to every party",
            ) from error
        except UnicodeDecodeError:
            raise CertificateError(f"{path} holds no public keys: it is no text") from None
        blocks = [f"{part}{_END}\n" for part in text.split(_END)[:-1]]
        found = []
        for block in blocks:
            try:
                key = load_pem_public_key(block.strip().encode("ascii"))
            except ValueError:
                key = None
            if not isinstance(key, Ed25519PublicKey):
                raise CertificateError(f"{path} holds a block that is no Ed25519 public key in PEM")
            found.append(key.public_bytes_raw())
        if not found:
            raise CertificateError(f"{path} holds no Ed25519 public key in PEM")
        return cls(tuple(found))

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
            hint="compare `operator_keys` with the operator's operator.pub",
        )


def save_operator_keys(path: Path, keys: Iterable[bytes]) -> None:
    """Write operators' raw Ed25519 public keys as PEM blocks, mode 0644.

    Raises
    ------
    CertificateError
        The file cannot be written.
    """
    blocks = [
        Ed25519PublicKey.from_public_bytes(key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for key in keys
    ]
    try:
        path.write_bytes(b"".join(blocks))
        path.chmod(0o644)
    except OSError as error:
        raise CertificateError(f"cannot write {path}: {error.strerror}") from error
