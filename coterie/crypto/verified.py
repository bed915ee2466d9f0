"""What is checked or agreed once, however many members of one host need it.

The members of one host are one trust domain, and one process: what one of them has verified, the others may rely on,
and a secret that two of them have in common is in its memory anyway.  Only successes are remembered.  Signatures are
remembered under the SHA-256 of key, signature and message together, everything else under all that it depends on, so a
memory holds no way to another outcome.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from threading import Lock
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Identity, Validity, check_signature
from coterie.crypto.verification import Reason

__all__ = ["HostRound", "Verified", "Waiting"]

_KEY = 32
_SIGNATURE = 64
_MOST = 1 << 17
_MOST_OF_A_ROUND = 1 << 16
_MOST_WAITING = 32 << 20

_Asked = ParamSpec("_Asked")
_Found = TypeVar("_Found")


class Waiting(NamedTuple):
    """Masks of a member that has not submitted, as far as members before it have expanded them.

    Parameters
    ----------
    vector : ndarray of uint32, shape (n,)
        Their sum, with the signs that they have for this member.
    peers : set of bytes
        Ids of the participants with whom they are.
    """

    vector: NDArray[np.uint32]
    peers: set[bytes]


class HostRound:
    """What the members of one host find out once for all of them, in one round.  Safe to share between threads.

    It is gone when the last of them has forgotten it, with whatever it remembers.

    Parameters
    ----------
    most : int
        How many answers, and how many secrets, are remembered; what is beyond is found again each time.
    most_waiting : int
        How many bytes of masks wait for members.
    """

    __slots__ = (
        "__weakref__",
        "_known",
        "_most",
        "_most_waiting",
        "_publics",
        "_secrets",
        "_taken",
        "_waiting",
        "masking",
    )

    def __init__(self, most: int = _MOST_OF_A_ROUND, most_waiting: int = _MOST_WAITING) -> None:
        self._most = most
        self._most_waiting = most_waiting
        self.masking = Lock()
        """Held by a member while it masks: it also writes what waits for others."""
        self._waiting: dict[tuple[bytes, bytes], Waiting] = {}
        self._taken: set[tuple[bytes, bytes]] = set()
        self._known: dict[Hashable, object] = {}
        self._publics: set[bytes] = set()
        self._secrets: dict[tuple[bytes, ...], object] = {}

    def once(
        self, question: Hashable, find: Callable[_Asked, _Found], *given: _Asked.args, **named: _Asked.kwargs
    ) -> _Found:
        """Return what ``find`` finds, asking it once for the same question; what it raises is not remembered.

        ``question`` has everything on which the answer depends, but for the plan; it and the answer are no secrets.
        """
        found = self._known.get(question)
        if found is None:
            found = find(*given, **named)
            if len(self._known) < self._most:
                self._known[question] = found
        return cast(_Found, found)

    def have(self, public: bytes) -> None:
        """Note that the secret half of a round's key is held by a member of this host."""
        self._publics.add(public)

    def between(
        self,
        own: tuple[bytes, bytes],
        peer: tuple[bytes, bytes],
        find: Callable[_Asked, _Found],
        *given: _Asked.args,
        **named: _Asked.kwargs,
    ) -> _Found:
        """Return the secret of two members, which both would find alike.

        Where both are of this host, the first one's stays here until the second one takes it.

        Parameters
        ----------
        own, peer : tuple of bytes
            Id of a participant and the public half of its key of the round.
        find : callable
            Finds the secret; never nothing.
        """
        if peer[1] not in self._publics or own[1] not in self._publics:
            return find(*given, **named)
        question = own + peer if own < peer else peer + own
        found = self._secrets.pop(question, None)
        if found is None:
            found = find(*given, **named)
            if len(self._secrets) < self._most:
                self._secrets[question] = found
        return cast(_Found, found)

    def wait_for(self, peer: tuple[bytes, bytes], size: int) -> Waiting | None:
        """Return what waits for another member of this host, to be added to; call under ``masking``.

        Nothing where the member is elsewhere or has taken its masks, and where too much waits already.
        """
        if peer[1] not in self._publics or peer in self._taken:
            return None
        found = self._waiting.get(peer)
        if found is None and 4 * size * (len(self._waiting) + 1) <= self._most_waiting:
            found = self._waiting[peer] = Waiting(np.zeros(size, np.uint32), set())
        return found if found is not None and len(found.vector) == size else None

    def take(self, own: tuple[bytes, bytes], size: int) -> Waiting:
        """Return what waited for a member, once, and let nothing more wait for it; call under ``masking``."""
        self._taken.add(own)
        found = self._waiting.pop(own, None)
        if found is None or len(found.vector) != size:
            return Waiting(np.zeros(0, np.uint32), set())
        return found

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HostRound holds secrets and is never pickled")


class Verified:
    """Remembers which signatures were right, and what a host's members share.  Safe to share between threads.

    Parameters
    ----------
    most : int
        How many are remembered; then all are forgotten and checked again.
    """

    __slots__ = ("_known", "_most", "_rounds")

    def __init__(self, most: int = _MOST) -> None:
        self._known: set[bytes] = set()
        self._most = most
        self._rounds: WeakValueDictionary[bytes, HostRound] = WeakValueDictionary()

    def round(self, plan_hash: bytes) -> HostRound:
        """Return what the members of this host share under a plan, for as long as one of them holds it."""
        return self._rounds.setdefault(plan_hash, HostRound())

    def bundle(self, bundle: Bundle, directory_key: bytes, now: int) -> None:
        """Check a bundle as ``Bundle.verify`` does; the validity is compared with the clock each time.

        Raises
        ------
        VerificationError
            As ``Bundle.verify``.
        """
        signatures = bundle.signature, bundle.countersignature
        parts = encode("verified-bundle", directory_key, *bundle.signed_fields(), *signatures)
        key = hashlib.sha256(parts).digest()
        if key in self._known:
            Validity(bundle.not_before, bundle.not_after).check("the key bundle", now)
            return
        bundle.verify(directory_key, now)
        self._remember(key)

    def signature(
        self, what: str, signing_public: bytes, signature: bytes, purpose: str, *fields: bytes | str | int
    ) -> None:
        """Check an Ed25519 signature over explicit bytes.

        Parameters
        ----------
        what : str
            What is signed, for the message of the error.
        signing_public : bytes
            Raw public key, 32 bytes.

        Raises
        ------
        VerificationError
            BAD_SIGNATURE.
        """
        message = encode(purpose, *fields)
        # Of fixed lengths, or never remembered: so the parts cannot be cut otherwise.
        key = hashlib.sha256(signing_public + signature + message).digest()
        if key in self._known and len(signing_public) == _KEY and len(signature) == _SIGNATURE:
            return
        check_signature(signing_public, signature, message, what, Reason.BAD_SIGNATURE)
        self._remember(key)

    def sign(self, identity: Identity, purpose: str, *fields: bytes | str | int) -> bytes:
        """Sign explicit bytes for a member of this host; the others need not check what was signed here.

        Returns
        -------
        bytes
            The signature, 64 bytes.
        """
        signature = identity.sign(purpose, *fields)
        message = encode(purpose, *fields)
        self._remember(hashlib.sha256(identity.signing_public + signature + message).digest())
        return signature

    def _remember(self, key: bytes) -> None:
        if len(self._known) >= self._most:
            self._known.clear()
        self._known.add(key)
