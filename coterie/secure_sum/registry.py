"""The registry of secure sums: gives each name's server half and member half.  Enter a new cryptosystem here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.verified import Verified
from coterie.errors import ConfigError
from coterie.secure_sum.aggregation import ADDED, Aggregation, check_aggregation
from coterie.secure_sum.chains import Chains
from coterie.secure_sum.clear import ClearMember, ClearServer
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.denoised import DenoisedMember, DenoisedServer
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import MemberHalf, ServerHalf
from coterie.secure_sum.robust import RobustServer

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators
    from coterie.secure_sum.encrypted import EncryptedServer, Keyring

__all__ = [
    "GIVES",
    "KEYED",
    "MEMBERS",
    "NEEDS",
    "SUMS",
    "Signer",
    "keyring_of",
    "member_half",
    "server_half",
    "taking_half",
]


@dataclass(frozen=True)
class Signer:
    """The keys with which a member of a sum signs, encrypts, and checks other members.

    Parameters
    ----------
    identity : Identity
    bundle : Bundle
        The identity's public keys, countersigned by the directory.
    directory_key : bytes
        Raw Ed25519 public key of the directory, 32 bytes.
    now : int
        Unix seconds.
    verified : Verified
        Signatures checked so far, shared by the members of one host.
    obfuscators : Obfuscators, optional
        Source of obfuscators for the key that the member accepts.  An encrypted sum needs it.
    layout : Layout, optional
        Layout of the contribution.  A sparse and a denoised sum need it.
    revoked : collection of bytes
        Participants that are revoked, as the member knew when it accepted the plan.
    bundles : mapping of bytes to Bundle
        Verified keys of others by participant.  A denoised sum needs those of the plan's denoisers.
    chains : Chains, optional
        Chains of the members of this host, of a masked run whose plan has them.
    """

    identity: Identity
    bundle: Bundle
    directory_key: bytes
    now: int
    verified: Verified
    obfuscators: Obfuscators | None = None
    layout: Layout | None = None
    revoked: Collection[bytes] = frozenset()
    bundles: Mapping[bytes, Bundle] = field(default_factory=dict)
    chains: Chains | None = None


SUMS: dict[str, Callable[[bytes | None], ServerHalf]] = {
    "clear": lambda _directory_key: ClearServer(),
    "denoised": lambda _directory_key: DenoisedServer(),
    "masked": lambda directory_key: MaskedServer(directory_key=directory_key),
    "encrypted": lambda _directory_key: _KEYED["encrypted"]()(),
    "shared-key": lambda _directory_key: _KEYED["shared-key"]()(),
}

_KEYED: dict[str, Callable[[], type[EncryptedServer]]] = {
    "encrypted": lambda: _paillier("encrypted").EncryptedServer,
    "shared-key": lambda: _paillier("shared_key").SharedKeyServer,
}
"""Class of the server's half of each sum under a key, imported when it is asked for."""

GIVES: dict[str, str] = {
    "clear": "the server sees the contribution of each party; a host adds up its users before",
    "denoised": "as in clear, but noise that parties add is taken out of the sum by denoisers on other hosts; the "
    "server and one denoiser together tell a party's noise from the rest",
    "masked": "the server sees sums over whole cohorts, and no contribution of a single party",
    "encrypted": "the same, by those who hold the key: the server and one of them together see everything",
    "shared-key": "participants hold the key: the server sees sums of metrics and neither contributions nor the model; "
    "it and one participant together see everything",
}
"""Protection that each secure sum gives contributions, in words."""

NEEDS: dict[str, str] = {
    "denoised": "its users add no noise to their contributions, which denoisers could take out",
}
"""Reason why a system that is not entered for a secure sum does not run under it, where the sum needs something."""

KEYED = ("encrypted", "shared-key")
"""Secure sums under a Paillier key, held by decrypting clients or by participants."""

