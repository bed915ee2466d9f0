"""Recommenders of the Python interface: a class for each registered system, and one for each central model.

No class is written here by name.  Systems come from the registry, plug-ins among them, and keywords are the keys of a
run's file; central models come from `coterie.evaluation.central`, and keywords are their hyper-parameters.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from coterie.api.checked import checked
from coterie.api.data import DataSplit
from coterie.api.fitted import FittedCentral, FittedModel
from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.central import PREDICTORS, RANKERS, Central
from coterie.evaluation.holdout import headline
from coterie.studies.run_data import make_feed
from coterie.systems.description import System
from coterie.systems.registry import systems

if TYPE_CHECKING:
    from coterie.api.federated_run import FederatedRun

__all__ = ["CentralRecommender", "FederatedRecommender", "Recommender", "models"]

_OF_SPLIT = ("data", "split")
_LEFT_ONE_OUT = ("leave-last-out", "leave-random-out")


class Recommender(ABC):
    """A recommender with its settings, before it has learned."""

    @abstractmethod
    def fit(self, split: DataSplit) -> FittedModel:
        """Learn from the training part of a split."""


class FederatedRecommender(Recommender):
    """A federated system with its settings; `models` has a subclass for each system.

    Parameters
    ----------
    **keys
        Keys of the system's own table, as ``factors=16``; or keys and tables of a run, as ``secure_sum="masked"`` or
        ``rounds={"passes": 20}``.

    Raises
    ------
    ConfigError
        An unknown key or a wrong value, with the same message as in a file.
    """

    system: ClassVar[System]

    def __init__(self, **keys: Any) -> None:
        for name in _OF_SPLIT:
            if name in keys:
                raise ConfigError(
                    f"{name}: no key of a model, which learns from the split that `fit` is given",
                    hint="`ct.load(...)` takes the keys of [data], `data.split(...)` those of [split]",
                )
        if "system" in keys:
            raise ConfigError(f"system: the class says it; this one is {self.system.name}")
        self.keys = dict(keys)
        # Wrong keys are refused here, not only where data is at hand.
        self._checked({})

    def tree(self) -> dict[str, Any]:
        """Return the settings as nested keys of a run's file."""
        table = self.system.table
        own = {name: value for name, value in self.keys.items() if name not in RunSettings.model_fields}
        shared = {name: value for name, value in self.keys.items() if name not in own}
        given = shared.get(table, {})
        tables = {} if not own else {table: {**(given if isinstance(given, Mapping) else {}), **own}}
        return {"system": self.system.name, "name": self.system.name, **shared, **tables}

    def settings(
        self, split: DataSplit, *, hosts: int | None = None, output: str | Path | None = None
    ) -> RunSettings:
        """Return the settings of a run on a split.

        Raises
        ------
        ConfigError
            The settings do not go together, or the system cannot be measured by the split.
        """
        DataSplit.require(split)
        tree: dict[str, Any] = {"seeds": [split.seed], **self.tree(), **split.tree()}
        if hosts is not None:
            tree["federation"] = {**tree.get("federation", {}), "hosts": hosts}
        if output is not None:
            tree["output"] = Path(output)
        found = self._checked(tree)
        if found.seeds[0] != split.seed:
            raise ConfigError(
                f"seeds {list(found.seeds)}: a run begins with the split of its first seed, and this split has "
                f"seed {split.seed}",
                hint=f"`data.split(..., seed={found.seeds[0]})` makes that one; or leave seeds out",
            )
        return found

    def _checked(self, more: Mapping[str, Any]) -> RunSettings:
        return checked(RunSettings, {**self.tree(), **more})

    def fit(
        self,
        split: DataSplit,
        *,
        hosts: int | None = None,
        in_process: bool = False,
        output: str | Path | None = None,
        progress: bool = False,
    ) -> FederatedRun:
        """Train a federation on this machine and wait for its end.

        Every service is a process of its own, as under ``coterie run``.  An interrupt stops them all, then is raised.

        Parameters
        ----------
        split : DataSplit
        hosts : int, optional
            Number of client hosts (``federation.hosts``).
        in_process : bool
            Whether to train in this process, without services: the same numbers, for systems that learn in rounds.
        output : str or Path, optional
            Folder in which the run gets a folder of its own; ``runs`` unless given.
        progress : bool
            Whether each evaluation is printed on standard error.

        Raises
        ------
        ConfigError, DataError
            The settings do not go together, or do not suit the data.
        RunError
            The run ended without a result.
        """
        from coterie.api.federated_run import train

        settings = self.settings(split, hosts=hosts, output=output)
        return train(settings, split, in_process=in_process, progress=progress)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.keys.items())
        return f"{type(self).__name__}({given})"


