"""Exchanges of a run of DRIFT's published form, read from the COS's transcript as input of the attacks.

To use a gradient, an attacker needs the rows that it was computed on.  The COS sent these rows itself, in the
answer to the owner's previous exchange, so they are in the transcript with their version; nothing has to be
replayed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from coterie.privacy.transcript import TranscriptEntry, read_transcript
from coterie.wire.refusal import Refusal
from coterie.wire.tensor import from_wire
from coterie.wire.v1.common_pb2 import Tensor
from coterie.wire.v1.orchestrator_pb2 import (
    ExchangeManyRequest,
    ExchangeManyResponse,
    ExchangeRequest,
    ExchangeResponse,
    Gradient,
)

__all__ = ["Exchange", "SeenGradient", "read_exchanges"]

Ids = npt.NDArray[np.uint32]
FactorRows = npt.NDArray[np.float32]

_KEPT_ANSWERS = 4
"""Answers kept for each owner: after a retry or a restart an owner may use one before the last."""


@dataclass(frozen=True)
class SeenGradient:
    """Item gradients of one update, with the rows that they were computed on.

    Attributes
    ----------
    users : ndarray of uint32, shape (m,)
        Slots of the users in the update.
    items : ndarray of uint32, shape (n,)
        Indices of its items.
    user_rows : ndarray of float32, shape (m, d)
        Their rows of Upsilon.
    item_rows : ndarray of float32, shape (n, d)
        Their rows of Psi.
    item_gradient : ndarray of float32, shape (n, d)
        Sum over the update's blocks of the gradient of the mean pair loss.
    """

    users: Ids
    items: Ids
    user_rows: FactorRows
    item_rows: FactorRows
    item_gradient: FactorRows


@dataclass(frozen=True)
class Exchange:
    """One exchange between an owner and the COS, as the COS saw it; a further gradient of it counts as one of its own.

    Attributes
    ----------
    owner : int
        Slot of the data owner.
    users, items : ndarray of uint32
        Slots and indices named together in the request; empty when nothing was asked for.
    carried : bool
        Whether the request carried a gradient that was not seen before.
    gradient : SeenGradient, optional
        That gradient, where the rows that it was computed on are in the transcript.
    """

    owner: int
    users: Ids
    items: Ids
    carried: bool
    gradient: SeenGradient | None


@dataclass(frozen=True)
class _Answer:
    users: Ids
    items: Ids
    user_rows: FactorRows
    item_rows: FactorRows


def read_exchanges(paths: Iterable[Path | str], run_id: str, rate: float) -> Iterator[Exchange]:
    """Read the exchanges of a run in the order of their arrival.

    Parameters
    ----------
    paths : iterable of Path
        Transcripts of the COS, oldest first.
    run_id : str
        The run.
    rate : float
        Its step size, by which an owner's rows move between the gradients of one exchange.

    Yields
    ------
    Exchange
        Each exchange once: a repeated request with the same bytes is left out.
    """
    reading = _Reading(rate)
    for path in paths:
        for entry in read_transcript(path):
            if entry.side != "server" or entry.rpc not in _MESSAGES:
                continue
            if entry.direction == "sent":
                for answer in _answers(entry):
                    reading.answered(entry.peer, answer)
                continue
            try:
                requests = _requests(entry)
            except DecodeError:
                # The COS refused a message that it could not read, and learned nothing from it.
                continue
            for request in requests:
                if request.run_id != run_id:
                    continue
                try:
                    exchanges = reading.asked(entry.peer, request)
                except Refusal:
                    continue
                yield from exchanges


_MESSAGES = frozenset({"Exchange", "ExchangeMany"})


def _requests(entry: TranscriptEntry) -> list[ExchangeRequest]:
    if entry.rpc == "Exchange":
        return [ExchangeRequest.FromString(entry.payload)]
    return list(ExchangeManyRequest.FromString(entry.payload).exchanges)


def _answers(entry: TranscriptEntry) -> list[ExchangeResponse]:
    if entry.rpc == "Exchange":
        return [ExchangeResponse.FromString(entry.payload)]
    response = ExchangeManyResponse.FromString(entry.payload)
    refused = {one.index for one in response.refused}
    return [answer for index, answer in enumerate(response.answers) if index not in refused]


class _Reading:
    """Reader that matches each answer with its request, and each gradient with the answer that had its rows."""

    def __init__(self, rate: float) -> None:
        self._rate = np.float32(rate)
        self._waiting: dict[str, list[ExchangeRequest]] = defaultdict(list)
        self._answers: dict[int, deque[tuple[int, _Answer]]] = defaultdict(
            lambda: deque(maxlen=_KEPT_ANSWERS)
        )
        self._requests: set[bytes] = set()
        self._gradients: set[tuple[int, int, int, int]] = set()

    def asked(self, peer: str, request: ExchangeRequest) -> list[Exchange]:
        # A repeated request is answered again: the last answer counts.
        self._waiting[peer].append(request)
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        if digest in self._requests:
            return []
        self._requests.add(digest)
        named = request.HasField("users") and request.HasField("items")
        seen = request.gradient
        key = (request.owner, seen.epoch, seen.first_block, seen.rows_version)
        carried = request.HasField("gradient") and key not in self._gradients
        gradients = self._seen(request) if carried else [None]
        if carried:
            self._gradients.add(key)
        nothing = np.zeros(0, np.uint32)
        first = Exchange(
            owner=request.owner,
            users=_ids(request.users, "users") if named else nothing,
            items=_ids(request.items, "items") if named else nothing,
            carried=carried,
            gradient=gradients[0],
        )
        return [first, *(Exchange(request.owner, nothing, nothing, True, one) for one in gradients[1:])]

    def answered(self, peer: str, response: ExchangeResponse) -> None:
        waiting = self._waiting[peer]
        fitting = [each for each in waiting if _fits(each, response)]
        if not fitting:
            return
        # One connection may serve several owners at a time; their progress tells the answers apart.
        request = next((each for each in fitting if _reached(each, response)), fitting[0])
        waiting[:] = [each for each in waiting if each.owner != request.owner]
        if not response.HasField("user_rows"):
            return
        self._answers[request.owner].append(
            (
                response.version,
                _Answer(
                    users=_ids(request.users, "users"),
                    items=_ids(request.items, "items"),
                    user_rows=from_wire(response.user_rows, np.float32, (None, None), field="user_rows"),
                    item_rows=from_wire(response.item_rows, np.float32, (None, None), field="item_rows"),
                ),
            )
        )

    def _seen(self, request: ExchangeRequest) -> list[SeenGradient | None]:
        """Return the gradients of a request; None for each where the rows they were computed on are not known."""
        messages = [request.gradient, *request.further]
        for version, answer in reversed(self._answers[request.owner]):
            if version == request.gradient.rows_version:
                found = self._on(answer, messages)
                if found is not None:
                    return [*found]
        return [None] * len(messages)

    def _on(self, answer: _Answer, messages: Sequence[Gradient]) -> list[SeenGradient] | None:
        """Return gradients on the rows of an answer, each moved by those before it; None where it lacks a row."""
        user_rows, item_rows = answer.user_rows.copy(), answer.item_rows.copy()
        found = []
        for message in messages:
            users, items = _ids(message.users, "gradient.users"), _ids(message.items, "gradient.items")
            user_at, item_at = _positions(users, answer.users), _positions(items, answer.items)
            if user_at is None or item_at is None:
                return None
            one = SeenGradient(
                users=users,
                items=items,
                user_rows=user_rows[user_at],
                item_rows=item_rows[item_at],
                item_gradient=_step(message.item_gradient, items, item_rows, "gradient.item_gradient"),
            )
            found.append(one)
            if len(messages) > 1:
                moved = _step(message.user_gradient, users, user_rows, "gradient.user_gradient")
                user_rows[user_at] -= self._rate * moved
                item_rows[item_at] -= self._rate * one.item_gradient
        return found


def _step(tensor: Tensor, ids: Ids, rows: FactorRows, field: str) -> FactorRows:
    """Return a gradient over rows of these ids."""
    return from_wire(tensor, np.float32, (len(ids), rows.shape[1]), field=field)


def _ids(tensor: Tensor, field: str) -> Ids:
    return from_wire(tensor, np.uint32, (None,), field=field)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if len(tensor.shape) else 0


def _fits(request: ExchangeRequest, response: ExchangeResponse) -> bool:
    """Return whether the answer has as many rows as the request named."""
    return _rows(request.users) == _rows(response.user_rows) and _rows(request.items) == _rows(
        response.item_rows
    )


def _reached(request: ExchangeRequest, response: ExchangeResponse) -> bool:
    """Return whether the progress in the answer is the progress that the request leads to."""
    if not request.HasField("gradient"):
        return response.progress.sequence <= request.sequence
    blocks = sum(one.blocks for one in [request.gradient, *request.further])
    reached = (request.gradient.epoch, request.gradient.first_block + blocks)
    return reached == (response.progress.epoch, response.progress.blocks)


def _positions(wanted: Ids, held: Ids) -> npt.NDArray[np.intp] | None:
    """Return the positions of increasing ids among other increasing ids; None unless all are there."""
    at = np.searchsorted(held, wanted)
    found = len(held) > 0 and bool(np.all(held[np.minimum(at, len(held) - 1)] == wanted))
    return at if found else None
