"""The rounds-based systems and the secure sums, by name: a new paper is entered here and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verified import Verified
from coterie.data.attributes import AttributeTable
from coterie.errors import ConfigError
from coterie.rounds.sides import HostSide, Keep, OwnerSide, ServerSide
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import MemberHalf, ServerHalf
from coterie.systems.fcf.host import FcfHost, FcfPlan
from coterie.systems.fedmf import mathematics as fedmf
from coterie.systems.fedmf.host import FedMfHost
from coterie.systems.fedmf.server import FedMfPlan, FedMfServer
from coterie.systems.fedmvmf.owner import MvmfOwner
from coterie.systems.fedncf.mathematics import Private, initial_private
from coterie.systems.fedncf.sides import FedNcfHost, FedNcfPlan, FedNcfServer
from coterie.systems.shared import factors as mvmf
from coterie.systems.shared.factor_host import MvmfHost
from coterie.systems.shared.factor_server import MvmfPlan, MvmfServer
from coterie.systems.shared.host_data import HostData

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators
    from coterie.secure_sum.contribution import Layout

__all__ = [
    "KEYED",
    "MEMBERS",
    "SUMS",
    "SYSTEMS",
    "Offered",
    "Signer",
    "asks_owners",
    "fewest_users",
    "host_side",
    "member_half",
    "owner_side",
    "ratings_of",
    "server_half",
    "server_side",
]


@dataclass(frozen=True)
class Offered:
    """A rounds-based system.

    Parameters
    ----------
    server : callable
        ``(settings, items, seed, groups) -> ServerSide``; raises ConfigError on settings that are not its own.
    host : callable
        ``(settings, data, keys, seed, keep) -> HostSide``; see `host_side`.
    sums : tuple of str
        The secure sums under which it can run.
    owner : callable, optional
        ``(settings, items, features, seed) -> OwnerSide``; of systems that ask data owners in each round of training,
        whose server side is then a `ToldServerSide`.  See `owner_side`.
    ratings : callable, optional
        ``(settings) -> (lowest, highest)``; of systems that predict ratings.
    fewest : callable, optional
        ``(settings) -> int``; users below which a sum of training may be solved for what is behind it, where that is
        known.  See `fewest_users`.
    """

    server: Callable[[str, int, int, int], ServerSide]
    host: Callable[[str, HostData, NDArray[np.uint64], int, Keep], HostSide]
    sums: tuple[str, ...]
    owner: Callable[[str, NDArray[np.integer], AttributeTable, int], OwnerSide] | None = None
    ratings: Callable[[str], tuple[float, float]] | None = None
    fewest: Callable[[str], int] | None = None


@dataclass(frozen=True)
class Signer:
    """Who signs for a member of a sum, and what it checks others by.

    Parameters
    ----------
    identity : Identity
    bundle : Bundle
        Its public keys, countersigned by the directory.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    now : int
        Unix seconds.
    verified : Verified
        Memory of signatures, shared by the members of one host.
    obfuscators : Obfuscators, optional
        Of the key that it accepts: what it encrypts with.  An encrypted sum needs them.
    layout : Layout, optional
        Of the contribution.  A sparse sum needs it.
    """

    identity: Identity
    bundle: Bundle
    directory_key: bytes
    now: int
    verified: Verified
    obfuscators: Obfuscators | None = None
    layout: Layout | None = None


def _fedncf(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return FedNcfServer(FedNcfPlan.from_json(settings), n_items, seed, groups)


def _fedncf_host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = FedNcfPlan.from_json(settings)
    private = Private(**keep(dict(initial_private(plan.learning, keys).arrays())))
    return FedNcfHost(plan, data.leave_one_out(seed), keys, private, seed)


def _fedmvmf(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return MvmfServer(MvmfPlan.from_json(settings), n_items, seed, groups)


def _fedmvmf_host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = MvmfPlan.from_json(settings)
    private = keep({"factors": mvmf.initial_factors(plan.learning, keys)})
    return MvmfHost(plan, data, keys, private, seed)


def _fedmvmf_owner(
    settings: str, items: NDArray[np.integer], features: AttributeTable, seed: int
) -> OwnerSide:
    return MvmfOwner(MvmfPlan.from_json(settings), items, features, seed)


def _fedmvmf_ratings(settings: str) -> tuple[float, float]:
    learning = MvmfPlan.from_json(settings).learning
    return learning.lowest, learning.highest


def _fedmvmf_fewest(settings: str) -> int:
    return mvmf.fewest_users(MvmfPlan.from_json(settings).learning)


def _fedmf(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return FedMfServer(FedMfPlan.from_json(settings), n_items, seed, groups)


def _fedmf_host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = FedMfPlan.from_json(settings)
    private = keep({"factors": fedmf.initial_factors(plan.learning, keys)})
    return FedMfHost(plan, data, keys, private, seed)


def _fedmf_ratings(settings: str) -> tuple[float, float]:
    learning = FedMfPlan.from_json(settings).learning
    return learning.lowest, learning.highest


def _fedmf_fewest(settings: str) -> int:
    return mvmf.fewest_users(fedmf.shared(FedMfPlan.from_json(settings).learning))


def _fcf(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return MvmfServer(FcfPlan.from_json(settings).mvmf(), n_items, seed, groups)


def _fcf_host(settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep) -> HostSide:
    plan = FcfPlan.from_json(settings)
    private = keep({"factors": mvmf.initial_factors(plan.learning.mvmf(), keys)})
    return FcfHost(plan, data, keys, private, seed)


def _fcf_fewest(settings: str) -> int:
    return mvmf.fewest_users(FcfPlan.from_json(settings).learning.mvmf())


SYSTEMS: dict[str, Offered] = {
    "fedncf": Offered(_fedncf, _fedncf_host, ("clear", "masked", "encrypted", "shared-key")),
    "fedmvmf": Offered(
        _fedmvmf,
        _fedmvmf_host,
        ("clear", "masked", "encrypted"),
        _fedmvmf_owner,
        _fedmvmf_ratings,
        _fedmvmf_fewest,
    ),
    "fedmf": Offered(
        _fedmf,
        _fedmf_host,
        ("clear", "masked", "encrypted", "shared-key"),
        ratings=_fedmf_ratings,
        fewest=_fedmf_fewest,
    ),
    "fcf": Offered(_fcf, _fcf_host, ("clear", "masked", "encrypted", "shared-key"), fewest=_fcf_fewest),
}

SUMS: dict[str, Callable[[bytes | None], ServerHalf]] = {
    "clear": lambda _directory_key: ClearServer(),
    "masked": lambda directory_key: MaskedServer(directory_key=directory_key),
    "encrypted": lambda _directory_key: _encrypted_server("encrypted", "EncryptedServer"),
    "shared-key": lambda _directory_key: _encrypted_server("shared_key", "SharedKeyServer"),
}

KEYED = ("encrypted", "shared-key")
"""The sums under a key that some hold: decrypting clients, or participants."""

MEMBERS: dict[str, Callable[[SumPlan, int, Signer], MemberHalf]] = {
    "clear": lambda _plan, _index, _signer: ClearMember(),
    "masked": lambda plan, index, signer: MaskedMember(
        plan,
        index,
        signer.identity,
        signer.bundle,
        signer.directory_key,
        signer.now,
        signer.verified,
    ),
    **dict.fromkeys(KEYED, lambda plan, index, signer: _encrypted_member(plan, index, signer)),
}


def _encrypted_server(module: str, name: str) -> ServerHalf:
    half: ServerHalf = getattr(_paillier(module), name)()
    return half


def _encrypted_member(plan: SumPlan, index: int, signer: Signer) -> MemberHalf:
    if signer.obfuscators is None:
        raise ConfigError("a member of an encrypted sum was given no key to encrypt with")
    half: MemberHalf = _paillier("encrypted").EncryptedMember(
        plan, index, signer.identity, signer.obfuscators, signer.layout
    )
    return half


def _paillier(module: str) -> ModuleType:
    """Return a module of ``coterie.secure_sum`` that nobody needs who has no sum under a key."""
    try:
        return importlib.import_module(f"coterie.secure_sum.{module}")
    except ImportError as error:
        raise ConfigError(
            "sums under a key (secure_sum 'encrypted' and 'shared-key') need gmpy2",
            hint="install it with: pip install 'coterie[paillier]'",
        ) from error


def _offered(system: str) -> Offered:
    offered = SYSTEMS.get(system)
    if offered is None:
        raise ConfigError(f"no rounds-based system {system!r}", hint=f"there are: {', '.join(SYSTEMS)}")
    return offered


def server_side(system: str, settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    """Return the server's side of a system.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    """
    return _offered(system).server(settings, n_items, seed, groups)


