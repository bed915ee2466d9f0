from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from coterie.systems.drift.blocks import Block, Stream
from coterie.systems.drift.central import train, user_order
from coterie.systems.drift.mathematics import initial, score, step
from coterie.systems.drift.settings import DriftSettings


class Wide(DriftSettings):
    """Factors far from zero."""

    init_scale: ClassVar[float] = 0.5


def planted(users: int = 30, items: int = 40, each: int = 30) -> tuple[Stream, np.ndarray]:
    """Two kinds of users, two kinds of items; a user likes the items of its kind. Users interleaved in time."""
    rng = np.random.default_rng(0)
    likes = (np.arange(users)[:, None] % 2) == (np.arange(items) % 2)
    user = np.repeat(np.arange(users), each)
    item = np.concatenate([rng.permutation(items)[:each] for _ in range(users)])
    order = rng.permutation(len(user))
    user, item = user[order], item[order]
    return Stream(user.astype(np.int32), item.astype(np.int32), likes[user, item]), likes


def test_training_separates_liked_from_passed_over() -> None:
    stream, likes = planted()
    scores = score(*train(stream, 30, 40, DriftSettings(dim=8, rate=0.3), epochs=10, seed=0))
    gap = np.array([row[liked].mean() - row[~liked].mean() for row, liked in zip(scores, likes, strict=True)])
    assert (gap > 0).mean() > 0.95


def test_one_block_makes_one_update_and_a_user_is_finished_before_the_next() -> None:
    user = np.array([0, 1, 0, 1, 0, 0, 1], np.int32)
    item = np.array([0, 4, 1, 5, 2, 3, 6], np.int32)
    positive = np.array([0, 0, 1, 1, 0, 1, 0], bool)
    blocks = {0: [Block(0, (0,), (1,)), Block(0, (2,), (3,))], 1: [Block(1, (4,), (5,))]}
    options = Wide(rate=0.5, theta=8)
    for seed in range(4):
        losses: list[float] = []
        trained = train(
            Stream(user, item, positive),
            2,
            7,
            options,
            epochs=2,
            seed=seed,
            on_epoch=lambda *done, into=losses: into.append(done[3]),
        )
        by_hand = initial(2, 7, options, seed)
        means = []
        for epoch in (1, 2):
            one_by_one = [
                step(*by_hand, [block], options).loss
                for at in user_order(seed, epoch, 2).tolist()
                for block in blocks[at]
            ]
            means.append(sum(one_by_one) / 3)
        np.testing.assert_array_equal(trained[0], by_hand[0])
        np.testing.assert_array_equal(trained[1], by_hand[1])
        assert losses == pytest.approx(means)


def test_the_order_of_users_changes_with_epoch_and_seed() -> None:
    order = user_order(0, 1, 50)
    assert sorted(order.tolist()) == list(range(50))
    np.testing.assert_array_equal(order, user_order(0, 1, 50))
    assert not np.array_equal(order, user_order(0, 2, 50))
    assert not np.array_equal(order, user_order(1, 1, 50))


def test_training_is_the_same_for_the_same_seed() -> None:
    stream, _ = planted()
    first, again, other = (train(stream, 30, 40, DriftSettings(), epochs=2, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


def test_every_epoch_is_reported_with_the_factors_after_it() -> None:
    stream, _ = planted()
    seen: list[tuple[int, np.ndarray, float]] = []

    def keep(epoch: int, Upsilon: np.ndarray, Psi: np.ndarray, loss: float) -> None:
        seen.append((epoch, Psi.copy(), loss))

    _, Psi = train(stream, 30, 40, DriftSettings(rate=0.3), epochs=6, seed=0, on_epoch=keep)
    assert [epoch for epoch, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(seen[-1][1], Psi)
    assert not np.array_equal(seen[0][1], Psi)
    assert seen[-1][2] < seen[0][2]


def test_an_item_bias_keeps_the_users_coordinate_at_one() -> None:
    stream, _ = planted()
    Upsilon, Psi = train(stream, 30, 40, DriftSettings(rate=0.3, item_bias=True), epochs=2, seed=0)
    np.testing.assert_array_equal(Upsilon[:, -1], np.ones(30, np.float32))
    assert Psi[:, -1].any()
