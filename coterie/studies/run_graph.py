"""The graph of a run over services, from the files that it leaves: what the third party stored, and of what."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coterie.crypto.graph_key import GraphSecrets
from coterie.crypto.graph_tags import bucket_counts
from coterie.data.dataset import Dataset
from coterie.parties.expansion import UserUpload
from coterie.parties.graph_records import graph_record_from_wire
from coterie.store.client import load_users
from coterie.store.reading import read_store
from coterie.studies.tag_matching import PublishedGraph
from coterie.wire.v1 import expansion_pb2 as wire

__all__ = ["graph_of_run"]

_FOLDER = "graph"
"""Folder of graph keys and uploads in a host's state folder."""


def graph_of_run(
    states: Mapping[str, Path], run: str, data: Dataset, train: NDArray[np.bool_]
) -> tuple[PublishedGraph, Path] | None:
    """Return the newest graph of a run and the file of the third party's store; None where nobody published.

    Parameters
    ----------
    states : mapping of str to Path
        State folder of each process, by party.
    run : str
        Id of the run.
    data : Dataset
        Data that the run was trained on; an attacker is taken to know who has rated what of it.
    train : ndarray of bool
        Interactions of the data that users train on.
    """
    files = [state / "expansion.db" for party, state in states.items() if party.startswith("thirdparty/")]
    kept = next((path for path in files if path.exists()), None)
    record = None if kept is None else _newest_record(kept, run)
    if kept is None or record is None:
        return None
    ratings = np.zeros((len(data.users), len(data.items)), np.bool_)
    ratings[data.user[train], data.item[train]] = True
    user_at = {name: at for at, name in enumerate(data.users)}
    item_at = {key: at for at, key in enumerate(data.items)}
    item_of_tag: dict[bytes, int] = {}
    user_of_upload: dict[bytes, int] = {}
    published = np.zeros(len(data.items), np.int64)
    secrets: GraphSecrets | None = None
    for party, state in states.items():
        key = state / _FOLDER / f"{run}.{record.epoch}.graph"
        if not party.startswith("client/") or not key.exists():
            continue
        secrets = GraphSecrets.load(key)
        for position, name in enumerate(read_store(state / "client.db", load_users)):
            path = state / _FOLDER / f"{run}.user-{position}"
            if not path.exists():
                continue
            upload = UserUpload(path, position)
            if upload.epoch != record.epoch or not upload.secret:
                continue
            user_of_upload[upload.upload_id] = user_at[name]
            for item, tag in upload.tags.items():
                item_of_tag[tag] = item_at[item]
                published[item_at[item]] += 1
    if secrets is None or not item_of_tag:
        return None
    terms = graph_record_from_wire(record).terms
    buckets = bucket_counts(published, terms.bucket_users)
    graph = PublishedGraph(
        data.items, ratings, published, buckets, terms.most_tags, secrets, item_of_tag, user_of_upload
    )
    return graph, kept


def _newest_record(path: Path, run: str) -> wire.GraphRecord | None:
    """Return the record of a run's newest graph."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "SELECT record FROM graphs WHERE run_id = ? ORDER BY epoch DESC LIMIT 1"
        found = connection.execute(query, [run]).fetchone()
    return None if found is None else wire.GraphRecord.FromString(found[0])
