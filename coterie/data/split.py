"""Splits of a data set into train, validation and test, and the file that a split is published as."""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coterie.data.dataset import Dataset
from coterie.data.keyed_order import key_hash, pair_hash
from coterie.data.whole_file import whole_file
from coterie.errors import DataError, nearest

__all__ = [
    "PARTS",
    "TEST",
    "TRAIN",
    "VALIDATION",
    "Split",
    "Ties",
    "cold_items",
    "cold_users",
    "hold_marked_out",
    "leave_last_out",
    "leave_marked_out",
    "leave_random_out",
    "random",
    "read_split",
    "temporal",
]

TRAIN, VALIDATION, TEST = 0, 1, 2
PARTS = ("train", "validation", "test")
"""Names of the parts in a split file, by their number."""

Ties = Literal["hash", "file"]
"""Order of interactions of a user at the same second: a seeded hash of (user, item), or the rows of the file."""

_LEAST_HISTORY = 3
"""Fewest interactions of a user of which one is held out: one to test, one to validate, one to train."""

_HEADER = ["user", "item", "part"]
_DIGEST_DOMAIN = b"coterie.split.v1\0"
_ROUNDING = 1e-9
"""Added to a share of a number before rounding down, since 0.29 * 100 is 28.999... in binary."""


@dataclass(frozen=True, eq=False)
class Split:
    """The split of a data set: a part for each interaction.

    Parameters
    ----------
    part : ndarray of uint8, shape (N,)
        ``TRAIN``, ``VALIDATION`` or ``TEST``, in the data set's row order.

    Raises
    ------
    DataError
        Another type, shape or value.
    """

    part: NDArray[np.uint8]

    def __post_init__(self) -> None:
        if self.part.dtype != np.uint8 or self.part.ndim != 1:
            raise DataError(f"part is {self.part.dtype} of shape {self.part.shape}; expected uint8, (N,)")
        if len(self.part) and self.part.max() > TEST:
            raise DataError(f"part holds {self.part.max()}; expected {TRAIN}, {VALIDATION} or {TEST}")

    @property
    def train(self) -> NDArray[np.bool_]:
        """Whether each row is for training, bool (N,)."""
        return np.asarray(self.part == TRAIN)

    @property
    def validation(self) -> NDArray[np.bool_]:
        """Whether each row is for validation, bool (N,)."""
        return np.asarray(self.part == VALIDATION)

    @property
    def test(self) -> NDArray[np.bool_]:
        """Whether each row is for testing, bool (N,)."""
        return np.asarray(self.part == TEST)

    def sha256(self, dataset: Dataset) -> str:
        """Return a digest of the split that does not depend on the data set's row order.

        The bytes: a domain string, the number of rows (8 bytes, little endian), then for each row, sorted by
        user key and item key (as UTF-8): length of the user key (4 bytes), user key, length of the item key
        (4 bytes), item key, part (1 byte).

        Parameters
        ----------
        dataset : Dataset
            The one that was split.

        Returns
        -------
        str
            64 hexadecimal digits.
        """
        self._check(dataset)
        users, items = _framed(dataset.users), _framed(dataset.items)
        parts = [bytes([part]) for part in (TRAIN, VALIDATION, TEST)]
        order = np.lexsort((_byte_rank(dataset.items)[dataset.item], _byte_rank(dataset.users)[dataset.user]))
        digest = hashlib.sha256(_DIGEST_DOMAIN + len(dataset).to_bytes(8, "little"))
        digest.update(
            b"".join(
                users[user] + items[item] + parts[part]
                for user, item, part in zip(
                    dataset.user[order].tolist(),
                    dataset.item[order].tolist(),
                    self.part[order].tolist(),
                    strict=True,
                )
            )
        )
        return digest.hexdigest()

    def write(self, path: Path, dataset: Dataset) -> None:
        """Write the split as CSV with the columns user, item, part (``train``, ``validation``, ``test``).

        Parameters
        ----------
        path : Path
            Replaced if it exists, once the split is written as a whole.
        dataset : Dataset
            The one that was split.

        Raises
        ------
        DataError
            The split of another data set.
        OSError
            The file cannot be written; one that exists stays as it is.
        """
        self._check(dataset)
        with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
            # Python's writer quotes a line break in a key only if it is one of those that end its lines: \r\n, its
            # default, quotes both characters.
            writer = csv.writer(file)
            writer.writerow(_HEADER)
            writer.writerows(
                (dataset.users[user], dataset.items[item], PARTS[part])
                for user, item, part in zip(
                    dataset.user.tolist(), dataset.item.tolist(), self.part.tolist(), strict=True
                )
            )

    def _check(self, dataset: Dataset) -> None:
        if len(self.part) != len(dataset):
            raise DataError(
                f"the split has {len(self.part)} rows but {dataset.name} has {len(dataset)} interactions; "
                "expected the data set that was split"
            )


