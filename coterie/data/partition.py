"""Partitions of a data set: items over data owners, users over client hosts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.keyed_order import key_hash
from coterie.errors import DataError

__all__ = ["Partition", "by_genre", "spread_users"]

_NAME_LENGTH = 40
"""Longest name of an owner: a DNS label may have 63 characters, and deployments add their own."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True, eq=False)
class Partition:
    """An assignment of items to owners; an item may have several owners.

    Parameters
    ----------
    names : tuple of str, length O
        One DNS label per owner: lower case letters, digits and inner hyphens, at most 40 characters.
    member : ndarray of bool, shape (I, O)
        Whether owner ``o`` holds item ``i``; no empty row and no empty column.

    Raises
    ------
    DataError
        A name that is no label or occurs twice, another type or shape, an item or owner left alone.
    """

    names: tuple[str, ...]
    member: NDArray[np.bool_]

    def __post_init__(self) -> None:
        for name in self.names:
            if len(name) > _NAME_LENGTH or not _LABEL.fullmatch(name):
                raise DataError(
                    f"owner name {name!r}; expected lower case letters, digits and inner hyphens, "
                    f"at most {_NAME_LENGTH} characters"
                )
        if len(set(self.names)) != len(self.names):
            raise DataError(f"owner names {', '.join(self.names)}; expected no name twice")
        if self.member.dtype != np.bool_ or self.member.ndim != 2 or self.member.shape[1] != len(self.names):
            raise DataError(
                f"member is {self.member.dtype} of shape {self.member.shape}; "
                f"expected bool of shape (items, {len(self.names)})"
            )
        if not (owned := self.member.any(axis=1)).all():
            raise DataError(
                f"item index {int(np.argmin(owned))} has no owner; expected at least one per item"
            )
        if not (used := self.member.any(axis=0)).all():
            raise DataError(
                f"owner {self.names[int(np.argmin(used))]!r} holds no item; expected at least one"
            )


def by_genre(dataset: Dataset, owners: int | None = None, *, seed: int = 0) -> Partition:
    """Assign items to owners by genre: an item belongs to every owner with one of its genres.

    Parameters
    ----------
    dataset : Dataset
    owners : int, optional
        By default one per genre that has an item (DRIFT, 6.1.2). Fewer: genres are grouped, the largest
        first, each into the group that stays smallest with it, counted in interactions. A data set without
        genres needs it: the items are dealt to that many owners in a seeded order, each item to one.
    seed : int
        Seed of that deal; not used where there are genres.

    Returns
    -------
    Partition
        Owners in the order of their first genre.

    Raises
    ------
    DataError
        No genres and no ``owners``, or a number of owners that the data set cannot fill.
    """
    if owners is not None and owners < 1:
        raise DataError(f"{owners} owners; expected at least 1")
    if dataset.item_genres is None:
        if owners is None:
            raise DataError(
                f"{dataset.name} has no genres, so there is no owner per genre",
                hint="give the number of owners: the items are then dealt to them",
            )
        return _dealt(dataset, owners, seed)
    # An empty genre would be an owner with nothing to train.
    kept = np.flatnonzero(dataset.item_genres.any(axis=0))
    genres = [dataset.genres[index] for index in kept]
    member = dataset.item_genres[:, kept]
    if owners is None:
        groups = [[index] for index in range(len(genres))]
    elif owners > len(genres):
        raise DataError(
            f"{owners} owners; {dataset.name} has {len(genres)} genres with items: at most so many",
            hint=f"federation.owners at most {len(genres)}, or 0 for one owner of each genre",
        )
    else:
        groups = _balanced(member, np.bincount(dataset.item, minlength=len(dataset.items)), owners)
    return Partition(
        names=_distinct([_label([genres[index] for index in group]) for group in groups]),
        member=np.stack([member[:, group].any(axis=1) for group in groups], axis=1),
    )


def spread_users(n_users: int, hosts: int, seed: int) -> NDArray[np.int64]:
    """Assign users to hosts at random, so that hosts' numbers of users differ by at most one.

    Parameters
    ----------
    n_users : int
    hosts : int
        At least 1.
    seed : int

    Returns
    -------
    ndarray of int64, shape (n_users,)
        Host of each user, 0 to ``hosts - 1``.

    Raises
    ------
    DataError
        Fewer than one host.
    """
    if hosts < 1:
        raise DataError(f"{hosts} hosts; expected at least 1")
    return np.random.default_rng(seed).permutation(np.arange(n_users, dtype=np.int64) % hosts)


def _dealt(dataset: Dataset, owners: int, seed: int) -> Partition:
    items = len(dataset.items)
    if owners > items:
        raise DataError(
            f"{owners} owners; {dataset.name} has {items} items: at most so many",
            hint=f"federation.owners at most {items}",
        )
    member = np.zeros((items, owners), dtype=np.bool_)
    member[np.argsort(key_hash(dataset.items, seed), kind="stable"), np.arange(items) % owners] = True
    width = len(str(owners))
    return Partition(tuple(f"owner-{index + 1:0{width}d}" for index in range(owners)), member)


def _balanced(member: NDArray[np.bool_], weight: NDArray[np.int64], groups: int) -> list[list[int]]:
    """Group the genres so that the groups' items have about equally many interactions."""
    held = np.zeros((len(member), groups), dtype=np.bool_)
    grouped: list[list[int]] = [[] for _ in range(groups)]
    for genre in np.argsort(-(weight @ member), kind="stable").tolist():
        # Weigh the union: an item that the group holds already through another genre adds nothing.
        load = weight @ (held | member[:, genre, None])
        # Fill empty groups first, or a genre whose items another group holds whole could leave one empty.
        target = min(range(groups), key=lambda group: (bool(grouped[group]), load[group], group))
        grouped[target].append(genre)
        held[:, target] |= member[:, genre]
    return sorted(sorted(group) for group in grouped)


def _label(genres: Sequence[str]) -> str:
    """Join genre names to one DNS label: ``Film-Noir`` to ``film-noir``, ``Children's`` to ``childrens``."""
    words = []
    for genre in genres:
        plain = unicodedata.normalize("NFKD", genre).encode("ascii", "ignore").decode().lower()
        words.append(re.sub(r"[^a-z0-9]+", "-", plain.replace("'", "")).strip("-") or "genre")
    return _shortened("-".join(words), _NAME_LENGTH)


def _distinct(labels: list[str]) -> tuple[str, ...]:
    """Append a number to labels that shortening or folding made equal."""
    taken: list[str] = []
    for label in labels:
        name, copy = label, 1
        while name in taken:
            copy += 1
            name = f"{_shortened(label, _NAME_LENGTH - 1 - len(str(copy)))}-{copy}"
        taken.append(name)
    return tuple(taken)


def _shortened(label: str, length: int) -> str:
    """Cut a label to ``length`` characters, between words if it has any."""
    if len(label) <= length:
        return label
    cut = label[: length + 1].rpartition("-")[0] or label[:length]
    return cut.strip("-")