class CentralRecommender(Recommender):
    """A central model with its hyper-parameters; `models` has a subclass for each.

    Parameters
    ----------
    **hyperparameters

    Raises
    ------
    ConfigError
        There is no such hyper-parameter, or a value is out of range.
    """

    model: ClassVar[type[Central]]

    def __init__(self, **hyperparameters: Any) -> None:
        self.hyperparameters = dict(hyperparameters)
        self.model.of(hyperparameters, 0)

    def fit(self, split: DataSplit) -> FittedCentral:
        """Learn from the training part of a split, with all data in this process.

        Raises
        ------
        DataError
            The data lacks what the model learns from, such as ratings.
        PreflightError
            The model needs more memory than it may use, or a package that is not installed.
        """
        from coterie.studies.tables.compare import divided_by
        from coterie.studies.tables.tasks import RANKING, RATING

        DataSplit.require(split)
        predicts = self.model in PREDICTORS
        task = replace(RATING if predicts else RANKING, split=split.settings.kind)
        feed = make_feed(divided_by(task, split.tree()), split.data.dataset, split.seed)
        model = self.model.of(self.hyperparameters, split.seed).fit(feed.training(ratings=predicts))
        if predicts or split.settings.kind in _LEFT_ONE_OUT:
            metrics: Mapping[str, float] = task.measured(feed, model.score).metrics
        else:
            metrics = headline(feed.holdout().measure(model.score))
        return FittedCentral(model, split, feed, metrics)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters.items())
        return f"{type(self).__name__}({given})"


@cache
def models() -> Mapping[str, type[Recommender]]:
    """Return the classes of recommenders by name: central models by their titles, systems by theirs.

    A system is called ``Fed`` and its title where a central model or another part of the interface has the title, or
    where Python would not take it for a name.
    """
    found: dict[str, type[Recommender]] = {}
    for model in (*RANKERS, *PREDICTORS):
        name = identifier(model.title or re.split(r"[,(]", model.label)[0])
        found[name] = _central(name, model)
    from coterie import api

    central = set(found)
    for system in systems().values():
        title = identifier(system.title)
        if title in central or title in api.__all__ or not title.isidentifier():
            title = f"Fed{title}"
        # Two distributions may call their systems alike; names of systems are never the same.
        name = title if title not in found else f"{title}_{system.name.replace('-', '_')}"
        found[name] = _federated(name, system)
    return found


def identifier(title: str) -> str:
    """Return a title as a name in Python.

    >>> identifier("Popular items, 2nd try")
    'PopularItems2ndTry'
    """
    words = re.findall(r"\w+", title)
    return "".join((words[:1] if words else []) + [word[:1].upper() + word[1:] for word in words[1:]])


def _federated(name: str, system: System) -> type[FederatedRecommender]:
    own = "\n".join(
        f"{key} = {field.get_default(call_default_factory=True)!r}\n    {field.description or ''}"
        for key, field in system.settings.model_fields.items()
    )
    text = f"""{system.title}: {system.paper}

Keywords are keys of a run's file: those of its table ``[{system.table}]``, listed here with their defaults, and
those of a run, such as ``secure_sum`` ({", ".join(system.sums)}) and ``rounds``.

{own}
"""
    return type(name, (FederatedRecommender,), {"system": system, "__doc__": text, "__module__": "coterie"})


def _central(name: str, model: type[Central]) -> type[CentralRecommender]:
    own = "\n".join(f"{key} = {value!r}" for key, value in model.defaults().items())
    about = (model.__doc__ or model.label).partition("\n")[0]
    text = f"{about}\n\nCentral model, with all data in one place. {model.note}\n\n{own}".rstrip() + "\n"
    return type(name, (CentralRecommender,), {"model": model, "__doc__": text, "__module__": "coterie"})
