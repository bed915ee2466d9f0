"""Checks of every request to a page before it reaches a route: host, origin, session; and headers of every answer."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection
from http.cookies import CookieError, SimpleCookie
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestGuard"]

_HEADERS = {
    # Nothing but own files and one inline script, named by its digest: no inline style, no other host, no frame around
    # the page.
    "content-security-policy": (
        "default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Headers of every answer; in the policy, the digest of the inline script is missing."""


def _headers_of_answers(inline: str) -> dict[str, str]:
    """Return the headers of every answer of a page with one inline script."""
    digest = base64.b64encode(hashlib.sha256(inline.encode("utf-8")).digest()).decode("ascii")
    return {name: value.replace("{digest}", digest) for name, value in _HEADERS.items()}


class RequestGuard:
    """ASGI middleware that lets only requests of the page's own browser sessions through.

    Refused are any request whose ``Host`` is not a name of this page (DNS rebinding); any request that another site
    made the browser send, also one on another port of this machine, except for opening the page itself; a request that
    changes something and does not state its origin; and a request without a session for anything that is private.

    Parameters
    ----------
    app : ASGI application
    hosts : collection of str
        Names of this page in the ``Host`` header, with port.
    scheme : str
        ``http`` or ``https``.
    cookie : str
        Name of the cookie with the session.
    admits : callable
        Returns whether a session's secret is valid.
    inline : str
        The text of the page's inline script.
    public : callable
        Returns whether a path is served without a session.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        scheme: str,
        cookie: str,
        admits: Callable[[str | None], bool],
        inline: str,
        public: Callable[[str], bool],
    ) -> None:
        self._app, self._headers = app, _headers_of_answers(inline)
        self._hosts = {host.lower() for host in hosts}
        self._scheme, self._cookie, self._admits, self._public = scheme, cookie, admits, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and hand it on, or answer it with the reason of its refusal."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
            await send(message)

        if scope["type"] != "http":  # no route takes a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        status, reason = self._objection(scope)
        answer: Any = JSONResponse({"error": reason}, status) if status else self._app
        await answer(scope, receive, sent)

    def _objection(self, scope: Scope) -> tuple[int, str]:
        """Return status and reason of a refusal; 0 if there is nothing against a request."""
        headers, path = Headers(scope=scope), scope["path"]
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return 421, "this page has another name"
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        own = f"{self._scheme}://{hosts[0].lower()}"
        reads = scope["method"] in ("GET", "HEAD")
        opens = reads and path == "/" and headers.get("sec-fetch-mode", "navigate") == "navigate"
        if (origin is not None and origin.lower() != own) or (
            site not in (None, "same-origin", "none") and not opens
        ):
            return 403, "another site sent this request"
        if not reads and origin is None and site != "same-origin":
            return 403, "the request does not say which page sent it"
        if self._public(path):
            return 0, ""
        return (0, "") if self._admits(secret_in(headers, self._cookie)) else (401, "no session")


def secret_in(headers: Headers, cookie: str) -> str | None:
    """Return the session's secret from the cookie of a request; None without one."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(cookie)
    except CookieError:
        return None
    return found.value if found else None
