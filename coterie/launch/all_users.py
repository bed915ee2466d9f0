"""Recommendations to all users of a local run, as one CSV file."""

from __future__ import annotations

import asyncio
import csv
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import PreflightError
from coterie.evaluation.unseen import best_unseen
from coterie.launch.kept_hosts import kept_hosts
from coterie.launch.local_run import LocalRun, Recommendation, Suggestion, recommend_to_all
from coterie.launch.released_model import gives_model, released
from coterie.process.runtime import in_use
from coterie.rounds.sides import scorer_of

__all__ = ["AllRecommended", "recommend_into"]

_TOLD_S = 2.0
"""Seconds between two lines about how far it is."""


@dataclass(frozen=True)
class AllRecommended:
    """What was written of recommendations to all users of a run.

    Attributes
    ----------
    run : str
    version : int
        Version of the model.
    users, without : int
        Users of the run, and those of them to whom nothing is recommended, as nothing is known of them.
    rows : int
        Recommendations in the file.
    """

    run: str
    version: int
    users: int
    without: int
    rows: int


def recommend_into(
    run: LocalRun, path: Path, k: int, say: Callable[[str], None] = lambda _: None
) -> AllRecommended:
    """Write the ``k`` best items of every user of a run into a CSV file, in the order of users' names.

    The file has the columns ``user``, ``rank``, ``item`` and ``score``, and only its owner may read it.  It is written
    beside and renamed, so that it is whole or not there.

    After the end of a run in rounds, its folder has the model and what each host keeps of its users: recommendations
    are computed from it as the hosts compute them, and nothing is started.  The hosts are asked while the run goes on,
    and where its model is sealed or not one of rounds.

    Parameters
    ----------
    run : LocalRun
    path : Path
    k : int
    say : callable
        Receives a line about how far it is, every two seconds.

    Raises
    ------
    PreflightError
        The file exists, or cannot be written.
    RunError, PeerError
        As `recommend_to_all`; or the folder of the run is not whole.
    """
    if path.exists():
        raise PreflightError(f"{path} exists already", hint="--out names another file")
    beside = path.with_name(f".{path.name}.part")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise PreflightError(
            f"cannot write {path}: {error.strerror}", hint="--out names a file in a folder that exists"
        ) from error
    try:
        with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as file:
            running = in_use(run.folder / "cos" / "state")
            computed = not running and gives_model(run)
            found = _computed(run, k, say) if computed else asyncio.run(_asked(run, k, say))
            writer = csv.writer(file)
            writer.writerow(["user", "rank", "item", "score"])
            for one in sorted(found, key=lambda one: one.user):
                # Nine digits give single precision back.
                writer.writerows(
                    (one.user, each.rank, each.item, f"{each.score:.9g}") for each in one.suggestions
                )
        beside.replace(path)
    except OSError as error:
        raise PreflightError(f"cannot write {path}: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)
    return AllRecommended(
        run.run_id,
        max((one.version for one in found), default=0),
        len(found),
        sum(not one.suggestions for one in found),
        sum(len(one.suggestions) for one in found),
    )


def _computed(run: LocalRun, k: int, say: Callable[[str], None]) -> list[Recommendation]:
    final = released(run)
    say(f"run {run.run_id}: computed from its folder, nothing is started")
    found: list[Recommendation] = []
    told = time.monotonic()
    for host in kept_hosts(run, final):
        score = scorer_of(host.side, final.model, len(host.data.users))
        for at, (user, seen) in enumerate(zip(host.data.users, host.seen, strict=True)):
            items, scores = best_unseen(final.items, score(at), set(seen.tolist()), k)
            suggestions = tuple(
                Suggestion(rank, item, None, score)
                for rank, (item, score) in enumerate(zip(items, scores, strict=True), start=1)
            )
            found.append(Recommendation(run.run_id, user, host.name, final.version, suggestions))
            if time.monotonic() - told >= _TOLD_S:
                told = time.monotonic()
                say(f"{len(found)} users")
    return found


async def _asked(run: LocalRun, k: int, say: Callable[[str], None]) -> list[Recommendation]:
    found: list[Recommendation] = []
    told = time.monotonic()

    def answered(one: Recommendation) -> None:
        nonlocal told
        found.append(one)
        if time.monotonic() - told >= _TOLD_S:
            told = time.monotonic()
            say(f"{len(found)} users")

    say(f"run {run.run_id}: its services are started once for all users")
    await recommend_to_all(run, k, answered)
    return found
