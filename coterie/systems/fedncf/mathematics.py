r"""Mathematics of FedNCF, federated neural collaborative filtering (Perifanis and Efraimidis, 2022).

Participants keep their own embedding :math:`p_u`; item embeddings (*rows*) and weights (*network*) are shared.  In a
round each participant trains for :math:`E` epochs on its own data from version :math:`t` and sends the changes of the
model, as the segments of one vector that can be summed (`layout`):

====================  ==================================  ==========================  ========================
aggregation           items                               network                     divided by
====================  ==================================  ==========================  ========================
``simple``            :math:`I - I^t`                     :math:`w - w^t`             participants
``fedavg``            :math:`n_c (I - I^t)`               :math:`n_c (w - w^t)`       instances :math:`n_c`
``mf-fedavg``         :math:`I_i - I_i^t` where touched   :math:`n_c (w - w^t)`       touches of :math:`i`; instances
====================  ==================================  ==========================  ========================

MF-FedAvg is the paper's Alg. 1.  Under ``touch = "exact"`` the participants send which rows they touched, as in the
paper; under ``touch = "once"`` they do not, and the orchestrator divides by an expected count (`expected_touches`), or
uses an optimiser that needs none.  The orchestrator passes the average to a server optimiser (`apply`).  The local step
of a participant is in `coterie.systems.fedncf.local_step`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.fedncf import networks
from coterie.systems.shared.optimisers import Arrays, initial_state, step

if TYPE_CHECKING:
    from coterie.systems.fedncf.settings import FedNcfSettings

__all__ = [
    "Private",
    "apply",
    "balance",
    "expected_touches",
    "initial",
    "initial_private",
    "initial_server_state",
    "layout",
    "scores",
]

_MODEL, _PRIVATE = 0, 1
"""First element of the key under which each use of a seed draws; `coterie.systems.fedncf.local_step` has 2."""


@dataclass(eq=False)
class Private:
    """Private arrays of participants between rounds, a slot for each; a host may map them from files.

    Parameters
    ----------
    embedding : ndarray of float32, shape (slots, width)
        :math:`p_u`.
    first, second : ndarray of float32, shape (slots, width)
        Moments of the embedding's optimiser.
    steps : ndarray of int32, shape (slots,)
        Number of steps that the optimiser took.
    control : ndarray of float32, shape (slots, network_size), or (slots, 0) without SCAFFOLD
        Control variates.
    """

    embedding: NDArray[np.float32]
    first: NDArray[np.float32]
    second: NDArray[np.float32]
    steps: NDArray[np.int32]
    control: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.embedding)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the arrays by name, as a store keeps them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def take(self, slots: Sequence[int] | NDArray[np.integer]) -> Private:
        """Return a copy of some slots."""
        return Private(**{name: np.array(value[slots]) for name, value in self.arrays().items()})

    def put(self, slots: Sequence[int] | NDArray[np.integer] | int, other: Private) -> None:
        """Write all slots of ``other`` into the given slots."""
        for name, value in self.arrays().items():
            value[slots] = getattr(other, name)


def initial(settings: FedNcfSettings, n_items: int, seed: int) -> Arrays:
    """Return version 0 of the shared model.

    Parameters
    ----------
    settings : FedNcfSettings
    n_items : int
    seed : int
        At least 0.

    Returns
    -------
    dict
        ``items``: float32 (n_items, width); ``network``: float32 (network_size,); with SCAFFOLD ``control``: float32
        (network_size,), the control variate that all participants fetch.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_MODEL,)))
    architecture = settings.architecture
    bias = networks.log_odds(settings.negatives) if settings.output_bias == "log-odds" else 0.0
    model: Arrays = {
        "items": networks.initial_items(architecture, n_items, rng),
        "network": networks.initial_network(architecture, rng, bias),
    }
    if settings.scaffold:
        model["control"] = np.zeros_like(model["network"])
    return model


