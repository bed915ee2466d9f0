"""Configuration of a run (``coterie run FILE.toml``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, field_validator, model_validator

from coterie.rounds.open_population import objection_to_growth
from coterie.systems.description import Driver
from coterie.systems.registry import DEFAULT, combination, failure_of, systems
from coterie.systems.run_settings import (
    AggregationSettings,
    BaseRunSettings,
    ChurnSettings,
    DataSettings,
    EncryptionSettings,
    FederationSettings,
    RoundsSettings,
    ServerOptimiserSettings,
    SplitSettings,
    SyntheticSettings,
)
from coterie.systems.server_step import objection_to_optimiser, own_optimiser_set
from coterie.systems.shared.problems import aggregation_problems, privacy_problems
from coterie.wire.v1.orchestrator_pb2 import CohortKind, PrivacyPlan, RoundsPlan

__all__ = [
    "AggregationSettings",
    "ChurnSettings",
    "DataSettings",
    "EncryptionSettings",
    "FederationSettings",
    "RoundsSettings",
    "RunSettings",
    "ServerOptimiserSettings",
    "SplitSettings",
    "SyntheticSettings",
]


def _with_moved_keys(given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the tables of a run with keys at their present places that earlier releases had elsewhere."""
    made = dict(given)
    for system in systems().values():
        for former, key in system.moved.items():
            name, _, last = former.partition(".")
            table, own = made.get(name), made.get(system.table, {})
            if (
                name in RunSettings.model_fields
                or not isinstance(table, Mapping)
                or not isinstance(own, Mapping)
            ):
                continue
            if last in table:
                made[system.table] = {key: table[last], **own}
                made[name] = {word: value for word, value in table.items() if word != last}
            if not made[name]:
                del made[name]
    return made


def _refuse_bfv(given: Mapping[Any, Any]) -> None:
    """Refuse the scheme BFV by name: there is no key ``scheme``, as encrypted sums have one scheme."""
    encryption = given.get("encryption", {})
    own = encryption.get("scheme") if isinstance(encryption, Mapping) else None
    if "bfv" in (given.get("secure_sum"), given.get("scheme"), own):
        raise ValueError(
            "there is no sum in BFV, as forged ciphertexts would tell a server the secret key (docs/bfv.md); expected "
            "secure_sum = 'encrypted', which is Paillier, and no key 'scheme'"
        )


class _Checked(BaseRunSettings):
    """A run whose parts go together."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_system(cls, given: Any) -> Any:
        """Fill in the system's own defaults of other tables' keys, such as split, cohorts and passes."""
        if not isinstance(given, Mapping):
            return given
        _refuse_bfv(given)
        given = _with_moved_keys(given)
        name = str(given.get("system", DEFAULT))
        system = systems().get(name)
        if system is None:
            # A broken system has no table; drop it, since its name is refused with the reason anyway.
            broken = failure_of(name)
            return given if broken is None else {key: value for key, value in given.items() if key != name}
        made = dict(given)
        for table, values in system.usual.items():
            held = given.get(table, {})
            if isinstance(held, Mapping):
                made[table] = {**values, **held}
        return made

    @field_validator("system", mode="before")
    @classmethod
    def _usable(cls, name: Any) -> Any:
        """Refuse an installed system that cannot be loaded, with the reason."""
        if (broken := failure_of(str(name))) is not None:
            raise ValueError(str(broken))
        return name

    @model_validator(mode="after")
    def _goes_together(self) -> _Checked:
        problems = self.own.problems(self) + aggregation_problems(self) + privacy_problems(self)
        together = combination(self.system, self.secure_sum, self.form)
        if not together.allowed:
            problems.append(f"secure_sum {self.secure_sum!r} with system {self.system!r}: {together.why}")
        problems += self._optimiser_problems() + self._growth_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _growth_problems(self) -> list[str]:
        """Return why the run cannot take in users who come later, if it is to, a sentence each."""
        rounds = self.rounds
        if not rounds.most_users:
            return []
        where = f"rounds.most_users {rounds.most_users}"
        if self.driver is not Driver.ROUNDS or not self.description.grows:
            growing = ", ".join(name for name, one in systems().items() if one.grows)
            return [
                f"{where} with system {self.system!r}: its users are fixed when a run begins; expected 0, or one of "
                f"{growing}"
            ]
        why = objection_to_growth(
            RoundsPlan(
                cohorts=CohortKind.Value(f"COHORT_KIND_{rounds.cohorts.upper()}"),
                redraw=rounds.redraw,
                experiment=rounds.experiment,
                privacy=PrivacyPlan() if rounds.privacy.terms.on else None,
            ),
            self.secure_sum,
        )
        return [f"{where}: {why}"] if why else []

    def _optimiser_problems(self) -> list[str]:
        """Return why the system does not take the optimiser of the rounds, a sentence each."""
        optimiser = self.rounds.server_optimiser.optimiser
        if optimiser is None:
            return []
        found = []
        if why := objection_to_optimiser(self.description, optimiser):
            found.append(f"rounds.server_optimiser.name {optimiser.name!r}: {why}")
        if own := own_optimiser_set(self.own):
            keys = ", ".join(f"{self.description.table}.{name}" for name in own)
            found.append(
                f"rounds.server_optimiser.name {optimiser.name!r} takes the place of {keys}; expected one or the other"
            )
        return found


if TYPE_CHECKING:

    class RunSettings(_Checked):
        """Settings of one run: data, split, learning system, sum, rounds and parties."""

else:
    _names = tuple(systems())
    RunSettings = create_model(
        "RunSettings",
        __base__=_Checked,
        __module__=__name__,
        __doc__="Settings of one run: data, split, learning system, sum, rounds and parties.",
        system=(
            Literal[_names],
            Field(DEFAULT, description="Learning system to train; `coterie systems` lists them."),
        ),
        **{
            system.table: (
                system.settings,
                Field(default_factory=system.settings, description=f"Settings of {system.title}."),
            )
            for system in systems().values()
        },
    )
