r"""Server optimisers of a run (``[rounds.server_optimiser]``) in the server's side of any system that steps.

A system *steps* if its server adds a sum of training, or a mean of it, to its model: :math:`x + \Delta`.
`System.stepped` names the arrays that it moves so.  `OptimisedServer` lets the system compute :math:`x + \Delta`, takes
the difference :math:`\Delta` as the change of the round, and moves the arrays by the run's optimiser
(`coterie.systems.shared.optimisers`).

Other systems step by an optimiser that their settings name, with the keys `OPTIMISER_KEYS`.  The run's optimiser then
takes the place of these keys' values, so that the numbers are those of a run that has them in the system's own table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.rounds.privacy import privacy_of
from coterie.rounds.sides import Arrays, ServerSide, Summed, named, unnamed
from coterie.rounds.training import Purpose
from coterie.systems.around_server import AroundServer
from coterie.systems.description import System
from coterie.systems.private_sides import PrivateServer
from coterie.systems.registry import server_side, system_named, systems
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.optimisers import ServerOptimiser, initial_state, step
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

__all__ = [
    "OPTIMISER_KEYS",
    "OptimisedServer",
    "objection_to_optimiser",
    "optimiser_of",
    "own_optimiser_set",
    "planned_server_side",
]

OPTIMISER_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "server_optimiser": "name",
        "server_rate": "rate",
        "server_beta1": "beta1",
        "server_beta2": "beta2",
        "server_tau": "tau",
    }
)
"""Keys by which a system's settings name an optimiser of their own, and the optimiser's fields that they stand for."""

_STATE = "server_optimiser."


def optimiser_of(rounds: RoundsPlan) -> ServerOptimiser | None:
    """Return the optimiser in a run's plan; None where the system's own step moves the model.

    Raises
    ------
    ConfigError
        An unknown name or a value out of its range.
    """
    if not rounds.HasField("server_optimiser"):
        return None
    one = rounds.server_optimiser
    return ServerOptimiser(one.name, one.rate, one.beta1, one.beta2, one.tau)


def objection_to_optimiser(system: System, optimiser: ServerOptimiser) -> str:
    """Return why a system does not take an optimiser of ``[rounds.server_optimiser]``; empty where it does."""
    if system.stepped:
        return ""
    if _has_keys(system):
        names = get_args(system.settings.model_fields["server_optimiser"].annotation)
        if optimiser.name in names:
            return ""
        return (
            f"users of {system.name} contribute gradients, along which {optimiser.name} has no step; expected one of "
            f"{', '.join(names)}"
        )
    stepping = ", ".join(name for name, one in systems().items() if one.stepped or _has_keys(one))
    return (
        f"{system.name} moves no model by steps along sums; expected no rounds.server_optimiser, or a system that "
        f"steps: {stepping}"
    )


def _has_keys(system: System) -> bool:
    return OPTIMISER_KEYS.keys() <= system.settings.model_fields.keys()


def own_optimiser_set(own: SystemSettings) -> list[str]:
    """Return the keys of a system's own optimiser that were given other values than they have without being given."""
    fields = type(own).model_fields.keys()
    if not OPTIMISER_KEYS.keys() <= fields:
        return []
    given = {name: getattr(own, name) for name in own.model_fields_set & fields - OPTIMISER_KEYS.keys()}
    usual = type(own).model_validate(given)
    return [name for name in OPTIMISER_KEYS if getattr(own, name) != getattr(usual, name)]


def planned_server_side(plan: RunPlan, n_items: int, groups: int) -> ServerSide:
    """Build the server's side of a planned run, with the plan's optimiser in it, and noise, where there are any.

    Raises
    ------
    ConfigError
        There is no such system, the settings are not its own, it does not go with the optimiser, or codes have no room
        for the noise.
    """
    side = _stepping_side(plan, n_items, groups)
    terms = privacy_of(plan.rounds)
    if not terms.on:
        return side
    return PrivateServer(side, terms, plan.rounds.min_sum, reports_of_users=plan.rounds.party_per_user)


def _stepping_side(plan: RunPlan, n_items: int, groups: int) -> ServerSide:
    """Build the server's side of a planned run whose sums are exact."""
    optimiser = optimiser_of(plan.rounds)
    if optimiser is None:
        return server_side(plan.system, plan.settings, n_items, plan.seed, groups)
    system = system_named(plan.system)
    if objection := objection_to_optimiser(system, optimiser):
        raise ConfigError(objection)
    if system.stepped:
        side = server_side(plan.system, plan.settings, n_items, plan.seed, groups)
        return OptimisedServer(side, optimiser, system.stepped)
    settings = _with_optimiser(plan.settings, optimiser)
    return server_side(plan.system, settings, n_items, plan.seed, groups)


def _with_optimiser(settings: str, optimiser: ServerOptimiser) -> str:
    """Return a system's settings with the run's optimiser in place of their own; what are none, as it is."""
    try:
        given = dict(json.loads(settings))
    except (TypeError, ValueError):
        return settings
    return json.dumps({**given, **{key: getattr(optimiser, field) for key, field in OPTIMISER_KEYS.items()}})


class OptimisedServer(AroundServer):
    """Server's side of a system whose model is moved by an optimiser of the run.

    It keeps the optimiser's moments among the arrays that it is given, so that they are stored with each version.

    Parameters
    ----------
    side : ServerSide
        The system's own side.
    optimiser : ServerOptimiser
    stepped : sequence of str
        Names of the arrays that the system moves by a step, at least one.
    """

    def __init__(self, side: ServerSide, optimiser: ServerOptimiser, stepped: Sequence[str]) -> None:
        super().__init__(side)
        self._optimiser = optimiser
        self._stepped = tuple(stepped)

    def initial(self) -> Arrays:
        """Return the system's arrays before the first round, and the optimiser's state.

        Raises
        ------
        ConfigError
            The system keeps no such arrays as its description says it moves.
        """
        arrays = self._side.initial()
        if missing := [name for name in self._stepped if name not in arrays]:
            raise ConfigError(
                f"System.stepped names {', '.join(missing)}; expected some of the arrays that the server's side keeps: "
                f"{', '.join(arrays)}"
            )
        return {**arrays, **named(_STATE, initial_state(self._optimiser, self._moved(arrays)))}

    def _moved(self, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
        return {name: arrays[name].astype(np.float32, copy=False) for name in self._stepped}

    def apply(self, arrays: Arrays, summed: Summed) -> Arrays:
        """Return the arrays after a sum, those that the system steps with moved by the optimiser."""
        after = self._side.apply(arrays, summed)
        if summed.purpose is not Purpose.TRAIN:
            return after
        before, state = self._moved(arrays), unnamed(_STATE, arrays)
        # Differences of single precision are exact in double precision: "fedavg" is the system's own step to the bit.
        change = {name: after[name].astype(np.float64) - value for name, value in before.items()}
        moved, left = step(self._optimiser, before, state, change)
        typed = {name: value.astype(arrays[name].dtype, copy=False) for name, value in moved.items()}
        return {**after, **typed, **named(_STATE, left)}