def initial_private(settings: FedNcfSettings, keys: Sequence[int] | NDArray[np.integer]) -> Private:
    """Return the initial private arrays of participants.

    Parameters
    ----------
    settings : FedNcfSettings
    keys : sequence of int
        Each participant's own number, at least 0, which nobody else knows: it decides the initial embedding.
    """
    architecture, bound = settings.architecture, settings.user_bound
    n, width = len(keys), architecture.width
    embedding = np.empty((n, width), np.float32)
    for slot, key in enumerate(keys):
        rng = np.random.default_rng(np.random.SeedSequence(int(key), spawn_key=(_PRIVATE,)))
        embedding[slot] = rng.uniform(-bound, bound, width)
    return Private(
        embedding,
        np.zeros((n, width), np.float32),
        np.zeros((n, width), np.float32),
        np.zeros(n, np.int32),
        np.zeros((n, architecture.network_size if settings.scaffold else 0), np.float32),
    )


def layout(settings: FedNcfSettings, n_items: int, extra: Sequence[Segment] = ()) -> Layout:
    """Return the segments of a contribution.

    Parameters
    ----------
    settings : FedNcfSettings
    n_items : int
    extra : sequence of Segment
        Further segments, such as sums of metrics.

    Returns
    -------
    Layout
        ``items`` (n_items, width) and ``network`` (network_size,), with their divisors: ``touched`` (n_items,),
        ``instances`` () or ``participants`` (); with SCAFFOLD ``control`` (network_size,).
    """
    architecture, bits = settings.architecture, settings.bits
    rows, size = (n_items, architecture.width), architecture.network_size
    weighted = settings.aggregation != "simple"
    largest = settings.n_cap if weighted else 1
    if settings.aggregation == "mf-fedavg":
        over = "touched" if settings.touch == "exact" else ""
        segments = [Segment("items", rows, settings.row_bound, bits, over)]
        if over:
            segments.append(Segment.whole("touched", (n_items,), 1))
    else:
        over = "instances" if weighted else "participants"
        segments = [Segment("items", rows, largest * settings.row_bound, bits, over)]
    count = Segment.whole("instances" if weighted else "participants", (), largest)
    segments += [Segment("network", (size,), largest * settings.network_bound, bits, count.name), count]
    if settings.scaffold:
        # A control variate is a mean gradient: a change of the network divided by the local rate.
        segments.append(Segment("control", (size,), 2 * settings.network_bound / settings.local_rate, bits))
    return Layout((*segments, *extra))


def expected_touches(
    support: NDArray[np.floating],
    interactions: NDArray[np.floating] | float,
    settings: FedNcfSettings,
    *,
    users: int,
) -> NDArray[np.float64]:
    r"""Return the expected number of a group's participants that touch each row in a round.

    A participant that interacted with item :math:`i` always touches it.  Every other participant draws
    :math:`E \nu n` negatives among the items without an interaction; :math:`n` is taken to be the group's mean.

    Parameters
    ----------
    support : ndarray, shape (n_items,)
        Number of the group's participants with each item in their training data; 0 for closed items.
    interactions : float
        Mean number of interactions of a participant.
    settings : FedNcfSettings
        Gives the negatives :math:`\nu` per interaction and the local epochs :math:`E`.
    users : int
        Participants in the group.

    Returns
    -------
    ndarray of float64, shape (n_items,)
        0 where the support is 0: nobody sends such a row.
    """
    n = float(np.mean(interactions))
    draws = settings.local_epochs * settings.negatives * n
    chance = -math.expm1(draws * math.log1p(-1 / max(len(support) - n, 2.0)))
    return np.where(support > 0, support + (users - support) * chance, 0.0)


