"""The rounds-based systems and the secure sums, by name: a new paper is entered here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verified import Verified
from coterie.errors import ConfigError
from coterie.evaluation.leave_one_out import LeaveOneOut
from coterie.learning.fedncf import Private, initial_private
from coterie.rounds.fedncf import FedNcfHost, FedNcfPlan, FedNcfServer
from coterie.rounds.system import HostSide, Keep, ServerSide
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import MemberHalf, ServerHalf

__all__ = [
    "MEMBERS",
    "SUMS",
    "SYSTEMS",
    "Offered",
    "Signer",
    "host_side",
    "member_half",
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
        ``(settings, holdout, keys, seed, keep) -> HostSide``; see `host_side`.
    sums : tuple of str
        The secure sums under which it can run.
    """

    server: Callable[[str, int, int, int], ServerSide]
    host: Callable[[str, LeaveOneOut, NDArray[np.uint64], int, Keep], HostSide]
    sums: tuple[str, ...]


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
    """

    identity: Identity
    bundle: Bundle
    directory_key: bytes
    now: int
    verified: Verified


def _fedncf(settings: str, n_items: int, seed: int, groups: int) -> ServerSide:
    return FedNcfServer(FedNcfPlan.from_json(settings), n_items, seed, groups)


def _fedncf_host(
    settings: str, holdout: LeaveOneOut, keys: NDArray[np.uint64], seed: int, keep: Keep
) -> HostSide:
    plan = FedNcfPlan.from_json(settings)
    private = Private(**keep(dict(initial_private(plan.learning, keys).arrays())))
    return FedNcfHost(plan, holdout, keys, private, seed)


SYSTEMS: dict[str, Offered] = {"fedncf": Offered(_fedncf, _fedncf_host, ("clear", "masked"))}

SUMS: dict[str, Callable[[bytes | None], ServerHalf]] = {
    "clear": lambda _directory_key: ClearServer(),
    "masked": lambda directory_key: MaskedServer(directory_key=directory_key),
}


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
}


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
    system: str, settings: str, holdout: LeaveOneOut, keys: NDArray[np.uint64], seed: int, keep: Keep
) -> HostSide:
    """Return a host's side of a system.

    Parameters
    ----------
    system, settings, seed
        As in the plan of the run.
    holdout : LeaveOneOut
        The users' interactions, by position at this host and item of the catalogue.
    keys : ndarray of uint64, shape (users,)
        Each user's own number, which nobody else knows.
    keep : callable
        Takes up the users' private arrays where they were left.

    Raises
    ------
    ConfigError
        When there is no such system, or the settings are not its own.
    """
    return _offered(system).host(settings, holdout, keys, seed, keep)


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
