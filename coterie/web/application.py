"""The routes that every page has: its files, the session, events, further links; and routes of its own beside them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from coterie.web.board import Board
from coterie.web.guard import RequestGuard, secret_in
from coterie.web.sessions import EntryError, PageSessions

__all__ = ["MOST_BODY", "STATIC", "asked_json", "make_application"]

STATIC = Path(__file__).parent / "static"
"""Folder of the pages' files; all of it is public."""

MOST_BODY = 4096
"""Most bytes of a request's body."""

_LOOK_S = 0.2
"""Interval at which a stream looks for changes, seconds; of what changes oftener, a browser gets the last form."""
_BEAT_S = 15.0
"""Longest silence of a stream, seconds."""
_MOST_STREAMS = 32


class _Files(StaticFiles):
    """The pages' files: a browser asks each time whether its copy is current."""

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        answer = super().file_response(*arguments, **named)
        answer.headers["cache-control"] = "no-cache"
        return answer


class _MalformedError(Exception):
    pass


async def asked_json(request: Request, most: int = MOST_BODY) -> dict[str, Any]:
    """Return the JSON object in a request's body, of at most so many bytes.

    Raises
    ------
    Exception
        The body is too long, of another type, or no JSON object; the application answers with status 400.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise _MalformedError("expected application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise _MalformedError(f"expected at most {most} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise _MalformedError("expected a JSON object") from None
    if not isinstance(found, dict):
        raise _MalformedError("expected a JSON object")
    return found


async def _malformed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


def make_application(
    board: Board,
    sessions: PageSessions,
    *,
    page: str,
    hosts: Collection[str],
    scheme: str,
    cookie: str,
    ended: Callable[[], bool],
    address: str,
    routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """Return the guarded application of a page.

    Parameters
    ----------
    board : Board
        The parts of the page, streamed from ``/events``.
    sessions : PageSessions
    page : str
        Name of the folder below `STATIC` whose ``index.html`` is served at ``/``.
    hosts, scheme, cookie
        As for `RequestGuard`.
    ended : callable
        Returns whether the server stops: streams then send what changed last, and end.
    address : str
        Address of the page, for further links.
    routes : sequence of BaseRoute
        Further routes; all of them need a session.
    """
    streams = 0

    # The only inline script: a script that loads the page again when a file of it is lost must not be a file itself.
    script = (STATIC / "shared" / "opening.js").read_text(encoding="utf-8")
    opened = (STATIC / page / "index.html").read_text(encoding="utf-8")
    opened = opened.replace("<script data-opening></script>", f"<script>{script}</script>")

    async def index(request: Request) -> Response:
        return HTMLResponse(opened, headers={"cache-control": "no-cache"})

    async def enter(request: Request) -> Response:
        asked = await asked_json(request)
        words = {name: asked.get(name) for name in ("link", "attempt", "name", "password")}
        try:
            if isinstance(words["link"], str):
                attempt = words["attempt"] if isinstance(words["attempt"], str) else ""
                secret = sessions.open_with_link(words["link"], attempt)
            elif isinstance(words["name"], str) and isinstance(words["password"], str):
                secret = await asyncio.to_thread(
                    sessions.open_with_password, words["name"], words["password"]
                )
            else:
                raise _MalformedError("expected link, or name and password")
        except EntryError as refusal:
            return JSONResponse({"error": str(refusal)}, 403)
        answer = JSONResponse({})
        answer.set_cookie(
            cookie, secret, httponly=True, samesite="strict", secure=scheme == "https", path="/"
        )
        return answer

    async def leave(request: Request) -> Response:
        sessions.close(secret_in(request.headers, cookie))
        answer = JSONResponse({})
        answer.delete_cookie(cookie, path="/")
        return answer

    async def entrance(request: Request) -> Response:
        inside = sessions.admits(secret_in(request.headers, cookie))
        return JSONResponse({"inside": inside, "passwords": sessions.passwords is not None})

    async def link(request: Request) -> Response:
        if sessions.passwords is not None:
            return JSONResponse({"error": "this page is opened by passwords"}, 409)
        return JSONResponse({"link": f"{address}#{sessions.new_link()}"})

    async def events(request: Request) -> Response:
        if streams >= _MOST_STREAMS:
            return JSONResponse({"error": "too many pages are open"}, 503, {"retry-after": "30"})
        # A browser that gave a silent stream up begins another one, whose headers it cannot set.
        mark = request.headers.get("last-event-id") or request.query_params.get("after", "")
        secret = secret_in(request.headers, cookie)
        return StreamingResponse(
            stream(mark, secret), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def stream(mark: str, secret: str | None) -> AsyncIterator[str]:
        nonlocal streams
        streams += 1
        try:
            said, seen = time.monotonic(), -1
            yield "retry: 1000\n\n"
            while sessions.admits(secret):
                stops = ended()
                if board.number != seen:
                    seen = board.number
                    mark, changed = board.since(mark)
                    parts = ",".join(f"{json.dumps(name)}:{text}" for name, text in changed.items())
                    said = time.monotonic()
                    # JSON has no line breaks of its own: one line of data.
                    yield f"id: {mark}\ndata: {{{parts}}}\n\n"
                elif time.monotonic() - said > _BEAT_S:
                    said = time.monotonic()
                    yield "event: beat\ndata: {}\n\n"
                if stops:
                    yield "event: end\ndata: {}\n\n"
                    return
                await asyncio.sleep(_LOOK_S)
        finally:
            streams -= 1

    application = Starlette(
        routes=[
            Route("/", index, methods=["GET"]),
            Mount("/assets", _Files(directory=STATIC)),
            Route("/session", entrance, methods=["GET"]),
            Route("/session", enter, methods=["POST"]),
            Route("/session", leave, methods=["DELETE"]),
            Route("/links", link, methods=["POST"]),
            Route("/events", events, methods=["GET"]),
            *routes,
        ],
        exception_handlers={_MalformedError: _malformed},
    )
    return RequestGuard(
        application,
        hosts=hosts,
        scheme=scheme,
        cookie=cookie,
        admits=sessions.admits,
        inline=script,
        public=lambda path: path in ("/", "/session") or path.startswith("/assets/"),
    )
