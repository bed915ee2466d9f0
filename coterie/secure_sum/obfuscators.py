"""What a contributor encrypts with, made once for a key: the tables behind it take some seconds and some 40 MB."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators, PublicKey, SecretKey

__all__ = ["OBFUSCATORS", "Way", "holder_obfuscators", "obfuscators"]

Way = Literal["public", "short"]
"""How obfuscators are drawn by who has no secret key."""

OBFUSCATORS: tuple[Way, ...] = ("public", "short")


def obfuscators(public: PublicKey, way: Way = "public") -> Obfuscators:
    """Return what draws obfuscators for a key, mode B or C; takes seconds at 3,072 bits, so call it in a thread.

    Raises
    ------
    ConfigError
        There is no such way.
    """
    from coterie.crypto.paillier import Mode, PublicObfuscators

    modes = {"public": Mode.PUBLIC, "short": Mode.SHORT}
    if way not in modes:
        raise ConfigError(f"no obfuscators {way!r}; there are {', '.join(modes)}")
    return PublicObfuscators(public, modes[way])


def holder_obfuscators(secret: SecretKey) -> Obfuscators:
    """Return what draws obfuscators for who holds the key, mode A; takes seconds at 3,072 bits, as the others."""
    from coterie.crypto.paillier import HolderObfuscators

    return HolderObfuscators(secret)
