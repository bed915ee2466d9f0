"""Keys of an issuer of ID tokens (JWKS), from a file or over HTTPS, with bounds on size and time."""

from __future__ import annotations

import asyncio
import http
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from coterie.config.services import OidcSettings
from coterie.errors import CoterieError, PeerError, PreflightError

__all__ = ["IssuerKeys"]

_log = structlog.get_logger("coterie.thirdparty")

_HEADERS = {"Accept": "application/json", "Accept-Encoding": "identity"}
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
        The authority of the issuer's server cannot be read, or httpx is not installed for an address.
    """

    def __init__(
        self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic, limit_s: float = _FETCH_S
    ) -> None:
        self._file = settings.jwks_file
        self._get = None if settings.jwks_url is None else _getter(settings.jwks_url, settings, limit_s)
        self._clock = clock
        self._fetching: asyncio.Task[None] | None = None
        self._keys: dict[str, Key] = {}
        self._tried: float | None = None
        self._fetched: float | None = None
        self._failure = ""

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
            if self._fetching is None and self._get is not None and self._due():
                self._fetching = asyncio.create_task(self._fetch(self._get))
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

    async def _fetch(self, get: Callable[[], Awaitable[dict[str, Key]]]) -> None:
        self._tried = now = self._clock()
        try:
            self._keys = await get()
        except CoterieError as error:
            self._failure = error.message
        else:
            self._fetched = now
            _log.info("fetched the keys of the issuer", keys=len(self._keys))
            return
        finally:
            self._fetching = None
        _log.warning("cannot fetch the keys of the issuer", message=self._failure)


def _getter(url: str, settings: OidcSettings, limit_s: float) -> Callable[[], Awaitable[dict[str, Key]]]:
    """Return a function that fetches the keys over HTTPS, without redirects, proxies or a compressed answer."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise PreflightError(
            "keys of an issuer by their address (oidc.jwks_url) need the package httpx",
            hint="pip install 'coterie[oidc]', or put the keys into a file (oidc.jwks_file)",
        ) from error
    try:
        trust = ssl.create_default_context(cafile=settings.jwks_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise PreflightError(
            f"cannot read the authority in {settings.jwks_ca_file}: {error}",
            hint="oidc.jwks_ca_file is a file of certificates in PEM",
        ) from error

    async def get() -> dict[str, Key]:
        content = bytearray()
        try:
            async with (
                # The limit of the client is for each piece that arrives; this one is for all of them.
                asyncio.timeout(limit_s),
                httpx.AsyncClient(verify=trust, trust_env=False, timeout=limit_s) as client,
                client.stream("GET", url, headers=_HEADERS) as response,
            ):
                if response.status_code != http.HTTPStatus.OK:
                    raise PeerError(f"{url} answered with status {response.status_code}, expected 200")
                async for piece in response.aiter_raw():
                    content += piece
                    if len(content) > _MOST_BYTES:
                        break
        except (TimeoutError, httpx.TimeoutException) as error:
            raise PeerError(f"cannot fetch {url}: no answer within {limit_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise PeerError(f"cannot fetch {url}: {str(error) or type(error).__name__}") from error
        return _parse(bytes(content), url)

    return get


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
