"""A person's own page: what left the device, consent, preferences, recommendations, and the own history from a file."""

from __future__ import annotations

import asyncio
import math
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coterie.errors import ConfigError, CoterieError, DataError, RunError
from coterie.rounds.consent import Consent
from coterie.rounds.sides import Likeness
from coterie.rounds.stance import Stance
from coterie.systems.registry import publishes, ratings_of
from coterie.telemetry.printable import printable
from coterie.web.board import Board, shown
from coterie.web.own_facts import choices, consent_rows, import_words, other_preferences, run_facts
from coterie.wire.v1 import client_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

__all__ = ["Device", "OwnPage", "read_titles"]

_LOOK_S = 1.0

_FORGET_S = 20.0
"""Longest wait of the page until what was published is deleted, seconds; the device goes on trying after it."""
_MOST_S = 60.0
_MOST_FILE = 4 << 20
_MOST_BODY = _MOST_FILE + (1 << 20)
_PREVIEWED = 20
_MOST_K = 100

_SENT = ("recipient", "kind", "protection", "count", "bytes", "first_ms", "last_ms")
_DECLINED = ("recipient", "reason", "count", "first_ms", "last_ms")


class Device(Protocol):
    """What the page needs of a host of one user."""

    agent: Any
    """Servicer of the user's calls."""

    @property
    def names(self) -> Sequence[str]:
        """The users of the host: one, or none yet."""

    @property
    def run(self) -> str:
        """Id of the run."""

    @property
    def plan(self) -> RunPlan | None:
        """The run's plan; None before the server has told it."""

    @property
    def consent(self) -> Consent:
        """The conditions under which the person takes part."""

    @property
    def metrics(self) -> Sequence[str] | None:
        """Names of metrics that leave inside sums; None before the host has joined."""

    @property
    def conditions(self) -> Mapping[str, bool]:
        """What must hold for the host to be healthy."""

    @property
    def standing(self) -> str:
        """``waiting``, ``takes part``, ``stays out`` or ``ended``."""

    def require_one(self) -> None:
        """Require that the store has one user, or none yet."""

    def own_items(self) -> set[str]:
        """Return the keys of all items in the person's history."""

    async def items(self) -> Sequence[str]:
        """Return the keys of the run's items."""

    async def because(self, items: Sequence[str]) -> Likeness | None:
        """Return the own item that is most like each of some items; None where the model compares none."""

    @property
    def stance(self) -> Stance:
        """What the person has chosen while the service runs."""

    @property
    def state(self) -> str:
        """The folder with everything that the device keeps."""

    def choose(self, **changes: Any) -> Stance:
        """Change what the person has chosen."""

    async def forget_published(self) -> int:
        """Have what was published beside sums deleted at the third party; return how many uploads there were."""

    async def keep(self, items: Sequence[str], ratings: Sequence[float | None]) -> int:
        """Add items to the person's history, except for those that are in it; return how many."""


@dataclass(frozen=True)
class _Read:
    """A file that was read and is not kept yet."""

    token: str
    items: list[str]
    ratings: list[float | None]


def read_titles(path: Path) -> dict[str, str]:
    """Read the titles of items from a CSV file with columns ``item`` and ``title``.

    Raises
    ------
    DataError
        The file cannot be read, or lacks a column.
    """
    from coterie.data.tables import Dialect, read_text

    table = read_text(path, Dialect(",", quoted=True))
    return dict(zip(table.texts("item"), table.texts("title"), strict=True))


