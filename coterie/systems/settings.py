"""Base classes of configuration: `ConfigModel` for every table of a file, `SystemSettings` for a system's table."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.systems.run_settings import BaseRunSettings
    from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = [
    "ConfigModel",
    "Label",
    "MaskedSum",
    "Sha256",
    "SideInformation",
    "SystemSettings",
    "ValidationMetric",
]

Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A DNS label: lower-case letters, digits and hyphens, at most 63 characters."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
"""A SHA-256 in lower-case hexadecimal digits, or nothing."""

ValidationMetric = Annotated[str, StringConstraints(pattern=r"^validation_")]
"""Name of a metric on the validation items."""


class ConfigModel(BaseModel):
    """Base of all configuration: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class SideInformation:
    """Side information (attributes of users, features of items) that a run's settings ask for.

    Attributes
    ----------
    attributes : bool
        Whether hosts are given the attributes of their users.
    features : {"known", "genres", "genome", "none"}
        Features of items that data owners are given.
    genome : Path or None
        Folder with MovieLens' ``genome-scores.csv``; the data set's own when None.
    """

    attributes: bool
    features: Literal["known", "genres", "genome", "none"]
    genome: Path | None = None


@dataclass(frozen=True)
class MaskedSum:
    """Kind of masked sum that a run forms: its number of members, and what happens when it is abandoned.

    Attributes
    ----------
    members : int
    who : str
        Kind of the members, in words.
    otherwise : str
        Consequence of an abandoned sum, in words.
    """

    members: int
    who: str
    otherwise: str


class SystemSettings(ConfigModel):
    """Settings of one learning system: a table in the file of a run.

    A subclass declares the fields and overrides the properties and methods that depend on them, whose defaults suit a
    system in rounds without ratings or side information.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    local: ClassVar[frozenset[str]] = frozenset()
    """Keys that only the launcher of a run reads: they are no part of its plan."""
    omitted: ClassVar[frozenset[str]] = frozenset()
    """Keys that a plan has only where they differ from their default: plans from before such a key hash as they did.

    No release may change such a default.
    """

    def to_json(self) -> str:
        """Return the settings that all parties of a run must share, as JSON: equal settings give equal texts."""
        unset = {
            name for name in self.omitted if getattr(self, name) == type(self).model_fields[name].default
        }
        plain = self.model_dump(mode="json", exclude={*self.local, *unset})
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the settings that a plan carries.

        Raises
        ------
        ConfigError
            When the settings are malformed, have an unknown or a missing key, or a value is out of its range.
        """
        try:
            found = cls.model_validate_json(cls._whole(text), strict=True)
        except ValidationError as error:
            raise _not_of(cls, "; ".join(map(_words, error.errors()))) from error
        sent = set(json.loads(text))
        # A missing key would get the default of this release, which may differ from the sender's.
        if missing := sorted(set(cls.model_fields) - cls.local - cls.omitted - sent):
            raise _not_of(cls, f"{', '.join(missing)}: missing")
        if strange := sorted(sent & cls.local):
            raise _not_of(cls, f"{', '.join(strange)}: no part of a plan")
        return found

    @classmethod
    def _whole(cls, text: str) -> str:
        """Return the settings of a plan with the keys that it omits, whatever a file without them would mean."""
        if not cls.omitted:
            return text
        try:
            given = json.loads(text)
        except ValueError:
            return text
        if not isinstance(given, dict):
            return text
        return json.dumps({**{name: cls.model_fields[name].default for name in cls.omitted}, **given})

    def for_plan(self, run: BaseRunSettings, attributes: Sequence[str] = ()) -> str:
        """Return the settings as ``RunPlan.settings`` carries them, JSON.

        Parameters
        ----------
        run : BaseRunSettings
            Run that the settings are part of.
        attributes : sequence of str
            Names of the users' attributes, for systems that learn from them.
        """
        return self.to_json()

    def fill(self, plan: RunPlan, run: BaseRunSettings, attributes: Sequence[str] = ()) -> None:
        """Write the settings into the plan of a run; parameters as for `for_plan`."""
        plan.settings = self.for_plan(run, attributes)

    @property
    def variant(self) -> str:
        """Name of the model or preset among the system's; empty where there is only one."""
        return ""

    def too_many_items(self, n_items: int) -> str:
        """Return why a catalogue of this size is too large for these settings; empty where it is not."""
        return ""

    def label(self, run: BaseRunSettings) -> str:
        """Return the name to show for a run: the system's title, or that of its model."""
        return run.description.title

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of values in a row of the model."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Largest number of users in a sum of training whose codes cannot overflow."""

    @property
    def rating_range(self) -> tuple[float, float] | None:
        """Lowest and highest rating that the system learns from; None where it learns from no ratings."""
        return None

    @property
    def catalogue_owners(self) -> int:
        """Number of data owners among which items are divided, unless the system divides them by genre."""
        return 1

    @property
    def owners_floor(self) -> int | None:
        """Fewest users behind a row that leaves a data owner; None where owners hold no rows back."""
        return None

    @property
    def without_dislikes(self) -> str:
        """Settings with which the system learns from likes alone, in words; empty where it does already."""
        return ""

    @property
    def side_information(self) -> SideInformation | None:
        """Side information that the system learns from; None where it learns from interactions only."""
        return None

    @property
    def preferences_file(self) -> Path | None:
        """CSV file of what users have set for themselves, for their hosts to begin with; None where there is none."""
        return None

    @property
    def expands(self) -> bool:
        """Whether users of a run find anonymous neighbours by graph expansion at the third party."""
        return False

    @property
    def combines(self) -> bool:
        """Whether users of a run learn from pseudo meta-latents, which the third party combines."""
        return False

    def passes(self, run: BaseRunSettings) -> int:
        """Return the most passes over all users that a run makes."""
        return run.rounds.passes

    def form_in(self, run: BaseRunSettings) -> str:
        """Return the form of the system, as the plan names it: ``users`` or ``hosts``, the members of sums."""
        return "users" if run.rounds.party_per_user else "hosts"

    def problems(self, run: BaseRunSettings) -> list[str]:
        """Return the conflicts between a run and these settings, a sentence each."""
        return []

    def sparse_problems(self, run: BaseRunSettings) -> list[str]:
        """Return why contributions cannot leave out ciphertexts of zeros, a sentence each."""
        return [
            f"encryption.sparse with system {run.system!r}: its users have something everywhere, or rows are divided "
            "by counts of the same sum"
        ]

    def narrower(self, run: BaseRunSettings) -> str:
        """Return, in words, which settings to change so that a sum may have more users."""
        return f"fewer {run.description.table}.bits"

    def warnings(self, run: BaseRunSettings) -> list[str]:
        """Return warnings about what the cohorts and settings of a run disclose, a sentence each."""
        return []

    def protection(self, run: BaseRunSettings, hosts: int) -> dict[str, Any] | None:
        """Describe what the sums of a run protect (`coterie.studies.protection`); None for a system in rounds."""
        return None

    def masked_sums(self, run: BaseRunSettings, hosts: int) -> list[MaskedSum] | None:
        """Return the kinds of masked sums that a run forms; None for a system in rounds."""
        return None


def _words(problem: ErrorDetails) -> str:
    return f"{'.'.join(map(str, problem['loc'])) or 'all'}: {problem['msg']}"


def _not_of(settings: type[SystemSettings], why: str) -> ConfigError:
    return ConfigError(
        f"the settings of the plan are not of {settings.__name__}: {why}",
        hint="the peers may be of another release",
    )