def temporal(dataset: Dataset, train: float = 0.8, validation: float = 0.1, seed: int = 0) -> Split:
    """Split every user's interactions by time: the first ``train`` of them train, the rest tests.

    Interactions of a user at the same second are ordered by a seeded hash of (user, item), not by their
    order in the file: in MovieLens many users rate whole pages in a second, and the file's order is not time.

    Parameters
    ----------
    dataset : Dataset
        Data set with times.
    train : float
        Share of each user's interactions, rounded down but at least one, in (0, 1].
    validation : float
        Share of each user's *train* interactions, its last ones, rounded down; 0 for none, below 1.
    seed : int
        Seed of the tie rule.

    Returns
    -------
    Split

    Raises
    ------
    DataError
        No times, or a share out of range.
    """
    if dataset.time is None:
        raise DataError(
            f"{dataset.name} has no timestamps, so it cannot be split by time",
            hint="use the random split",
        )
    return _per_user(dataset, (_tie_rule(dataset, seed), dataset.time), train, validation)


def random(dataset: Dataset, train: float = 0.8, validation: float = 0.1, seed: int = 0) -> Split:
    """Split every user's interactions in a seeded random order; the shares mean what they do in `temporal`.

    The order is a hash of (user, item) under the seed: the same split from the same data in any row order.

    Parameters
    ----------
    dataset : Dataset
    train, validation : float
    seed : int

    Returns
    -------
    Split

    Raises
    ------
    DataError
        A share out of range.
    """
    return _per_user(dataset, (_tie_rule(dataset, seed),), train, validation)


def leave_last_out(dataset: Dataset, *, ties: Ties = "hash", validation: bool = True, seed: int = 0) -> Split:
    """Hold out every user's last interaction by time; the one before it validates (FedNCF, 6.1).

    In MovieLens many users rate whole pages in a second, so "the last" is often one of several (for 44% of the users
    of MovieLens 100K), and the rule that picks it moves the hit ratio: a report names it.

    Parameters
    ----------
    dataset : Dataset
        Data set with times.
    ties : {"hash", "file"}
        Rule that orders interactions of a user at the same second: a seeded hash of (user, item), or the row in
        the data set, a later one counting as later. Only with ``"hash"`` is the split the same in any row order.
    validation : bool
        Whether the second-last interaction validates; otherwise it trains.
    seed : int
        Seed of the hash.

    Returns
    -------
    Split
        Users with fewer than 3 interactions keep them all in training, whether or not one would validate.

    Raises
    ------
    DataError
        No times, or another ``ties``.
    """
    if dataset.time is None:
        raise DataError(
            f"{dataset.name} has no timestamps, so there is no last interaction to hold out",
            hint="use split.kind 'leave-random-out', or the hold-out that is published with it ('published')",
        )
    if ties not in ("hash", "file"):
        raise DataError(f"ties is {ties!r}; expected 'hash' or 'file'")
    rule = _tie_rule(dataset, seed) if ties == "hash" else np.arange(len(dataset))
    return _leave_one_out(dataset, (rule, dataset.time), validation)


def leave_random_out(dataset: Dataset, *, validation: bool = True, seed: int = 0) -> Split:
    """Hold out one interaction of every user at random; another one validates.

    For data sets without times.  It is easier than `leave_last_out` where tastes change: training then also holds
    interactions after the held-out one.

    Parameters
    ----------
    dataset : Dataset
    validation : bool
        Whether a second interaction validates; otherwise it trains.
    seed : int
        Seed of the hash of (user, item) that draws them: the same split from the same data in any row order.

    Returns
    -------
    Split
        Users with fewer than 3 interactions keep them all in training.
    """
    return _leave_one_out(dataset, (_tie_rule(dataset, seed),), validation)


def hold_marked_out(
    dataset: Dataset, marked: NDArray[np.bool_], *, validation: float = 0.1, seed: int = 0
) -> Split:
    """Hold out the interactions that a published split tests by, any number of each user.

    Parameters
    ----------
    dataset : Dataset
    marked : ndarray of bool, shape (N,)
        The interactions that test.
    validation : float
        Share of each user's other interactions that validates, rounded down; drawn by the seeded hash.
    seed : int
        Seed of the hash.

    Returns
    -------
    Split

    Raises
    ------
    DataError
        Another length, or a share out of range.
    """
    if marked.shape != (len(dataset),):
        raise DataError(f"marked has shape {marked.shape}; expected ({len(dataset)},)")
    others = np.flatnonzero(~marked)
    rest = replace(
        dataset,
        user=dataset.user[others],
        item=dataset.item[others],
        rating=dataset.rating[others],
        time=None if dataset.time is None else dataset.time[others],
    )
    part = np.full(len(dataset), TEST, np.uint8)
    part[others] = random(rest, train=1.0, validation=validation, seed=seed).part
    return Split(part)


