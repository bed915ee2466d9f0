"""Caches that the members of one host share: verified signatures, agreed secrets and expanded masks.

The members of one host are one trust domain and one process: each may rely on what another has verified, and a secret
that two of them share is in the process's memory anyway.  Only successes are cached.  Signatures are cached under the
SHA-256 of key, signature and message together, everything else under all of its inputs, so a cached result is the one
that a new computation would give.
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
    """Pair masks for a member that has not masked yet, already expanded by members of the host that have.

    Parameters
    ----------
    vector : ndarray of uint32, shape (n,)
        Sum of the masks, with this member's signs.
    peers : set of bytes
        Ids of the other participants of these pairs.
    """

    vector: NDArray[np.uint32]
    peers: set[bytes]


class HostRound:
    """The cache that the members of one host share in one round.  Safe to share between threads.

    It is freed when the last member drops it.

    Parameters
    ----------
    most : int
        Most answers, and most secrets, in the cache; further ones are computed each time.
    most_waiting : int
        Most bytes of expanded masks that wait for members.
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
        """Held by a member while it masks, because it also writes masks that wait for others."""
        self._waiting: dict[tuple[bytes, bytes], Waiting] = {}
        self._taken: set[tuple[bytes, bytes]] = set()
        self._known: dict[Hashable, object] = {}
        self._publics: set[bytes] = set()
        self._secrets: dict[tuple[bytes, ...], object] = {}

    def once(
        self, question: Hashable, find: Callable[_Asked, _Found], *given: _Asked.args, **named: _Asked.kwargs
    ) -> _Found:
        """Return ``find``'s result, cached by ``question``; an exception is not cached.

        ``question`` has everything on which the result depends, but for the plan; neither is a secret.
        """
        found = self._known.get(question)
        if found is None:
            found = find(*given, **named)
            if len(self._known) < self._most:
                self._known[question] = found
        return cast(_Found, found)

    def have(self, public: bytes) -> None:
        """Record that a member of this host holds the secret half of this round key."""
        self._publics.add(public)

    def between(
        self,
        own: tuple[bytes, bytes],
        peer: tuple[bytes, bytes],
        find: Callable[_Asked, _Found],
        *given: _Asked.args,
        **named: _Asked.kwargs,
    ) -> _Found:
        """Return the secret that two members share; either of them would compute the same.

        Where both are of this host, the first member's result stays in the cache until the second takes it.

        Parameters
        ----------
        own, peer : tuple of bytes
            Id of a participant and the public half of its key of the round.
        find : callable
            Computes the secret; never returns None.
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
        """Return the masks that wait for another member of this host, to add to them; call under ``masking``.

        None where the member is of another host or has taken its masks, and where too many bytes wait already.
        """
        if peer[1] not in self._publics or peer in self._taken:
            return None
        found = self._waiting.get(peer)
        if found is None and 4 * size * (len(self._waiting) + 1) <= self._most_waiting:
            found = self._waiting[peer] = Waiting(np.zeros(size, np.uint32), set())
        return found if found is not None and len(found.vector) == size else None

    def take(self, own: tuple[bytes, bytes], size: int) -> Waiting:
        """Take the masks that wait for a member, and accept no more for it; call under ``masking``."""
        self._taken.add(own)
        found = self._waiting.pop(own, None)
        if found is None or len(found.vector) != size:
            return Waiting(np.zeros(0, np.uint32), set())
        return found

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HostRound holds secrets and is never pickled")


class Verified:
    """The cache of one host: valid signatures, and a `HostRound` for each plan.  Safe to share between threads.

    Parameters
    ----------
    most : int
        Most signatures in the cache; when it is full, it is emptied.
    note : callable, optional
        Called with each bundle that is found valid, from any thread.
    """

    __slots__ = ("_known", "_most", "_note", "_rounds")

    def __init__(self, most: int = _MOST, note: Callable[[Bundle], None] | None = None) -> None:
        self._note = note
        self._known: set[bytes] = set()
        self._most = most
        self._rounds: WeakValueDictionary[bytes, HostRound] = WeakValueDictionary()

    def round(self, plan_hash: bytes) -> HostRound:
        """Return the cache that this host's members share under a plan; it lives while one of them holds it."""
        return self._rounds.setdefault(plan_hash, HostRound())

    def bundle(self, bundle: Bundle, directory_key: bytes, now: int) -> None:
        """Check a bundle as ``Bundle.verify`` does; its signatures are cached, its validity is checked each time.

        Raises
        ------
        VerificationError
            As ``Bundle.verify``.
        """
        signed = *bundle.signed_fields(), bundle.signature, bundle.party, bundle.countersignature
        parts = encode("verified-bundle", directory_key, *signed)
        key = hashlib.sha256(parts).digest()
        if key in self._known:
            Validity(bundle.not_before, bundle.not_after).check("the key bundle", now)
            return
        bundle.verify(directory_key, now)
        if self._note is not None:
            self._note(bundle)
        self._remember(key)

    def signature(
        self, what: str, signing_public: bytes, signature: bytes, purpose: str, *fields: bytes | str | int
    ) -> None:
        """Check an Ed25519 signature over explicit bytes, unless it is in the cache.

        Parameters
        ----------
        what : str
            Name of the signed object, for the error's message.
        signing_public : bytes
            Raw public key, 32 bytes.

        Raises
        ------
        VerificationError
            BAD_SIGNATURE.
        """
        message = encode(purpose, *fields)
        # Only entries of these fixed lengths are trusted: other cuts of the same bytes would have the same digest.
        key = hashlib.sha256(signing_public + signature + message).digest()
        if key in self._known and len(signing_public) == _KEY and len(signature) == _SIGNATURE:
            return
        check_signature(signing_public, signature, message, what, Reason.BAD_SIGNATURE)
        self._remember(key)

    def sign(self, identity: Identity, purpose: str, *fields: bytes | str | int) -> bytes:
        """Sign explicit bytes for a member of this host, and cache the signature as valid.

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
