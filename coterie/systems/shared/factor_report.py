"""Keys of systems that factorise ratings in the report of a run: FedMVMF, FedMF and FCF."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, SerializeAsAny

from coterie.telemetry.quantities import percent
from coterie.telemetry.report import AttackFigures, Number, Report

__all__ = ["FactorAttack", "FactorReport"]


class FactorAttack(AttackFigures):
    """Figures of one attack on a run that factorises ratings.

    `reconstruction` solves for all that users sent, `profiles` for single users in a sum over several, `intersection`
    for the touched items that a user rated, `places` for the same by the ciphertexts of sparse contributions, `lengths`
    guesses rated items by the lengths of their rows, also where noise is in all of them.
    """

    rated: Number = Field(None, description="`reconstruction`: share of a user's ratings that are right.")
    rated_guess: Number = Field(None, description="The same for guesses by the public marginals.")
    ratings: Number = Field(
        None, description="`reconstruction`: as `rated` over all items, an unrated one being 0."
    )
    ratings_guess: Number = Field(None, description="The same for guesses by the public marginals.")
    attributes: Number = Field(
        None, description="`reconstruction`: share of the known attributes that are right."
    )
    attributes_guess: Number = Field(None, description="The same for guesses by the public marginals.")
    whole: Number = Field(None, description="`reconstruction`: share of the users of whom all is right.")
    sums: Number = Field(None, description="Number of contributions or sums that were attacked.")
    smallest_sum: Number = Field(None, description="Users of the smallest of these sums.")
    profiles: Number = Field(None, description="`profiles`: mean number of profiles found in a sum.")
    right: Number = Field(
        None,
        description="`profiles`: share of their ratings that is right, for the user whom each fits best.",
    )
    found: Number = Field(None, description="`profiles`: share of all ratings of the sum that was found so.")
    exposed: Number = Field(
        None,
        description="`differencing`: share of the users that pairs of sums single out. `profiles`: share of the users "
        "of whom at least half of the ratings are found.",
    )

    certain: Number = Field(
        None,
        description="`noise_sums`: share of what users touched of which the sums tell for sure whether it was rated.",
    )

    def words(self) -> list[str]:
        """Return the figures that a line in the terminal shows."""
        found = super().words()
        for right, guessed, what in (
            (self.rated, self.rated_guess, "ratings"),
            (self.attributes, self.attributes_guess, "attributes"),
        ):
            if right is not None and guessed is not None:
                found.append(f"{percent(right)} of the {what} right (guessed {percent(guessed)})")
        if self.found is not None:
            found.append(f"{percent(self.found)} of the ratings in sums read off")
        return found

    def reveals(self) -> str:
        """Return the share of ratings that was read off sums, in words."""
        if self.found is None:
            return super().reveals()
        return f"{percent(self.found)} of the ratings in sums" if self.found else "no rating"


class FactorReport(Report):
    """The report of a run that factorises ratings."""

    attacks: Mapping[str, SerializeAsAny[FactorAttack]] = Field(
        default_factory=dict,
        description="Figures by [attack](#attacks); only with `federation.attacks`.",
    )
