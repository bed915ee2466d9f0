"""Collect item factors from data owners in a round of training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from coterie.rounds.sides import Arrays
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import from_wire, increasing_ids
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import RoundRef
from coterie_cos.participants import Registry, ranges
from coterie_cos.run import parse

__all__ = ["ItemServers"]

_log = structlog.get_logger("coterie.cos")

_LOOK_S = 0.5
"""How often presence of awaited owners is checked again, seconds."""


class ItemServers:
    """The data owners' answers in the round in progress; used by `RoundsRun` where the system asks owners.

    Parameters
    ----------
    run_id : str
    registry : Registry
    present : callable
        Tells whether a party takes part and was heard lately.
    """

    def __init__(self, run_id: str, registry: Registry, present: Callable[[str], bool]) -> None:
        self._run_id = run_id
        self._registry = registry
        self._present = present
        self._round = 0
        self._version = 0
        self._deadline = 0.0
        self._answers: dict[int, Arrays] = {}
        self._more = asyncio.Event()

    def ask(self, round_: int, version: int, patience_s: float) -> None:
        """Ask owners about the version that a round trains; answers of earlier rounds are dropped."""
        self._round, self._version = round_, version
        self._deadline = time.monotonic() + patience_s
        self._answers = {}

    def tasks(self, slots: Iterable[int]) -> list[wire.Task]:
        """Return a party's task: item factors for those of its slots that are owners and have not answered."""
        waiting = [slot for slot in slots if slot in self._registry.owners and slot not in self._answers]
        if not waiting:
            return []
        return [
            wire.Task(
                kind=wire.TaskKind.TASK_KIND_ITEM_FACTORS,
                round=RoundRef(run_id=self._run_id, round=self._round),
                version=self._version,
                slots=ranges(waiting),
            )
        ]

    def submitted(self, head: wire.SubmitRequest, slots: Sequence[int], payload: bytes) -> None:
        """Take an owner's item factors; its last answer about a version counts.

        Raises
        ------
        Refusal
            UNKNOWN_ROUND for another round or version than the one in progress, INVALID_FIELD unless there is exactly
            one owner or for an item in both lists, UNKNOWN_ITEM for an item that is not the owner's, WRONG_SHAPE,
            NOT_FINITE.
        """
        message = parse(wire.ItemFactors, payload)
        if head.round.round != self._round or message.version != self._version:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"item factors of round {head.round.round} about version {message.version}",
                field="version",
                expected="those of the round in progress",
            )
        if len(slots) != 1:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"item factors for {len(slots)} slots",
                field="slots",
                expected="one data owner",
            )
        found: Arrays = {}
        for items, rows, tensor, values in (
            ("items", "pull", message.items, message.pull),
            ("new_items", "rows", message.new_items, message.rows),
        ):
            ids = increasing_ids(
                tensor, len(self._registry.items), field=items, unknown=ErrorReason.ERROR_REASON_UNKNOWN_ITEM
            )
            self._registry.check_items(slots[0], ids, field=items)
            found[items] = ids
            found[rows] = from_wire(values, "float32", (len(ids), None), field=rows)
        if set(found["items"].tolist()) & set(found["new_items"].tolist()):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "an item is among those that are trained and among those that are not",
                field="new_items",
                expected="no item twice",
            )
        self._answers[slots[0]] = found
        self._more.set()

    async def answers(self, factors: int) -> tuple[list[Arrays], list[str]]:
        """Wait for all present owners or the deadline; return the answers, and the names of owners without one.

        Parameters
        ----------
        factors : int
            Length of a row; an answer with rows of another length counts as none.
        """
        while True:
            waiting = [
                slot
                for slot in self._registry.owners
                if slot not in self._answers and self._present(self._registry.by_slot[slot].party)
            ]
            left = self._deadline - time.monotonic()
            if not waiting or left <= 0:
                break
            self._more.clear()
            try:
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await self._more.wait()
            except TimeoutError:
                continue
        told, silent = [], []
        for slot in sorted(self._registry.owners, key=self._registry.by_name):
            found = self._answers.get(slot)
            # An owner without features sends no rows, so their length does not matter.
            if found is None or not all(
                found[name].shape[1] == factors or not len(found[name]) for name in ("pull", "rows")
            ):
                owner = self._registry.by_slot[slot].owner
                silent.append("" if owner is None else owner.name)
            else:
                told.append(
                    {
                        name: value.reshape(len(value), factors) if value.ndim == 2 else value
                        for name, value in found.items()
                    }
                )
        if silent:
            _log.warning(
                "owners told nothing of their items", run=self._run_id, round=self._round, owners=silent
            )
        return told, silent
