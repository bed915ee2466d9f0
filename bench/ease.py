"""Measure EASE: a user's contribution to the sum of pairs, the server's solution, and both by a sketch."""

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
from coterie.systems.ease.sketch import directions, factors_of, low_rank_model, row_of, signs

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
    yield _sketched_contribution(ask, table, where)
    yield _sketched_solution(ask, table, where)


_COLUMNS = 64


def _contribution(ask: Ask, table: NDArray[np.float64], where: str) -> Row:
    items = np.flatnonzero(table[table.sum(axis=1).argmax()])

    def contribute(packed: int) -> NDArray[np.uint32]:
        return _pairs(EaseSettings(packed=packed), items, table.shape[1])

    ours, theirs = in_turn(lambda: contribute(2), lambda: contribute(1), ask.size(5, 1))
    return lower(
        "ease.contribution",
        ours * 1e3,
        theirs * 1e3,
        "CPU ms",
        f"two counts in a code, {contribute(2).nbytes:,} bytes, against one, {contribute(1).nbytes:,}; a user with "
        f"{len(items)} items; {where}",
    )


def _pairs(settings: EaseSettings, items: NDArray[np.integer], n_items: int) -> NDArray[np.uint32]:
    made = Contribution(settings.layout(Purpose.TRAIN, n_items))
    codes, values = settings.packing.codes(pair_places(items, n_items), pairs_of(n_items))
    made.add("pairs", values, np.random.default_rng(0), rows=codes)
    made.count()
    return made.codes()


def _sketched_contribution(ask: Ask, table: NDArray[np.float64], where: str) -> Row:
    items, n_items = np.flatnonzero(table[table.sum(axis=1).argmax()]), table.shape[1]
    columns = min(_COLUMNS, n_items)
    settings, drawn = EaseSettings(sketch=columns), signs(0, n_items, columns)
    everything = np.ones(n_items, np.bool_)

    def contribute() -> NDArray[np.uint32]:
        made = Contribution(settings.layout(Purpose.TRAIN, n_items))
        row = row_of(items, drawn, everything)
        values = np.broadcast_to(row, (len(items), columns))
        made.add("sketch", values, np.random.default_rng(0), rows=items)
        made.count()
        return made.codes()

    whole = EaseSettings()
    ours, theirs = in_turn(contribute, lambda: _pairs(whole, items, n_items), ask.size(5, 1))
    return lower(
        "ease.sketched_contribution",
        ours * 1e3,
        theirs * 1e3,
        "CPU ms",
        f"one sum of a sketch of {columns} columns, {contribute().nbytes:,} bytes, against all pairs, "
        f"{_pairs(whole, items, n_items).nbytes:,}; a user with {len(items)} items; {where}",
    )


def _sketched_solution(ask: Ask, table: NDArray[np.float64], where: str) -> Row:
    opened = table[:, table.sum(axis=0) >= EaseSettings().min_touch]
    gram, supports, columns = opened.T @ opened, opened.sum(axis=0), min(_COLUMNS, opened.shape[1])
    counts, step = (
        triangle(gram),
        EaseSettings(sketch=columns).layout(Purpose.TRAIN, table.shape[1])["sketch"].step,
    )
    first = signs(0, opened.shape[1], columns)
    made = low_rank_model(factors_of(first, gram @ first, 2 * columns), supports, _RIDGE, columns)
    told = directions(made)
    probes = np.hstack([first, first if told is None else told])
    products = gram @ probes

    def sketched() -> None:
        factors = factors_of(probes, products, 2 * columns, step, int(supports.max(initial=0)))
        low_rank_model(factors, supports, _RIDGE, columns)

    ours, theirs = in_turn(sketched, lambda: precision(counts, _RIDGE), ask.size(3, 1))
    return lower(
        "ease.sketched_solution",
        ours,
        theirs,
        "CPU s",
        f"{opened.shape[1]} open items, two sums of a sketch of {columns} columns against all pairs; {where}",
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
