"""Creation of a federation's certificate authority and of its parties' one-time tokens, by the operator."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from coterie.crypto.authority import new_token
from coterie.crypto.keyfile import write_private_file
from coterie.errors import CertificateError
from coterie.store.authority import create_secrets, secrets_exist
from coterie.store.tokens import append_token

__all__ = ["TOKENS", "held_operator_keys", "keep_operator_keys", "make_authority", "make_token"]

TOKENS = "tokens.jsonl"
"""Name of the token file in the third party's state folder."""

_OPERATOR_KEYS = "operator_keys"
"""Name of the file in that folder with the public keys of operators that invitations name, one a line."""


def keep_operator_keys(state: Path, keys: Sequence[str]) -> None:
    """Keep the public keys of operators, which `coterie certs invite` puts into invitations.

    The third party itself reads them nowhere.
    """
    write_private_file(state / _OPERATOR_KEYS, "".join(f"{key}\n" for key in keys).encode())


def held_operator_keys(state: Path) -> list[str]:
    """Return the operators' public keys that `keep_operator_keys` wrote; empty when it wrote none."""
    path = state / _OPERATOR_KEYS
    return path.read_text().split() if path.exists() else []


def make_authority(state: Path) -> None:
    """Create a federation's certificate authority in a state folder, unless the folder already holds one."""
    if not secrets_exist(state):
        create_secrets(state)


def make_token(
    state: Path, role: str, name: str, participants: int, out: Path, *, hours: float = 24.0
) -> None:
    """Draw a party's one-time token, record its hash, and write the token to a file of mode 0600.

    Parameters
    ----------
    state : Path
        State folder of the third party.
    role, name : str
        The party that the token enrols.
    participants : int
        For how many participants the holder may publish bundles.
    out : Path
        File of the token; an existing file is replaced.
    hours : float
        Validity, hours.

    Raises
    ------
    CertificateError
        The role or name is not valid, or a file cannot be written.
    """
    secret, record = new_token(role, name, int(time.time() + hours * 3600), participants)
    append_token(state / TOKENS, record)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.unlink(missing_ok=True)
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secret + "\n")
    except OSError as error:
        raise CertificateError(f"cannot write the token to {out}: {error.strerror}") from error
