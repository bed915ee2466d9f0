"""Settings of FPL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.factor_settings import (
    Bits,
    Factors,
    ServerBeta1,
    ServerBeta2,
    ServerOptimiserName,
    ServerRate,
    ServerTau,
    room_for,
)
from coterie.systems.shared.optimisers import ServerOptimiser
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    split_problems,
)
from coterie.systems.shared.rated_measures import choosable
from coterie.systems.shared.taken_up import FIGURES

__all__ = ["FplSettings"]


class FplSettings(SystemSettings):
    r"""FPL: items ranked by pairs of an item that a user has and one that it has not, in rounds.

    ``factors`` is the length of :math:`p_u` and :math:`q_i`, ``ridge`` :math:`\lambda`, ``pi`` :math:`\pi`.  The paper
    has one learning rate :math:`\alpha`; here ``private_rate`` moves :math:`p_u`, and the server's optimiser moves
    :math:`q_i` and :math:`b_i`, which with ``fedsgd`` is the paper's step of size ``server_rate``.

    Which of the four forms a run trains follows from ``triples_per_item`` and the cohorts: `label`.
    """

    pi: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the updates of their own items that users send, 0 to 1; updates of sampled items are "
        "always sent. Below 1 one round discloses fewer of a user's items; all rounds together disclose nearly all.",
    )
    pi_spread: float = Field(
        0.0,
        ge=0,
        le=1,
        description="How far users' own shares lie from `pi`: each draws its share uniformly from `pi` - `pi_spread` "
        "to `pi` + `pi_spread`, within 0 and 1, and sends it to nobody. 0: `pi` for all.",
    )
    disclose: Literal["updates", "items"] = Field(
        "updates",
        description="What a user withholds. updates: each update of an own item is sent with probability `pi`, as in "
        "the paper; over many rounds nearly every own item is sent. items: a share `pi` of the own items is drawn "
        "once, and the others are never sent.",
    )
    triples_per_item: int = Field(
        1,
        ge=0,
        le=100,
        description="Triples that a user trains on in a round, for each of its items (sFPL+, pFPL+). 0: one triple in "
        "all (sFPL, pFPL).",
    )
    factors: Factors = 20
    private_rate: float = Field(0.05, gt=0, description="Step size of users' own factors.")
    ridge: float = Field(
        0.01, ge=0, description="Weight of the L2 penalty (lambda) on all that a triple moves."
    )
    server_optimiser: ServerOptimiserName = Field(
        "fedadam",
        description="Optimiser by which the server moves factors and biases of items; the paper's is fedsgd.",
    )
    server_rate: ServerRate = 0.03
    server_beta1: ServerBeta1 = 0.9
    server_beta2: ServerBeta2 = 0.99
    server_tau: ServerTau = 1e-8
    bits: Bits = 16
    item_bound: float = Field(
        4.0,
        gt=0,
        description="Largest absolute value of a user's update of a factor or bias of an item; larger ones are "
        "clipped before they are sent.",
    )
    min_touch: int = Field(
        3,
        ge=1,
        description="Smallest number of users of a group that must have an item for the group to train it. Other "
        "items stay closed. With `pi` 1 and `triples_per_item` above 0 no row of a sum over whole groups then belongs "
        "to fewer users. 1: all items are open, and no group is asked for its items, which in clear would tell more "
        "than `pi` withholds.",
    )

    @property
    def closes_items(self) -> bool:
        """Whether groups are asked for their items, and those of few users are closed."""
        return self.min_touch > 1

    @property
    def server(self) -> ServerOptimiser:
        """The optimiser that moves factors and biases of items."""
        return ServerOptimiser(
            self.server_optimiser, self.server_rate, self.server_beta1, self.server_beta2, self.server_tau
        )

    @property
    def width(self) -> int:
        """Number of values in a row of the model: a bias and the factors."""
        return 1 + self.factors

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return room_for(self.bits)

    def label(self, run: BaseRunSettings) -> str:
        """Return the name of the form that a run trains, as the paper writes it.

        s: one user in each round.  p: several or all.  +: as many triples as a user has items, or a multiple.
        """
        users = "s" if _alone(run) else "p"
        return f"{users}FPL{'+' if self.triples_per_item else ''}"

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        found = split_problems(run, ("temporal", "random", "leave-last-out", "leave-random-out"))
        if _alone(run) and run.secure_sum != "clear":
            found.append(
                f"secure_sum {run.secure_sum!r} with rounds.cohort 1: a sum over one user protects nothing; expected "
                "'clear', or more users in a round"
            )
        return found + rounds_problems(
            run,
            chosen_by=choosable(FIGURES),
            wide=f"{run.description.table}.bits {self.bits}",
        )

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        found = [NO_GROUPS] if self.closes_items and random_cohorts(run) else []
        found += few_behind(run, self.min_touch)
        if run.secure_sum != "clear" and not self.triples_per_item:
            found.append(
                "fpl.triples_per_item 0: with one triple of each user many rows of a sum are of one user alone, and "
                "show its factor and whether it has the item, though not who it is; expected 1 or more."
            )
        if run.secure_sum == "clear":
            if self.closes_items:
                found.append(
                    "The items for which a group is asked are sent in clear, too, whatever fpl.pi withholds; with "
                    "fpl.min_touch 1 no group is asked."
                )
            found.append(
                "In a contribution in clear the sign of an item's bias tells own items from sampled ones, and items "
                "that a user never sends are its own: below 1, fpl.pi hides some of them in one round, and few in all "
                "rounds together. The update of an item's factors, divided by that of its bias, is the user's own "
                "factor, or nearly so."
            )
        return found


def _alone(run: BaseRunSettings) -> bool:
    """Return whether each round has one user."""
    return random_cohorts(run) and run.rounds.cohort == 1