def leave_marked_out(
    dataset: Dataset, marked: NDArray[np.bool_], *, validation: bool = True, seed: int = 0
) -> Split:
    """Hold out the interactions that a published hold-out names, at most one for each user.

    Without times nothing is known of the order of the others: the one that validates is drawn by the seeded hash.

    Parameters
    ----------
    dataset : Dataset
    marked : ndarray of bool, shape (N,)
        The interactions that test.
    validation : bool
        Whether one more interaction of each user validates.
    seed : int
        Seed of the hash.

    Returns
    -------
    Split
        Users without a marked interaction, or with fewer than 3, keep everything in training.

    Raises
    ------
    DataError
        Another length, or two marked interactions of one user.
    """
    if marked.shape != (len(dataset),):
        raise DataError(f"marked has shape {marked.shape}; expected ({len(dataset)},)")
    of_user = np.bincount(dataset.user[marked], minlength=len(dataset.users))
    if len(of_user) and of_user.max() > 1:
        raise DataError(
            f"{of_user.max()} interactions of user {dataset.users[int(of_user.argmax())]!r} are held out; "
            "expected at most one"
        )
    split = _leave_one_out(dataset, (_tie_rule(dataset, seed), marked), validation)
    split.part[of_user[dataset.user] == 0] = TRAIN
    return split


def cold_users(dataset: Dataset, test: float = 0.1, validation: float = 0.0, seed: int = 0) -> Split:
    """Hold out whole users: none of their interactions trains, as if they joined afterwards (MVMF, 6.3).

    Parameters
    ----------
    dataset : Dataset
    test, validation : float
        Shares of the users that have interactions, rounded, but at least one user; ``validation`` may be 0.
    seed : int
        Seed of the hash of user keys that picks them: the same users from the same data in any order of rows.

    Returns
    -------
    Split

    Raises
    ------
    DataError
        A share out of range, or too few users.
    """
    return Split(_cold(dataset.users, dataset.user, "user", test, validation, seed))


def cold_items(dataset: Dataset, test: float = 0.1, validation: float = 0.0, seed: int = 0) -> Split:
    """Hold out whole items: none of their interactions trains, as if they were new (MVMF, 6.3).

    Parameters
    ----------
    dataset : Dataset
    test, validation : float
        Shares of the items that have interactions; as in `cold_users`.
    seed : int
        Seed of the hash of item keys.

    Returns
    -------
    Split

    Raises
    ------
    DataError
        A share out of range, or too few items.
    """
    return Split(_cold(dataset.items, dataset.item, "item", test, validation, seed))


def _cold(
    keys: tuple[str, ...], index: NDArray[np.int32], what: str, test: float, validation: float, seed: int
) -> NDArray[np.uint8]:
    """Return the part of each row when users or items are held out as a whole."""
    if not 0 < test < 1:
        raise DataError(f"test is {test}; expected a share of the {what}s above 0 and below 1")
    if not 0 <= validation < 1:
        raise DataError(f"validation is {validation}; expected a share of the {what}s from 0 to below 1")
    present = np.unique(index)
    counts = [0 if not share else max(1, round(share * len(present))) for share in (test, validation)]
    if sum(counts) >= len(present):
        raise DataError(
            f"{sum(counts)} of {len(present)} {what}s would be held out; expected at least one to be left"
        )
    hashed = key_hash(keys, seed)[present]
    order = present[np.lexsort((_byte_rank(keys)[present], hashed))]
    of_key = np.full(len(keys), TRAIN, np.uint8)
    of_key[order[: counts[0]]] = TEST
    of_key[order[counts[0] : sum(counts)]] = VALIDATION
    return of_key[index]


