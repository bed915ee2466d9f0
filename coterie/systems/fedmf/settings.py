"""Settings of FedMF, its metrics, and the figure by which a version is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared import rated_measures
from coterie.systems.shared.biases import width_of
from coterie.systems.shared.factor_settings import (
    Bits,
    Factors,
    FactorSettings,
    Highest,
    Lowest,
    MinTouch,
    check_range,
    drawing_settings,
    room_for,
    rows_settings,
)
from coterie.systems.shared.metric_segments import LARGEST, Measure
from coterie.systems.shared.problems import (
    NO_GROUPS,
    few_behind,
    random_cohorts,
    rounds_problems,
    sparse_problems,
    split_problems,
)
from coterie.systems.shared.rated_measures import choosable

__all__ = ["CHOOSE_BY", "FIGURES", "MEASURES", "FedMfSettings"]

MEASURES: tuple[str | Measure, ...] = (
    *rated_measures.MEASURES,
    Measure("train_squared_error", LARGEST),
    Measure("train_ratings", LARGEST),
)
"""Metrics measured for each user (`coterie.evaluation.rated`), the errors on the training part included."""

FIGURES = (*rated_measures.FIGURES, "train_rmse")
"""Figures of an evaluation."""

CHOOSE_BY = "validation_rmse"
"""Figure whose lowest value decides the version that counts, unless a run names another one."""

_PLAIN: Mapping[str, float] = MappingProxyType(
    {"factors": 10, "local_epochs": 1, "rate": 0.05, "private_rate": 0.05}
)
"""Defaults without biases, where steps that are too long diverge on a wide range of ratings."""

_PRINTED: Mapping[str, float] = MappingProxyType({"rate": 1e-4, "private_rate": 1e-4, "change_bound": 0.02})
"""Defaults for the printed steps, which are sums and so need small rates."""


class FedMfSettings(SystemSettings):
    r"""FedMF: ratings predicted from ratings alone, by gradient steps of each user, in rounds.

    ``factors`` is the length of :math:`p_u` and :math:`q_j`, ``rate`` :math:`\eta` of :math:`q_j` and
    ``private_rate`` that of :math:`p_u`: the printed algorithm has one for both.  ``ridge`` is :math:`\lambda`.  Under
    mean steps a user moves by the mean over its own ratings, and an item by the mean over its raters in the cohort, so
    that one step size fits users and items with few ratings and with many.  A user's change of a row is clipped at
    ``change_bound``.

    With ``biases`` a rating on the scale from -1 to 1 is predicted as :math:`a_u + b_j + p_u q_j`: the bias of the user
    is part of its factor, and stays with it, the bias of the item part of the item's row (`coterie.systems.fedmf.
    mathematics`).  Without them the prediction is the printed one, :math:`p_u q_j`.

    With ``samples``, :math:`\rho`, this is FedRec: a user also sends changes of rows of items that it has not rated, as
    if it had rated each with its mean rating, or with what the model predicts (``filling``).
    """

    omitted: ClassVar[frozenset[str]] = frozenset(
        {"samples", "filling", "fill_after", "resample", "proximal", "stragglers", "scaffold"}
    )

    choices: ClassVar[Sequence[str]] = choosable(FIGURES)
    """Figures by which a version may be chosen."""

    biases: bool = Field(
        True,
        description="Whether a rating is predicted as the sum of a bias of the user, one of the item and the product "
        "of their factors, all on a scale on which `lowest` is -1 and `highest` 1, so that the same rates fit every "
        "range. It predicts better than the paper's product alone, `false`, with which factors, epochs and rates "
        "that are not given are 10, 1 and 0.05. Unless given it is `false` with steps = sum.",
    )
    factors: Factors = 20
    local_epochs: int = Field(5, ge=1, le=1000, description="Gradient steps of a user in a round (E).")
    steps: Literal["mean", "sum"] = Field(
        "mean",
        description="Whether factors move by the mean of their gradients over ratings, or by the sum, as the "
        "paper prints it. A sum needs step sizes small enough for the most active user and the most "
        "rated item.",
    )
    rate: float = Field(
        0.3, gt=0, description="Step size of the factors of items; 1e-4 with steps = sum unless given."
    )
    private_rate: float = Field(
        0.3, gt=0, description="Step size of users' own factors; 1e-4 with steps = sum unless given."
    )
    ridge: float = Field(
        0.02,
        ge=0,
        description="Weight of the L2 penalty (lambda) on a user's factor and its copies of the factors of "
        "items.",
    )
    lowest: Lowest = 0.5
    highest: Highest = 5.0
    bits: Bits = 16
    change_bound: float = Field(
        4.0,
        gt=0,
        description="Largest change of a value of an item factor by one user; larger ones are clipped before "
        "they are sent. 0.02 with steps = sum unless given.",
    )
    min_touch: MinTouch = 3
    samples: float = Field(
        0.0,
        ge=0,
        le=100,
        description="FedRec: smallest number of sampled unrated items per rated one, rho, whose rows a user also "
        "moves, so that which rows it moves does not tell which items it has rated. 0: none, plain FedMF.",
    )
    filling: Literal["average", "hybrid"] = Field(
        "average",
        description="FedRec: what a sampled item counts as rated with. average: the user's mean rating. hybrid: the "
        "same in the first `fill_after` passes, then the prediction by the model.",
    )
    fill_after: int = Field(
        10,
        ge=0,
        le=100_000,
        description="hybrid: passes over all users before predictions take the place of means.",
    )
    resample: bool = Field(
        False,
        description="FedRec: whether items are drawn anew in each round, exactly `samples` per rated one, as in the "
        "paper. An observer of two contributions of one user can then tell which items it has rated.",
    )
    proximal: float = Field(
        0.0,
        ge=0,
        description="Weight of FedProx's proximal term, mu, which keeps a user's copies of rows near the fetched ones "
        "over several local epochs. 0: none.",
    )
    stragglers: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of users who in a round take only a part of their local epochs, as slow devices in FedProx: "
        "a number drawn uniformly from 1 to `local_epochs`. Their contributions count like the others.",
    )
    scaffold: bool = Field(
        False,
        description="Whether SCAFFOLD's control variates correct the local steps of rows, for several local epochs and "
        "mean steps: users then fetch twice as much, and send as much as without.",
    )

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, given: Any) -> Any:
        """Fill in rates, bound and sizes that are not given, by the kind of steps and of prediction."""
        if not isinstance(given, Mapping):
            return given
        printed = given.get("steps") == "sum"
        biases = given.get("biases", not printed)
        usual = {} if biases else dict(_PLAIN)
        if printed:
            usual |= _PRINTED
        return {"biases": biases, **usual, **given}

    @model_validator(mode="after")
    def _range(self) -> FedMfSettings:
        check_range(self.lowest, self.highest)
        if not self.samples and (self.resample or self.filling != "average"):
            raise ValueError(
                f"filling {self.filling!r} and resample {self.resample} without samples; expected samples above 0, or "
                "neither"
            )
        usual = type(self).model_fields["fill_after"].default
        if self.filling == "average" and self.fill_after != usual:
            raise ValueError(
                f"fill_after {self.fill_after} with filling 'average', in which predictions never take the place of "
                "means; expected filling 'hybrid', or no fill_after"
            )
        return self

    @model_validator(mode="after")
    def _corrected(self) -> FedMfSettings:
        """Refuse corrections of local steps that would do nothing, as a single step has nothing to correct."""
        if self.local_epochs == 1 and (self.proximal or self.stragglers):
            raise ValueError(
                f"proximal {self.proximal:g}, stragglers {self.stragglers:g} with local_epochs 1: the first step "
                "begins at the fetched rows, and there is no part of one; expected local_epochs above 1, or 0 for both"
            )
        if self.scaffold and (why := self._no_scaffold()):
            raise ValueError(f"scaffold {why}, or no scaffold")
        return self

    def _no_scaffold(self) -> str:
        """Return why control variates do not go with the other settings, with what is expected; empty if they do."""
        if self.steps == "sum":
            return (
                "with steps 'sum': beside a sum of changes a mean of control variates tells everybody how many users "
                "have rated an item; expected steps 'mean'"
            )
        if self.local_epochs == 1:
            return "with local_epochs 1: a single step drifts nowhere; expected local_epochs above 1"
        if self.stragglers:
            return (
                f"with stragglers {self.stragglers:g}: the server computes control variates from changes of rows, for "
                "which all users take the same number of steps; expected stragglers 0"
            )
        if self.proximal:
            return (
                f"with proximal {self.proximal:g}: the mean gradient that a control variate stands for would have the "
                "proximal term in it; expected proximal 0"
            )
        if self.samples:
            return (
                f"with samples {self.samples:g}: a control variate is a mean over the users who rated an item, and "
                "rows of sampled items have made-up gradients; expected samples 0"
            )
        return ""

    def factor_settings(self) -> FactorSettings:
        """Return FedMVMF's settings with the same biases, first factors, layout and checks of ratings."""
        return rows_settings(self)

    def sampling(self) -> FactorSettings:
        """Return FedMVMF's settings that draw the same items; without samples, none."""
        return drawing_settings(self, resample=self.resample)

    def predicts(self, pass_number: int) -> bool:
        """Return whether sampled items count as rated with predictions in a pass, counted from 0."""
        return self.filling == "hybrid" and pass_number >= self.fill_after

    @property
    def variant(self) -> str:
        """Name of the kind of steps, of the prediction, of corrections, and of the filling of sampled items."""
        names = {"FedProx": self.proximal, "stragglers": self.stragglers, "SCAFFOLD": self.scaffold}
        corrected = "".join(f", {name}" for name, value in names.items() if value)
        found = f"{self.steps} of gradients" + (", with biases" if self.biases else "") + corrected
        return found + (f", {self.samples:g} sampled per rating, {self.filling}" if self.samples else "")

    @property
    def width(self) -> int:
        """Number of values in a row of the model: factors, and with biases two more."""
        return width_of(self.factors, self.biases)

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return room_for(self.bits)

    @property
    def rating_range(self) -> tuple[float, float]:
        """Lowest and highest rating that the system learns from."""
        return self.lowest, self.highest

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        return (
            self._steps_too_long()
            + self._without_noise(run)
            + (self._unknown_raters(run) if self.scaffold else [])
            + split_problems(run, ("random", "temporal"))
            + rounds_problems(
                run,
                chosen_by=self.choices,
                wide=f"{run.description.table}.bits {self.bits}",
            )
        )

    def _without_noise(self, run: BaseRunSettings) -> list[str]:
        """Return why there is nothing that denoisers could take out, a sentence."""
        if run.secure_sum != "denoised" or self.samples:
            return []
        return [
            f"secure_sum 'denoised' with {run.description.table}.samples 0: without sampled items there is no noise "
            "for denoisers to take out; expected samples above 0, or secure_sum 'clear'"
        ]

    def _unknown_raters(self, run: BaseRunSettings) -> list[str]:
        """Return why the server cannot know whose control variates a sum of changes moves, a sentence each."""
        found, rounds = [], run.rounds
        if random_cohorts(run) or rounds.redraw:
            found.append(
                f"fedmf.scaffold with rounds.cohorts {rounds.cohorts!r}, redraw {rounds.redraw}: the server computes "
                "control variates from the means of changes over the raters of an item, of whom it knows the number in "
                "fixed groups alone; expected rounds.cohorts all, or groups that are not drawn anew"
            )
        if rounds.most_users:
            found.append(
                f"fedmf.scaffold with rounds.most_users {rounds.most_users}: users who come later have no control "
                "variates yet, and the server cannot tell their changes from the others'; expected most_users 0"
            )
        if rounds.cohorts == "groups" and rounds.cohort > rounds.group:
            found.append(
                f"fedmf.scaffold with rounds.cohort {rounds.cohort} above group {rounds.group}: each pass would put "
                "other groups together, whose means the server cannot tell apart; expected a cohort no larger"
            )
        if not rounds.aggregation.terms.adds or rounds.aggregation.norm_bound:
            found.append(
                "fedmf.scaffold with rounds.aggregation: the server computes control variates from the sum of all "
                "changes, and changes that are left out or scaled down are missing from it; expected rule sum and no "
                "norm_bound"
            )
        if rounds.privacy.terms.on:
            found.append(
                "fedmf.scaffold with rounds.privacy: the server computes control variates from the sum of all changes, "
                "and its noise and clip would stay in them from round to round; expected place 'none'"
            )
        return found

    def _steps_too_long(self) -> list[str]:
        r"""Return why mean steps diverge on ratings of the range, a sentence.

        Factors begin with :math:`p_u q_j = |p_u|^2 = |q_j|^2 = r`, the middle of the range.  A step along the mean
        gradient multiplies an error that all ratings share by :math:`1 - 2 r (\eta_p + \eta_q)`, which is below -1
        where the rates are too large.  Rates of steps that are sums depend on the number of ratings instead, and with
        biases every range is learned on the scale from -1 to 1.
        """
        middle = (self.lowest + self.highest) / 2
        if self.biases or self.steps == "sum" or middle * (self.rate + self.private_rate) < 1:
            return []
        return [
            f"fedmf.rate {self.rate:g} and private_rate {self.private_rate:g} for ratings from {self.lowest:g} to "
            f"{self.highest:g}: steps so long grow with each round; expected their sum below {1 / middle:.2g}, such "
            f"as {0.25 / middle:.1g} each, or fedmf.biases, with which rates fit every range"
        ]

    def sparse_problems(self, run: BaseRunSettings) -> list[str]:
        """Return why contributions cannot leave out ciphertexts of zeros, a sentence each."""
        return sparse_problems(run, self.min_touch)

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        found = [NO_GROUPS] if random_cohorts(run) else []
        found += few_behind(run, self.min_touch)
        found += self._sampling_warnings(run)
        if run.secure_sum == "clear" and not self.samples:
            found.append(
                "In a user's contribution the rows of items that it has not rated are zero: in clear it shows which it "
                "has rated, and the others are multiples of the user's own factor, or nearly so."
            )
        return found

    def _sampling_warnings(self, run: BaseRunSettings) -> list[str]:
        """Return what sampled items do not hide, a sentence each."""
        if not self.samples:
            return []
        found = []
        if run.secure_sum in ("clear", "denoised"):
            found.append(
                "Sampled items hide which rows of a contribution are of rated ones, and not what the rows say: sampled "
                "ones count as rated with one value, so their errors tell them apart in clear."
            )
        else:
            found.append(
                f"Under a {run.secure_sum} sum no contribution is seen, and sampled items cost quality without hiding "
                f"more; {run.description.table}.min_touch counts users who sampled an item like those who rated it."
            )
        if run.secure_sum == "denoised":
            found.append(
                "A denoiser sees which items the users that it serves have sampled and the direction of each one's own "
                "factor, and the server and one denoiser together see what they have rated."
            )
        if self.resample:
            found.append(
                "resample: unrated items are drawn anew in each round; who sees contributions of one user in two "
                "rounds can tell the rated ones. The number of users who sample an item changes, too, so that fewer "
                f"than {run.description.table}.min_touch may be behind a row."
            )
        return found