class OwnPage:
    """The parts of a person's own page, and what the person may do there.

    Parameters
    ----------
    device : Device
        Its coroutines run on the event loop of `watch`.
    board : Board
    titles : mapping of str to str
        Titles of items by key; items without one are shown by their keys.
    """

    def __init__(self, device: Device, board: Board, titles: Mapping[str, str]) -> None:
        self._device, self._board, self._titles = device, board, titles
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read: _Read | None = None
        self._rows: tuple[bytes, Any, list[list[str]]] | None = None
        self._apart = ""
        self._leaving = ""

    async def watch(self) -> None:
        """Keep the page current until cancelled."""
        self._loop = asyncio.get_running_loop()
        while True:
            await self.refresh()
            await asyncio.sleep(_LOOK_S)

    def apart(self, reason: str) -> None:
        """Show that this device has given the run up until it is started again, and why."""
        self._apart = reason

    async def refresh(self) -> None:
        """Put the present state on the board."""
        names, plan = self._device.names, self._device.plan
        user = names[0] if names else ""
        self._board.put(
            "about",
            {
                "user": user,
                "run": self._device.run,
                "standing": "apart" if self._apart else self._device.standing,
                "reason": self._apart,
                "conditions": [[name, held] for name, held in self._device.conditions.items()],
                "facts": None if plan is None else run_facts(plan),
                "consent": await self._consent(plan),
                "import": import_words(plan),
            },
        )
        try:
            device = self._device
            ended = device.standing == "ended"
            self._board.put("choices", choices(plan, device.stance, device.state, ended=ended))
        except DataError as error:
            self._board.put("choices", {"error": error.message, "hint": error.hint or ""})
        if not user:
            return
        answer = await self._device.agent.DisclosureReceipt(wire.DisclosureReceiptRequest(user=user), None)
        self._board.put(
            "receipt",
            {
                "sent": [{name: getattr(one, name) for name in _SENT} for one in answer.disclosures],
                "declined": [{name: getattr(one, name) for name in _DECLINED} for one in answer.declined],
            },
        )
        known = await self._device.agent.ShowPreferences(wire.ShowPreferencesRequest(user=user), None)
        self._board.put(
            "preferences",
            {
                "own": [_preference(one) for one in known.preferences],
                "others": None if plan is None else other_preferences(plan.system),
            },
        )

    async def _consent(self, plan: RunPlan | None) -> list[list[str]]:
        """Return the consent beside the run; computed once for a plan, as epsilon takes long."""
        metrics = self._device.metrics
        key = b"" if plan is None else plan.SerializeToString(deterministic=True)
        if self._rows is None or self._rows[:2] != (key, metrics):
            rows = await asyncio.to_thread(consent_rows, self._device.consent, plan, metrics)
            self._rows = key, metrics, rows
        return self._rows[2]

    def routes(self) -> list[BaseRoute]:
        """Return the page's routes; all of them change or compute something, and are reached by POST only."""
        from starlette.routing import Route

        carried = {
            "preferences": self.prefer,
            "recommend": self.recommend,
            "preview": self.preview,
            "keep": self.keep,
            "choose": self.choose,
            "leave": self.leave,
        }
        return [Route(f"/own/{name}", self._route(do), methods=["POST"]) for name, do in carried.items()]

    def _route(
        self, do: Callable[[dict[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
    ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def answer(request: Request) -> Response:
            from starlette.responses import JSONResponse

            from coterie.web.application import asked_json

            asked, loop = await asked_json(request, _MOST_BODY), self._loop
            if loop is None or not self._device.names:
                return JSONResponse({"error": "this device has not taken in its history yet"}, 409)
            done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(do(asked), loop))
            try:
                return JSONResponse(shown(await asyncio.wait_for(done, _MOST_S)))
            except CoterieError as error:
                return JSONResponse(
                    {"error": printable(error.message), "hint": printable(error.hint or "")}, 409
                )
            except TimeoutError:
                return JSONResponse({"error": "no answer in time; is the run's server away?"}, 504)

        return answer

    def _user(self) -> str:
        return self._device.names[0]

    def _named(self, item: str) -> str:
        return self._titles.get(item) or item

    async def prefer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Set one preference, or leave it to the run's plan again.

        Raises
        ------
        CoterieError
            The name or value is none that the run's system takes.
        """
        name, value = asked.get("name"), asked.get("value")
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(name, str) or not (value is None or number):
            raise ConfigError("expected the name of a preference, and a number or nothing")
        change = wire.PreferenceChange(name=name, value=None if value is None else float(value))
        await self._device.agent.SetPreferences(
            wire.SetPreferencesRequest(user=self._user(), changes=[change]), None
        )
        await self.refresh()
        return {}

    async def recommend(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the best items that the person has not seen, each with the own item that is most like it.

        Raises
        ------
        CoterieError
            The number is out of range, or there is no model yet.
        """
        k = asked.get("k", 10)
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= _MOST_K:
            raise ConfigError(f"expected a number of items from 1 to {_MOST_K}")
        answer = await self._device.agent.Recommend(wire.UserRecommendRequest(user=self._user(), k=k), None)
        found = await self._device.because(list(answer.items))
        reasons = [None] * len(answer.items) if found is None else zip(found.own, found.values, strict=True)
        return {
            "version": answer.version,
            "measure": "" if found is None else found.measure,
            "items": [
                {
                    "item": item,
                    "title": self._named(item),
                    "score": score,
                    "because": self._named(reason[0]) if reason and reason[0] is not None else "",
                    "likeness": reason[1] if reason else 0.0,
                }
                for item, score, reason in zip(answer.items, answer.scores, reasons, strict=True)
            ],
        }

    async def choose(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Pause, go on, or limit the rounds in a day.

        Raises
        ------
        ConfigError
            Another choice, or a value that is none; or the run has ended.
        """
        self._require_rounds()
        known = {"paused": bool, "rounds_per_day": int}
        for name, value in asked.items():
            if name not in known or type(value) is not known[name]:
                raise ConfigError("expected paused (true or false) or rounds_per_day (a whole number)")
        self._device.choose(**asked)
        await self.refresh()
        return {}

    async def leave(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Leave the run for good, and have what was published deleted; the first step only gives a token.

        Raises
        ------
        ConfigError
            The token of the second step is not the one that was given last; or the run has ended and nothing was
            published in it.
        CoterieError
            What was published cannot be deleted now; the device has left all the same, and tries again.
        """
        plan = self._device.plan
        if plan is None or not publishes(plan.system, plan.settings):
            self._require_rounds()
        if "token" not in asked:
            self._leaving = secrets.token_urlsafe(16)
            return {"token": self._leaving}
        token, self._leaving = self._leaving, ""
        if not token or not secrets.compare_digest(token.encode(), str(asked["token"]).encode()):
            raise ConfigError("this is not the question that was asked last; ask again")
        self._device.choose(left=True, forget=True)
        await self.refresh()
        try:
            async with asyncio.timeout(_FORGET_S):
                return {"deleted": await self._device.forget_published()}
        except (CoterieError, TimeoutError) as error:
            reason = error.message if isinstance(error, CoterieError) else "there was no answer in time"
            raise RunError(
                f"this device has left; what it has published is not deleted yet: {reason}",
                hint="it tries again by itself until it is done, as long as the agent runs",
            ) from error

    def _require_rounds(self) -> None:
        """Refuse a choice about rounds after the last one."""
        if self._device.standing == "ended":
            raise ConfigError("the run has ended: there is no round left to stay out of")

    async def preview(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Read a file of own items and return what would be kept; nothing is kept.

        Raises
        ------
        DataError
            The line and what was expected there; or the device has not joined the run.
        """
        self._read = None
        text, name = asked.get("text"), asked.get("name")
        plan = self._device.plan
        if not isinstance(text, str) or not isinstance(name, str):
            raise ConfigError("expected a file's name and its text")
        if len(text.encode("utf-8", "surrogatepass")) > _MOST_FILE:
            raise DataError(f"the file is too long; expected at most {_MOST_FILE >> 20} MiB")
        if plan is None:
            raise DataError(import_words(None))
        items = await self._device.items()
        limits = ratings_of(plan.system, plan.settings)
        own = await asyncio.to_thread(_own, text, name, items, limits)
        held = self._device.own_items()
        keys = [items[at] for at in own.item]
        rated = [None if limits is None or math.isnan(one) else float(one) for one in own.rating]
        fresh = [(key, one) for key, one in zip(keys, rated, strict=True) if key not in held]
        if limits is not None:
            fresh = [(key, one) for key, one in fresh if one is not None]
        self._read = _Read(secrets.token_urlsafe(16), [key for key, _ in fresh], [one for _, one in fresh])
        return {
            "token": self._read.token,
            "fresh": len(fresh),
            "held": sum(key in held for key in keys),
            "unrated": sum(key not in held for key in keys) - len(fresh),
            "repeated": own.repeated,
            "unknown": len(own.unknown),
            "unknown_items": list(own.unknown[:_PREVIEWED]),
            "rated": limits is not None,
            "rows": [[key, self._named(key), one] for key, one in fresh[:_PREVIEWED]],
        }

    async def keep(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Keep the items of the file that was previewed last.

        Raises
        ------
        ConfigError
            Another file was previewed since, or none.
        """
        read, self._read = self._read, None
        if read is None or not secrets.compare_digest(read.token.encode(), str(asked.get("token")).encode()):
            raise ConfigError("this is not the file that was previewed last; preview it again")
        return {"kept": await self._device.keep(read.items, read.ratings)}


def _preference(one: wire.Preference) -> dict[str, Any]:
    return {
        "name": one.name,
        "value": one.value if one.HasField("value") else None,
        "meaning": one.meaning,
        "lowest": one.lowest,
        "highest": one.highest,
    }


def _own(text: str, name: str, items: Sequence[str], limits: tuple[float, float] | None) -> Any:
    """Return the own items of a file's text; its reader names lines of a file."""
    from coterie.data.own_ratings import read_own_ratings

    with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
        path = Path(folder) / ("history.tsv" if name.lower().endswith(".tsv") else "history.csv")
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            return read_own_ratings(path, items, rating_range=limits)
        except DataError as error:
            said = error.message.replace(str(path), "the file")
            raise DataError(said, hint=error.hint) from error
