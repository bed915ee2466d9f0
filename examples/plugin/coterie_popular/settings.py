"""Settings of Popular: the table ``[popular]`` of a run."""

from pydantic import Field

from coterie.rounds.training import Purpose
from coterie.systems.run_settings import BaseRunSettings
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.problems import few_behind, rounds_problems
from coterie_popular.mathematics import METRICS, layout

__all__ = ["PopularSettings"]


class PopularSettings(SystemSettings):
    """Popular: an item scores by how many users have it, counted in one pass of rounds."""

    damping: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Exponent by which users of many items count less: each of a user's n items weighs n^-damping. "
        "0: each item counts 1; 1: a user counts 1 in all.",
    )
    min_touch: int = Field(3, ge=1, description="Fewest users of an item that gets a score; others keep 0.")
    bits: int = Field(16, ge=8, le=24, description="Bits of a transmitted value.")

    @property
    def width(self) -> int:
        """Number of values in a row of the model."""
        return 1

    @property
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""
        return layout(Purpose.TRAIN, 1, self.bits).capacity

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        found = []
        if run.split.kind != "leave-last-out":
            found.append(f"split.kind {run.split.kind!r}: popular is measured by the last item of each user")
        if run.rounds.passes > 1 or run.rounds.cohorts == "independent":
            found.append("popular counts each user once; expected rounds.passes 1 and no independent cohorts")
        chosen_by = [name for name in METRICS if name.startswith("validation_")]
        return found + rounds_problems(run, chosen_by=chosen_by, wide=f"popular.bits {self.bits}")

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        return few_behind(run, self.min_touch)
