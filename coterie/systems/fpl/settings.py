"""Settings of FPL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

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
from coterie.systems.shared.popularity import PopularityWeight
from coterie.systems.shared.preferences import Preference
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    split_problems,
    uncounted,
)
from coterie.systems.shared.rated_measures import choosable
from coterie.systems.shared.taken_up import FIGURES
from coterie.telemetry.quantities import percent

__all__ = ["PI", "FplSettings"]

PI = Preference(
    "pi",
    "Share of the updates of your own items that is sent: 0 for none, 1 for all. From the next round on.",
    0.0,
    1.0,
)
"""The share that each user may set at its own host."""

_ROUNDING = 1e-9
"""How far the parts of ``pi_mix`` may be from 1, as sums of decimal fractions are."""

Share = Annotated[float, Field(ge=0, le=1)]


class FplSettings(SystemSettings):
    r"""FPL: items ranked by pairs of an item that a user has and one that it has not, in rounds.

    ``factors`` is the length of :math:`p_u` and :math:`q_i`, ``ridge`` :math:`\lambda`, ``pi`` :math:`\pi`.  The paper
    has one learning rate :math:`\alpha`; here ``private_rate`` moves :math:`p_u`, and the server's optimiser moves
    :math:`q_i` and :math:`b_i`, which with ``fedsgd`` is the paper's step of size ``server_rate``.

    A user that has set its own share at its host has that share, whatever these settings say.

    Which of the four forms a run trains follows from ``triples_per_item`` and the cohorts: `label`.
    """

    local: ClassVar[frozenset[str]] = frozenset({"preferences"})
    omitted: ClassVar[frozenset[str]] = frozenset({"pi_mix", "popularity"})

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
    pi_mix: tuple[tuple[Share, Share], ...] = Field(
        (),
        description="Shares that users draw, each with the part of the users that draws it, as in "
        "`[[0.0, 0.2], [0.5, 0.8]]`: a fifth sends none, the others half. The parts add up to 1. In place of `pi` "
        "and `pi_spread`, which then keep their defaults.",
    )
    preferences: Path | None = Field(
        None,
        description="CSV file with columns `user` and `pi`: shares that users have set themselves, with nothing where "
        "a user has set none. Their hosts begin with them; they are no part of the plan.",
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
    popularity: PopularityWeight = 0.0

    @field_validator("pi_mix")
    @classmethod
    def _add_up(cls, mix: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        total = sum(part for _, part in mix)
        if mix and abs(total - 1) > _ROUNDING:
            raise ValueError(f"the parts of the users add up to {total:g}; expected 1")
        return mix

    @property
    def preferences_file(self) -> Path | None:
        """CSV file of the shares that users have set for themselves."""
        return self.preferences

    @property
    def share_in_words(self) -> str:
        """How users come by their shares, without any user's share."""
        if self.pi_mix:
            parts = ", ".join(f"{share:g} for {percent(part)} of the users" for share, part in self.pi_mix)
            found = f"drawn by each user: {parts}"
        elif self.pi_spread:
            found = f"drawn by each user, uniformly from {self.lowest:g} to {self.highest:g}"
        else:
            found = f"{self.pi:g} for all"
        return f"{found}; users' own settings before it" if self.preferences is not None else found

    @property
    def lowest(self) -> float:
        """Lowest share that a user draws by ``pi`` and ``pi_spread``."""
        return max(self.pi - self.pi_spread, 0.0)

    @property
    def highest(self) -> float:
        """Highest share that a user draws by ``pi`` and ``pi_spread``."""
        return min(self.pi + self.pi_spread, 1.0)

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
        found += uncounted(
            self.popularity, "fpl", counted=self.closes_items, otherwise="fpl.min_touch above 1"
        )
        if self.pi_mix and (self.pi, self.pi_spread) != (1.0, 0.0):
            found.append(
                "fpl.pi_mix beside fpl.pi or fpl.pi_spread: each says what share users send; expected one of them"
            )
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