def read_split(path: Path, dataset: Dataset, sha256: str = "") -> Split:
    """Read a split file for a data set.

    Parameters
    ----------
    path : Path
        As `Split.write` makes it; the order of rows is free.
    dataset : Dataset
        Each of its interactions is expected once, and no other.
    sha256 : str
        Digest that the split must have; empty for any.

    Returns
    -------
    Split

    Raises
    ------
    DataError
        No such file, text that is not UTF-8, another header, an unknown key or part, a pair that the data set lacks, a
        pair twice or not at all, each with the line; another digest than ``sha256``.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read the split {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, byte {error.start}: not UTF-8, which a split file must be") from error
    split = Split(_parts(path, content, dataset))
    if sha256 and (found := split.sha256(dataset)) != sha256:
        raise DataError(
            f"{path} is the split {found}; expected {sha256}",
            hint="the file has changed, or split.sha256 is that of another split",
        )
    return split


def _parts(path: Path, content: str, dataset: Dataset) -> NDArray[np.uint8]:
    """Return the part of each interaction by the content of a split file."""
    users = {key: index for index, key in enumerate(dataset.users)}
    items = {key: index for index, key in enumerate(dataset.items)}
    row_of = {
        pair: row for row, pair in enumerate(zip(dataset.user.tolist(), dataset.item.tolist(), strict=True))
    }
    part = np.full(len(dataset), len(PARTS), dtype=np.uint8)
    lines = csv.reader(io.StringIO(content, newline=""))
    try:
        if (header := next(lines, [])) != _HEADER:
            raise DataError(f"{path}, line 1: {','.join(header)!r}; expected {','.join(_HEADER)!r}")
        for fields in lines:
            where = f"{path}, line {lines.line_num}"
            if len(fields) != len(_HEADER):
                raise DataError(f"{where}: {len(fields)} fields; expected {len(_HEADER)}")
            user, item, name = fields
            row = row_of.get((users.get(user, -1), items.get(item, -1)))
            if row is None:
                raise DataError(
                    f"{where}: {dataset.name} has no interaction of user {user!r} with item {item!r}"
                )
            if name not in PARTS:
                raise DataError(
                    f"{where}, column 'part': {name!r}; expected one of {', '.join(PARTS)}",
                    hint=f"did you mean {guess!r}?" if (guess := nearest(name, PARTS)) else None,
                )
            if part[row] != len(PARTS):
                raise DataError(
                    f"{where}: user {user!r} and item {item!r} a second time; expected each pair once"
                )
            part[row] = PARTS.index(name)
    except csv.Error as error:
        raise DataError(f"{path}, line {lines.line_num}: {error}; expected CSV") from error
    absent = part == len(PARTS)
    if (count := int(np.count_nonzero(absent))) > 0:
        first = int(absent.argmax())
        raise DataError(
            f"{path} says nothing of {count} of the {len(dataset)} interactions of {dataset.name}, the first of user "
            f"{dataset.users[dataset.user[first]]!r} with item {dataset.items[dataset.item[first]]!r}"
        )
    return part


def _per_user(
    dataset: Dataset, keys: tuple[NDArray[np.generic], ...], train: float, validation: float
) -> Split:
    """Order each user's rows by ``keys`` (the last one leads) and cut each order at the shares."""
    if not 0 < train <= 1:
        raise DataError(f"train is {train}; expected a share above 0 and at most 1")
    if not 0 <= validation < 1:
        raise DataError(f"validation is {validation}; expected a share from 0 to below 1")
    order, position, counts = _ordered(dataset, keys)
    user = dataset.user[order]
    trained = np.maximum(np.floor(counts * train + _ROUNDING), 1).astype(np.int64)
    learned = trained - np.floor(trained * validation + _ROUNDING).astype(np.int64)
    part = np.empty(len(order), dtype=np.uint8)
    part[order] = (position >= learned[user]).astype(np.uint8) + (position >= trained[user])
    return Split(part)


def _leave_one_out(dataset: Dataset, keys: tuple[NDArray[np.generic], ...], validation: bool) -> Split:
    """Order each user's rows by ``keys`` (the last one leads); the last row tests, the second-last validates."""
    order, position, counts = _ordered(dataset, keys)
    remaining = counts[dataset.user[order]] - position
    part = np.full(len(order), TRAIN, dtype=np.uint8)
    long_enough = counts[dataset.user[order]] >= _LEAST_HISTORY
    part[order[long_enough & (remaining == 1)]] = TEST
    if validation:
        part[order[long_enough & (remaining == 2)]] = VALIDATION
    return Split(part)


def _ordered(
    dataset: Dataset, keys: tuple[NDArray[np.generic], ...]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Return rows (N,) user by user in the order of ``keys``, their positions in it (N,), and users' counts (U,)."""
    order = np.lexsort((*keys, dataset.user))
    counts = np.bincount(dataset.user, minlength=len(dataset.users))
    first = np.cumsum(counts) - counts
    return order, np.arange(len(order)) - first[dataset.user[order]], counts


def _tie_rule(dataset: Dataset, seed: int) -> NDArray[np.uint64]:
    return pair_hash(dataset.users, dataset.items, dataset.user, dataset.item, seed)


def _framed(keys: tuple[str, ...]) -> list[bytes]:
    return [len(raw).to_bytes(4, "little") + raw for raw in (key.encode() for key in keys)]


def _byte_rank(keys: tuple[str, ...]) -> NDArray[np.int64]:
    """Return each key's position in the order of UTF-8 bytes (which is that of code points)."""
    rank = np.empty(len(keys), dtype=np.int64)
    rank[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
    return rank
