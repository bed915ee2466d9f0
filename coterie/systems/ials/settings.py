"""Settings of federated iALS: the table ``[ials]`` of a run."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from coterie.evaluation.leave_one_out import metric_names
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Layout
from coterie.systems.ials.mathematics import layout, row_values
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.factor_settings import Bits
from coterie.systems.shared.popularity import PopularityWeight
from coterie.systems.shared.problems import few_behind, one_held_out_problems, rounds_problems
from coterie.systems.shared.rated_server import Layouts

__all__ = ["METRICS", "IalsSettings"]

METRICS = metric_names()
"""Metrics of an evaluation, which ranks the held-out item among sampled items and among all unseen ones."""


class IalsSettings(SystemSettings):
    r"""iALS: factors of users and of items, each solved for exactly with the other side fixed, in rounds.

    In the cost of `coterie.systems.ials.mathematics`, ``factors`` is :math:`d`, ``ridge`` :math:`\lambda`, ``alpha0``
    :math:`\alpha_0` and ``nu`` :math:`\nu`.
    """

    omitted: ClassVar[frozenset[str]] = frozenset({"popularity"})

    factors: int = Field(
        16,
        ge=1,
        le=128,
        description="Number of latent factors, d.",
    )
    ridge: float = Field(
        0.01,
        ge=1e-6,
        description="Weight of the L2 penalty, lambda. Without one, equations have no single solution.",
    )
    alpha0: float = Field(0.3, gt=0, le=1e3, description="Weight of all pairs of user and item, alpha 0.")
    nu: float = Field(
        1.0,
        ge=0,
        le=2,
        description="Exponent by which the L2 penalty of a user or an item grows with its number of interactions.",
    )
    user_bound: float = Field(
        2.0,
        gt=0,
        le=1e3,
        description="Largest norm of a user's factor; a longer one is shortened before it is sent.",
    )
    bits: Bits = 16
    min_touch: int = Field(
        10,
        ge=1,
        description="Smallest number of users of the whole population that must have an item. Other items are closed: "
        "nothing is sent for them, and they score 0.",
    )
    popularity: PopularityWeight = 0.0
    products: Literal["average", "item"] = Field(
        "average",
        description="Products of users' factors in the equations of an item. average: those of the item's mean user, "
        "as often as it has users: nothing but the d values of the factors is summed for it. item: summed for each "
        "item, d (d + 1) / 2 values more; two rounds of them can tell the space in which all histories lie.",
    )
    min_products: int = Field(
        32,
        ge=1,
        description="products = item: smallest number of users of an item whose products are summed; items of fewer "
        "users are as under average. Well above factors, so that it stays above them where users are absent: the sums "
        "of an item of no more users than factors show which users it has.",
    )

    def layouts(self, n_items: int) -> Layouts:
        """Return the layouts of contributions, by purpose of a sum."""
        return Layouts(n_items, self._training(n_items), METRICS)

    def layout(self, purpose: Purpose, n_items: int) -> Layout:
        """Return the layout of a contribution to a sum of a purpose."""
        return self.layouts(n_items).layout(purpose)

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""
        return self.factors

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return self._training(1).capacity

    @property
    def with_products(self) -> bool:
        """Whether products are summed for each item of enough users."""
        return self.products == "item"

    def _training(self, n_items: int) -> Layout:
        return layout(n_items, self.factors, self.user_bound, self.bits, with_products=self.with_products)

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        found = one_held_out_problems(run)
        if run.rounds.cohorts != "all":
            found.append(
                f"rounds.cohorts {run.rounds.cohorts!r}: ials solves for items by the sum of one round, which forgets "
                "who is not in it; expected 'all'"
            )
        return found + rounds_problems(
            run,
            chosen_by=[name for name in METRICS if name.startswith("validation_")],
            wide=f"ials.bits {self.bits}",
        )

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the sums of a run disclose, a sentence each."""
        found = few_behind(run, self.min_touch)
        if self.with_products and self.min_products <= self.factors:
            found.append(
                f"ials.min_products {self.min_products} with ials.factors {self.factors}: the sum of an item of no "
                "more users than factors shows the space that their factors span, and a few such items with one user "
                "in common show who has them; expected more users than factors"
            )
        if run.secure_sum != "clear" and self.with_products:
            told = row_values(self.factors, with_products=self.with_products) * run.rounds.passes
            found.append(
                f"The sums of {run.rounds.passes} rounds hold {told} combinations of users' histories. With fewer "
                "users than that, and more items than users, a server that knows most of a user's history can compute "
                "the rest (docs/systems/ials.md); ials.products 'average' tells less."
            )
        return found
