"""The server as attacker on FedIDCF: ratings and vectors from contributions in clear, and what sums tell."""

import numpy as np
import pytest

from coterie.data import SyntheticSpec, generate, random
from coterie.data.keyed_order import key_hash
from coterie.privacy.attacks.scoring import Truth
from coterie.rounds.sides import User
from coterie.rounds.training import Purpose
from coterie.studies.replay import Received
from coterie.studies.study import Recorded
from coterie.systems.fedidcf.host import FedIdcfHost
from coterie.systems.fedidcf.server import FedIdcfServer
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.systems.fedidcf.study import attacks
from coterie.systems.fedidcf.study.attacks import attack, vector_of
from coterie.systems.fedmf.study.biased_reconstruction import reconstruct
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.study.reconstruction import Marginals, seen_in_sum
from coterie.wire.v1.orchestrator_pb2 import RunPlan

DATA = generate(SyntheticSpec(users=60, items=80, interactions=1_500, genres=4))
SPLIT = random(DATA, validation=0.1, seed=3)
SETTINGS = FedIdcfSettings(factors=4, hidden=4, factor_passes=2)
OWN = SPLIT.part == 0


def plan(pass_number):
    given = {"purpose": "train", "round": 1 + pass_number, "pass_number": pass_number, "noise_floor": 0}
    return type("Plan", (), given)()


@pytest.fixture
def seen():
    """Return a side, the layout, the model, and a function that gives contributions of a pass by member."""
    keys = key_hash(DATA.users, 0)
    data = HostData(DATA.users, DATA.items, DATA.user, DATA.item, SPLIT.part, DATA.rating)
    side = FedIdcfHost(SETTINGS, data, keys, 0, lambda private: private)
    server = FedIdcfServer(SETTINGS, 80, 0, 1)
    model = server.model({**server.initial(), "popularity": np.ones(80, np.float32)})
    opened = np.ones((1, 80), np.bool_)

    def contributions(pass_number, members):
        made = side.contributions(plan(pass_number), model, opened, members)
        return dict(made)

    return side, server.layout(Purpose.TRAIN), model, contributions


def alone():
    return {user: [User(user, 0)] for user in range(60)}


def everybody():
    return {0: [User(user, 0) for user in range(60)]}


def marginals():
    stars = np.unique(DATA.rating).tolist()
    return Marginals.of(DATA.item, DATA.rating, np.zeros((60, 0)), stars, 80)


def share_right(found, user):
    own = OWN & (DATA.user == user)
    return float((np.abs(found.ratings[DATA.item[own]] - DATA.rating[own]) < 0.25).mean())


def test_the_first_contribution_of_a_key_user_is_its_ratings_and_a_query_user_sends_nothing(seen):
    side, layout, model, contributions = seen
    found = contributions(0, alone())
    nobody = np.zeros((0, SETTINGS.width), np.float32)
    right = []
    for user, codes in found.items():
        one = seen_in_sum(codes, layout, model["items"], nobody, users=1)
        if not side.trains[user]:
            assert not one.touched.any()
            continue
        guess = reconstruct(one, SETTINGS, marginals(), first=True)
        right.append(share_right(guess, user))
        own = np.sort(DATA.item[OWN & (DATA.user == user)])
        assert np.flatnonzero(guess.rated == np.inf).tolist() == own.tolist()
    assert np.mean(right) > 0.95


def test_a_sum_over_all_users_tells_no_more_than_the_commonest_ratings(seen):
    side, layout, model, contributions = seen
    (codes,) = contributions(0, everybody()).values()
    whole = seen_in_sum(codes, layout, model["items"], np.zeros((0, SETTINGS.width), np.float32), users=60)
    known = marginals()
    guess = reconstruct(whole, SETTINGS, known, first=True)
    common = known.stars[known.shares.argmax(axis=1)]
    keys = np.flatnonzero(side.trains).tolist()
    by_guess = [
        float(
            (
                np.abs(common[DATA.item[OWN & (DATA.user == u)]] - DATA.rating[OWN & (DATA.user == u)]) < 0.25
            ).mean()
        )
        for u in keys
    ]
    assert np.mean([share_right(guess, user) for user in keys]) < np.mean(by_guess) + 0.05


def test_in_the_pass_of_moments_a_contribution_in_clear_is_the_vector(seen):
    side, layout, _, contributions = seen
    for user, codes in contributions(2, alone()).items():
        found = vector_of(codes, layout, 1)
        if side.trains[user]:
            assert found == pytest.approx(side.private["factors"][user, 2:], abs=1e-3)
        else:
            assert found is None


def test_a_sum_over_several_key_users_is_nobody_s_vector(seen):
    _, layout, _, contributions = seen
    (codes,) = contributions(2, everybody()).values()
    assert vector_of(codes, layout, 60) is None


def attacked(monkeypatch, made, model):
    """Return the figures of `vectors` for sums of the pass of moments, given as slots and codes."""
    asked = []

    class Transcript:
        def __init__(self, *given, **more):
            pass

        def received(self, layout):
            for slots, codes in made:
                yield Received(plan(2), layout(Purpose.TRAIN), slots, codes, 0)

        def model(self, plan):
            asked.append(plan)
            return model

    monkeypatch.setattr(attacks, "Replay", Transcript)
    monkeypatch.setattr(attacks, "report", lambda *given, **more: {})
    positive = np.ones(OWN.sum(), np.bool_)
    truth = Truth(users=DATA.user[OWN], items=DATA.item[OWN], positive=positive, n_users=60, n_items=80)
    run = RunPlan(settings=SETTINGS.model_dump_json())
    found = attack(Recorded([], run, truth, DATA.rating[OWN], np.zeros((60, 0))))
    return found["vectors"], len(asked)


def test_a_sum_with_one_key_user_tells_a_vector_and_one_user_is_not_counted_twice(seen, monkeypatch):
    side, _, model, contributions = seen
    keys, queries = np.flatnonzero(side.trains).tolist(), np.flatnonzero(~side.trains).tolist()
    groups = [
        (keys[0],),
        (keys[0], queries[0]),
        (keys[1], queries[1], queries[2]),
        (queries[1], keys[1]),
        (keys[2], keys[3], queries[3]),
        (queries[4],),
    ]
    made = []
    for group in groups:
        ((_, codes),) = contributions(2, {0: [User(user, 0) for user in group]}).items()
        made.append((group, codes))
    found, asked = attacked(monkeypatch, made, model)
    covered = {user for group in groups for user in group}
    # One by name, and one of the two sums of the same key user.
    assert (found["sums"], found["vectors"]) == (len(groups), 2 / len(covered))
    assert np.isfinite(found["correlation"])
    assert asked == 1
