"""The server's copy of the model: in the open, or as versions sealed for participants that share the key.

If participants share the key, the key holders apply sums and seal the next version.  The server stores the sealed bytes
as it would store arrays, and hands them out to participants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from coterie.rounds.conductor import Conductor, decode_sum, model_to_bytes
from coterie.rounds.sides import Arrays
from coterie.rounds.training import Training
from coterie.secure_sum.protocol import Applied, Formed
from coterie.wire.tensor import to_wire
from coterie.wire.v1.rounds_pb2 import SealedModel

__all__ = ["DecodedSum", "MetricTotals", "ModelState", "OpenModel", "SealedVersions"]

MetricTotals = dict[str, tuple[float, float]]
"""Sum and number of users by metric."""

_SEALED = "sealed"


@dataclass(frozen=True)
class DecodedSum:
    """A decoded sum, which the server applies to its arrays.

    Parameters
    ----------
    apply : callable
        Returns the arrays after the sum, from those before it: `ServerSide.apply` with the decoded sum, or what stands
        for it where key holders applied the sum.
    measured : MetricTotals
        Metrics in the sum.
    """

    apply: Callable[[Arrays], Arrays]
    measured: MetricTotals


class ModelState(Protocol):
    """The interface by which the server's run keeps its model, open or sealed."""

    def initial(self) -> Arrays:
        """Return the arrays before the first round."""
        ...

    def model(self, arrays: Arrays) -> bytes:
        """Return the model as participants fetch it, the payload of FETCH_KIND_MODEL."""
        ...

    def opened(self, arrays: Arrays) -> bytes:
        """Return which items each group may train, the payload of FETCH_KIND_OPEN_ITEMS; empty without such a list."""
        ...

    def closed_share(self, arrays: Arrays) -> float | None:
        """Return the share of all users' training items that is closed to learning: too few of a group have them.

        None where the system closes no items, where the server does not see them, and before groups were asked.
        """
        ...

    def decode(self, state: Training, formed: Formed, users: int) -> DecodedSum:
        """Decode the next sum, which is over ``users`` users.

        Raises
        ------
        ImpossibleSumError
            When the sum is beyond its bounds.
        """
        ...


class OpenModel:
    """A model that the server reads, and changes by each sum.

    Parameters
    ----------
    conductor : Conductor
    """

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def initial(self) -> Arrays:
        """Return the arrays before the first round."""
        return self._conductor.side.initial()

    def model(self, arrays: Arrays) -> bytes:
        """Return the model, a serialised ``Model``."""
        return model_to_bytes(self._conductor.side.model(arrays))

    def opened(self, arrays: Arrays) -> bytes:
        """Return the open items, a serialised ``Tensor`` of bits, a row for each group; empty without such a list."""
        opened = self._conductor.side.opened(arrays)
        if opened is None:
            return b""
        return to_wire(np.packbits(opened, axis=1, bitorder="little")).SerializeToString()

    def closed_share(self, arrays: Arrays) -> float | None:
        """Return the share of all users' training items that is closed to learning; None where nothing is known."""
        opened = self._conductor.side.opened(arrays)
        if opened is None or not (told := int(arrays["supports"].sum())):
            return None
        return int(arrays["supports"][~opened].sum()) / told

    def decode(self, state: Training, formed: Formed, users: int) -> DecodedSum:
        """Decode a sum, which the system's side applies.

        Raises
        ------
        ImpossibleSumError
            When the sum is beyond its bounds.
        """
        if isinstance(formed, Applied):
            raise AssertionError("a sum that others applied, to a model that the server has")
        side, cover = self._conductor.side, self._conductor.cover(state, users)
        summed = decode_sum(side, formed, cover, self._conductor.layout(cover.purpose))
        return DecodedSum(partial(side.apply, summed=summed), side.measured(summed.purpose, summed.sums))


class SealedVersions:
    """A model as sealed versions that the server cannot open; it decodes only sums of metrics.

    Parameters
    ----------
    conductor : Conductor
    """

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def initial(self) -> Arrays:
        """Return the first version, with nothing sealed in it: key holders compute it from the plan."""
        return _kept(SealedModel().SerializeToString(deterministic=True))

    def model(self, arrays: Arrays) -> bytes:
        """Return the current version, a serialised ``SealedModel``."""
        return arrays[_SEALED].tobytes()

    def opened(self, arrays: Arrays) -> bytes:
        """Return empty bytes: the list of open items is inside the sealed model."""
        return b""

    def closed_share(self, arrays: Arrays) -> float | None:
        """Return None: the server does not see which items are closed."""
        return None

    def decode(self, state: Training, formed: Formed, users: int) -> DecodedSum:
        """Decode a sum: to the version that holders agreed on, or to the version before for a sum that measures.

        Raises
        ------
        ImpossibleSumError
            When the sum is beyond its bounds.
        """
        if isinstance(formed, Applied):
            after = _kept(formed.model)
            return DecodedSum(lambda arrays: after, dict(formed.measured))
        side = self._conductor.side
        sums = side.layout(state.purpose).decode(formed, users)
        return DecodedSum(lambda arrays: arrays, side.measured(state.purpose, sums))


def _kept(payload: bytes) -> Arrays:
    return {_SEALED: np.frombuffer(payload, np.uint8)}
