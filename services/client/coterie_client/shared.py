"""Build the key holder's part of a client host that holds the run's key with others.

Such a host encrypts as a holder, and opens and makes versions of the model.  Needs ``gmpy2``; imported only where a
host holds the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from coterie.config.services import ClientSettings
from coterie.crypto.identity import Bundle
from coterie.errors import ConfigError
from coterie.net.channel import Channel
from coterie.net.enrolment import HOLDER, identities
from coterie.parties.decryption import Bundles, MakeHalf
from coterie.parties.key_holding import KeyHolding
from coterie.parties.party import Party
from coterie.parties.shared_model import SharedModels
from coterie.process.key_trust import key_trust
from coterie.process.runtime import Runtime
from coterie.secure_sum.shared_key import SharedKeyHolder
from coterie.store.engine import Keeping
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["key_holding"]


def key_holding(
    settings: ClientSettings,
    runtime: Runtime,
    party: Party,
    thirdparty: Channel,
    bundle: Bundle,
    bundles: Bundles,
    revoked: Callable[[], Collection[bytes]],
    keeping: Keeping,
) -> KeyHolding:
    """Build a host's part as a holder of the key.

    Parameters
    ----------
    settings : ClientSettings
    runtime : Runtime
    party : Party
        The holder's own party, apart from the users'.
    thirdparty : Channel
    bundle : Bundle
        The holder's keys, countersigned.
    bundles : callable
        Gives verified bundles of participants.
    revoked : callable
        Gives the ids of all revoked participants.
    keeping : callable
        Writes files beside the host's store; on a full volume it waits for room.

    Raises
    ------
    ConfigError
        The host's configuration has no ``[encryption]``.
    """
    encryption = settings.encryption
    if encryption is None:
        raise ConfigError("a host that holds no key", hint="encryption.holds_key")
    (identity,) = identities(settings.state / HOLDER, 1)
    # Old keys are kept: the version that is served may be sealed under one.
    holding = KeyHolding(
        party,
        thirdparty,
        identity,
        bundle,
        key_trust(settings.run, encryption, revoked),
        bundles,
        settings.operators,
        settings.consent.consent(1),
        settings.state / HOLDER,
        runtime.accounting.process_activity,
        rotate_every=encryption.rotate_every,
        keeps=True,
        half=lambda plan: _half(plan, holding),
        keeping=keeping,
    )
    return holding


def _half(plan: RunPlan, holding: KeyHolding) -> MakeHalf:
    return partial(SharedKeyHolder, apply=SharedModels(plan, holding.custody.secrets).applied)
