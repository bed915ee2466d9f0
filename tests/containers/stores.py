"""Content of the stores of a federation, read from copies of the parties' folders."""

import csv
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from coterie.crypto.sealed import decode_records
from coterie.evaluation.holdout import TRAIN
from coterie.net.enrolment import saved_bundles

from .stack import HOSTS, OWNERS

Records = dict[tuple[bytes, bytes], list[tuple[str, bool]]]
"""Item and flag of each record, by (owner, user)."""


def _rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def _csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def stored(folders: Mapping[str, Path]) -> Records:
    """Return what owners hold, in order of sequence."""
    keys = [
        key for (key,) in _rows(folders["cos"] / "state" / "cos.db", "SELECT key FROM items ORDER BY item")
    ]
    found = defaultdict(list)
    for owner in OWNERS:
        store = folders[owner] / "state" / "data_owner.db"
        query = 'SELECT owner, user, "first", length, records FROM batches ORDER BY number'
        for key, user, first, length, records in _rows(store, query):
            assert first == len(found[key, user]) + 1, "a record that is counted twice, or never came"
            items, flags = decode_records(records, length)
            found[key, user] += [(keys[i], bool(flag)) for i, flag in zip(items, flags, strict=True)]
    return dict(found)


def sent(folders: Mapping[str, Path]) -> Records:
    """Return what hosts have in their outboxes, in order of sequence."""
    found = defaultdict(list)
    for host in HOSTS:
        state = folders[host] / "state"
        ids = [bundle.participant_id for bundle in saved_bundles(state)]
        history = {
            row: (item, bool(flag))
            for row, item, flag in _rows(state / "client.db", "SELECT row, item, positive FROM history")
        }
        query = "SELECT user, owner, rows FROM outbox ORDER BY entry"
        for user, owner, packed in _rows(state / "client.db", query):
            found[owner, ids[user - 1]] += [history[row] for row in np.frombuffer(packed, "<u4").tolist()]
    return dict(found)


def given(folders: Mapping[str, Path]) -> Counter[tuple[bytes, bytes, str, bool]]:
    """Return what owners should hold by the files of `coterie bootstrap`: how often, by (owner, user, item, flag)."""
    items = {}
    for owner in OWNERS:
        (bundle,) = saved_bundles(folders[owner] / "state")
        (path,) = folders[owner].glob("items-*.csv")
        items[bundle.participant_id] = {row["item"] for row in _csv(path)}
    expected = Counter()
    for host in HOSTS:
        ids = [bundle.participant_id for bundle in saved_bundles(folders[host] / "state")]
        numbers = {}
        for row in _csv(folders[host] / "histories.csv"):
            user = ids[numbers.setdefault(row["user"], len(numbers))]
            if int(row["part"]) == TRAIN:
                flag = row["positive"] == "1"
                expected.update(
                    (owner, user, row["item"], flag) for owner, held in items.items() if row["item"] in held
                )
    return expected
