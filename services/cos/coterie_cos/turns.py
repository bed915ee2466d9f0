"""Say how many sums come before the next one that a device is in, from the drawing of a pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coterie.rounds import policy
from coterie.rounds.conductor import Conductor
from coterie.rounds.training import Purpose, Training

__all__ = ["Turns"]

_NOBODY = -1


class Turns:
    """The sums of a pass in which each user is; used by `RoundsRun` for devices that check in.

    The drawing of a pass is looked at once for all users, and then costs nothing that grows with their number.

    Parameters
    ----------
    conductor : Conductor
    users : sequence of int
        Slots of the population, in its order.
    """

    def __init__(self, conductor: Conductor, users: Sequence[int]) -> None:
        self._conductor = conductor
        slots = np.asarray(users, np.int64)
        self._place = np.full(int(slots.max()) + 1, _NOBODY, np.int64)
        self._place[slots] = np.arange(len(slots))
        self._drawn_for: tuple[Purpose, int] | None = None
        self._part: npt.NDArray[np.int64] | None = None
        self._parts = 0

    def sums_before(self, state: Training, slots: Sequence[int], *, begun: bool) -> float:
        """Return how many whole sums come before the next one that a device is in, at least.

        Parameters
        ----------
        state : Training
        slots : sequence of int
            The device's slots.
        begun : bool
            Whether the sum of ``state`` is in progress, without the device.

        Returns
        -------
        float
            Infinity for a device of which nobody is in the population.
        """
        asked = np.asarray(slots, np.int64)
        places = self._place[asked[asked < len(self._place)]]
        places = places[places != _NOBODY]
        if not len(places):
            return math.inf
        self._look(state)
        # A sum in progress may end at any moment.
        first = state.part + 1 if begun else state.part
        if self._part is None:
            return 0.0
        own = self._part[places]
        own = own[own >= first]
        # After the last sum of the pass anybody may be in the next one.
        return float((own.min() if len(own) else max(self._parts, first)) - first)

    def _look(self, state: Training) -> None:
        """Look at the drawing of the state's pass, unless that is known."""
        wanted = state.purpose, state.pass_number
        if wanted == self._drawn_for:
            return
        self._drawn_for, self._part = wanted, None
        conductor, users = self._conductor, len(self._conductor.population)
        if state.purpose is Purpose.SUPPORTS:
            self._part, self._parts = conductor.group_of(state.pass_number), state.groups
        elif state.purpose is Purpose.EVALUATE and state.evaluation_parts == 1:
            self._part, self._parts = np.zeros(users, np.int64), 1
        elif state.purpose is Purpose.TRAIN and conductor.rule.kind == "independent":
            # Anybody may be in any sum.
            return
        else:
            drawn = policy.everybody(conductor.rule, users, state.pass_number)
            part = np.empty(users, np.int64)
            for number, places in enumerate(drawn):
                part[places] = number
            self._part, self._parts = part, len(drawn)
