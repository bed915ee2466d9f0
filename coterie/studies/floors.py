"""What the floors of a run will cost and hide, before it runs: items closed to learning, and what counts of items tell.

Each group of a run sums which items its users have, and items that too few of them have stay closed to the group.
Larger groups close less, and their counts tell less of each user.  Both follow from the data set and the sizes of the
groups; nothing has to be trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.config.run import RunSettings
from coterie.errors import DataError
from coterie.privacy.attacks.disaggregate import disaggregate
from coterie.privacy.attacks.rounds_view import RoundView
from coterie.privacy.attacks.scoring import Truth, mean_auc
from coterie.rounds.sides import Arrays, Summed
from coterie.rounds.training import Purpose
from coterie.studies.run_data import Feed
from coterie.systems.registry import server_side

__all__ = [
    "MOST_CLOSED",
    "MOST_TOLD",
    "Floors",
    "curve",
    "fitted",
    "floors",
    "group_sizes",
    "require_open",
    "sufficient",
]

MOST_CLOSED = 0.05
"""Largest share of users' training items that groups should close."""

MOST_TOLD = 0.03
"""By how much the counts of groups may exceed popularity in AUC."""

_CELLS = 50_000_000
"""Most pairs of user and item for which the attack is run: it holds a few numbers for each."""


@dataclass(frozen=True)
class Floors:
    """What groups of one size close and show.

    Attributes
    ----------
    group : int
        Least number of users of a group.
    groups : int
        Number of groups into which the users are cut.
    closed : float
        Share of users' training items that is closed to the users' groups.
    held_out : float
        The same of held-out items, those of validation and test; 0 where there are none.  A held-out item that is
        closed cannot be found by what its user's group has learned of it.
    auc : float or None
        Area under the ROC curve with which the counts of the groups tell a user's training items from others, mean over
        users (`coterie.privacy.attacks.disaggregate`); None for data sets of more than 50 million pairs.
    popularity_auc : float or None
        The same for the counts of all users together, which is what popularity tells.
    """

    group: int
    groups: int
    closed: float
    held_out: float
    auc: float | None
    popularity_auc: float | None

    @property
    def told(self) -> float:
        """By how much the AUC of the counts exceeds that of popularity; 0 where the attack was not run."""
        return 0.0 if self.auc is None or self.popularity_auc is None else self.auc - self.popularity_auc

    @property
    def costly(self) -> bool:
        """Whether more is closed, or told by the counts, than there should be."""
        return self.closed > MOST_CLOSED or self.told > MOST_TOLD

    def __str__(self) -> str:
        """Return the facts, as a clause."""
        many = (
            f"{self.groups} groups of at least {self.group} users"
            if self.groups > 1
            else "one group of all users"
        )
        found = (
            f"{many}: {self.closed:.0%} of users' training items and {self.held_out:.0%} of the held-out ones are "
            "closed to learning, because too few of a group have them"
        )
        if self.auc is None or self.popularity_auc is None:
            return found
        return (
            f"{found}; what each group has tells its users' items from others with an AUC of {self.auc:.3f}, "
            f"popularity with {self.popularity_auc:.3f}"
        )


