"""Settings of matrix factorisations: `FactorSettings`, and types of keys that systems have in common."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from coterie.secure_sum.contribution import Layout, Segment
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.biases import Biased, width_of
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
    "SteppedSettings",
    "check_range",
    "drawing_settings",
    "room_for",
    "rows_settings",
]

Factors = Annotated[int, Field(ge=1, le=1024, description="Number of latent factors, K.")]
ServerOptimiserName = Literal["fedsgd", "fedadagrad", "fedadam", "fedyogi"]
ServerRate = Annotated[float, Field(gt=0, description="Step size of the server's optimiser.")]
ServerBeta1 = Annotated[
    float, Field(ge=0, lt=1, description="Decay of the first moment of the server's optimiser.")
]
ServerBeta2 = Annotated[
    float, Field(ge=0, lt=1, description="Decay of the second moment of the server's optimiser.")
]
ServerTau = Annotated[
    float, Field(gt=0, description="Added to the root of the second moment of the server's optimiser.")
]
Lowest = Annotated[float, Field(description="Lowest possible rating; data with a lower one are refused.")]
Highest = Annotated[float, Field(description="Highest possible rating; data with a higher one are refused.")]
Bits = Annotated[
    int, Field(ge=8, le=31, description="Bits to which each value of a contribution is rounded.")
]
MinTouch = Annotated[
    int,
    Field(
        ge=1,
        description="Smallest number of users of a group that must have an item for the group to train it. Other "
        "items stay closed, so that no row of a sum belongs to fewer users.",
    ),
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

    With ``biases`` rows have two more values, and :math:`R` is on the scale from -1 to 1
    (`coterie.systems.shared.biases`).

    A rating of 0 means no rating, so ``lowest`` is above 0.  ``item_bound`` and ``attribute_bound`` clip
    :math:`f(i, j)` and :math:`f(i, d)` before they are sent, in codes of ``bits``.
    """

    biases: bool = Field(
        False,
        description="Whether a rating is predicted as the sum of a bias of the user, one of the item and the product "
        "of their factors, all on a scale on which `lowest` is -1 and `highest` 1; attributes and features then have "
        "a constant, too. Only with weights = obs-only.",
    )
    factors: Factors = 6
    weights: Literal["obs-only", "incl-unc", "sampled"] = Field(
        "sampled",
        description="Weights of unrated items. obs-only: none. incl-unc: `uncertainty` for every one. sampled: "
        "`uncertainty` for sampled ones.",
    )
    uncertainty: float = Field(
        0.1, gt=0, lt=1, description="Weight of an unrated item, alpha; a rated one weighs 1."
    )
    samples: float = Field(
        1.0, gt=0, description="sampled: smallest number of sampled unrated items per rated one, rho."
    )
    resample: bool = Field(
        False,
        description="sampled: whether they are drawn anew in each round, as in the paper. An observer of two "
        "contributions of one user can then tell which items it has rated.",
    )
    side: float = Field(
        1.0, ge=0, description="Weight of attributes of users and features of items, lambda 1."
    )
    ridge: float = Field(10.0, gt=0, description="Weight of the L2 penalty, lambda 2.")
    update: Literal["semi-als", "sgd"] = Field(
        "semi-als",
        description="How factors of users and of features are computed. semi-als: solved for. sgd: moved by a "
        "gradient step.",
    )
    private_rate: float = Field(1e-4, gt=0, description="sgd: step size of users' factors.")
    feature_rate: float = Field(1e-5, gt=0, description="sgd: step size of the factors of features.")
    server_optimiser: ServerOptimiserName = Field(
        "fedadam", description="Optimiser by which the server moves the factors of items and attributes."
    )
    server_rate: ServerRate = 0.05
    server_beta1: ServerBeta1 = 0.5
    server_beta2: ServerBeta2 = 0.99
    server_tau: ServerTau = 1e-8
    lowest: Lowest = 0.5
    highest: Highest = 5.0
    bits: Bits = 16
    item_bound: float = Field(
        16.0,
        gt=0,
        description="Largest absolute value of a user's gradient of an item factor; larger ones are clipped "
        "before they are sent.",
    )
    attribute_bound: float = Field(
        8.0,
        gt=0,
        description="Largest absolute value of a user's gradient of an attribute's factor; larger ones are "
        "clipped before they are sent.",
    )
    min_touch: MinTouch = 3

    @model_validator(mode="after")
    def _range(self) -> FactorSettings:
        check_range(self.lowest, self.highest)
        if self.biases and self.weights != "obs-only":
            raise ValueError(
                f"biases with weights {self.weights!r}: an unrated item has no place on the scale of ratings; expected "
                "weights 'obs-only'"
            )
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
        return width_of(self.factors, self.biases)

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return room_for(self.bits)

    @property
    def rating_range(self) -> tuple[float, float]:
        """Lowest and highest rating that the system learns from."""
        return self.lowest, self.highest


class SteppedSettings(Biased, Protocol):
    """Settings of a system whose users take steps on rows of items and contribute the changes."""

    @property
    def factors(self) -> int:
        """Number of values of a row beside biases, K."""

    @property
    def bits(self) -> int:
        """Bits to which each value of a contribution is rounded."""

    @property
    def change_bound(self) -> float:
        """Largest change of a value of a row by one user."""

    @property
    def min_touch(self) -> int:
        """Smallest number of users of a group that must have an item for the group to train it."""

    @property
    def samples(self) -> float:
        """Smallest number of sampled unrated items per rated one; 0: none."""


def rows_settings(settings: SteppedSettings) -> FactorSettings:
    """Return FedMVMF's settings with the same biases, first rows, layout and checks of ratings."""
    return FactorSettings(
        factors=settings.factors,
        biases=settings.biases,
        weights="obs-only",
        side=0.0,
        update="sgd",
        lowest=settings.lowest,
        highest=settings.highest,
        bits=settings.bits,
        item_bound=settings.change_bound,
        min_touch=settings.min_touch,
    )


def drawing_settings(settings: SteppedSettings, *, resample: bool = False) -> FactorSettings:
    """Return FedMVMF's settings that draw the same items; without samples, none."""
    return FactorSettings(
        weights="sampled" if settings.samples else "obs-only",
        samples=settings.samples or 1.0,
        resample=resample,
        lowest=settings.lowest,
        highest=settings.highest,
    )


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
