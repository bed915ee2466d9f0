"""Division of a run's data set among its parties: items for data owners, histories for client hosts."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coterie.config.run import RunSettings
from coterie.data import (
    Dataset,
    Filter,
    Partition,
    Split,
    SyntheticSpec,
    by_genre,
    cold_items,
    cold_users,
    generate,
    generate_user_attributes,
    hold_marked_out,
    leave_last_out,
    leave_marked_out,
    leave_random_out,
    random,
    read,
    read_split,
    spread_users,
    temporal,
)
from coterie.data.attributes import (
    AttributeTable,
    in_order,
    item_attributes,
    read_attributes,
    restrict,
    write_attributes,
)
from coterie.data.demographics import read_user_attributes
from coterie.data.filters import filtered
from coterie.data.folds import FOLDS, fold_parts, has_folds
from coterie.data.genome import has_genome, read_genome
from coterie.data.keyed_order import key_hash
from coterie.data.matlab import published_parts
from coterie.data.ncf import FOLDER, PublishedHoldout, read_ncf_holdout
from coterie.data.readers import detect
from coterie.errors import DataError
from coterie.evaluation.central import Interactions
from coterie.evaluation.holdout import Holdout
from coterie.evaluation.leave_one_out import RANKED, LeaveOneOut
from coterie.evaluation.rated import Rated
from coterie.rounds.plan_hash import holding_of
from coterie.systems.run_settings import DataSettings, SplitSettings
from coterie.systems.settings import SideInformation
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.preferences import objection
from coterie.wire.v1.orchestrator_pb2 import Holding

__all__ = [
    "CATALOGUE",
    "Feed",
    "dataset_of",
    "divided",
    "load",
    "make_feed",
    "read_interactions",
    "read_published",
]

CATALOGUE = "catalogue"
"""Name of the data owner that registers all items of a rounds-based run."""


@dataclass(frozen=True)
class Feed:
    """A data set divided for one seed: interactions into the split's parts, items over owners, users over hosts.

    Parameters
    ----------
    dataset : Dataset
        The data set, read or generated.
    positive : ndarray of bool, shape (N,)
        Which interactions are positive.
    split : Split
        Part of each interaction.
    partition : Partition
        Items over owners.
    host : ndarray of int, shape (U,)
        Host of each user.
    seed : int
        Seed of the division.
    negatives : ndarray of int32, shape (U, m), or None
        Items that the published hold-out ranks the test items among, filled up with -1.
    attributes, features : AttributeTable, optional
        Attributes of users and features of items; one row for each user or item of the data set.
    preferences : AttributeTable, optional
        What users have set for themselves; one row for each user of the data set.
    explicit : bool
        Whether hosts are given ratings.
    """

    dataset: Dataset
    positive: npt.NDArray[np.bool_]
    split: Split
    partition: Partition
    host: npt.NDArray[np.int64]
    seed: int = 0
    negatives: npt.NDArray[np.int32] | None = None
    attributes: AttributeTable | None = None
    features: AttributeTable | None = None
    explicit: bool = False
    preferences: AttributeTable | None = None

    def holdout(self) -> Holdout:
        """Return the hold-out for ranking metrics over all users."""
        return Holdout(
            n_users=len(self.dataset.users),
            n_items=len(self.dataset.items),
            user=self.dataset.user,
            item=self.dataset.item,
            positive=self.positive,
            part=self.split.part,
        )

    def leave_one_out(self) -> LeaveOneOut:
        """Return the hold-out of one item per user, ranked among negatives, over all users.

        The negatives are the published ones if there are any; otherwise they are drawn with the feed's seed.
        """
        data, part = self.dataset, self.split.part
        if self.negatives is not None:
            return LeaveOneOut(len(data.items), data.user, data.item, part, self.negatives)
        return LeaveOneOut.sampled(data.users, data.items, data.user, data.item, part, seed=self.seed)

    def training(self, *, ratings: bool = False) -> Interactions:
        """Return the training interactions for central models, the liked ones where a system learns from likes.

        Parameters
        ----------
        ratings : bool
            Whether with their ratings.
        """
        data, own = self.dataset, self.split.train & self.positive
        rating = data.rating[own] if ratings else None
        return Interactions(len(data.users), len(data.items), data.user[own], data.item[own], rating)

    def users_of_hosts(self) -> list[int]:
        """Return how many users with a history each host has, up to the last host that has any."""
        users = np.unique(self.dataset.user)
        return [int(count) for count in np.bincount(self.host[users])]

    def hosted(self, host: int) -> HostData:
        """Return the data of a host's users, with users numbered from 0 on the host.

        Users without any interaction belong to no host.
        """
        data = self.dataset
        mine = self.host[data.user] == host
        users = np.unique(data.user[mine])
        position = np.searchsorted(users, data.user[mine])
        item, part, rating = data.item[mine], self.split.part[mine], data.rating[mine]
        if self.negatives is not None:
            listed = self.negatives[users]
            row, column = np.nonzero(listed >= 0)
            position, item = np.append(position, row), np.append(item, listed[row, column])
            part = np.append(part, np.full(len(row), RANKED))
            rating = np.append(rating, np.full(len(row), np.nan, np.float32))
        names = [data.users[user] for user in users.tolist()]
        told, preferred = (
            None if table is None else AttributeTable(table.names, table.values[users])
            for table in (self.attributes, self.preferences)
        )
        return HostData(names, data.items, position, item, part, rating, told, preferred)

    def owned(self, owner: int) -> tuple[npt.NDArray[np.intp], AttributeTable | None]:
        """Return the indices of a data owner's items, and its features of them."""
        own = np.flatnonzero(self.partition.member[:, owner])
        if self.features is None:
            return own, None
        return own, AttributeTable(self.features.names, self.features.values[own])

    def rated(self) -> Rated:
        """Return the hold-out for metrics of predicted ratings over all users."""
        data = self.dataset
        return Rated(len(data.users), len(data.items), data.user, data.item, data.rating, self.split.part)

    @property
    def attribute_names(self) -> tuple[str, ...]:
        """Names of the users' attributes, as the plan of a run carries them."""
        return () if self.attributes is None else self.attributes.names

    def holdings(self, processes: int) -> list[Holding]:
        """Return which data owner holds which items, as the operator states it in the run's plan.

        Parameters
        ----------
        processes : int
            As for `owner_processes`.
        """
        items, names = np.array(self.dataset.items, object), self.partition.names
        return [
            holding_of(names[owner], items[self.partition.member[:, owner]], party)
            for party, owners in self.owner_processes(processes)
            for owner in owners
        ]

    def owner_processes(self, processes: int) -> list[tuple[str, list[int]]]:
        """Return the name of each data-owner process, with the positions of its owners.

        Parameters
        ----------
        processes : int
            Number of processes among which owners are divided; 0 for one each.
        """
        names = self.partition.names
        groups = np.array_split(np.arange(len(names)), min(processes or len(names), len(names)))
        return [
            (names[group[0]] if len(group) == 1 else f"owners-{position}", group.tolist())
            for position, group in enumerate(groups)
        ]

    def write_attributes(self, host: int, path: Path) -> Path | None:
        """Write the attributes of a host's users as CSV and return the path; None, with no file, if there are none."""
        data = self.hosted(host)
        return _written(path, data.users, data.attributes)

    def write_preferences(self, host: int, path: Path) -> Path | None:
        """Write what a host's users have set for themselves, as `write_attributes` writes attributes."""
        data = self.hosted(host)
        return _written(path, data.users, data.preferences)

    def write_features(self, owner: int, path: Path) -> Path | None:
        """Write a data owner's item features as CSV and return the path; None, with no file, if there are none."""
        own, features = self.owned(owner)
        if features is None or not features.names:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        write_attributes(path, "item", [self.dataset.items[n] for n in own.tolist()], features)
        return path

    def write_items(self, owner: int, path: Path) -> None:
        """Write the items of an owner, CSV with a column ``item``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["item"])
            writer.writerows([self.dataset.items[n]] for n in np.nonzero(self.partition.member[:, owner])[0])

    def write_histories(self, host: int, path: Path) -> int:
        """Write the histories of a host's users as CSV, in time order, and return how many users have one.

        The negatives of a published hold-out follow as rows of their own.  The column of ratings is written only for
        systems that predict ratings.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.dataset
        time = data.time if data.time is not None else np.arange(len(data), dtype=np.int64)
        chosen = np.nonzero(self.host[data.user] == host)[0]
        chosen = chosen[np.lexsort((chosen, time[chosen], data.user[chosen]))]
        restrict(path)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["user", "item", "positive", "time", "part", *(["rating"] if self.explicit else [])]
            )
            for n in chosen.tolist():
                writer.writerow(
                    (
                        data.users[data.user[n]],
                        data.items[data.item[n]],
                        int(self.positive[n]),
                        int(time[n]),
                        int(self.split.part[n]),
                        *((f"{data.rating[n]:.9g}",) if self.explicit else ()),
                    )
                )
            users = np.unique(data.user[chosen])
            if self.negatives is not None:
                for user in users.tolist():
                    listed = self.negatives[user]
                    key = data.users[user]
                    writer.writerows((key, data.items[item], 0, 0, RANKED) for item in listed[listed >= 0])
        return len(users)


