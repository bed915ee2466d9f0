"""A file with names and hashed passwords of people who may open a page from other machines.

One line each, ``name:scrypt:N:r:p:salt:hash`` with salt and hash in base64; empty lines and lines that begin with ``#``
are passed over.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError

__all__ = ["PasswordFile", "password_line", "save_password"]

_LEAST = 12
_COST, _BLOCK, _LANES, _BYTES = 1 << 15, 8, 1, 32
_MOST_MEMORY = 64 << 20
_OTHERS = 0o077


@dataclass(frozen=True)
class _Hashed:
    cost: int
    block: int
    lanes: int
    salt: bytes
    expected: bytes

    def matches(self, password: str) -> bool:
        return hmac.compare_digest(
            _scrypt(password, self.salt, self.cost, self.block, self.lanes), self.expected
        )


def _scrypt(password: str, salt: bytes, cost: int, block: int, lanes: int) -> bytes:
    given = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(given, salt=salt, n=cost, r=block, p=lanes, maxmem=_MOST_MEMORY, dklen=_BYTES)


def password_line(name: str, password: str) -> str:
    """Return the line of a password file for a name and its password.

    Raises
    ------
    ConfigError
        The name is empty or has a colon or space, or the password is shorter than 12 characters.
    """
    if not name or ":" in name or name.startswith("#") or not name.isprintable() or " " in name:
        raise ConfigError(f"{name!r} cannot be a name in a password file", hint="letters and digits would do")
    if len(password) < _LEAST:
        raise ConfigError(f"the password has {len(password)} characters, expected at least {_LEAST}")
    salt = secrets.token_bytes(16)
    made = _scrypt(password, salt, _COST, _BLOCK, _LANES)
    salted, hashed = (base64.b64encode(one).decode() for one in (salt, made))
    return f"{name}:scrypt:{_COST}:{_BLOCK}:{_LANES}:{salted}:{hashed}"


def save_password(path: Path, name: str, password: str) -> None:
    """Set the password of a name in a file, which is made or replaced as a whole, for its owner alone.

    Raises
    ------
    ConfigError
        As for `password_line`; or the file cannot be read or written.
    """
    line = password_line(name, password)
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [one for one in lines if one.partition(":")[0] != name]
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write("\n".join([*kept, line]) + "\n")
        beside.replace(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the password file {path}: {error}") from error


class PasswordFile:
    """Names and hashed passwords, read once from a file.

    Parameters
    ----------
    path : Path

    Raises
    ------
    ConfigError
        The file cannot be read, others than its owner may read it, it has no line, or a line is malformed.
    """

    def __init__(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode & 0o777
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the password file {path}: {error}", hint=_HOW) from error
        if os.name == "posix" and mode & _OTHERS:
            raise ConfigError(
                f"others may read the password file {path} (mode {mode:o})", hint=f"chmod 600 {path}"
            )
        self._hashed: dict[str, _Hashed] = {}
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.startswith("#"):
                name, hashed = _parsed(line.strip(), f"{path}, line {number}")
                self._hashed[name] = hashed
        if not self._hashed:
            raise ConfigError(f"the password file {path} has no line", hint=_HOW)
        # What an unknown name is compared with, so that it takes as long as a known one.
        self._nobody = _parsed(password_line("nobody", secrets.token_urlsafe(16)), "")[1]

    def matches(self, name: str, password: str) -> bool:
        """Return whether a password is that of a name, in a time that says nothing about either."""
        known = self._hashed.get(name)
        return (known or self._nobody).matches(password) and known is not None


_HOW = "`coterie certs password FILE NAME` writes a line"


def _parsed(line: str, where: str) -> tuple[str, _Hashed]:
    expected = "expected name:scrypt:N:r:p:salt:hash"
    try:
        name, kind, cost, block, lanes, salt, hashed = line.split(":")
        found = _Hashed(
            int(cost),
            int(block),
            int(lanes),
            base64.b64decode(salt, validate=True),
            base64.b64decode(hashed, validate=True),
        )
    except (ValueError, binascii.Error):
        raise ConfigError(f"{where}: {expected}", hint=_HOW) from None
    strong = found.cost >= 1 << 14 and found.block >= 8 and found.lanes >= 1
    bounded = 128 * found.cost * found.block < _MOST_MEMORY and found.lanes <= 16
    if (
        kind != "scrypt"
        or not name
        or found.cost & (found.cost - 1)
        or not (strong and bounded)
        or len(found.salt) < 16
        or len(found.expected) != _BYTES
    ):
        raise ConfigError(
            f"{where}: a hash that is too weak, too costly or of another kind; {expected}", hint=_HOW
        )
    return name, found