def host_side(
    system: str, settings: str, data: HostData, keys: NDArray[np.uint64], seed: int, keep: Keep
) -> HostSide:
    """Return a host's side of a system.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    data : HostData
        What the users have.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    keep : callable
        Takes up the users' private arrays where they were left.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    ValueError
        When the data does not fit the system.
    """
    return _offered(system).host(settings, data, keys, seed, keep)


def asks_owners(system: str) -> bool:
    """Whether a system asks data owners for something in each round of training."""
    return system in SYSTEMS and SYSTEMS[system].owner is not None


def ratings_of(system: str, settings: str) -> tuple[float, float] | None:
    """Return the lowest and the highest rating that a system learns from; None where it learns from none.

    Raises
    ------
    ConfigError
        When the settings are not the system's own.
    """
    offered = SYSTEMS.get(system)
    return None if offered is None or offered.ratings is None else offered.ratings(settings)


def fewest_users(system: str, settings: str) -> int:
    """Return the fewest users whose sum of training those who hold its key decrypt: 1 where a system names no number.

    Raises
    ------
    ConfigError
        When the settings are not the system's own.
    """
    offered = SYSTEMS.get(system)
    return 1 if offered is None or offered.fewest is None else offered.fewest(settings)


def owner_side(
    system: str, settings: str, items: NDArray[np.integer], features: AttributeTable, seed: int
) -> OwnerSide:
    """Return a data owner's side of a system.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    items : ndarray of int, shape (n,)
        The owner's items, by position in the catalogue.
    features : AttributeTable
        What the owner knows of them, a row for each.

    Raises
    ------
    ConfigError
        When there is no such system, it asks owners for nothing, or the settings are not its own.
    """
    make = _offered(system).owner
    if make is None:
        raise ConfigError(f"system {system!r} asks data owners for nothing")
    return make(settings, items, features, seed)


def server_half(secure_sum: str, directory_key: bytes | None = None) -> ServerHalf:
    """Return the server's half of a secure sum.

    Parameters
    ----------
    secure_sum : str
        Its name.
    directory_key : bytes, optional
        The directory's public key: a member whose keys it has not countersigned is refused by the server, too.

    Raises
    ------
    ConfigError
        When there is no such sum.
    """
    make = SUMS.get(secure_sum)
    if make is None:
        raise ConfigError(f"no secure sum {secure_sum!r}", hint=f"there are: {', '.join(SUMS)}")
    return make(directory_key)


def member_half(plan: SumPlan, index: int, signer: Signer) -> MemberHalf:
    """Return a member's half of the secure sum of a plan, with fresh secrets.

    Raises
    ------
    ConfigError
        When there is no such sum.
    """
    make = MEMBERS.get(plan.secure_sum)
    if make is None:
        raise ConfigError(f"no secure sum {plan.secure_sum!r}", hint=f"there are: {', '.join(MEMBERS)}")
    return make(plan, index, signer)
