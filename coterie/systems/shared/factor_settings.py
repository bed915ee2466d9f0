"""Settings of matrix factorisations: `FactorSettings`, and types of keys that systems have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.optimisers import ServerOptimiser

__all__ = [
    "Bits",
    "FactorSettings",
    "Factors",
    "Highest",
    "Lowest",
    "MinTouch",
    "ServerBeta1",
    "ServerBeta2",
    "ServerOptimiserName",
    "ServerRate",
    "ServerTau",
    "check_range",
    "room_for",
]

Factors = Annotated[int, Field(ge=1, le=1024, description="Latent factors K.")]
ServerOptimiserName = Literal["fedsgd", "fedadagrad", "fedadam", "fedyogi"]
ServerRate = Annotated[float, Field(gt=0, description="Its step size.")]
ServerBeta1 = Annotated[float, Field(ge=0, lt=1, description="Decay of its first moment.")]
ServerBeta2 = Annotated[float, Field(ge=0, lt=1, description="Decay of its second moment.")]
ServerTau = Annotated[float, Field(gt=0, description="Added to the root of its second moment.")]
Lowest = Annotated[float, Field(gt=0, description="Lowest rating that there is; one below is refused.")]
Highest = Annotated[float, Field(gt=0, description="Highest rating that there is; one above is refused.")]
Bits = Annotated[int, Field(ge=8, le=31, description="Bits of a transmitted value.")]
MinTouch = Annotated[
    int,
    Field(ge=1, description="Fewest users of a group that must have rated an item for it to be trained."),
]


class FactorSettings(SystemSettings):
    r"""Settings of a factorisation of ratings; the defaults are those of PrivMVMF (table 2), sampling apart.

    FedMVMF extends this class.  FCF and FedMF build an instance for initial factors, layout, checks and, in FCF, every
    step.

    Notes
    -----
    In the cost :math:`J` of `coterie.systems.shared.factors`, ``factors`` is :math:`K`, ``side`` :math:`\lambda_1` and
    ``ridge`` :math:`\lambda_2`.  The weight :math:`c_{ij}` of a rated item is 1.  ``weights`` decides that of an
    unrated item: 0; ``uncertainty``, :math:`\alpha`; or :math:`\alpha` if the item is among the user's sampled ones
    (36), of which there are at least ``samples``, :math:`\rho`, for each rated one.  Under ``resample`` there are
    exactly :math:`\rho` for each, uniform and drawn anew in each round: an observer of two rounds knows the rated
    items, which are the intersection.

    Under ``update`` "semi-als" :math:`p_i` and :math:`V` are solved for; under "sgd" they take a step along their
    gradient, of size :math:`\gamma`: ``private_rate`` in (9), ``feature_rate`` in (12).  Gradients are sums over the
    items of a user and over all items, so stable rates are small.  ``server`` moves :math:`Q` and :math:`U`.

    A rating of 0 means no rating, so ``lowest`` is above 0.  ``item_bound`` and ``attribute_bound`` clip
    :math:`f(i, j)` and :math:`f(i, d)` before they are sent, in codes of ``bits``.
    """

    factors: Factors = 6
    weights: Literal["obs-only", "incl-unc", "sampled"] = Field(
        "sampled",
        description="Weight of an unrated item: none, uncertainty for every item, or uncertainty for sampled ones.",
    )
    uncertainty: float = Field(0.1, gt=0, lt=1, description="Weight of an unrated item, alpha.")
    samples: float = Field(1.0, gt=0, description="sampled: least unrated items per rated one, rho.")
    resample: bool = Field(
        False,
        description="sampled: draw them anew in each round, as the paper does. Who sees two rounds of one user then "
        "knows what it has rated.",
    )
    side: float = Field(1.0, ge=0, description="Weight of attributes and features, lambda 1.")
    ridge: float = Field(10.0, gt=0, description="Ridge coefficient, lambda 2.")
    update: Literal["semi-als", "sgd"] = Field(
        "semi-als", description="Whether users' factors and those of features are solved for, or take a step."
    )
    private_rate: float = Field(1e-4, gt=0, description="sgd: step size of users' factors.")
    feature_rate: float = Field(1e-5, gt=0, description="sgd: step size of the factors of features.")
    server_optimiser: ServerOptimiserName = Field(
        "fedadam", description="What moves the factors of items and attributes."
    )
    server_rate: ServerRate = 0.05
    server_beta1: ServerBeta1 = 0.5
    server_beta2: ServerBeta2 = 0.99
    server_tau: ServerTau = 1e-8
    lowest: Lowest = 0.5
    highest: Highest = 5.0
    bits: Bits = 16
    item_bound: float = Field(16.0, gt=0, description="Largest transmitted value of an item's gradient.")
    attribute_bound: float = Field(
        8.0, gt=0, description="Largest transmitted value of an attribute's gradient."
    )
    min_touch: MinTouch = 3

    @model_validator(mode="after")
    def _range(self) -> FactorSettings:
        check_range(self.lowest, self.highest)
        return self

    @property
    def server(self) -> ServerOptimiser:
        """The optimiser that moves the factors of items and attributes."""
        return ServerOptimiser(
            self.server_optimiser, self.server_rate, self.server_beta1, self.server_beta2, self.server_tau
        )

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""
        return self.factors

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return room_for(self.bits)

    @property
    def rating_range(self) -> tuple[float, float]:
        """Lowest and highest rating that the system learns from."""
        return self.lowest, self.highest


def check_range(lowest: float, highest: float) -> None:
    """Check that a range of ratings does not end before it begins.

    Raises
    ------
    ValueError
        It ends before it begins.
    """
    if lowest > highest:
        raise ValueError(
            f"lowest is {lowest}, highest {highest}; expected the lowest rating, then the highest"
        )


def room_for(bits: int) -> int:
    """Return the largest number of users whose codes of so many bits can be summed without overflow."""
    return Layout((Segment("items", (1,), 1.0, bits),)).capacity
