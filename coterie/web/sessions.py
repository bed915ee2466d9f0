"""Links that open a page once, passwords, and the sessions that browsers hold afterwards as a cookie."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from coterie.web.passwords import PasswordFile

__all__ = ["EntryError", "PageSessions"]

LINK_S = 3600.0
"""How long a link can be used, seconds."""
SESSION_S = 24 * 3600.0
"""How long a session lasts after its last request, seconds."""
MOST_SESSIONS = 64
_MOST_LINKS = 16
_ATTEMPT_S = 30.0
"""For how long an attempt to use a link may be repeated, seconds."""
_PAUSE_S = 1.0
"""Least time between two wrong passwords that are looked at, seconds."""


class EntryError(Exception):
    """A link or password that opens nothing; the message is for the person at the browser."""


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


@dataclass
class _Link:
    """A link that was handed out; once it is used, by which attempt, when, and for which session, as digests."""

    ends: float
    attempt: bytes = b""
    used_at: float = 0.0
    session: bytes = b""

    @property
    def used(self) -> bool:
        return bool(self.session)


class PageSessions:
    """Record of who may see a page: links that were handed out, and sessions of browsers.

    Secrets are random, 256 bits each.  Only their SHA-256 digests are kept, and looked up by digest, so that the time
    of an answer says nothing about a secret.  All methods may be called from any thread.

    Parameters
    ----------
    passwords : PasswordFile, optional
        Passwords that open the page; with it, links are refused.
    link_s, session_s : float
        How long a link can be used, and a session lasts after its last request, seconds.
    clock : callable
        Returns seconds that never run backwards.
    """

    def __init__(
        self,
        passwords: PasswordFile | None = None,
        *,
        link_s: float = LINK_S,
        session_s: float = SESSION_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.passwords = passwords
        self._link_s, self._session_s, self._clock = link_s, session_s, clock
        self._links: dict[bytes, _Link] = {}
        self._sessions: dict[bytes, float] = {}
        self._wrong_until = 0.0
        self._lock, self._guessing = threading.Lock(), threading.Lock()

    def new_link(self, lasting_s: float | None = None) -> str:
        """Return a secret that opens a session once, within the lifetime of links unless another one is given."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._links) >= _MOST_LINKS:
                self._links.pop(next(iter(self._links)))
            self._links[_digest(secret)] = _Link(self._clock() + (lasting_s or self._link_s))
        return secret

    def usable(self, secret: str) -> bool:
        """Return whether a link would open a session now."""
        link = self._links.get(_digest(secret))
        return link is not None and not link.used and link.ends > self._clock()

    def open_with_link(self, secret: str, attempt: str = "") -> str:
        """Use a link and return the secret of a new session.

        Parameters
        ----------
        secret : str
        attempt : str, optional
            Random words of the page that uses the link.  A page whose answer was lost on its way may repeat them for
            half a minute: it gets another session, and the session of the lost answer ends.

        Raises
        ------
        EntryError
            The link is unknown, used or expired.
        """
        with self._lock:
            link = self._links.get(_digest(secret))
            if link is None or self.passwords is not None:
                raise EntryError("This link is not one of this page.")
            now, by = self._clock(), _digest(attempt)
            if link.used:
                if not attempt or link.attempt != by or link.used_at + _ATTEMPT_S <= now:
                    raise EntryError("This link was used already; each opens the page in one browser.")
                self._sessions.pop(link.session, None)
            elif link.ends <= now:
                raise EntryError("This link has expired.")
            else:
                link.attempt, link.used_at = by, now
            session = self._new_session()
            link.session = _digest(session)
            return session

    def open_with_password(self, name: str, password: str) -> str:
        """Check a password and return the secret of a new session; slow on purpose.

        After a wrong password, further attempts are refused for a second.

        Raises
        ------
        EntryError
            There are no passwords, name or password is wrong, or an attempt came too soon.
        """
        if self.passwords is None:
            raise EntryError("This page is opened by a link, not by a password.")
        # One at a time: many attempts at once would be as many guesses.  Sessions are admitted meanwhile.
        with self._guessing:
            if self._clock() < self._wrong_until:
                raise EntryError("Too many attempts; try again in a second.")
            if not self.passwords.matches(name, password):
                self._wrong_until = self._clock() + _PAUSE_S
                raise EntryError("Name or password is wrong.")
        with self._lock:
            return self._new_session()

    def admits(self, secret: str | None) -> bool:
        """Return whether a session's secret is valid, and let the session last on if it is."""
        if not secret:
            return False
        digest, now = _digest(secret), self._clock()
        with self._lock:
            if self._sessions.get(digest, 0.0) <= now:
                self._sessions.pop(digest, None)
                return False
            self._sessions[digest] = now + self._session_s
            return True

    def close(self, secret: str | None) -> None:
        """End a session."""
        if secret:
            with self._lock:
                self._sessions.pop(_digest(secret), None)

    def _new_session(self) -> str:
        secret, now = secrets.token_urlsafe(32), self._clock()
        self._sessions = {one: ends for one, ends in self._sessions.items() if ends > now}
        while len(self._sessions) >= MOST_SESSIONS:
            # The one that was silent for longest.
            self._sessions.pop(min(self._sessions, key=lambda one: self._sessions[one]))
        self._sessions[_digest(secret)] = now + self._session_s
        return secret
