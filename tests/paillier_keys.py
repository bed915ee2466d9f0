"""Paillier keys for tests: as short as a comparison with a paper allows, made once for each process that asks."""

from functools import cache

from coterie.crypto.paillier import (
    HolderObfuscators,
    Mode,
    Obfuscators,
    PublicObfuscators,
    SecretKey,
    generate,
)

BITS = 1024
SET_PUBLIC = bytes(range(32))


def key(name: str = "one", *, subgroup: bool = False) -> SecretKey:
    """Return the key of a name."""
    return _key(name, subgroup)


def obfuscators(
    mode: Mode, name: str = "one", *, subgroup: bool | None = None, holder: bool = False
) -> Obfuscators:
    """Return what draws in a mode for the key of a name, a subgroup key where the mode needs one."""
    needed = mode is Mode.SUBGROUP if subgroup is None else subgroup
    return _obfuscators(mode, name, needed, holder or mode is Mode.KEY_HOLDER)


@cache
def _key(name: str, subgroup: bool) -> SecretKey:
    return generate(name, SET_PUBLIC, bits=BITS, subgroup=subgroup, comparison=True)


@cache
def _obfuscators(mode: Mode, name: str, subgroup: bool, holder: bool) -> Obfuscators:
    secret = _key(name, subgroup)
    return HolderObfuscators(secret, mode) if holder else PublicObfuscators(secret.public, mode)
