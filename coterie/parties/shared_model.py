"""Sealed versions of the model in a run whose participants share the key: holders open, change and seal them.

A sealed version has all arrays that a server would keep for the system: model, the optimiser's state, groups' items.
The first version of a run is not sealed, as it follows from the plan.  A holder that opens a version computes from it
what participants fetch in other runs: the model, and the items that are open to each group.

Needs ``gmpy2``; services import this module only where they hold keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from coterie.crypto.custody import HeldKey
from coterie.crypto.explicit import encode
from coterie.crypto.sealed_model import agreement, open_model, seal_model
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CoterieError
from coterie.rounds.conductor import Cover, decode_sum
from coterie.rounds.sides import Arrays, ServerSide
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import ImpossibleSumError
from coterie.secure_sum.plan import SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined
from coterie.systems.server_step import planned_server_side
from coterie.wire.v1 import rounds_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = ["SharedModels"]


class SharedModels:
    """Opens the sealed versions of a run's model, and makes the next ones, for a key holder.

    Parameters
    ----------
    plan : RunPlan
    secrets : callable
        Returns the secrets of a key, by its id; raises `CoterieError` when the key is not held.
    """

    def __init__(self, plan: RunPlan, secrets: Callable[[bytes], HeldKey]) -> None:
        self._plan = plan
        self._secrets = secrets

    def side(self, items: int, groups: int) -> ServerSide:
        """Return the server's side of the run's system."""
        return planned_server_side(self._plan, items, groups)

    def opened(self, payload: bytes, items: int, groups: int) -> tuple[Arrays, int]:
        """Open a version; return the arrays that the server would keep in an open run, and the round that made them.

        The round is 0 for the first version.

        Parameters
        ----------
        payload : bytes
            A serialised ``SealedModel``.
        items, groups : int
            Numbers of items of the catalogue and of groups of the population; used for the first version.

        Raises
        ------
        VerificationError
            When the payload is no sealed model, or does not open.
        CoterieError
            When the key is not held.
        """
        try:
            version = wire.SealedModel.FromString(payload)
        except DecodeError:
            raise VerificationError(Reason.MALFORMED, "what is no sealed model") from None
        if not version.key_id:
            return self.side(items, groups).initial(), 0
        content = open_model(self._secrets(version.key_id), self._plan.run_id, version.round, version.sealed)
        try:
            return load(content), version.round
        except SafetensorError:
            raise VerificationError(Reason.MALFORMED, "a sealed model with no arrays in it") from None

    def applied(
        self, plan: SumPlan, task: wire.ApplyTask, codes: NDArray[np.uint32], users: int
    ) -> wire.AppliedSum:
        """Apply a sum to the model; return the sealed next version and the metrics, as `shared_key.Apply` asks.

        Raises
        ------
        Declined
            When the model is not the plan's or does not open, the layout is not the system's, or the sum is beyond its
            bounds.
        """
        if hashlib.sha256(task.model).digest() != plan.model_sha256:
            raise Declined("is asked to change another model than that of the plan")
        purpose, groups = Purpose(plan.purpose), len(task.shares)
        side = self.side(task.items, groups)
        layout = side.layout(purpose)
        if layout_hash(layout) != plan.layout_sha256:
            raise Declined("the layout of the sum is not the one that this holder computes")
        if len(codes) < layout.size or codes[layout.size :].any():
            raise Declined("is asked to apply a sum of another length than its layout's")
        try:
            cover = Cover(
                purpose=purpose,
                users=users,
                cohort=plan.users,
                population=task.population,
                shares=np.array(task.shares),
                pass_number=plan.pass_number,
                part=plan.part,
            )
            before, _ = self.opened(task.model, task.items, groups)
            summed = decode_sum(side, codes[: layout.size], cover)
            arrays, measured = side.apply(before, summed), side.measured(purpose, summed.sums)
            held = self._secrets(plan.key_id)
        except (CoterieError, ImpossibleSumError) as error:
            raise Declined(str(error)) from None
        sealed = seal_model(held, plan.run_id, plan.round, save(arrays))
        metrics = [
            wire.CohortMetric(name=name, total=total, count=count)
            for name, (total, count) in sorted(measured.items())
        ]
        told = hashlib.sha256(
            encode("applied-to", task.items, task.population, np.array(task.shares).tobytes())
        )
        made = hashlib.sha256(b"".join(one.SerializeToString(deterministic=True) for one in metrics))
        return wire.AppliedSum(
            model=wire.SealedModel(key_id=plan.key_id, round=plan.round, sealed=sealed).SerializeToString(
                deterministic=True
            ),
            measured=metrics,
            agreement=agreement(held, plan.hash, told.digest(), _digest(arrays), made.digest()),
        )


def _digest(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Return a hash of arrays: name, type, shape and values of each, by ascending name."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(encode("array", name, str(value.dtype), *value.shape))
        digest.update(value.tobytes())
    return digest.digest()
