"""What the server keeps of the model, and what participants fetch: arrays that it reads, or versions sealed for others.

Where participants share the key, those who hold it apply sums and seal what comes out; the server keeps that as it
would keep arrays, and hands it out.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from coterie.rounds.conductor import Conductor, apply_sum, model_to_bytes
from coterie.rounds.sides import Arrays
from coterie.rounds.training import Training
from coterie.secure_sum.protocol import Applied, Formed
from coterie.wire.tensor import to_wire
from coterie.wire.v1.rounds_pb2 import SealedModel

__all__ = ["Measured", "ModelState", "OpenModel", "SealedVersions"]

Measured = dict[str, tuple[float, float]]
"""Sum and number of users by metric."""

_SEALED = "sealed"


class ModelState(Protocol):
    """How the model of a run is kept."""

    def initial(self) -> Arrays:
        """Return what is kept before the first round."""
        ...

    def model(self, arrays: Arrays) -> bytes:
        """Return the payload of FETCH_KIND_MODEL."""
        ...

    def opened(self, arrays: Arrays) -> bytes:
        """Return the payload of FETCH_KIND_OPEN_ITEMS; empty where the server has no such list."""
        ...

    def closed_share(self, arrays: Arrays) -> float | None:
        """Return which share of all users' training items is closed to learning: too few of a group have them.

        None where there are no closed items, where the server does not see them, and before groups were asked.
        """
        ...

    def after_sum(
        self, state: Training, arrays: Arrays, formed: Formed, users: int
    ) -> tuple[Arrays, Measured]:
        """Return what is kept after a sum over so many users, and the metrics in it.

        Raises
        ------
        ImpossibleSumError
            When the sum is beyond its bounds.
        """
        ...


class OpenModel:
    """The server has the model.

    Parameters
    ----------
    conductor : Conductor
    """

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def initial(self) -> Arrays:
        """Return what is kept before the first round."""
        return self._conductor.side.initial()

    def model(self, arrays: Arrays) -> bytes:
        """Return a ``Model``."""
        return model_to_bytes(self._conductor.side.model(arrays))

    def opened(self, arrays: Arrays) -> bytes:
        """Return a ``Tensor`` of bits, a row for each group."""
        opened = self._conductor.side.opened(arrays)
        if opened is None:
            return b""
        return to_wire(np.packbits(opened, axis=1, bitorder="little")).SerializeToString()

    def closed_share(self, arrays: Arrays) -> float | None:
        """Return which share of all users' training items is closed to learning."""
        opened = self._conductor.side.opened(arrays)
        if opened is None or not (told := int(arrays["supports"].sum())):
            return None
        return int(arrays["supports"][~opened].sum()) / told

    def after_sum(
        self, state: Training, arrays: Arrays, formed: Formed, users: int
    ) -> tuple[Arrays, Measured]:
        """Return what is kept after a sum, and the metrics in it.

        Raises
        ------
        ImpossibleSumError
            When the sum is beyond its bounds.
        """
        if isinstance(formed, Applied):
            raise AssertionError("a sum that others applied, to a model that the server has")
        return apply_sum(self._conductor.side, arrays, formed, self._conductor.cover(state, users))


class SealedVersions:
    """The server has versions that it cannot open, and sums that only measure.

    Parameters
    ----------
    conductor : Conductor
    """

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def initial(self) -> Arrays:
        """Return a version with nothing sealed: it follows from the plan."""
        return _kept(SealedModel().SerializeToString(deterministic=True))

    def model(self, arrays: Arrays) -> bytes:
        """Return a ``SealedModel``."""
        return arrays[_SEALED].tobytes()

    def opened(self, arrays: Arrays) -> bytes:
        """Return nothing: who can open the model finds the list in it."""
        return b""

    def closed_share(self, arrays: Arrays) -> float | None:
        """Return nothing: the server does not see it."""
        return None

    def after_sum(
        self, state: Training, arrays: Arrays, formed: Formed, users: int
    ) -> tuple[Arrays, Measured]:
        """Return the next version that holders agreed on and the metrics that they told, or those of a sum.

        Raises
        ------
        ImpossibleSumError
            When the sum is beyond its bounds.
        """
        if isinstance(formed, Applied):
            return _kept(formed.model), dict(formed.measured)
        side = self._conductor.side
        sums = side.layout(state.purpose).decode(formed, users)
        return arrays, side.measured(state.purpose, sums)


def _kept(payload: bytes) -> Arrays:
    return {_SEALED: np.frombuffer(payload, np.uint8)}
