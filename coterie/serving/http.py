"""The server of an exported model over HTTP with JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, CoterieError, DataError, PreflightError
from coterie.serving.answers import ModelAnswers, ServedUser, ServingLimits, SuggestedItems

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["model_app", "user_of"]

_K = 10
_KEYS = ("vector", "history", "exclude", "k")


def user_of(given: object, *, alone: bool = True) -> ServedUser:
    """Return a user of a request from parsed JSON.

    Parameters
    ----------
    given : object
    alone : bool
        Whether ``k`` may stand beside the user.

    Raises
    ------
    DataError
        The key, what stands there, and what was expected.
    """
    if not isinstance(given, Mapping):
        raise DataError(f"a user is {_shown(given)}; expected an object with `vector` or `history`")
    known = _KEYS if alone else _KEYS[:-1]
    if strange := [key for key in given if key not in known]:
        raise DataError(f"unknown key {strange[0]!r}; expected {', '.join(known)}")
    vector, history, exclude = given.get("vector"), given.get("history"), given.get("exclude", [])
    if vector is not None and not (isinstance(vector, list) and all(map(_is_number, vector))):
        raise DataError(f"vector is {_shown(vector)}; expected a list of numbers")
    if not isinstance(exclude, list) or not all(isinstance(one, str) for one in exclude):
        raise DataError(f"exclude is {_shown(exclude)}; expected a list of items")
    return ServedUser(vector, None if history is None else _history(history), exclude)


def _history(given: object) -> list[tuple[str, float | None]]:
    if isinstance(given, Mapping):
        for item, rating in given.items():
            if rating is not None and not _is_number(rating):
                raise DataError(f"rating {_shown(rating)} of item {item!r}; expected a number or null")
        return [(item, None if rating is None else float(rating)) for item, rating in given.items()]
    if isinstance(given, list) and all(isinstance(one, str) for one in given):
        return [(one, None) for one in given]
    raise DataError(
        f"history is {_shown(given)}; expected a list of items, or an object with ratings by item"
    )


def _is_number(value: object) -> bool:
    """Whether a value is a number that fits into 64 bits; JSON has integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


def model_app(answers: ModelAnswers, hosts: Sequence[str] | None = None) -> Starlette:
    """Return the application: ``GET /health``, ``GET /model``, ``POST /recommend``, ``POST /recommend/batch``.

    Parameters
    ----------
    answers : ModelAnswers
    hosts : sequence of str, optional
        Names by which the server is called, as in the header ``Host``; any if left out.

    Raises
    ------
    PreflightError
        Starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise PreflightError(f"HTTP needs {error.name}", hint="pip install 'coterie[serve]'") from error

    async def body(request: Request) -> Any:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"content type {kind or 'none'!r}; expected application/json")
        most = answers.limits.request_bytes
        read = bytearray()
        async for piece in request.stream():
            read += piece
            if len(read) > most:
                raise HTTPException(413, f"a request of more than {most} bytes; expected at most that")
        try:
            return _parsed(bytes(read))
        except (ValueError, RecursionError) as error:
            raise DataError(f"the body is no JSON: {error}") from error

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "serving"})

    async def model(request: Request) -> Response:
        return JSONResponse(_described(answers))

    async def recommend(request: Request) -> Response:
        given = await body(request)
        user = user_of(given)
        (found,) = await asyncio.to_thread(answers.recommend, [user], _k(given))
        return JSONResponse(_told(found))

    async def batch(request: Request) -> Response:
        given = await body(request)
        if not isinstance(given, Mapping) or not isinstance(given.get("users"), list):
            raise DataError(f"the body is {_shown(given)}; expected an object with a list `users`")
        if strange := [key for key in given if key not in ("users", "k")]:
            raise DataError(f"unknown key {strange[0]!r}; expected users, k")
        users = []
        for place, one in enumerate(given["users"]):
            try:
                users.append(user_of(one, alone=False))
            except DataError as error:
                raise DataError(f"user {place}: {error.message}") from error
        found = await asyncio.to_thread(answers.recommend, users, _k(given))
        return JSONResponse({"answers": [_told(one) for one in found]})

    async def refused(request: Request, error: Exception) -> Response:
        if not isinstance(error, CoterieError):
            raise error
        status = 422 if isinstance(error, ConfigError) else 400
        return _error(JSONResponse, status, error.code, error.message, error.hint)

    async def http_refused(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        return _error(JSONResponse, error.status_code, "http", str(error.detail), None)

    routes = [
        Route("/health", health),
        Route("/model", model),
        Route("/recommend", recommend, methods=["POST"]),
        Route("/recommend/batch", batch, methods=["POST"]),
    ]
    guard = [] if hosts is None else [Middleware(_NamedHost, hosts=hosts)]
    return Starlette(
        routes=routes,
        middleware=guard,
        exception_handlers={CoterieError: refused, HTTPException: http_refused},
    )


class _NamedHost:
    """ASGI middleware that refuses requests by other names than some.

    A page of elsewhere that a browser resolves to this machine has another name in its requests (DNS rebinding).

    Parameters
    ----------
    app : ASGI application
    hosts : sequence of str
        Names as in the header ``Host``, without port; addresses of IPv6 in brackets.
    """

    def __init__(self, app: Any, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        answer = self._app
        if scope["type"] == "http":
            names = Headers(scope=scope).getlist("host")
            if len(names) != 1 or _without_port(names[0]).lower() not in self._hosts:
                answer = _error(JSONResponse, 421, "http", "this server has another name", None)
        await answer(scope, receive, send)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _parsed(read: bytes) -> Any:
    """Return the content of a body.

    Raises
    ------
    ValueError
        It is no JSON, or holds half of a character, which no answer could repeat.
    RecursionError
    """
    # As text: of bytes the reader lets halves of surrogate pairs through.
    text = read.decode("utf-8")
    found = json.loads(text, parse_constant=_no_constant)
    if "\\u" in text:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half of a surrogate pair") from error
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _k(given: Mapping[str, Any]) -> int:
    k = given.get("k", _K)
    if isinstance(k, bool) or not isinstance(k, int) or abs(k) > 1 << 31:
        raise DataError(f"k is {_shown(k)}; expected a whole number, 1 to {ServingLimits.items}")
    return k


def _told(found: SuggestedItems) -> dict[str, Any]:
    pairs = zip(found.items, found.scores, strict=True)
    told: dict[str, Any] = {"items": [{"item": item, "score": score} for item, score in pairs]}
    return {**told, "unknown": list(found.unknown)} if found.unknown else told


def _described(answers: ModelAnswers) -> dict[str, Any]:
    model, limits = answers.model, answers.limits
    return {
        "label": model.about.get("label"),
        "system": model.system,
        "run": model.about.get("run"),
        "version": model.version,
        "items": len(model.items),
        "vector_length": answers.vector_length,
        "takes_histories": model.takes_histories,
        "ratings": None if answers.ratings is None else list(answers.ratings),
        "limits": {
            "users": limits.users,
            "items": limits.items,
            "history": limits.history,
            "request_bytes": limits.request_bytes,
        },
    }


def _error(make: Any, status: int, code: str, message: str, hint: str | None) -> Response:
    answer: Response = make({"error": {"code": code, "message": message, "hint": hint}}, status_code=status)
    return answer
