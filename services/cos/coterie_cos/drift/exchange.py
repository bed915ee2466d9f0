"""Answer calls of DRIFT's published form at the COS: gradients for rows from owners, recommendations for hosts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from coterie.net.uncancelled import completed
from coterie.store import cos as store
from coterie.systems.drift.published_run import MOST_EXCHANGED, MOST_EXCHANGES, exchanged
from coterie.telemetry.accounting import Accounting
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.tensor import increasing_ids, to_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie_cos.drift.asynchronous import AsynchronousRun
from coterie_cos.drift.model import PublishedModel
from coterie_cos.run import Run

__all__ = ["AsynchronousCalls"]

_MAX_K = 10_000

Ids = npt.NDArray[np.uint32]


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
        (answer,) = await self.exchanges(known, party, [request])
        if isinstance(answer, Refusal):
            raise answer
        return answer

    async def exchange_many(
        self,
        known: Callable[[str], Awaitable[tuple[Run, str]]],
        requests: Sequence[wire.ExchangeRequest],
    ) -> wire.ExchangeManyResponse:
        """Make the exchanges of one message; each is answered or refused by itself, or all of a run for their size.

        Parameters
        ----------
        known : callable
            Returns the run of an id, and the caller's name in it; raises a Refusal.
        requests : sequence of ExchangeRequest

        Raises
        ------
        Refusal
            TOO_LARGE for more exchanges than a message may have.
        """
        if len(requests) > MOST_EXCHANGES:
            raise Refusal(
                ErrorReason.ERROR_REASON_TOO_LARGE,
                f"{len(requests)} exchanges in a message",
                field="exchanges",
                expected=f"at most {MOST_EXCHANGES}",
            )
        response, size = wire.ExchangeManyResponse(), 0
        for run_id, found in itertools.groupby(requests, key=lambda one: one.run_id):
            together = list(found)
            answers: Sequence[wire.ExchangeResponse | Refusal]
            try:
                run, party = await known(run_id)
                size += exchanged(together, run.plan.dim)
                if len(requests) > 1 and size > MOST_EXCHANGED:
                    # Nothing of them is applied and no row is read: 64 times all rows may not fit in memory.
                    raise Refusal(
                        ErrorReason.ERROR_REASON_TOO_LARGE,
                        f"exchanges in one message that take {size} bytes with the rows that they ask for",
                        field="exchanges",
                        expected=f"at most {MOST_EXCHANGED} bytes, or one exchange alone",
                    )
                answers = await self.exchanges(run, party, together)
            except Refusal as refusal:
                answers = [refusal] * len(together)
            for answer in answers:
                if isinstance(answer, Refusal):
                    response.refused.add(
                        index=len(response.answers), reason=answer.reason, message=answer.message
                    )
                    response.answers.add()
                else:
                    response.answers.append(answer)
        return response

    async def exchanges(
        self, known: Run, party: str, requests: Sequence[wire.ExchangeRequest]
    ) -> list[wire.ExchangeResponse | Refusal]:
        """Make exchanges one after the other, and return their answers once all updates are durable.

        One transaction keeps the updates; rows are read after it, so that all answers are of one version.

        Parameters
        ----------
        known : Run
        party : str
            The caller.
        requests : sequence of ExchangeRequest
            Exchanges of any owners of the caller.

        Returns
        -------
        list of ExchangeResponse or Refusal
            One for each request: its answer, or why it was refused; a refused one has no effect on the others.

        Raises
        ------
        Refusal
            When the run is of another kind.
        """
        run = _asynchronous(known)
        found: list[tuple[Ids, Ids] | Refusal] = []
        made: list[store.OwnerUpdate] | None = None
        with run.charged("Exchange", party):
            try:
                for request in requests:
                    try:
                        asked = self._asked(run, party, request)
                        if request.HasField("gradient"):
                            made = made or []
                            made += self._apply(run, request)
                    except Refusal as refusal:
                        found.append(refusal)
                        continue
                    found.append(asked)
                    if run.evaluation_due:
                        made, kept = None, made
                        await run.model.keep(kept or ())
                        await completed(run.maybe_evaluate())
            finally:
                # Also after a failure: what was applied in memory is in the log as well.
                if made is not None:
                    await run.model.keep(made)
        return [
            one if isinstance(one, Refusal) else self._answer(run, request.owner, *one)
            for request, one in zip(requests, found, strict=True)
        ]

    def _asked(self, run: AsynchronousRun, party: str, request: wire.ExchangeRequest) -> tuple[Ids, Ids]:
        """Check an exchange apart from its gradient; return the users and items whose rows it asks for."""
        run.registry.own_slot(party, request.owner, owner=True)
        model = run.model
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
        if request.further and not request.HasField("gradient"):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                f"{len(request.further)} further gradients without a first",
                field="further",
                expected="none without a gradient",
            )
        if request.HasField("gradient") == (request.sequence == 0):
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a gradient without a sequence number, or a number without a gradient",
                field="sequence",
                expected="0 without a gradient, the next number with one",
            )
        return users, items

    @staticmethod
    def _answer(run: AsynchronousRun, owner: int, users: Ids, items: Ids) -> wire.ExchangeResponse:
        model = run.model
        at = model.progress.get(owner, store.Progress())
        return wire.ExchangeResponse(
            version=model.version,
            user_rows=to_wire(model.users.take(users, 0)),
            item_rows=to_wire(model.items.take(items, 0)),
            progress=wire.OwnerProgress(sequence=at.sequence, epoch=at.epoch, blocks=at.blocks),
        )

    def _apply(self, run: AsynchronousRun, request: wire.ExchangeRequest) -> list[store.OwnerUpdate]:
        """Check gradients and apply them in memory; return what the log has to keep of them, none for repeated ones."""
        owner, sequence, gradient = request.owner, request.sequence, request.gradient
        gradients = [gradient, *request.further]
        at = run.model.progress.get(owner, store.Progress())
        packed = [one.SerializeToString(deterministic=True) for one in gradients]
        mark = _mark(packed)
        if sequence == at.sequence:
            if mark != at.digest:
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    f"exchange {sequence} was made before with another gradient",
                    field="gradient",
                    expected="the same bytes again",
                )
            return []
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
        blocks = sum(one.blocks for one in gradients)
        with self._accounting.activity("apply gradients", blocks):
            decoded = run.model.check(owner, gradients)
            for number, one in enumerate(decoded):
                field = f"further[{number - 1}].items" if number else "gradient.items"
                run.registry.check_items(owner, one.items, field=field)
        following = store.Progress(
            sequence=sequence,
            epoch=gradient.epoch,
            blocks=gradient.first_block + blocks,
            digest=mark,
        )
        return run.model.apply(owner, gradients, decoded, packed, following)

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


def _mark(packed: Sequence[bytes]) -> bytes:
    """Return the SHA-256 by which repeated gradients are known; of several, each goes with its length before it."""
    if len(packed) == 1:
        return hashlib.sha256(packed[0]).digest()
    mark = hashlib.sha256()
    for one in packed:
        mark.update(len(one).to_bytes(8, "big") + one)
    return mark.digest()


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
