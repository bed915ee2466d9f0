"""Keys of an issuer of ID tokens (JWKS), from a file or over HTTPS, with bounds on size and time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from coterie.config.services import OidcSettings
from coterie.errors import CoterieError, PeerError, PreflightError

__all__ = ["IssuerKeys"]

_log = structlog.get_logger("coterie.thirdparty")

_FETCH_S = 10.0
_MOST_BYTES = 256 * 1024
_MOST_KEYS = 100
_AGAIN_S = 60.0
"""Least time between two fetches, successful or not."""
_KEPT_S = 3600.0
"""Time for which fetched keys are used."""

Key = Mapping[str, Any]


class IssuerKeys:
    """The issuer's keys by their ids.

    Parameters
    ----------
    settings : OidcSettings
        Where the keys are.
    clock : callable, optional
        Monotonic time, seconds.
    limit_s : float, optional
        Longest time for a fetch, seconds.

    Raises
    ------
    PreflightError
        The authority of the issuer's server cannot be read.
    """

    def __init__(
        self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic, limit_s: float = _FETCH_S
    ) -> None:
        self._limit_s = limit_s
        self._url, self._file = settings.jwks_url, settings.jwks_file
        self._clock = clock
        self._fetching: asyncio.Task[None] | None = None
        self._keys: dict[str, Key] = {}
        self._tried: float | None = None
        self._fetched: float | None = None
        self._failure = ""
        try:
            self._trust = (
                None if self._url is None else ssl.create_default_context(cafile=settings.jwks_ca_file)
            )
        except (OSError, ssl.SSLError) as error:
            raise PreflightError(
                f"cannot read the authority in {settings.jwks_ca_file}: {error}",
                hint="oidc.jwks_ca_file is a file of certificates in PEM",
            ) from error

    async def find(self, key_id: str) -> Key | None:
        """Return a key of the issuer as a JWK; None when there is none of this id.

        Raises
        ------
        PeerError
            The keys cannot be had.
        """
        if self._file is not None:
            return (await asyncio.to_thread(_read, self._file)).get(key_id)
        if not self._fresh() or key_id not in self._keys:
            if self._fetching is None and self._due():
                self._fetching = asyncio.create_task(self._fetch())
            if self._fetching is not None:
                # Callers share a fetch, and one that goes away does not end it for the others.
                await asyncio.shield(self._fetching)
        if not self._fresh():
            raise PeerError(f"the issuer's keys cannot be had: {self._failure}")
        return self._keys.get(key_id)

    def _due(self) -> bool:
        return self._tried is None or self._clock() - self._tried >= _AGAIN_S

    def _fresh(self) -> bool:
        return self._fetched is not None and self._clock() - self._fetched < _KEPT_S

    async def _fetch(self) -> None:
        self._tried = now = self._clock()
        try:
            # The time of the thread has a bound, too, but for a resolver that hangs.
            self._keys = await asyncio.wait_for(asyncio.to_thread(self._get), 2 * self._limit_s)
        except CoterieError as error:
            self._failure = error.message
        except TimeoutError:
            self._failure = f"no answer from {self._url} within {2 * self._limit_s:g} s"
        else:
            self._fetched = now
            _log.info("fetched the keys of the issuer", keys=len(self._keys))
            return
        finally:
            self._fetching = None
        _log.warning("cannot fetch the keys of the issuer", message=self._failure)

    def _get(self) -> dict[str, Key]:
        parts = urlsplit(self._url or "")
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        host, port = parts.hostname or "", parts.port or 443
        try:
            raw = socket.create_connection((host, port), self._limit_s)
        except OSError as error:
            raise PeerError(f"cannot fetch {self._url}: {error}") from error
        # The time limit of a socket is for each piece that arrives; this one is for all of them.
        overdue = threading.Event()

        def cut() -> None:
            overdue.set()
            with contextlib.suppress(OSError):
                # Not that of TLS, which is no method for another thread than the one that reads.
                socket.socket.shutdown(secure, socket.SHUT_RDWR)

        assert self._trust is not None  # noqa: S101 - made with the address
        secure = self._trust.wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)
        connection = http.client.HTTPSConnection(host, port)
        connection.sock = secure
        limit = threading.Timer(self._limit_s, cut)
        limit.daemon = True
        limit.start()
        try:
            secure.do_handshake()
            connection.request("GET", path, headers={"Accept": "application/json", "Connection": "close"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise PeerError(f"{self._url} answered with status {response.status}, expected 200")
            content = response.read(_MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = (
                f"no answer within {self._limit_s:g} s"
                if overdue.is_set()
                else str(error) or type(error).__name__
            )
            raise PeerError(f"cannot fetch {self._url}: {reason}") from error
        finally:
            limit.cancel()
            connection.close()
            secure.close()
        if overdue.is_set():
            raise PeerError(f"cannot fetch {self._url}: no answer within {self._limit_s:g} s")
        return _parse(content, str(self._url))


def _read(path: Path) -> dict[str, Key]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise PeerError(f"the issuer's keys cannot be had: cannot read {path}: {error.strerror}") from error
    try:
        return _parse(content, str(path))
    except PeerError as error:
        raise PeerError(f"the issuer's keys cannot be had: {error.message}") from error


def _parse(content: bytes, place: str) -> dict[str, Key]:
    """Return the keys of a JWKS that have an id; two keys of one id are refused."""
    if len(content) > _MOST_BYTES:
        raise PeerError(f"{place} has more than {_MOST_BYTES} bytes, which no set of keys needs")
    try:
        listed = json.loads(content)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError):
        listed = None
    if not isinstance(listed, list) or len(listed) > _MOST_KEYS:
        raise PeerError(f"{place} is no JWKS, expected JSON with a list `keys` of at most {_MOST_KEYS}")
    found: dict[str, Key] = {}
    for key in listed:
        key_id = key.get("kid") if isinstance(key, dict) else None
        if not isinstance(key_id, str):
            continue
        if key_id in found:
            raise PeerError(f"{place} has two keys of one id (kid)")
        found[key_id] = key
    return found
