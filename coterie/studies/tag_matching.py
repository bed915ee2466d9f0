"""How well a third party with public ratings recognises the tags in its own store: with and without buckets and cap.

Users of a data set publish all their interactions as hosts do (`coterie.crypto.graph_tags`), into a real store of graph
expansion.  The attacks read the store's tables and nothing else of the run.  ``python -m coterie.studies.tag_matching
FOLDER`` prints the shares of tags, items and uploads that were identified.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import sqlite3
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.crypto.graph_key import GraphSecrets
from coterie.crypto.graph_tags import TAG_BYTES, bucket_counts, bucket_of, choose_items, item_tag
from coterie.data.dataset import Dataset
from coterie.data.readers import read
from coterie.privacy.attacks.tag_matching import (
    MatchedTags,
    TagView,
    match_by_likelihood,
    match_by_signature,
    scored_matches,
)
from coterie.store.expansion import ExpansionStore, TagPublication

__all__ = ["PublishedGraph", "attack_graph", "attack_run", "main", "publish_graph", "view_of_store"]

_RUN = "tag-matching"
_UNSPLIT = 1 << 20
_ALL = 1024
_ROUNDS = (1, 2, 4)

FORMS = {
    "unsplit, all items": (_ALL, _UNSPLIT),
    "buckets of 20, all items": (_ALL, 20),
    "unsplit, 32 items": (32, _UNSPLIT),
    "buckets of 20, 32 items": (32, 20),
    "buckets of 20, 20 items": (20, 20),
}
"""Most tags of an upload and users of a bucket, by the form's name."""


@dataclass(frozen=True)
class PublishedGraph:
    """A graph in a store, and the truth about it that no store has."""

    items: Sequence[str]
    """Keys of the items."""
    ratings: npt.NDArray[np.bool_]
    """Who has what, (U, I)."""
    published: npt.NDArray[np.int64]
    """How many users publish each item, (I,)."""
    buckets: npt.NDArray[np.int64]
    """Number of buckets of each item, (I,)."""
    most_tags: int
    secrets: GraphSecrets
    item_of_tag: dict[bytes, int]
    user_of_upload: dict[bytes, int]


def publish_graph(
    dataset: Dataset, folder: Path, most_tags: int, bucket_users: int, seed: int
) -> PublishedGraph:
    """Publish what all users of a data set have into a new store in a folder, as hosts do.

    Parameters
    ----------
    dataset : Dataset
    folder : Path
        Folder for the store's file.
    most_tags, bucket_users : int
        Terms of the graph.
    seed : int
        Of the users' secrets.
    """
    ratings = np.zeros((len(dataset.users), len(dataset.items)), np.bool_)
    ratings[dataset.user, dataset.item] = True
    secrets = GraphSecrets(_RUN, 1, _secret(seed, "tags"), _secret(seed, "group"))
    own = [_secret(seed, f"user {user}") for user in range(len(ratings))]
    chosen = [
        choose_items(own[user], _RUN, [str(item) for item in np.flatnonzero(row)], most_tags)
        for user, row in enumerate(ratings)
    ]
    published = np.zeros(ratings.shape[1], np.int64)
    for some in chosen:
        published[[int(item) for item in some]] += 1
    buckets = bucket_counts(published, bucket_users)
    item_of_tag: dict[bytes, int] = {}
    user_of_upload: dict[bytes, int] = {}
    publications = []
    for user, some in enumerate(chosen):
        tags = []
        for item in some:
            bucket = bucket_of(own[user], _RUN, 1, item, int(buckets[int(item)]))
            tags.append(item_tag(secrets.tag_key, _RUN, 1, item, bucket))
            item_of_tag[tags[-1]] = int(item)
        upload_id = _secret(seed, f"upload {user}")
        user_of_upload[upload_id] = user
        publications.append(TagPublication(upload_id, 1, b"".join(sorted(tags)), bytes(TAG_BYTES)))
    asyncio.run(_kept(folder, publications, most_tags))
    items = [str(item) for item in range(ratings.shape[1])]
    return PublishedGraph(items, ratings, published, buckets, most_tags, secrets, item_of_tag, user_of_upload)


