"""The versions of the contract between services that this release speaks, and their agreement with a peer's.

Both sides of a connection speak the highest version that they have in common; without one, either side refuses by
name and says which of the two has to be upgraded.  A peer of a release that says nothing speaks version 1.

Version 1
    The contract before versions were exchanged.
Version 2
    Versions and features are exchanged at registration, polls, enrolment and with the list of revocations; a plan may
    name the lowest version that its parties must speak (``RunPlan.oldest_protocol``).  Ciphertexts of encrypted sums
    have pads in the place of tags.  Pieces of a submission travel together, and items of one chunk without a hash
    (``SubmitRequest.more``).  A plan may open its population (``RoundsPlan.most_users``), and members may keep chains
    of keys (``RoundsPlan.channel_rounds``).
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import Protocol

__all__ = [
    "NEWEST",
    "OLDEST",
    "UnsupportedVersionError",
    "agree",
    "agree_on_newest",
    "own",
    "release",
    "release_of",
]

OLDEST, NEWEST = 1, 2
"""Lowest and highest version that this release speaks: at least those of the release before it."""

_UNSAID = 1
"""Version of a peer that names none."""

_LONGEST = 40
"""Length to which the name of a peer's release is cut."""


class UnsupportedVersionError(Refusal):
    """Two processes have no version in common, or one lacks what a run's plan asks for; one has to be upgraded.

    Parameters
    ----------
    message : str
        Names both sides, with what each speaks.
    field : str
        Field of the contract that does not fit.
    expected : str
        What to upgrade.
    """

    exit_code = 51
    code = "version"

    def __init__(self, message: str, *, field: str = "protocol", expected: str) -> None:
        super().__init__(
            ErrorReason.ERROR_REASON_UNSUPPORTED_VERSION, message, field=field, expected=expected
        )


@cache
def release() -> str:
    """Return the version of this package."""
    return metadata.version("coterie")


def own(features: frozenset[str] = frozenset()) -> Protocol:
    """Return what this process says of itself, with the features that it has."""
    return Protocol(oldest=OLDEST, newest=NEWEST, release=release(), features=sorted(features))


def release_of(said: Protocol) -> str:
    """Return the release that a peer names, fit for logs and terminals; empty when it names none."""
    return "".join(letter if letter.isprintable() else "?" for letter in said.release[:_LONGEST])


def agree(peer: str, said: Protocol, *, lowest: int = OLDEST) -> int:
    """Return the highest version that a peer and this process both speak.

    Parameters
    ----------
    peer : str
        Role and name of the peer.
    said : Protocol
        Its versions; an empty message when it named none.
    lowest : int
        Lowest version that is wanted here.

    Raises
    ------
    UnsupportedVersionError
        There is none, or the peer's versions are no range.
    """
    newest = said.newest or _UNSAID
    oldest = said.oldest or min(newest, _UNSAID)
    named = f"{peer} (release {told})" if (told := release_of(said)) else peer
    if oldest > newest:
        raise UnsupportedVersionError(
            f"{named} speaks versions {oldest} to {newest} of the protocol, which is no range",
            expected="an upgrade of " + peer,
        )
    if newest < lowest:
        raise UnsupportedVersionError(
            f"{named} speaks {_range(oldest, newest)} of the protocol, and {_range(lowest, NEWEST)} is asked for",
            expected=f"an upgrade of {peer}, to a release that speaks version {lowest}",
        )
    if oldest > NEWEST:
        raise UnsupportedVersionError(
            f"{named} speaks {_range(oldest, newest)} of the protocol, and release {release()} here speaks "
            f"{_range(OLDEST, NEWEST)}",
            expected=f"an upgrade of the service that {peer} talks to, to a release that speaks version {oldest}",
        )
    return min(newest, NEWEST)


def agree_on_newest(peer: str, newest: int, *, lowest: int = OLDEST) -> int:
    """Return what `agree` returns for a peer that names only the highest version that it speaks; 0 when it names none.

    Raises
    ------
    UnsupportedVersionError
        When this process does not speak so low a version.
    """
    return agree(peer, Protocol(newest=newest, oldest=min(newest, OLDEST)), lowest=lowest)


def _range(oldest: int, newest: int) -> str:
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
