"""Description of a learning system, which the server, the hosts and the command line read.

Each system is a package whose ``__init__`` holds one `System`.  No module outside that package knows the system's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.data.attributes import AttributeTable
from coterie.privacy.declarations import AccessRows
from coterie.rounds.sides import HostSide, KeepPrivate, OwnerSide, ServerSide
from coterie.systems.settings import SystemSettings
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.preferences import Preference
from coterie.telemetry.report import Report

__all__ = ["IN_ROUNDS", "DataNeeds", "Driver", "System"]


class Driver(Enum):
    """Schedule by which the orchestration server drives one form of a system."""

    ROUNDS = "rounds"
    """Rounds over cohorts of users: hosts contribute, a sum is applied."""

    WINDOWS = "windows"
    """Windows over data owners, whom users visit in between."""

    ASYNCHRONOUS = "asynchronous"
    """No sum: each owner updates the model whenever it has work."""


@dataclass(frozen=True)
class DataNeeds:
    """Kinds of data that a system asks for; they decide what hosts and data owners are given.

    Attributes
    ----------
    ratings : bool
        Whether hosts are given ratings, within `SystemSettings.rating_range`.
    likes : bool
        Whether interactions are divided into likes and dislikes at ``data.positive_from``; otherwise all of them count.
    owners_by_genre : bool
        Whether data owners hold genres; otherwise ``SystemSettings.catalogue_owners`` owners divide the catalogue.
    """

    ratings: bool = False
    likes: bool = False
    owners_by_genre: bool = False


def _no_objection(form: str, secure_sum: str) -> str:
    return ""


@dataclass(frozen=True)
class System:
    """Learning system, as its package describes it to the server, the hosts and the command line.

    Attributes
    ----------
    name : str
        Name in files, plans and certificates: lower-case letters, digits and hyphens.
    title : str
        Name as the paper writes it.
    paper : str
        Authors, title and year.
    page : str
        Page in the documentation, path or address; empty where there is none.
    settings : type of SystemSettings
        Class of the system's table in the file of a run.
    table : str
        Name of the table; unless given, the name of the system with underscores for hyphens.
    forms : mapping of str to Driver
        Driver of each form, by the form's name in a plan.
    sums : tuple of str
        Secure sums under which at least one form runs.
    objection : callable
        ``(form, secure_sum) -> str``: the reason why a form does not run under a sum; empty where it runs.
    gives : callable, optional
        ``(form, secure_sum) -> str``: a description of what the sum hides; that of the sum itself unless given.
    declared : callable
        ``(form, secure_sum) -> Rows``: which role may see which kind of datum.
    shown : tuple of str
        Metrics that the progress of a run shows, the most important first.
    usual : mapping
        Defaults of the system for other tables of a run's file, by table and key.
    needs : DataNeeds
    moved : mapping of str to str
        Keys of the system that earlier releases had in a table of another name: the key of the system's table, by the
        former ``table.key``.  Files with the former key are still read.
    server : callable, optional
        ``(settings, items, seed, groups) -> ServerSide``, for systems in rounds.  Settings are `RunPlan.settings`;
        the call raises ConfigError where they are not the system's own.
    host : callable, optional
        ``(settings, data, keys, seed, keep) -> HostSide``, for systems in rounds.
    owner : callable, optional
        ``(settings, items, features, seed) -> OwnerSide``, for systems that ask data owners in each training round;
        their server's side is a `ToldServerSide`.
    ratings : callable, optional
        ``(settings) -> (lowest, highest)``, for systems that predict ratings.
    stepped : tuple of str
        Names of the arrays of the server's side to which a sum of training is added as a step, possibly scaled; empty
        where the server solves for its model, counts, or has an optimiser that its settings name.  The optimisers of
        ``[rounds.server_optimiser]`` move these arrays.
    fewest : callable, optional
        ``(settings) -> int``: fewest users of a sum of training; from a smaller sum single users' data might be solved
        for.
    preferences : tuple of Preference
        Numbers that each user may set for itself at its host, which gives them to the host's side in `HostData`.
    folds_in : bool
        Whether hosts serve users who never took part in training: their sides are `coterie.rounds.sides.FoldsIn`.
    grows : bool
        Whether runs may take in users who come after they have begun: the server's side keeps nothing by group, or is
        `coterie.rounds.sides.Growing`, and nothing at hosts depends on who the other users are.
    seeded_users : bool
        Whether users' own randomness follows the run's seed in every run, not in experiments only.
    report : type of Report
        Model of the report of a run: a subclass where the system has keys of its own, or attacks with figures of their
        own.  Every key has a default and a description.
    kernels : tuple of callable
        Each compares a compiled kernel of the system with its reference, as its first use does (`coterie.kernels`).
    study : str
        Module with ``STUDY``, a `coterie.studies.study.Study`: loaded only to make a table, a reference or an attack.
    """

    name: str
    title: str
    paper: str
    settings: type[SystemSettings]
    forms: Mapping[str, Driver]
    sums: tuple[str, ...]
    declared: Callable[[str, str], AccessRows]
    shown: tuple[str, ...]
    study: str
    page: str = ""
    table: str = ""
    objection: Callable[[str, str], str] = _no_objection
    gives: Callable[[str, str], str] | None = None
    usual: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    needs: DataNeeds = DataNeeds()
    moved: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    server: Callable[[str, int, int, int], ServerSide] | None = None
    host: Callable[[str, HostData, NDArray[np.uint64], int, KeepPrivate], HostSide] | None = None
    owner: Callable[[str, NDArray[np.integer], AttributeTable, int], OwnerSide] | None = None
    ratings: Callable[[str], tuple[float, float]] | None = None
    stepped: tuple[str, ...] = ()
    fewest: Callable[[str], int] | None = None
    preferences: tuple[Preference, ...] = ()
    folds_in: bool = False
    grows: bool = False
    seeded_users: bool = False
    kernels: tuple[Callable[[], None], ...] = ()
    report: type[Report] = Report

    def __post_init__(self) -> None:
        if not self.table:
            object.__setattr__(self, "table", self.name.replace("-", "_"))

    @property
    def in_rounds(self) -> bool:
        """Whether the system is trained in rounds over cohorts of users."""
        return Driver.ROUNDS in self.forms.values()


IN_ROUNDS: Mapping[str, Driver] = MappingProxyType({"hosts": Driver.ROUNDS, "users": Driver.ROUNDS})
"""Forms of a system in rounds: the members of a sum are hosts, or single users."""
