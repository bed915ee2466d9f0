"""Answer calls of DRIFT's published form at the COS: gradients for rows from owners, recommendations for hosts."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from coterie.net.uncancelled import completed
from coterie.store import cos as store
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import increasing_ids, to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_cos.drift.asynchronous import AsynchronousRun
from coterie_cos.drift.model import PublishedModel
from coterie_cos.run import Run

__all__ = ["AsynchronousCalls"]

_MAX_K = 10_000


class AsynchronousCalls:
    """Handlers of the calls that only DRIFT's published form has; used by `Orchestrator`.

    Parameters
    ----------
    accounting : Accounting
        Counts CPU time by activity.
    """

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting

    async def exchange(self, known: Run, party: str, request: wire.ExchangeRequest) -> wire.ExchangeResponse:
        """Apply an owner's gradient, if any, and return the rows for its next one.

        Raises
        ------
        Refusal
            When the run is of another kind, or the gradient or the requested rows do not fit it.
        """
        run = _asynchronous(known)
        run.registry.own_slot(party, request.owner, owner=True)
        model = run.model
        at = model.progress.get(request.owner, store.Progress())
        users = increasing_ids(
            request.users,
            len(model.users),
            field="users",
            unknown=ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
        )
        items = increasing_ids(
            request.items, len(model.items), field="items", unknown=ErrorReason.ERROR_REASON_UNKNOWN_ITEM
        )
        run.registry.check_items(request.owner, items, field="items")
        gradient = request.gradient if request.HasField("gradient") else None
        if (gradient is None) != (request.sequence == 0):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a gradient without a sequence number, or a number without a gradient",
                field="sequence",
                expected="0 without a gradient, the next number with one",
            )
        if gradient is not None:
            with run.charged("Exchange", party):
                await self._apply(run, request.owner, request.sequence, gradient, at)
            if run.evaluation_due:
                await completed(run.maybe_evaluate())
        at = model.progress.get(request.owner, store.Progress())
        return wire.ExchangeResponse(
            version=model.version,
            user_rows=to_wire(model.users[users]),
            item_rows=to_wire(model.items[items]),
            progress=wire.OwnerProgress(sequence=at.sequence, epoch=at.epoch, blocks=at.blocks),
        )

    async def _apply(
        self, run: AsynchronousRun, owner: int, sequence: int, gradient: wire.Gradient, at: store.Progress
    ) -> None:
        packed = gradient.SerializeToString(deterministic=True)
        mark = hashlib.sha256(packed).digest()
        if sequence == at.sequence:
            if mark != at.digest:
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    f"exchange {sequence} was made before with another gradient",
                    field="gradient",
                    expected="the same bytes again",
                )
            # A retry may come before the first update is durable: wait for the writer.
            await run.term.run(lambda _: None)
            return
        if sequence != at.sequence + 1:
            raise Refusal(
                ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
                f"exchange {sequence} does not follow {at.sequence}",
                field="sequence",
                expected=str(at.sequence + 1),
            )
        if run.state.phase.ended:
            raise Refusal(
                ErrorReason.ERROR_REASON_WRONG_STATE,
                "the run has ended: its model stays as it is",
                field="run_id",
                expected="a run that goes on",
            )
        if not 1 <= gradient.epoch <= run.state.epoch:
            raise Refusal(
                ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
                f"epoch {gradient.epoch} has not begun",
                field="gradient.epoch",
                expected=f"1 to {run.state.epoch}",
            )
        with self._accounting.activity("apply gradients", gradient.blocks):
            decoded = run.model.check(owner, gradient)
            items = np.frombuffer(gradient.items.data, "<u4")
            run.registry.check_items(owner, items, field="gradient.items")
        following = store.Progress(
            sequence=sequence,
            epoch=gradient.epoch,
            blocks=gradient.first_block + gradient.blocks,
            digest=mark,
        )
        await run.model.apply(owner, gradient, decoded, packed, following)

    def recommend(self, known: Run, party: str, request: wire.RecommendRequest) -> wire.RecommendResponse:
        """Return the best items for one of the caller's users, by the user's factors.

        Raises
        ------
        Refusal
            When the run is of another kind, the user is not the caller's, or the number of items is out of range.
        """
        run = _asynchronous(known)
        run.registry.own_slot(party, request.slot, owner=False)
        if not 1 <= request.k <= _MAX_K:
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"k is {request.k}",
                field="k",
                expected=f"1 to {_MAX_K}",
            )
        best, scores = _top_k(run.model, request.slot, request.k)
        return wire.RecommendResponse(items=to_wire(best), scores=to_wire(scores), version=run.model.version)


def _asynchronous(run: Run) -> AsynchronousRun:
    if not isinstance(run, AsynchronousRun):
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_SYSTEM,
            f"the run is {run.plan.system}, {run.plan.form}",
            field="run_id",
            expected="drift, published",
        )
    return run


def _top_k(
    model: PublishedModel, slot: int, k: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return the k best items of a user, best first, with their scores."""
    scores = model.items @ model.users[slot]
    k = min(k, len(scores))
    found = np.argpartition(-scores, k - 1)[:k]
    found = found[np.argsort(-scores[found], kind="stable")]
    return found.astype(np.uint32), scores[found]
