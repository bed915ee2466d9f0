"""What a service relies on about the key of sums, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection

from coterie.config.services import KeySettings
from coterie.crypto.roster import Roster, load_roster_key
from coterie.parties.public_keys import Trust

__all__ = ["key_trust"]


def key_trust(run: str, settings: KeySettings, revoked: Callable[[], Collection[bytes]]) -> Trust:
    """Return what a party relies on.

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
        The roster or the operator's key cannot be read.
    """
    roster, roster_key = Roster.load(settings.roster), load_roster_key(settings.roster_key)
    return Trust(run, roster, roster_key, settings.terms, revoked)
