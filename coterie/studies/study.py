"""The study of a learning system: its reference rows, attacks on its transcripts, and tables of its paper.

The ``study`` module of a system's package holds a `Study` as ``STUDY``.  `study_of` loads it by name and on demand, so
that services never load it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.evaluation.central import ScoreItems
from coterie.evaluation.search import Space
from coterie.privacy.attacks.scoring import Truth
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.registry import REMEDY, distribution_of, system_named, systems
from coterie.wire.v1.orchestrator_pb2 import RunPlan

if TYPE_CHECKING:
    from coterie.studies.tables.paper_table import PaperTable

__all__ = ["Further", "Recorded", "Study", "studies", "study_of"]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded run for attacks, with the true data by which the experimenter scores them.

    Attributes
    ----------
    transcripts : sequence of Path
        Transcripts of the COS, oldest first.
    plan : RunPlan
    truth : Truth
        The (user, item) pairs of the training part.
    ratings : ndarray of float, shape (p,)
        Ratings of these pairs.
    attributes : ndarray of float, shape (n_users, l)
        Users' attributes by slot, NaN where missing.
    """

    transcripts: Sequence[Path]
    plan: RunPlan
    truth: Truth
    ratings: NDArray[np.floating]
    attributes: NDArray[np.floating]


@dataclass(frozen=True)
class Further:
    """A further federation that is run after a run, for a section of its own in the report.

    Attributes
    ----------
    section : str
        Key of the system's report (`System.report`): a list of `FurtherRun`, an entry for each federation.
    folder : str
        Name of the federation's folder.
    facts : mapping
        Facts in which the federation differs, for its entry.
    settings : RunSettings
    """

    section: str
    folder: str
    facts: Mapping[str, Any]
    settings: RunSettings


def _no_references(settings: RunSettings, feed: Feed, seed: int) -> dict[str, Reference]:
    return {}


def _nothing_further(settings: RunSettings) -> Iterator[Further]:
    return iter(())


@dataclass(frozen=True)
class Study:
    """The study of a learning system.

    Attributes
    ----------
    attack : callable
        ``(recorded) -> {name: figures}``: the attacks on the server's transcript.
    references : callable
        ``(settings, data, seed) -> {name: Reference}``: the system's own reference rows, on the run's data and split.
    tables : tuple of PaperTable
        Tables of the paper, for ``coterie evaluate``.
    further : callable
        ``(settings) -> Iterator[Further]``: the federations that ``[study]`` asks for.
    space : mapping
        Distributions of the settings that tuning may change, by dotted key, for the table that compares systems.
    judged : callable, optional
        ``(settings, data) -> measure``, for systems that rank items: ``measure(score)`` returns the metrics of a run's
        report for the scores of a simple judge (`coterie.studies.judges`).
    """

    attack: Callable[[Recorded], Mapping[str, Any]]
    references: Callable[[RunSettings, Feed, int], dict[str, Reference]] = _no_references
    tables: tuple[PaperTable, ...] = ()
    further: Callable[[RunSettings], Iterator[Further]] = _nothing_further
    space: Space = field(default_factory=dict)
    judged: Callable[[RunSettings, Feed], Callable[[ScoreItems], Mapping[str, float]]] | None = None


def study_of(system: str) -> Study:
    """Return the study of a system.

    Raises
    ------
    ConfigError
        There is no such system, or its module cannot be imported or has no study.
    """
    module = system_named(system).study
    try:
        found = getattr(importlib.import_module(module), "STUDY", None)
    # A plug-in may raise anything on import; the error names its distribution.
    except Exception as error:
        raise ConfigError(
            f"the study of system {system!r} of {distribution_of(system)} cannot be loaded: {error}",
            hint=REMEDY,
        ) from error
    if not isinstance(found, Study):
        raise ConfigError(
            f"the module {module} of system {system!r} of {distribution_of(system)} has no STUDY"
        )
    return found


def studies() -> Iterator[Study]:
    """Yield the study of every system whose study can be loaded."""
    for system in systems():
        try:
            found = study_of(system)
        except ConfigError:
            continue
        yield found