def _written(path: Path, users: Sequence[str], table: AttributeTable | None) -> Path | None:
    """Write a row of numbers for each user; return None, with no file, where there are no users or no numbers."""
    if table is None or not table.names or not users:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_attributes(path, "user", users, table)
    return path


def load(settings: RunSettings) -> Dataset:
    """Read the data set of a run, or generate the synthetic one, and filter it."""
    return dataset_of(settings.data)


def dataset_of(options: DataSettings) -> Dataset:
    """Read the data set that a table ``[data]`` names, or generate the synthetic one, and filter it."""
    if options.path is None:
        return filtered(generate(_spec(options)), _filter(options))
    return read_interactions(options.path, options)


def read_interactions(path: Path, options: DataSettings) -> Dataset:
    """Read a data set from a file or folder by a run's settings; ``options.path`` is ignored."""
    return read(
        path,
        options.layout,
        columns=options.columns or None,
        rating_range=options.rating_range,
        keep=_filter(options),
    )


def _filter(options: DataSettings) -> Filter:
    return Filter(options.min_user, options.min_item, options.k_core)


def _spec(options: DataSettings) -> SyntheticSpec:
    spec = options.synthetic
    return SyntheticSpec(
        users=spec.users,
        items=spec.items,
        interactions=spec.interactions,
        genres=spec.genres,
        seed=spec.seed,
    )