def balance(opened: NDArray[np.bool_], users: NDArray[np.integer]) -> NDArray[np.float32]:
    r"""Return the weight of negatives in the change of each item's row, where groups have different open items.

    A row learns from interactions and negatives only in the groups where its item is open, which have nearly all
    of its interactions but only a part of its negatives.  Without the weight rare items would be ranked too high.

    Parameters
    ----------
    opened : ndarray of bool, shape (groups, n_items)
        Open items of each group, which the orchestrator knows.
    users : ndarray of int, shape (groups,)
        Participants of each group.

    Returns
    -------
    ndarray of float32, shape (n_items,)
        Number of all participants divided by that of participants to whom the item is open; 1 where there are none.
    """
    reached = np.asarray(users, np.float64) @ opened
    return np.where(reached > 0, np.sum(users) / np.maximum(reached, 1), 1.0).astype(np.float32)


def initial_server_state(settings: FedNcfSettings, model: Mapping[str, NDArray[np.float32]]) -> Arrays:
    """Return the state of the server optimiser before the first round."""
    return initial_state(settings.server, _moved_by_rounds(model))


def _moved_by_rounds(model: Mapping[str, NDArray[np.float32]]) -> Arrays:
    return {name: model[name] for name in ("items", "network")}


def apply(
    model: Mapping[str, NDArray[np.float32]],
    state: Mapping[str, NDArray[np.float32]],
    sums: Mapping[str, NDArray[np.float64]],
    settings: FedNcfSettings,
    *,
    users: int,
    global_round: float = 0.0,
    expected: NDArray[np.floating] | None = None,
    population: int | None = None,
) -> tuple[Arrays, Arrays]:
    """Make the next version of the model from the sums of a round.

    Parameters
    ----------
    model : mapping
        Version of the model that the participants fetched.
    state : mapping
        State from `initial_server_state`, or from the last round.
    sums : mapping
        `Layout.decode` of a layout that begins with `layout`.
    settings : FedNcfSettings
    users : int
        How many participants the sums cover, at least 1.
    global_round : float
        Global rounds before this round.
    expected : ndarray, shape (n_items,), optional
        Divisor of each row under ``touch = "once"`` (numbers below 1 count as 1).  If left out, rows are divided by
        ``users``, which only an optimiser that rescales allows.
    population : int, optional
        Number of all participants; used by SCAFFOLD only.

    Returns
    -------
    model, state : dict of str to ndarray of float32
        New arrays.  A row that nobody touched keeps its value, unless the optimiser has momentum left for it.

    Raises
    ------
    ConfigError
        Touch counts are needed and missing.
    """
    server = settings.server
    averages = layout(settings, len(model["items"])).average(sums)
    change = {name: averages[name] for name in ("items", "network")}
    if settings.aggregation == "mf-fedavg" and settings.touch == "once":
        if expected is not None:
            change["items"] = change["items"] / np.maximum(expected, 1.0)[:, None]
        elif server.keeps_moments:
            change["items"] = change["items"] / users
        else:
            raise ConfigError(
                f"touch 'once' with the server optimiser {server.name!r} needs expected touch counts",
                hint="use 'fedadam', or touch 'exact'",
            )
    moved, left = step(
        server,
        _moved_by_rounds(model),
        state,
        change,
        factor=settings.rate_factor(global_round),
    )
    if settings.scaffold:
        moved["control"] = (model["control"] + sums["control"] / (population or users)).astype(np.float32)
    return moved, left


def scores(
    model: Mapping[str, NDArray[np.float32]],
    embedding: NDArray[np.float32],
    settings: FedNcfSettings,
    candidates: NDArray[np.integer] | None = None,
) -> NDArray[np.float32]:
    """Return the scores of some participants for some items; the higher the better.

    Items that are open to no group keep their initial row.  Users' embeddings are trained on these rows, too, so such
    items are ranked by their scores like the others.

    Parameters
    ----------
    model : mapping
    embedding : ndarray of float32, shape (users, width)
        Rows of `Private.embedding`.
    settings : FedNcfSettings
    candidates : ndarray of int, shape (users, n), optional
        Each user's items; all items for everybody if left out.

    Returns
    -------
    ndarray of float32, shape (users, n) or (users, n_items)
    """
    return networks.scores(settings.architecture, model["items"], model["network"], embedding, candidates)
