"""The server as attacker on FedGNN: a user's ratings from a contribution in clear, and what a sum tells."""

from typing import Any

import numpy as np
import pytest

from coterie.data import SyntheticSpec, generate
from coterie.data.keyed_order import key_hash
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedgnn.local_step import contribute, local_step
from coterie.systems.fedgnn.mathematics import apply, initial, initial_factors, layout
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.fedgnn.study.attacks import reconstruct
from coterie.systems.shared.factor_steps import UserData
from coterie.systems.shared.study.reconstruction import Marginals, Seen, seen_in_sum

DATA = generate(SyntheticSpec(users=60, items=80, interactions=1_500, genres=4))
ITEMS, USERS = len(DATA.items), len(DATA.users)
KEYS = key_hash(DATA.users, 0)
SOME = range(0, USERS, 4)


def marginals() -> Marginals:
    stars = np.unique(DATA.rating).tolist()
    return Marginals.of(DATA.item, DATA.rating, np.zeros((USERS, 0)), stars, ITEMS)


def rounds(settings: FedGnnSettings, number: int) -> tuple[list[Seen], Seen]:
    """Return what the server sees in a round of each user, in clear, and of the sum over all."""
    people = [UserData(DATA.item[DATA.user == u], DATA.rating[DATA.user == u]) for u in range(USERS)]
    model, kept, shape = initial(settings, ITEMS, 1), initial_factors(settings, KEYS), layout(settings, ITEMS)
    raters = np.bincount(DATA.item, minlength=ITEMS).astype(np.float64)
    for round_ in range(1, number + 1):
        whole, alone = Contribution(shape), [Contribution(shape) for _ in range(USERS)]
        updates = local_step(model, people, settings, KEYS, rows=kept, seed=1, round_=round_)
        for update in sorted(updates, key=lambda one: one.index):
            for one in (whole, alone[update.index]):
                contribute(update, one)
                one.count()
            kept[update.index] = update.kept
        before = model
        model = apply(model, shape.decode(whole.codes(), USERS), raters=raters, users=USERS)
    nobody = np.zeros((0, settings.width), np.float32)

    def seen(one: Contribution) -> Seen:
        return seen_in_sum(one.codes(), shape, before["items"], nobody, users=one.users)

    return [seen(one) for one in alone], seen(whole)


def right(found: np.ndarray[Any, Any], user: int) -> float:
    """Return the share of a user's ratings that were guessed."""
    own = DATA.user == user
    return float((np.abs(found[DATA.item[own]] - DATA.rating[own]) < 0.25).mean())


@pytest.mark.parametrize("given", [{}, {"local_epochs": 1}], ids=str)
def test_the_first_contribution_of_a_user_is_its_ratings(given: dict[str, Any]) -> None:
    settings = FedGnnSettings(**given)
    alone, _ = rounds(settings, 1)
    found = [reconstruct(alone[user], settings, marginals(), first=True) for user in SOME]
    for user, one in zip(SOME, found, strict=True):
        own = np.sort(DATA.item[DATA.user == user])
        np.testing.assert_array_equal(np.flatnonzero(one.rated == np.inf), own)
    assert np.mean([right(one.ratings, user) for user, one in zip(SOME, found, strict=True)]) > 0.95


def test_a_later_contribution_tells_most_of_them() -> None:
    settings = FedGnnSettings()
    alone, _ = rounds(settings, 6)
    known = marginals()
    guess = known.stars[known.shares.argmax(axis=1)]
    found = [right(reconstruct(alone[user], settings, known, first=False).ratings, user) for user in SOME]
    assert np.mean(found) > np.mean([right(guess, user) for user in SOME]) + 0.2


def test_a_sum_over_everybody_tells_no_more_than_the_commonest_rating_of_each_item() -> None:
    settings = FedGnnSettings()
    _, whole = rounds(settings, 1)
    known = marginals()
    table = reconstruct(whole, settings, known, first=True).ratings
    guess = known.stars[known.shares.argmax(axis=1)]
    found = [right(table, user) for user in range(USERS)]
    assert np.mean(found) < np.mean([right(guess, user) for user in range(USERS)])


def test_of_a_user_who_sent_nothing_nothing_is_guessed() -> None:
    settings = FedGnnSettings()
    alone, _ = rounds(settings, 1)
    silent = Seen(
        np.zeros_like(alone[0].items), alone[0].attributes, alone[0].item_factors, alone[0].attribute_factors
    )
    found = reconstruct(silent, settings, marginals(), first=True)
    assert not found.ratings.any()