MEMBERS: dict[str, Callable[[SumPlan, int, Signer], MemberHalf]] = {
    "clear": lambda _plan, _index, _signer: ClearMember(),
    "denoised": lambda plan, index, signer: _denoised_member(plan, index, signer),
    "masked": lambda plan, index, signer: MaskedMember(
        plan,
        index,
        signer.identity,
        signer.bundle,
        signer.directory_key,
        signer.now,
        signer.verified,
        revoked=signer.revoked,
        chains=signer.chains,
    ),
    **dict.fromkeys(KEYED, lambda plan, index, signer: _encrypted_member(plan, index, signer)),
}


def _denoised_member(plan: SumPlan, index: int, signer: Signer) -> MemberHalf:
    if signer.layout is None:
        raise ConfigError("a member of a denoised sum was given no layout of its contribution")
    return DenoisedMember(plan, index, signer.identity, signer.layout, signer.bundles)


def _encrypted_member(plan: SumPlan, index: int, signer: Signer) -> MemberHalf:
    if signer.obfuscators is None:
        raise ConfigError("a member of an encrypted sum was given no key to encrypt with")
    half: MemberHalf = _paillier("encrypted").EncryptedMember(
        plan, index, signer.identity, signer.obfuscators, signer.layout
    )
    return half


def _paillier(module: str) -> ModuleType:
    """Import a module of ``coterie.secure_sum`` that only sums under a key need."""
    try:
        return importlib.import_module(f"coterie.secure_sum.{module}")
    except ImportError as error:
        raise ConfigError(
            "sums under a key (secure_sum 'encrypted' and 'shared-key') need gmpy2",
            hint="install it with: pip install 'coterie[paillier]'",
        ) from error


def server_half(
    secure_sum: str, directory_key: bytes | None = None, aggregation: Aggregation = ADDED
) -> ServerHalf:
    """Return the server's half of a secure sum.

    Parameters
    ----------
    secure_sum : str
        Its name.
    directory_key : bytes, optional
        The directory's public key: with it, the server too refuses members whose keys are not countersigned.
    aggregation : Aggregation, optional
        Terms on which contributions to training become one sum.

    Raises
    ------
    ConfigError
        When there is no such sum, or it cannot meet the terms.
    """
    make = SUMS.get(secure_sum)
    if make is None:
        raise ConfigError(f"no secure sum {secure_sum!r}", hint=f"there are: {', '.join(SUMS)}")
    check_aggregation(aggregation, secure_sum)
    return make(directory_key) if aggregation.adds else RobustServer(aggregation)


def taking_half(secure_sum: str, terms: bytes) -> ServerHalf:
    """Return a server's half that takes contributions for the half of another process.

    Parameters
    ----------
    secure_sum : str
        Its name.
    terms : bytes
        What the other half says of the sum (`ServerHalf.terms`).

    Raises
    ------
    ConfigError
        When there is no such sum, or gmpy2 is missing.
    CryptoError
        When the terms are none of this sum.
    """
    if secure_sum in KEYED:
        half: ServerHalf = _KEYED[secure_sum]().of_terms(terms)
        return half
    if terms:
        return RobustServer.of_terms(terms)
    # Keys of members were checked by the coordinator before the step was closed.
    return server_half(secure_sum)


def keyring_of(half: ServerHalf) -> Keyring:
    """Return the keyring of a sum under a key; the service updates the keyring as keys change.

    Raises
    ------
    ConfigError
        When the sum is under no key.
    """
    found: Keyring | None = getattr(half, "keys", None)
    if found is None:
        raise ConfigError(f"the secure sum {half.name!r} is under no key")
    return found


def member_half(plan: SumPlan, index: int, signer: Signer) -> MemberHalf:
    """Return a member's half of a plan's secure sum, with fresh secrets.

    Raises
    ------
    ConfigError
        When there is no such sum.
    """
    make = MEMBERS.get(plan.secure_sum)
    if make is None:
        raise ConfigError(f"no secure sum {plan.secure_sum!r}", hint=f"there are: {', '.join(MEMBERS)}")
    return make(plan, index, signer)
