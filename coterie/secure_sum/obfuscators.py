"""Obfuscators, the random factors by which a contributor encrypts; tables, built once per key, make them cheap.

The tables take some seconds and about 40 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators, PublicKey, SecretKey

__all__ = ["OBFUSCATORS", "Way", "holder_obfuscators", "obfuscators"]

Way = Literal["public", "short"]
"""Ways to draw obfuscators without the secret key."""

OBFUSCATORS: tuple[Way, ...] = ("public", "short")


def obfuscators(public: PublicKey, way: Way = "public") -> Obfuscators:
    """Build a source of obfuscators for a public key, mode B or C; takes seconds at 3,072 bits: call it in a thread.

    Raises
    ------
    ConfigError
        When there is no such way.
    """
    from coterie.crypto.paillier import Mode, PublicObfuscators

    modes = {"public": Mode.PUBLIC, "short": Mode.SHORT}
    if way not in modes:
        raise ConfigError(f"no obfuscators {way!r}; there are {', '.join(modes)}")
    return PublicObfuscators(public, modes[way])


def holder_obfuscators(secret: SecretKey) -> Obfuscators:
    """Build a source of obfuscators from the secret key, mode A; takes seconds at 3,072 bits: call it in a thread."""
    from coterie.crypto.paillier import HolderObfuscators

    return HolderObfuscators(secret)
