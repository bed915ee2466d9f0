"""Measure EASE: the contribution of a user to the sum of pairs, and the server's solution of its equations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.rows import Ask, Row, in_turn, lower
from coterie.config.run import RunSettings
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution
from coterie.studies.run_data import load
from coterie.systems.ease.mathematics import (
    nearest_noise_free,
    pair_places,
    pairs_of,
    precision,
    symmetric,
    triangle,
)
from coterie.systems.ease.settings import EaseSettings

_USUAL = {"users": 3000, "items": 1500, "interactions": 300_000}
_FEW = {"users": 30, "items": 40, "interactions": 400}
_RIDGE = 1000.0


def rows(ask: Ask) -> Iterator[Row]:
    """Measure both with all interactions of a data set."""
    data: dict[str, Any] = {"synthetic": ask.size(_USUAL, _FEW)} if ask.data is None else {"path": ask.data}
    dataset = load(RunSettings.model_validate({"system": "ease", "data": data}))
    table = np.zeros((len(dataset.users), len(dataset.items)))
    table[dataset.user, dataset.item] = 1
    where = f"{dataset.name}, {table.shape[0]} users, {table.shape[1]} items"
    yield _contribution(ask, table, where)
    yield _solution(ask, table, where)


def _contribution(ask: Ask, table: NDArray[np.float64], where: str) -> Row:
    items = np.flatnonzero(table[table.sum(axis=1).argmax()])

    def contribute(packed: int) -> NDArray[np.uint32]:
        settings, n_items = EaseSettings(packed=packed), table.shape[1]
        made = Contribution(settings.layout(Purpose.TRAIN, n_items))
        codes, values = settings.packing.codes(pair_places(items, n_items), pairs_of(n_items))
        made.add("pairs", values, np.random.default_rng(0), rows=codes)
        made.count()
        return made.codes()

    ours, theirs = in_turn(lambda: contribute(2), lambda: contribute(1), ask.size(5, 1))
    return lower(
        "ease.contribution",
        ours * 1e3,
        theirs * 1e3,
        "CPU ms",
        f"two counts in a code, {contribute(2).nbytes:,} bytes, against one, {contribute(1).nbytes:,}; a user with "
        f"{len(items)} items; {where}",
    )


def _solution(ask: Ask, table: NDArray[np.float64], where: str) -> Row:
    settings = EaseSettings()
    opened = table[:, table.sum(axis=0) >= settings.min_touch]
    counts = triangle(opened.T @ opened)

    def with_eigenvalues() -> None:
        gram = symmetric(counts)
        cut = np.where((gram < settings.min_pairs) & ~np.eye(len(gram), dtype=bool), 0, gram)
        np.linalg.inv(nearest_noise_free(cut, 0.0) + _RIDGE * np.eye(len(gram)))

    ours, theirs = in_turn(
        lambda: precision(counts, _RIDGE, min_pairs=settings.min_pairs), with_eigenvalues, ask.size(3, 1)
    )
    return lower(
        "ease.solution",
        ours,
        theirs,
        "CPU s",
        f"{opened.shape[1]} open items, against eigenvalues and an inverse; {where}",
    )
