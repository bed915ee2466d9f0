"""Reads the roster and terms by which a service checks the key of sums, from the service's configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection

from coterie.config.services import KeySettings
from coterie.crypto.roster import Roster, load_roster_key
from coterie.parties.public_keys import Trust

__all__ = ["key_trust"]


def key_trust(run: str, settings: KeySettings, revoked: Callable[[], Collection[bytes]]) -> Trust:
    """Return the trust by which a party checks a run's Paillier keys.

    Parameters
    ----------
    run : str
        The run.
    settings : KeySettings
    revoked : callable
        Gives the ids of all revoked participants, as known now.

    Raises
    ------
    CertificateError
        When the roster or the operator's key cannot be read.
    """
    roster, roster_key = Roster.load(settings.roster), load_roster_key(settings.roster_key)
    return Trust(run, roster, roster_key, settings.terms, revoked)