def make_feed(settings: RunSettings, dataset: Dataset, seed: int) -> Feed:
    """Divide a data set for one seed.

    Raises
    ------
    DataError
        When the data set lacks what the division needs, such as timestamps, genres, a published hold-out or ratings.
    """
    partition = _partition(settings, dataset, seed)
    needs, own = settings.description.needs, settings.own
    if not needs.owners_by_genre:
        dataset, partition = _numbered_by_owner(dataset, partition)
    published = read_published(settings, dataset)
    split = divided(settings.data, settings.split, dataset, seed, published)
    if settings.split.kind in ("published", "file"):
        _require_measurable(settings, dataset, split)
    feed = Feed(
        dataset=dataset,
        # Systems that do not learn from likes count every rated item as positive.
        positive=dataset.positive(settings.data.positive_from)
        if needs.likes
        else np.ones(len(dataset), np.bool_),
        split=split,
        partition=partition,
        host=spread_users(len(dataset.users), settings.federation.hosts, seed),
        seed=seed,
        negatives=None if published is None else published.negatives,
    )
    if own.without_dislikes:
        _require_dislikes(settings, feed)
    if needs.ratings and own.rating_range is not None:
        _require_ratings(settings.system, dataset, *own.rating_range, settings.description.table)
        feed = dataclasses.replace(feed, explicit=True)
    if own.preferences_file is not None:
        feed = dataclasses.replace(feed, preferences=_preferred(settings, dataset, own.preferences_file))
    asked = own.side_information
    return feed if asked is None else _with_side_information(settings, feed, asked)


def _preferred(settings: RunSettings, dataset: Dataset, path: Path) -> AttributeTable:
    """Return what users have set for themselves, by the file that a run names.

    Raises
    ------
    DataError
        The file is malformed, names users that the data set does not have, or says what the system cannot take.
    """
    known = settings.description.preferences
    rows, table = read_attributes(path, "user")
    if not table.names:
        raise DataError(f"{path} has no column but 'user'; expected {', '.join(one.name for one in known)}")
    if unknown := objection(settings.system, known, dict.fromkeys(table.names)):
        raise DataError(f"{path}: {unknown}")
    if strangers := sorted(set(rows) - set(dataset.users)):
        raise DataError(
            f"{path} names {len(strangers)} users that {dataset.name} does not have, such as {strangers[0]!r}",
            hint="users are named as in the data set; data.min_user and data.k_core leave some out",
        )
    for user, values in zip(rows, table.values.tolist(), strict=True):
        stated = {name: value for name, value in zip(table.names, values, strict=True) if not isnan(value)}
        if why := objection(settings.system, known, stated):
            raise DataError(f"{path}, user {user!r}: {why}")
    return in_order(dataset.users, rows, table)


def _require_dislikes(settings: RunSettings, feed: Feed) -> None:
    """Check that the training data has both likes and dislikes.

    Raises
    ------
    DataError
        All training interactions are liked, or none is.
    """
    liked = feed.positive[feed.split.train]
    if liked.any() and not liked.all():
        return
    share = "all" if liked.any() else "none"
    raise DataError(
        f"{share} of the {len(liked)} training interactions of {feed.dataset.name} are liked at data.positive_from "
        f"{settings.data.positive_from:g}: {settings.system} compares liked with disliked items, so it would learn "
        "nothing",
        hint=f"another data.positive_from, or {settings.own.without_dislikes}",
    )


