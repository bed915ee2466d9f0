r"""Optimisers: the server's, over averaged updates, and the corrections of clients' local steps.

A *change*, :math:`\Delta`, is the average of the changes of the model by the participants of a round.  The server
optimisers are those of Reddi et al., *Adaptive Federated Optimization* (2021), Alg. 2, and McMahan et al. (2017):

- FedSGD: :math:`x + \eta \Delta`, where :math:`\Delta` comes from one local step;
- FedAvg: :math:`x + \Delta`;
- FedAdagrad, FedAdam, FedYogi: :math:`x + \eta\, \hat m / (\sqrt{\hat v} + \tau)`.

They are pure: model and state go in, a new model and a new state come out.  Both are dicts of arrays, so that a store
can keep them as they are.  Adam and Yogi start from zero and correct for it, as Kingma and Ba (2015) do; Reddi et al.
start from :math:`\tau^2` without correction.

Clients use `adam` in place for their private arrays, `add_proximal` (FedProx: Li et al., 2020) and SCAFFOLD's control
variates (Karimireddy et al., 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError

__all__ = [
    "SERVER_OPTIMISERS",
    "Arrays",
    "ServerOptimiser",
    "adam",
    "add_proximal",
    "corrected",
    "initial_state",
    "next_common",
    "next_control",
    "step",
]

SERVER_OPTIMISERS = ("fedsgd", "fedavg", "fedadagrad", "fedadam", "fedyogi")

Arrays = dict[str, NDArray[np.float32]]
"""Model or state: arrays by name."""

Real = TypeVar("Real", np.float32, np.float64)
"""Kind of floating-point numbers in which control variates are computed."""


@dataclass(frozen=True)
class ServerOptimiser:
    r"""Name and settings of a server optimiser.

    Parameters
    ----------
    name : {"fedsgd", "fedavg", "fedadagrad", "fedadam", "fedyogi"}
    rate : float
        :math:`\eta`, above 0; FedAvg has none.
    beta1, beta2 : float
        Decay of the first and the second moment, in [0, 1); FedAdagrad uses the first only.
    tau : float
        Added to the root of the second moment, above 0.

    Raises
    ------
    ConfigError
        An unknown name or a value out of its range.
    """

    name: str = "fedadam"
    rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-8

    def __post_init__(self) -> None:
        if self.name not in SERVER_OPTIMISERS:
            raise ConfigError(
                f"server optimiser is {self.name!r}; expected one of {', '.join(SERVER_OPTIMISERS)}"
            )
        # Written so that NaN fails, too.
        if not (0 < self.rate < np.inf and 0 < self.tau < np.inf):
            raise ConfigError(f"server rate {self.rate}, tau {self.tau}; expected finite numbers above 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError(f"beta1 {self.beta1}, beta2 {self.beta2}; expected at least 0 and below 1")

    @property
    def keeps_moments(self) -> bool:
        """Whether the optimiser keeps moments between rounds."""
        return self.name not in ("fedsgd", "fedavg")


def initial_state(optimiser: ServerOptimiser, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """Return the state before the first round: empty, or zero moments of each array and a count of steps."""
    if not optimiser.keeps_moments:
        return {}
    state: Arrays = {"steps": np.zeros(1, np.float32)}
    for name, value in model.items():
        state[f"first.{name}"] = np.zeros_like(value)
        state[f"second.{name}"] = np.zeros_like(value)
    return state


def step(
    optimiser: ServerOptimiser,
    model: Mapping[str, NDArray[np.float32]],
    state: Mapping[str, NDArray[np.float32]],
    change: Mapping[str, NDArray[np.floating]],
    *,
    factor: float = 1.0,
) -> tuple[Arrays, Arrays]:
    r"""Move the model by one round.

    Parameters
    ----------
    optimiser : ServerOptimiser
    model : mapping of str to ndarray of float32
    state : mapping of str to ndarray of float32
        State from `initial_state`, or from the last round.
    change : mapping of str to ndarray
        :math:`\Delta` for every array of the model.
    factor : float
        Multiplies the rate, for a schedule; FedAvg ignores it.

    Returns
    -------
    model, state : dict of str to ndarray of float32
        New arrays; nothing given is changed.
    """
    moved: Arrays = {}
    if not optimiser.keeps_moments:
        rate = optimiser.rate * factor if optimiser.name == "fedsgd" else 1.0
        for name, value in model.items():
            moved[name] = (value + rate * change[name]).astype(np.float32)
        return moved, {}

    steps = float(state["steps"][0]) + 1
    left: Arrays = {"steps": np.full(1, steps, np.float32)}
    beta1, beta2 = optimiser.beta1, optimiser.beta2
    for name, value in model.items():
        delta = np.asarray(change[name], np.float64)
        square = delta * delta
        first = beta1 * state[f"first.{name}"].astype(np.float64) + (1 - beta1) * delta
        second = state[f"second.{name}"].astype(np.float64)
        unbiased = 1.0
        if optimiser.name == "fedadagrad":
            second = second + square
        else:
            unbiased = 1 - beta2**steps
            if optimiser.name == "fedadam":
                second = beta2 * second + (1 - beta2) * square
            else:
                second = second - (1 - beta2) * square * np.sign(second - square)
        rate = optimiser.rate * factor / (1 - beta1**steps)
        moved[name] = (value + rate * first / (np.sqrt(second / unbiased) + optimiser.tau)).astype(np.float32)
        left[f"first.{name}"], left[f"second.{name}"] = first.astype(np.float32), second.astype(np.float32)
    return moved, left


def adam(
    value: NDArray[np.float32],
    gradient: NDArray[np.float32],
    first: NDArray[np.float32],
    second: NDArray[np.float32],
    steps: NDArray[np.integer] | int,
    rate: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> None:
    """Take one step of Adam (Kingma and Ba, 2015) in place.

    Parameters
    ----------
    value, gradient, first, second : ndarray of float32, shape (users, ...)
        Parameters, their gradient and both moments.
    steps : int or ndarray of int, shape (users,)
        How many steps were taken, this one included; each user may have its own count.
    rate, betas, epsilon
        As in the paper.
    """
    beta1, beta2 = betas
    first *= np.float32(beta1)
    first += np.float32(1 - beta1) * gradient
    second *= np.float32(beta2)
    second += np.float32(1 - beta2) * (gradient * gradient)
    count = np.asarray(steps, np.float64).reshape(-1, *[1] * (value.ndim - 1))
    size = (rate / (1 - beta1**count)).astype(np.float32)
    root = np.sqrt(second)
    root *= (1 / np.sqrt(1 - beta2**count)).astype(np.float32)
    root += np.float32(epsilon)
    np.divide(first, root, out=root)
    root *= size
    value -= root


def add_proximal(
    gradient: NDArray[np.float32], value: NDArray[np.float32], start: NDArray[np.float32], mu: float
) -> None:
    r"""Add the derivative of :math:`\frac{\mu}{2} |w - w^t|^2` in place (FedProx, (2)).

    The term keeps a client near the model that it fetched, so that clients may do different amounts of work.
    """
    gradient += np.float32(mu) * (value - start)


def corrected(gradient: NDArray[Real], own: NDArray[Real], common: NDArray[Real]) -> NDArray[Real]:
    """Return the gradient corrected for the client's drift: ``g - c_i + c`` (SCAFFOLD, Alg. 1, line 10)."""
    return gradient - own + common