def view_of_store(path: Path) -> tuple[TagView, list[bytes], list[bytes]]:
    """Return what the file of a store tells of its newest graph: the pairs, and the tags and upload ids by number."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        pairs = connection.execute(
            "SELECT tag, upload_id FROM graph_tags JOIN graph_uploads USING (graph, upload) "
            "WHERE graph = (SELECT max(graph) FROM graphs)"
        ).fetchall()
    tags, uploads = sorted({tag for tag, _ in pairs}), sorted({upload for _, upload in pairs})
    tag_at = {tag: at for at, tag in enumerate(tags)}
    upload_at = {upload: at for at, upload in enumerate(uploads)}
    view = TagView(
        np.array([tag_at[tag] for tag, _ in pairs], np.int64),
        np.array([upload_at[upload] for _, upload in pairs], np.int64),
        len(tags),
        len(uploads),
    )
    return view, tags, uploads


def attack_graph(graph: PublishedGraph, path: Path) -> dict[str, Any]:
    """Attack the store of a graph with the data set as public ratings; return shares that were identified.

    ``likelihood`` is the best of several numbers of rounds, a choice that the attacker cannot make so well.
    ``chance`` guesses the item with the most tags for every tag.
    """
    view, tags, uploads = view_of_store(path)
    items = np.array([graph.item_of_tag[tag] for tag in tags], np.int64)
    users = np.array([graph.user_of_upload[upload] for upload in uploads], np.int64)
    owned = _by_likelihood(graph, view, owners=users)
    return {
        "tags": view.n_tags,
        "pairs": len(view.tags),
        "chance": float(np.bincount(items).max() / view.n_tags),
        "signature": scored_matches(match_by_signature(view, graph.ratings), items, users),
        "likelihood": _best_likelihood(graph, view, items, users),
        "with the COS": scored_matches(owned, items, users),
        "with a client": _with_a_client(graph, view, tags, items, users),
    }


def attack_run(graph: PublishedGraph, path: Path) -> dict[str, float]:
    """Attack the store of a run's graph for its report, and the same uploads as they were with unsplit tags.

    Parameters
    ----------
    graph : PublishedGraph
    path : Path
        File of the third party's store.

    Returns
    -------
    dict
        ``users`` and ``tags``, numbers of uploads and tags; ``chance``; shares that somebody with public ratings names:
        ``tags_named``, ``uploads_named``, unsplit ``unsplit_named``, and with a client's keys ``client_tags_named`` and
        ``client_uploads_named``.
    """
    view, tags, uploads = view_of_store(path)
    items = np.array([graph.item_of_tag[tag] for tag in tags], np.int64)
    users = np.array([graph.user_of_upload[upload] for upload in uploads], np.int64)
    used, merged = np.unique(items, return_inverse=True)
    unsplit = TagView(merged[view.tags], view.uploads, len(used), view.n_uploads)
    plain = replace(graph, buckets=np.ones_like(graph.buckets))
    likeliest = _best_likelihood(graph, view, items, users)
    with_client = _with_a_client(graph, view, tags, items, users)
    return {
        "users": view.n_uploads,
        "tags": view.n_tags,
        "chance": float(np.bincount(items).max() / view.n_tags),
        "tags_named": _most(graph, view, items, users, likeliest),
        "uploads_named": likeliest["uploads"],
        "unsplit_named": _most(plain, unsplit, used, users, _best_likelihood(plain, unsplit, used, users)),
        "client_tags_named": with_client["tags"],
        "client_uploads_named": with_client["uploads"],
    }


def _most(
    graph: PublishedGraph,
    view: TagView,
    items: npt.NDArray[np.int64],
    users: npt.NDArray[np.int64],
    likeliest: Mapping[str, float],
) -> float:
    """Return the share of tags that the better of both attacks names."""
    signed = scored_matches(match_by_signature(view, graph.ratings), items, users)
    return max(signed["tags"], likeliest["tags"])


def _by_likelihood(graph: PublishedGraph, view: TagView, **how: Any) -> MatchedTags:
    known = graph.ratings, graph.published, graph.buckets, graph.most_tags
    return match_by_likelihood(view, *known, **how)


def _best_likelihood(
    graph: PublishedGraph, view: TagView, items: npt.NDArray[np.int64], users: npt.NDArray[np.int64]
) -> dict[str, float]:
    found = [scored_matches(_by_likelihood(graph, view, rounds=rounds), items, users) for rounds in _ROUNDS]
    return max(found, key=lambda one: one["tags"])


def _with_a_client(
    graph: PublishedGraph,
    view: TagView,
    tags: list[bytes],
    items: npt.NDArray[np.int64],
    users: npt.NDArray[np.int64],
) -> dict[str, float]:
    """Attack with the tag key that a client gives away: every tag is computed, and users are found by their items."""
    run, epoch, key = graph.secrets.run, graph.secrets.epoch, graph.secrets.tag_key
    # Hosts know the number of an item's buckets by coarse levels; who computes tags computes some more.
    known = {
        item_tag(key, run, epoch, graph.items[item], bucket): item
        for item, count in enumerate(graph.buckets)
        for bucket in range(int(count) + int(count) // 4 + 2)
    }
    guessed = np.array([known.get(tag, -1) for tag in tags], np.int64)
    right = 0
    for upload in range(view.n_uploads):
        own = guessed[view.tags[view.uploads == upload]]
        fitting = np.flatnonzero(graph.ratings[:, own].all(axis=1))
        # Whoever has fewest is the likeliest to have chosen these.
        likeliest = fitting[np.argmin(graph.ratings[fitting].sum(axis=1))]
        right += int(likeliest) == int(users[upload])
    return {"tags": float((guessed == items).mean()), "uploads": right / view.n_uploads}


def main(arguments: list[str]) -> int:
    """Measure all forms on a data set, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="folder or file of a data set")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    dataset = read(given.data)
    found: dict[str, Any] = {"data": given.data, "users": len(dataset.users), "items": len(dataset.items)}
    for form, terms in FORMS.items():
        found[form] = []
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                graph = publish_graph(dataset, Path(folder), *terms, seed)
                found[form].append(attack_graph(graph, Path(folder) / "expansion.db"))
        print(form, json.dumps(found[form]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


async def _kept(folder: Path, publications: list[TagPublication], most_tags: int) -> None:
    store = ExpansionStore(folder)
    try:
        expiry = int(time.time()) + 3600
        await store.publish_graph(_RUN, 1, bytes(32), expiry, b"record", {})
        kept = await store.graph(_RUN, 1)
        await asyncio.gather(*(store.publish(kept, one, most_tags) for one in publications))
    finally:
        store.close()


def _secret(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode()).digest()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