def _require_ratings(system: str, data: Dataset, lowest: float, highest: float, table: str) -> None:
    """Check that a data set has ratings to predict, within a system's configured range.

    Raises
    ------
    DataError
        All ratings are the same, or some are out of the range.
    """
    if len(data) and (data.rating == data.rating[0]).all():
        raise DataError(
            f"all {len(data)} ratings of {data.name} are {data.rating[0]:g}: there is nothing to predict",
            hint=f"{system} needs a data set with ratings",
        )
    beyond = int(np.count_nonzero((data.rating < lowest) | (data.rating > highest)))
    if beyond:
        raise DataError(
            f"{beyond} ratings of {data.name} are out of range, the lowest {data.rating.min():g} and the highest "
            f"{data.rating.max():g}; expected {lowest:g} to {highest:g}",
            hint=f"{table}.lowest and {table}.highest say what the range is",
        )


def _with_side_information(settings: RunSettings, feed: Feed, asked: SideInformation) -> Feed:
    """Return the feed with attributes of users and features of items."""
    data = feed.dataset
    told = None
    if asked.attributes:
        path = settings.data.path
        told = (
            generate_user_attributes(_spec(settings.data), data.users)
            if path is None
            else read_user_attributes(path, data)
        )
    return dataclasses.replace(feed, attributes=told, features=_features(settings, data, asked))


def _features(settings: RunSettings, dataset: Dataset, asked: SideInformation) -> AttributeTable | None:
    path, table = settings.data.path, settings.description.table
    if asked.features == "none":
        return None
    own = None if path is None else (path if path.is_dir() else path.parent)
    folder = asked.genome or own
    if asked.features == "genome" or (
        asked.features == "known" and folder is not None and has_genome(folder)
    ):
        if folder is None:
            raise DataError(
                f"{table}.features 'genome' with the synthetic set, which has none",
                hint=f"{table}.genome names the folder with genome-scores.csv",
            )
        return read_genome(folder, dataset)
    return item_attributes(dataset)


def _partition(settings: RunSettings, dataset: Dataset, seed: int) -> Partition:
    if settings.description.needs.owners_by_genre:
        return by_genre(dataset, settings.federation.owners or None)
    servers = settings.own.catalogue_owners
    if servers == 1:
        return _catalogue(dataset)
    if servers > len(dataset.items):
        raise DataError(
            f"{settings.description.table}.item_servers {servers} for {len(dataset.items)} items; expected at most one "
            "for each"
        )
    # Each item has one owner, chosen by a seeded hash of its key.
    order = np.argsort(key_hash(dataset.items, seed), kind="stable")
    member = np.zeros((len(dataset.items), servers), np.bool_)
    member[order, np.arange(len(order)) % servers] = True
    return Partition(tuple(f"{CATALOGUE}-{n}" for n in range(servers)), member)


