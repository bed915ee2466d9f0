"""Files of the third party's secrets: the certificate authority, the directory's signing key, and the log's."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.authority import Authority
from coterie.crypto.identity import load_signing_key, save_signing_key
from coterie.errors import CertificateError

__all__ = [
    "AUTHORITY_DAYS",
    "DirectorySecrets",
    "create_secrets",
    "load_secrets",
    "log_key",
    "secrets_exist",
]

AUTHORITY_DAYS = 3650
"""Validity of a new authority, days; no certificate of the federation outlives it."""

_SIGNING_KEY = "directory-signing.key"
_LOG_KEY = "log-signing.key"


class DirectorySecrets(NamedTuple):
    """The secret keys of a third party."""

    authority: Authority
    """Signs the certificates of all parties."""
    signing_key: Ed25519PrivateKey
    """Countersigns the bundles of all participants."""

    @property
    def directory_key(self) -> bytes:
        """Public half of the signing key, 32 bytes, with which every party verifies bundles."""
        return self.signing_key.public_key().public_bytes_raw()


def secrets_exist(state: Path) -> bool:
    """Return whether a state folder holds an authority."""
    return (state / "ca.pem").is_file()


def create_secrets(state: Path, name: str = "Coterie authority") -> DirectorySecrets:
    """Make a new authority and a signing key, and write them: ``ca.pem``, and two files of mode 0600.

    Parameters
    ----------
    state : Path
        State folder of the third party; made when absent.
    name : str
        Common name of the authority, for people.

    Raises
    ------
    CertificateError
        There is an authority already, or the files cannot be written.
    """
    if secrets_exist(state):
        raise CertificateError(
            f"{state} holds an authority already",
            hint="every certificate of its federation depends on it; a new federation takes a new folder",
        )
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise CertificateError(f"cannot make the state folder {state}: {error.strerror}") from error
    secrets = DirectorySecrets(Authority.create(name, AUTHORITY_DAYS), Ed25519PrivateKey.generate())
    # The authority's certificate comes last: where it is, everything is.
    save_signing_key(state / _SIGNING_KEY, secrets.signing_key)
    secrets.authority.save(state)
    return secrets


def load_secrets(state: Path) -> DirectorySecrets:
    """Read the files that `create_secrets` wrote.

    Raises
    ------
    CertificateError
        A file is missing, damaged, or readable by others.
    """
    return DirectorySecrets(Authority.load(state), load_signing_key(state / _SIGNING_KEY))


def log_key(state: Path) -> Ed25519PrivateKey:
    """Return the key that signs heads of the transparency log; make it at the first start.

    The directory's key certifies it, so that a new one is as good as the one before.

    Raises
    ------
    CertificateError
        The file is damaged, readable by others, or cannot be written.
    """
    path = state / _LOG_KEY
    if not path.exists():
        save_signing_key(path, Ed25519PrivateKey.generate())
    return load_signing_key(path)