def floors(
    settings: RunSettings, feed: Feed, group: int | None = None, *, attacked: bool = True
) -> Floors | None:
    """Return what groups close and show, for groups drawn with the seed of the feed.

    Parameters
    ----------
    settings : RunSettings
        A run of a system in rounds.
    feed : Feed
        Its data.
    group : int, optional
        Least number of users of a group; that of the settings if absent.
    attacked : bool
        Whether to run the attack on the counts, which takes a few seconds for millions of pairs.

    Returns
    -------
    Floors or None
        None where the system closes no items, and where nobody has any.
    """
    group = settings.rounds.group if group is None else group
    pairs = _pairs(feed, feed.split.train)
    users = np.unique(feed.dataset.user)
    if not len(pairs):
        return None
    parts = max(len(users) // max(group, 1), 1)
    side = server_side(
        settings.system, settings.own.for_plan(settings), len(feed.dataset.items), feed.seed, parts
    )
    if not side.asks_supports:
        return None
    drawn = np.array_split(np.random.default_rng(feed.seed).permutation(users), parts)
    group_of = np.empty(len(feed.dataset.users), np.int64)
    for number, members in enumerate(drawn):
        group_of[members] = number
    supports = np.zeros((parts, len(feed.dataset.items)), np.int64)
    np.add.at(supports, (group_of[pairs[:, 0]], pairs[:, 1]), 1)
    arrays: Arrays = side.initial()
    for number, members in enumerate(drawn):
        shares = np.zeros(parts)
        shares[number] = 1
        summed = {"supports": supports[number].astype(np.float64)}
        arrays = side.apply(
            arrays, Summed(Purpose.SUPPORTS, summed, len(members), 0, number, shares, len(users))
        )
    opened = side.opened(arrays)
    if opened is None:
        return None
    auc = popularity_auc = None
    if attacked and len(users) * len(feed.dataset.items) <= _CELLS:
        auc, popularity_auc = _told(pairs, drawn, supports, len(feed.dataset.users))
    held_out = _pairs(feed, ~feed.split.train)
    return Floors(
        group,
        parts,
        _closed(opened, group_of, pairs),
        _closed(opened, group_of, held_out),
        auc,
        popularity_auc,
    )


def _pairs(feed: Feed, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return chosen pairs of user and item, none twice, (n, 2)."""
    data = feed.dataset
    both = np.stack([data.user[chosen], data.item[chosen]], axis=1).astype(np.int64)
    return np.unique(both, axis=0)


def _closed(opened: NDArray[np.bool_], group_of: NDArray[np.int64], pairs: NDArray[np.int64]) -> float:
    if not len(pairs):
        return 0.0
    return 1 - float(opened[group_of[pairs[:, 0]], pairs[:, 1]].mean())


def _told(
    pairs: NDArray[np.int64], drawn: Sequence[NDArray[np.int64]], supports: NDArray[np.int64], n_users: int
) -> tuple[float | None, float | None]:
    """Return the AUC of the attack on the counts of groups, and that of the counts of all users together."""
    truth = Truth(pairs[:, 0], pairs[:, 1], np.ones(len(pairs), np.bool_), n_users, supports.shape[1])
    views = [
        RoundView(0, members.astype(np.int64), touched=counts.astype(np.float32))
        for members, counts in zip(drawn, supports, strict=True)
    ]
    consumed, popularity = truth.consumed(), truth.popularity()
    counts = disaggregate(views, popularity, n_users).counts
    auc = None if counts is None else mean_auc(counts, consumed)[0]
    return auc, mean_auc(popularity, consumed)[0]


def curve(settings: RunSettings, feed: Feed, *, attacked: bool = True) -> Iterator[Floors]:
    """Yield what groups of growing size close and show: each twice the last, and one group of everybody at the end.

    Parameters
    ----------
    settings, feed, attacked
        As for `floors`; the first size is that of the settings.
    """
    for size in group_sizes(settings.rounds.group, len(np.unique(feed.dataset.user))):
        found = floors(settings, feed, size, attacked=attacked)
        if found is None:
            return
        yield found


def group_sizes(first: int, users: int) -> Iterator[int]:
    """Yield growing sizes of groups: each twice the last, and the whole population at the end.

    Parameters
    ----------
    first : int
        The first size, at least 1.
    users : int
        Number of users.  Sizes of which the population holds fewer than two groups are left out.
    """
    while first * 2 <= users:
        yield first
        first *= 2
    yield users


def sufficient(settings: RunSettings, feed: Feed) -> Floors | None:
    """Return the smallest groups of the `curve` that are not `Floors.costly`, or else one group of everybody.

    Parameters
    ----------
    settings, feed
        As for `floors`.

    Returns
    -------
    Floors or None
        None where the system closes no items.
    """
    found = None
    for found in curve(settings, feed):
        if not found.costly:
            break
    return found


def fitted(settings: RunSettings, feed: Feed) -> RunSettings:
    """Return the settings of a run with groups as large as its data need, where it asks for that.

    Parameters
    ----------
    settings : RunSettings
        A run of any system; without ``rounds.fit_groups`` it is returned as it is.
    feed : Feed
        Its data.

    Returns
    -------
    RunSettings
        With ``rounds.group`` of the `sufficient` groups, and with cohorts of groups ``rounds.cohort`` of at least as
        many users.
    """
    rounds = settings.rounds
    found = sufficient(settings, feed) if rounds.fit_groups and settings.description.in_rounds else None
    if found is None:
        return settings
    cohort = max(rounds.cohort, found.group) if rounds.cohorts == "groups" else rounds.cohort
    larger = rounds.model_copy(update={"group": found.group, "cohort": cohort})
    return settings.model_copy(update={"rounds": larger})


def require_open(settings: RunSettings, feed: Feed) -> None:
    """Require that the system can learn the catalogue, and some item of some user.

    Raises
    ------
    DataError
        When there are more items than the system's settings allow, or when every item that users have in training is
        closed to their groups.
    """
    if large := settings.own.too_many_items(len(feed.dataset.items)):
        raise DataError(f"{feed.dataset.name}: {large}")
    found = floors(settings, feed, attacked=False)
    if found is not None and found.closed == 1:
        raise DataError(
            f"{feed.dataset.name}: every item is closed to learning, because too few users of a group share it",
            hint="larger groups (rounds.group), fewer users behind an item "
            f"({settings.description.table}.min_touch), or data whose users have items in common",
        )