def _numbered_by_owner(dataset: Dataset, partition: Partition) -> tuple[Dataset, Partition]:
    """Return data set and partition with items renumbered owner by owner, owners in the order of their names.

    The COS numbers items in this way, and initial models depend on the numbers.  Each item has one owner.
    """
    member = partition.member
    rank = np.argsort(np.argsort(partition.names))
    order = np.argsort(rank[member.argmax(axis=1)], kind="stable")
    number = np.empty(len(order), np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    places, genres, titles = order.tolist(), dataset.item_genres, dataset.item_titles
    renumbered = dataclasses.replace(
        dataset,
        items=tuple(dataset.items[place] for place in places),
        item=number[dataset.item],
        item_genres=None if genres is None else genres[order],
        item_titles=None if titles is None else tuple(titles[place] for place in places),
    )
    return renumbered, dataclasses.replace(partition, member=member[order])


def _catalogue(dataset: Dataset) -> Partition:
    """Return the partition with one owner of all items."""
    return Partition((CATALOGUE,), np.ones((len(dataset.items), 1), np.bool_))


def divided(
    data: DataSettings,
    options: SplitSettings,
    dataset: Dataset,
    seed: int,
    published: PublishedHoldout | None = None,
) -> Split:
    """Split a data set by a run's settings.

    Parameters
    ----------
    data : DataSettings
        How the data set was read.
    options : SplitSettings
    dataset : Dataset
    seed : int
    published : PublishedHoldout, optional
        By `read_published`, where it was called before.

    Raises
    ------
    DataError
        The data set lacks what the split needs, or a split file is of other data.
    """
    validates = options.validation > 0
    if options.path is not None:
        return read_split(options.path, dataset, options.sha256)
    match options.kind:
        case "published":
            if (file := _matlab(data)) is not None:
                tests = published_parts(file, dataset)
                return hold_marked_out(dataset, tests, validation=options.validation, seed=seed)
            if (folder := _folds(data)) is not None:
                tests = fold_parts(folder, options.fold or seed % FOLDS + 1, dataset)
                return hold_marked_out(dataset, tests, validation=options.validation, seed=seed)
            found = published or _read_ncf(data, dataset)
            return leave_marked_out(dataset, found.test, validation=validates, seed=seed)
        case "leave-last-out":
            return leave_last_out(dataset, ties=options.ties, validation=validates, seed=seed)
        case "leave-random-out":
            return leave_random_out(dataset, validation=validates, seed=seed)
        case "cold-users" | "cold-items":
            hold_out = cold_users if options.kind == "cold-users" else cold_items
            # Here the shares are of users or of items; elsewhere they are of interactions.
            return hold_out(dataset, 1 - options.train, options.train * options.validation, seed)
        case _:
            divide = random if options.kind == "random" else temporal
            return divide(dataset, train=options.train, validation=options.validation, seed=seed)


def read_published(settings: RunSettings, dataset: Dataset) -> PublishedHoldout | None:
    """Return the published hold-out of a data set, with its negatives.

    None where the settings ask for another split, and for data whose published split has no negatives: a MATLAB file,
    and the folds of MovieLens 100K.

    Raises
    ------
    DataError
        The data set's folder has no published hold-out, or it is malformed.
    """
    if settings.split.kind != "published" or _matlab(settings.data) or _folds(settings.data):
        return None
    return _read_ncf(settings.data, dataset)


def _matlab(data: DataSettings) -> Path | None:
    """Return the data set's file if it is one of MATLAB."""
    if data.path is None or (data.layout or detect(data.path)) != "mat":
        return None
    return data.path


def _folds(data: DataSettings) -> Path | None:
    """Return the data set's folder if it is MovieLens 100K with its published folds."""
    if data.path is None or (data.layout or detect(data.path)) != "ml-100k" or not has_folds(data.path):
        return None
    return data.path


def _read_ncf(data: DataSettings, dataset: Dataset) -> PublishedHoldout:
    path = data.path
    folder = None if path is None else (path if path.is_dir() else path.parent) / FOLDER
    if folder is None or not folder.is_dir():
        raise DataError(
            f"{dataset.name} has no published hold-out: there is no folder {FOLDER}/ in it",
            hint="split.kind 'leave-last-out' needs timestamps, 'leave-random-out' and 'random' need nothing",
        )
    return read_ncf_holdout(folder, dataset)


def _require_measurable(settings: RunSettings, dataset: Dataset, split: Split) -> None:
    """Check that a system can be measured by a split that others made, of which only the parts are known.

    A system says by which kinds of splits it can be measured, so it is asked about the kind that holds out the same.

    Raises
    ------
    DataError
        No part to learn from, to test or, for a system in rounds, to validate by; or no kind that suits the system.
    """
    needed = {"train": split.train, "test": split.test}
    if settings.description.in_rounds:
        needed["validation"] = split.validation
    for name, rows in needed.items():
        if not rows.any():
            raise DataError(
                f"the split of {dataset.name} has no part {name!r}, which {settings.system} needs"
            )
    kind = _kind_like(dataset, split)
    if kind == "cold-items":
        # Systems that know items by their features are told with their plan that items are new.
        raise DataError(
            f"the split of {dataset.name} holds out whole items, which systems have to know beforehand",
            hint="split.kind 'cold-items' makes such a split",
        )
    alike = settings.model_copy(update={"split": settings.split.model_copy(update={"kind": kind})})
    if problems := settings.own.problems(alike):
        raise DataError(
            f"split.kind {settings.split.kind!r} divides {dataset.name} as {kind!r} does: {problems[0]}"
        )


def _kind_like(dataset: Dataset, split: Split) -> str:
    """Return a kind of split that holds out what this one does: users, items, one interaction of each user, or any."""
    held = [dataset.user[rows] for rows in (split.test, split.validation)]
    if all(len(np.unique(users)) == len(users) for users in held):
        return "leave-last-out"
    for kind, index in (("cold-users", dataset.user), ("cold-items", dataset.item)):
        if not np.isin(index[split.test], index[split.train]).any():
            return kind
    return "random"