def next_control(
    own: NDArray[Real], common: NDArray[Real], delta: NDArray[Real], travelled: NDArray[Real] | float
) -> NDArray[Real]:
    r"""Return the client's control variate after its local steps (SCAFFOLD, Alg. 1, line 12, option II).

    Parameters
    ----------
    own, common : ndarray of float
        :math:`c_i` and :math:`c`.
    delta : ndarray of float
        :math:`w - w^t`, the change by the local steps.
    travelled : float, or ndarray of float of a shape that divides ``delta``
        Number of local steps times their rate, above 0.

    Returns
    -------
    ndarray of float
        :math:`c_i - c - \Delta / (K \eta)`: the mean of the gradients that were taken.
    """
    return own - common - delta / travelled


def next_common(
    common: NDArray[np.float64],
    change: NDArray[np.float64],
    travelled: float,
    share: NDArray[np.float64] | float,
) -> NDArray[np.float64]:
    r"""Return the server's control variate after a round (SCAFFOLD, Alg. 1, line 17), from changes of the model alone.

    By option II a client's control variate changes by :math:`c_i^+ - c_i = -c - \Delta_i / (K \eta)`, in which the
    client's own :math:`c_i` cancels.  So where all clients take K steps of the same rate, the mean change of the model
    tells the mean change of control variates, and nobody has to send the latter.

    Parameters
    ----------
    common : ndarray of float
        :math:`c`.
    change : ndarray of float
        Mean of :math:`\Delta_i` over the clients of the round.
    travelled : float
        :math:`K \eta`, above 0.
    share : float, or ndarray of float of a shape that multiplies ``common``
        Share of all clients that is in the round.
    """
    return common - share * (common + change / travelled)
