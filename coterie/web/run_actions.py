"""Start and stop of a run from its page, carried out on the command's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from coterie.errors import CoterieError
from coterie.web.board import Board

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

__all__ = ["RunActions"]

_MOST_S = 90.0
_MOST_REASON = 200

Start = Callable[[], Coroutine[Any, Any, None]]
Stop = Callable[[str], Coroutine[Any, Any, None]]
"""Function that stops a run; receives the reason."""


class RunActions:
    """What a page may do to its run at the moment; the part ``actions`` of the board says it.

    Parameters
    ----------
    board : Board
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start: Start | None = None
        self._stop: Stop | None = None
        self._measure: Start | None = None
        self.offer()

    def offer(
        self,
        *,
        start: Start | None = None,
        stop: Stop | None = None,
        measure: Start | None = None,
        resumes: bool = False,
    ) -> None:
        """Set what can be done from now on; with an action, to be called on the event loop that carries it out.

        Parameters
        ----------
        start : callable, optional
            Starts the run, or resumes it.
        stop : callable, optional
        measure : callable, optional
            Measures the network between the services.
        resumes : bool
            Whether ``start`` resumes a run that has failed.
        """
        if not (start is None and stop is None and measure is None):
            self._loop = asyncio.get_running_loop()
        self._start, self._stop, self._measure = start, stop, measure
        word = "" if start is None else "resume" if resumes else "start"
        self._board.put("actions", {"start": word, "stop": stop is not None, "measure": measure is not None})

    def routes(self) -> list[BaseRoute]:
        """Return the page's routes for these actions."""
        from starlette.routing import Route

        return [
            Route("/run/start", self._asked_to_start, methods=["POST"]),
            Route("/run/measure", self._asked_to_measure, methods=["POST"]),
            Route("/run/stop", self._asked_to_stop, methods=["POST"]),
        ]

    async def _asked_to_start(self, request: Request) -> Response:
        return await self._carry_out(self._start)

    async def _asked_to_measure(self, request: Request) -> Response:
        return await self._carry_out(self._measure)

    async def _asked_to_stop(self, request: Request) -> Response:
        from coterie.web.application import asked_json

        reason = str((await asked_json(request)).get("reason", ""))[:_MOST_REASON]
        stop = self._stop
        return await self._carry_out(None if stop is None else lambda: stop(reason))

    async def _carry_out(self, action: Start | None) -> Response:
        from starlette.responses import JSONResponse

        loop = self._loop
        if action is None or loop is None:
            return JSONResponse({"error": "the run is not in a state for this"}, 409)
        done: Awaitable[None] = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(action(), loop))
        try:
            await asyncio.wait_for(done, _MOST_S)
        except CoterieError as error:
            return JSONResponse({"error": error.message}, 409)
        except TimeoutError:
            return JSONResponse({"error": "no answer in time"}, 504)
        return JSONResponse({})
