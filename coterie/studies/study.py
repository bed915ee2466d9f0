"""What a system is studied with: rows beside a run, attacks on its transcript, tables of its paper.

A room's ``study`` module has a `Study` as ``STUDY``.  It is loaded by name (`study_of`), where one of these is asked
for, so that services never load it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import ConfigError
from coterie.privacy.attacks.scoring import Truth
from coterie.studies.reference import Reference
from coterie.studies.run_data import Feed
from coterie.systems.registry import REMEDY, distribution_of, system_named, systems
from coterie.wire.v1.orchestrator_pb2 import RunPlan

if TYPE_CHECKING:
    from coterie.studies.tables.table import Table

__all__ = ["Further", "Recorded", "Study", "studies", "study_of"]


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded run, and what the experimenter knows to judge attacks by.

    Attributes
    ----------
    transcripts : sequence of Path
        Of the orchestration server, oldest first.
    plan : RunPlan
    truth : Truth
        Who has what in training.
    ratings : ndarray of float, shape (p,)
        Of the same pairs.
    attributes : ndarray of float, shape (n_users, l)
        By slot, NaN where missing.
    """

    transcripts: Sequence[Path]
    plan: RunPlan
    truth: Truth
    ratings: NDArray[np.floating]
    attributes: NDArray[np.floating]


@dataclass(frozen=True)
class Further:
    """Another federation beside a run, for a section of its own in the report.

    Attributes
    ----------
    section : str
        Key of the section, a list with an entry for each federation.
    folder : str
        Name of the federation's folder.
    facts : mapping
        What sets it apart; part of its entry.
    settings : RunSettings
    """

    section: str
    folder: str
    facts: Mapping[str, Any]
    settings: RunSettings


def _nothing_further(settings: RunSettings) -> Iterator[Further]:
    return iter(())


@dataclass(frozen=True)
class Study:
    """What a system is studied with.

    Attributes
    ----------
    references : callable
        ``(settings, data, seed) -> {name: Reference}``: the rows beside a run, on the same data and split.
    attack : callable
        ``(recorded) -> {name: figures}``: the attacks on the server's transcript.
    tables : tuple of Table
        Tables of the paper, for ``coterie evaluate``.
    further : callable
        ``(settings) -> Iterator[Further]``: the federations that ``[study]`` asks for.
    """

    references: Callable[[RunSettings, Feed, int], dict[str, Reference]]
    attack: Callable[[Recorded], Mapping[str, Any]]
    tables: tuple[Table, ...] = ()
    further: Callable[[RunSettings], Iterator[Further]] = _nothing_further


def study_of(system: str) -> Study:
    """Return what a system is studied with.

    Raises
    ------
    ConfigError
        There is no such system, or its module cannot be imported or has no study.
    """
    module = system_named(system).study
    try:
        found = getattr(importlib.import_module(module), "STUDY", None)
    # A plug-in is anybody's code: whatever it raises is said of its distribution.
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
