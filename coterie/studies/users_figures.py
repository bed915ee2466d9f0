"""UsersFigures of single users in a run's folder (``users.csv``), by which two runs are compared user by user.

They are kept where a run asks for them (``federation.per_user_metrics``): in an experiment on one machine they leave
no host of anybody, and are private data all the same.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.data.whole_file import whole_file, whole_lines
from coterie.errors import DataError
from coterie.evaluation.holdout import TRAIN
from coterie.rounds.sides import HostSide
from coterie.rounds.training import Training
from coterie.studies.recorded_run import numbering
from coterie.studies.run_data import Feed
from coterie.telemetry.report import ActivityPart, Course, UsersPart

__all__ = [
    "USERS",
    "UsersAtBest",
    "UsersFigures",
    "measured_by_hosts",
    "over_users",
    "read_users",
    "write_users",
]

_BINS = 10
_PARTS, _LEAST = 10, 5
"""Parts of users by activity, and fewest users of each."""

USERS = "users.csv"
"""Name of the file, in the folder of a federation: user, metric, value."""

_MEASURED = "metrics.csv"
"""Name of the file in which a host keeps its users' figures: point, slot, metric, value."""

UsersFigures = Mapping[str, Mapping[str, float]]
"""Each user's value by metric and user; a user without anything to measure is left out."""


def measured_by_hosts(states: Mapping[str, Path], course: Course) -> UsersFigures:
    """Return users' figures at the chosen version, else at the last evaluation, from the hosts' own files.

    Parameters
    ----------
    states : mapping of str to Path
        State folder of each process, by party.
    course : Course
        What the federation did.
    """
    slots, _ = numbering(states)
    names = {slot: name for name, slot in slots.items()}
    points: dict[int, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for party, state in states.items():
        path = state / _MEASURED
        if not party.startswith("client/") or not path.is_file():
            continue
        for row in csv.DictReader(io.StringIO(whole_lines(path))):
            value = float(row["value"])
            if not math.isnan(value):
                # An evaluation that a host repeats after a restart comes to the same values.
                points[int(row["point"])][row["metric"]][names[int(row["slot"])]] = value
    chosen = course.chosen.epoch if course.chosen is not None else None
    if chosen is None:
        return points[max(points)] if points else {}
    return points.get(int(chosen), {})


class UsersAtBest:
    """Users' figures at the best evaluation so far of a run in one process; called after each evaluation.

    Parameters
    ----------
    feed : Feed
    hosts : int
        Hosts over which its users are spread.
    """

    def __init__(self, feed: Feed, hosts: int) -> None:
        self._users = [feed.hosted(number).users for number in range(hosts)]
        self.kept: dict[str, dict[str, float]] = {}

    def __call__(
        self, state: Training, sides: Sequence[HostSide], model: Mapping[str, NDArray[np.float32]]
    ) -> None:
        """Take the users' figures where the evaluation is the best so far."""
        if state.best != len(state.evaluations) - 1:
            return
        self.kept = defaultdict(dict)
        hosted = [users for users in self._users if len(users)]
        for users, side in zip(hosted, sides, strict=True):
            for metric, values in side.measured.items():
                found = zip(users, values.tolist(), strict=True)
                self.kept[metric].update((user, value) for user, value in found if not math.isnan(value))


def over_users(figures: UsersFigures, feed: Feed) -> dict[str, UsersPart]:
    """Return how each metric is spread over users: counts by value, and means by how much users had to train on.

    Parameters
    ----------
    figures : mapping
        Each user's value, by metric and user.
    feed : Feed
        The data, divided: how many training items each user has.
    """
    data, train = feed.dataset, feed.split.part == TRAIN
    held = dict(zip(data.users, np.bincount(data.user[train], minlength=len(data.users)), strict=True))
    return {metric: _spread(values, held) for metric, values in figures.items() if values}


def _spread(values: Mapping[str, float], held: Mapping[str, int]) -> UsersPart:
    # By the users' names where activity is equal, so that the parts do not depend on the order of the hosts.
    users = sorted(values, key=lambda user: (held[user], user))
    of_users, items = np.array([values[user] for user in users]), np.array([held[user] for user in users])
    low, high = min(0.0, float(of_users.min())), max(1.0, float(of_users.max()))
    counts, edges = np.histogram(of_users, bins=_BINS, range=(low, high))
    # So many users stand behind each mean that none is a user's own figure.
    number = min(_PARTS, len(users) // _LEAST)
    parts = np.array_split(np.arange(len(users)), number) if number else []
    return UsersPart(
        users=len(users),
        counts=tuple(counts.tolist()),
        edges=tuple(edges.tolist()),
        by_activity=tuple(
            ActivityPart(
                users=len(part),
                least=int(items[part[0]]),
                most=int(items[part[-1]]),
                mean=float(of_users[part].mean()),
            )
            for part in parts
        ),
    )


def write_users(figures: UsersFigures, folder: Path) -> None:
    """Write users' figures into the folder of a federation, readable by its owner only."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / USERS) as beside:
        beside.touch(mode=0o600)
        with beside.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("user", "metric", "value"))
            for metric in sorted(figures):
                writer.writerows(
                    (user, metric, repr(float(value))) for user, value in sorted(figures[metric].items())
                )


def read_users(folder: Path) -> dict[str, dict[str, float]] | None:
    """Return users' figures from the folder of a federation; None where it kept none.

    Raises
    ------
    DataError
        The file cannot be read.
    """
    path = folder / USERS
    if not path.is_file():
        return None
    found: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found[row["metric"]][row["user"]] = float(row["value"])
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{path} holds no figures of users: {error}") from error
    return dict(found)
