"""Settings of EASE: the table ``[ease]`` of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from coterie.evaluation.leave_one_out import metric_names
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.noise_accounting import concentrated, epsilon_of
from coterie.systems.ease.accounting import support_parts
from coterie.systems.ease.mathematics import PairCodes, layout_of_supports, packing, pairs_of
from coterie.systems.ease.sketch import sketch_segment
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.metric_segments import measure_segments
from coterie.systems.shared.popularity import PopularityWeight
from coterie.systems.shared.problems import few_behind, one_held_out_problems, rounds_problems

__all__ = ["METRICS", "MOST_SUMS", "EaseSettings"]

METRICS = metric_names()
"""Metrics of an evaluation, which ranks the held-out item among sampled items and among all unseen ones."""


MOST_SUMS = 3
"""Most sums of a sketch: each further one brings the stand-in nearer to the counts, and a fourth hardly does."""


class EaseSettings(SystemSettings):
    """EASE: weights between items in closed form, from one sum of who has which pair of items, or from its sketch."""

    ridge: float = Field(
        500.0,
        ge=1e-3,
        description="Weight of the L2 penalty, lambda. More where users have more items, and with noise.",
    )
    min_touch: int = Field(
        10,
        ge=1,
        description="Smallest number of users of the whole population that must have an item. Other items are closed: "
        "no pair with them is counted, and they are ranked behind all others. With noise it is as much larger as twice "
        "the standard deviation of a count of users.",
    )
    min_pairs: int = Field(
        3,
        ge=1,
        description="Pairs of items that fewer users have are taken as pairs that nobody has, before the model is "
        "solved for: users who fetch it do not learn of them. The server does, without noise. 1 with `sketch`.",
    )
    most_items: int = Field(
        0,
        ge=0,
        le=2_000,
        description="Largest number of items by which a user counts: of more, a sample that the user draws once. 0: "
        "all of them. Scores always use all of a user's items.",
    )
    noise: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Standard deviation of the discrete Gaussian noise that each user adds to each count, 1 or more; "
        "a sum over n users has sqrt(n) times as much. Needs `most_items`. 0: counts are exact.",
    )
    delta: float = Field(
        1e-5,
        gt=0,
        lt=1,
        description="With `noise`: delta of the differential privacy whose epsilon is reported.",
    )
    popularity: PopularityWeight = 0.0
    packed: int = Field(
        2,
        ge=1,
        le=3,
        description="Counts of pairs in one code of 4 bytes: 2 for up to 32,768 users, 3 for up to 1,024, fewer with "
        "noise.",
    )
    sketch: int = Field(
        0,
        ge=0,
        le=1_000,
        description="Columns of a sketch that is summed in place of the pairs, for large catalogues: contributions and "
        "model grow with items times columns. `rounds.passes` says how many sums there are, 1 to 3. 0: all pairs.",
    )
    sketch_bits: int = Field(
        16,
        ge=8,
        le=24,
        description="With `sketch`: bits to which a user rounds each value, at random; 16 for sums over up to 65,537 "
        "users, one bit less for twice as many.",
    )
    most_mb: float = Field(
        64.0,
        gt=0,
        description="Largest contribution of a member to one sum of pairs or of a sketch, MB. A run whose catalogue "
        "needs more is refused, by the server, too: with all pairs they grow with the square of the number of items.",
    )

    omitted = frozenset({"most_mb", "popularity", "sketch", "sketch_bits"})

    @model_validator(mode="before")
    @classmethod
    def _sketched(cls, given: Any) -> Any:
        """Take no floor of pairs where a file with a sketch names none: a sketch has no counts of single pairs."""
        if isinstance(given, Mapping) and given.get("sketch") and "min_pairs" not in given:
            return {**given, "min_pairs": 1}
        return given

    @model_validator(mode="after")
    def _fits(self) -> EaseSettings:
        if self.sketch and self.min_pairs > 1:
            raise ValueError(
                f"min_pairs {self.min_pairs} with sketch {self.sketch}: a sketch has no counts of single pairs of "
                "which small ones could be left out; expected min_pairs 1, or sketch 0"
            )
        if self.sketch and self.noise:
            raise ValueError(
                f"noise {self.noise} with sketch {self.sketch}: a user moves a sketch by its items times their "
                "products, and no noise that hides so much leaves a model; expected noise 0, or sketch 0"
            )
        if self.noise and (self.noise < 1 or not self.most_items):
            raise ValueError(
                f"noise {self.noise} with most_items {self.most_items}; expected 1 or more, and a limit of a user's "
                "items: without one there is no noise that hides a user"
            )
        try:
            _ = self.packing
        except ValueError as error:
            raise ValueError(f"packed {self.packed}: {error}; expected fewer") from error
        return self

    @property
    def variance(self) -> int:
        """Variance of the noise that one user adds to a count, a whole number; 0 without noise."""
        return math.ceil(self.noise**2)

    @property
    def parts(self) -> int:
        """How much an item of a user counts in the sum of supports: more than 1 with noise, which is then finer."""
        return support_parts(self.most_items) if self.noise else 1

    @property
    def packing(self) -> PairCodes:
        """PairCodes of counts of pairs into codes."""
        return packing(self.packed, self.variance)

    def layout(self, purpose: Purpose, n_items: int) -> Layout:
        """Return the layout of a contribution to a sum of a purpose."""
        match purpose:
            case Purpose.SUPPORTS:
                return layout_of_supports(n_items, self.parts, self.variance)
            case Purpose.EVALUATE:
                return Layout(measure_segments(METRICS))
            case Purpose.TRAIN if self.sketch:
                return Layout((sketch_segment(n_items, self.sketch, self.sketch_bits),))
            case Purpose.TRAIN:
                return Layout((self.packing.segment(pairs_of(n_items)),))

    def epsilon(self, users: int, n_items: int) -> float | None:
        """Return epsilon at `delta` of both sums together, over a number of users; None without noise."""
        if not self.noise:
            return None
        m, variance = self.most_items, self.variance
        supports = concentrated(2 * m * self.parts**2, variance, users, n_items)
        pairs = concentrated(m * (m + 1), variance, users, pairs_of(n_items))
        return epsilon_of(supports + pairs, self.delta)

    def too_many_items(self, n_items: int) -> str:
        """Return why a catalogue of this size is too large for these settings; empty where it is not."""
        if self.sketch > n_items:
            return (
                f"a sketch of {self.sketch:,} columns (ease.sketch) over {n_items:,} items; expected at most as many "
                "columns as items"
            )
        needed = 4 * self.layout(Purpose.TRAIN, n_items).size / 1e6
        if needed <= self.most_mb:
            return ""
        summed = f"a sketch of {self.sketch:,} columns over" if self.sketch else "the pairs of"
        fewer = "fewer columns (ease.sketch)" if self.sketch else "a sketch of them (ease.sketch)"
        return (
            f"{summed} {n_items:,} items are a contribution of {needed:,.3g} MB for each member; expected at most "
            f"{self.most_mb:g} MB (ease.most_mb), {fewer}, fewer items, or a system that learns factors of items"
        )

    @property
    def width(self) -> int:
        """Number of values in a row of the model: a weight of one pair, or the factors of an item."""
        return self.sketch or 1

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return self.layout(Purpose.TRAIN, 2).capacity

    def narrower(self, run: BaseRunSettings) -> str:
        """Return, in words, which settings to change so that a sum may have more users."""
        return "a lower ease.sketch_bits" if self.sketch else "a lower ease.packed"

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        found = one_held_out_problems(run)
        most = MOST_SUMS if self.sketch else 1
        if run.rounds.cohorts != "all" or run.rounds.passes > most:
            what = (
                "ease learns from a few sums over the same users"
                if self.sketch
                else "ease learns from one sum over all users, from which nothing can be subtracted"
            )
            found.append(
                f"rounds.cohorts {run.rounds.cohorts!r} and rounds.passes {run.rounds.passes}: {what}; expected 'all' "
                f"and {f'1 to {most}' if self.sketch else most}"
            )
        terms = run.rounds.aggregation.terms
        if not terms.adds or terms.norm_bound:
            found.append(
                f"rounds.aggregation.rule {terms.rule!r} and norm_bound {terms.norm_bound:g}: ease sums exact counts, "
                "which ease.most_items bounds; expected 'sum' and 0"
            )
        if run.rounds.privacy.terms.on:
            found.append("rounds.privacy: ease has noise of its own; expected ease.noise, and place 'none'")
        return found + rounds_problems(
            run,
            chosen_by=[name for name in METRICS if name.startswith("validation_")],
            wide=f"ease.sketch_bits {self.sketch_bits}" if self.sketch else f"ease.packed {self.packed}",
        )

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the sums of a run disclose, a sentence each."""
        if self.noise:
            return [
                f"Each user adds noise of variance {self.variance} to each count of both sums; `epsilon` of the report "
                "holds if all of them do, and tell nobody what they added. Metrics have no noise."
            ]
        if self.sketch:
            return [
                "A sketch tells the server nearly as much as all counts of pairs: of an item that few users have, so "
                "many products of their histories as it has columns in all sums.",
                *few_behind(run, self.min_touch),
            ]
        return [
            "Without ease.noise the server sees exactly how many users have each pair of open items: a pair of one "
            "user is that user's.",
            *few_behind(run, self.min_touch),
        ]
