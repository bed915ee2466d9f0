"""FPL: its updates beside derivatives of the likelihood of a triple, what users send, its sides in one process."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.data.attributes import AttributeTable
from coterie.data.keyed_order import key_hash
from coterie.evaluation.holdout import TEST, TRAIN
from coterie.privacy.attacks.scoring import Truth
from coterie.rounds.sides import Summed, User
from coterie.rounds.training import Purpose
from coterie.studies.in_process import train_in_process
from coterie.studies.judges import references
from coterie.studies.run_data import load, make_feed
from coterie.systems.fpl.host import FplHost
from coterie.systems.fpl.local_step import Disclosure, Triples, disclosure, local_step, stepped
from coterie.systems.fpl.mathematics import initial, initial_factors, scores
from coterie.systems.fpl.report import FplReport
from coterie.systems.fpl.server import FplServer
from coterie.systems.fpl.settings import FplSettings
from coterie.systems.fpl.study.attacks import BiasMoves, attack_biases
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.taken_up import FIGURES
from coterie.systems.visibility import matrix

ITEMS, USERS, K = 40, 12, 3
OPTIONS = FplSettings(factors=K, ridge=0.07, private_rate=0.3, min_touch=1)
EVERYTHING = np.ones(ITEMS, np.bool_)


def rows_and_factors(n=USERS):
    """Return rows of items and factors of users that are no first ones, float64."""
    rng = np.random.default_rng(4)
    items, factors = rng.normal(size=(ITEMS, 1 + K)), rng.normal(size=(n, 1 + K))
    factors[:, 0] = 1
    return items, factors


def likelihood(p, q, b, i, j, ridge):
    """Return what one triple climbs, as the paper has it: ln sigma(x_ui - x_uj) less the penalty on what it moves."""
    x = (b[i] + p @ q[i]) - (b[j] + p @ q[j])
    moved = [p @ p, q[i] @ q[i], q[j] @ q[j], b[i] ** 2, b[j] ** 2]
    return np.log(1 / (1 + np.exp(-x))) - ridge / 2 * sum(moved)


def derivative(function, value):
    """Return the derivative by each value, from differences."""
    found = np.zeros_like(value)
    for at in np.ndindex(value.shape):
        step = np.zeros_like(value)
        step[at] = 1e-6
        found[at] = (function(value + step) - function(value - step)) / 2e-6
    return found


def of_loop(p, items, triples, options):
    """Return updates of all rows and the factor kept, triple by triple from derivatives of the likelihood."""
    p, q, b = p[1:].copy(), items[:, 1:], items[:, 0]
    sent = np.zeros_like(items)
    for i, j, tells in zip(triples.own, triples.other, triples.sent, strict=True):
        here = {"i": i, "j": j, "ridge": options.ridge}
        by_q = derivative(partial(lambda p, q, **more: likelihood(p, q, b, **more), p, **here), q)
        by_b = derivative(partial(likelihood, p, q, **here), b)
        by_p = derivative(partial(lambda p, **more: likelihood(p, q, b, **more), **here), p)
        for item in (i, j) if tells else (j,):
            sent[item] += [by_b[item], *by_q[item]]
        p = p + options.private_rate * by_p
    return sent, p


def drawn(count, seed=0, pi=0.5):
    rng = np.random.default_rng(seed)
    own, other = rng.integers(0, 15, count), rng.integers(15, ITEMS, count)
    return Triples(own, other, rng.random(count) < pi)


@pytest.mark.parametrize("pi", [0.0, 0.5, 1.0])
def test_updates_are_derivatives_of_the_likelihood_triple_by_triple(pi):
    items, factors = rows_and_factors(3)
    triples = [drawn(count, seed, pi) for seed, count in enumerate((9, 4, 1))]
    made = list(stepped(items, factors, triples, OPTIONS))
    for (rows, change, kept), p, one in zip(made, factors, triples, strict=True):
        sent, moved = of_loop(p, items, one, OPTIONS)
        np.testing.assert_array_equal(rows, np.unique(np.concatenate([one.own[one.sent], one.other])))
        np.testing.assert_allclose(change, sent[rows], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(kept[1:], moved, rtol=1e-6, atol=1e-8)
        assert kept[0] == 1


def test_a_triple_moves_its_items_by_the_same_in_opposite_directions():
    items, factors = rows_and_factors(1)
    triple = Triples(np.array([2]), np.array([30]), np.array([True]))
    ((rows, change, _),) = stepped(items, factors, [triple], FplSettings(factors=K, ridge=0))
    assert rows.tolist() == [2, 30]
    np.testing.assert_array_equal(change[0], -change[1])
    assert change[0, 0] > 0


def test_an_update_of_a_sampled_item_in_clear_tells_the_factor_of_a_user_that_sends_no_other():
    items, factors = rows_and_factors(1)
    triple = Triples(np.array([2]), np.array([30]), np.array([False]))
    ((rows, change, _),) = stepped(items, factors, [triple], OPTIONS)
    assert rows.tolist() == [30]
    pull = change[0] + OPTIONS.ridge * items[30]
    np.testing.assert_allclose(pull / pull[0], factors[0])


def contributed(options, *, users=USERS, round_=1, allowed=EVERYTHING, items=None):
    """Return the updates of users with 8 of the items each, by position, and the items."""
    rng = np.random.default_rng(6)
    own = [np.sort(rng.choice(ITEMS, 8, replace=False)) for _ in range(users)] if items is None else items
    keys = key_hash([str(user) for user in range(len(own))], 0)
    updates = local_step(
        initial(options, ITEMS, 0),
        own,
        options,
        keys,
        factors=initial_factors(options, keys),
        disclosed=[disclosure(options, int(key), ITEMS) for key in keys],
        seed=0,
        round_=round_,
        allowed=allowed,
    )
    return {update.index: update for update in updates}, own


def test_a_user_sends_of_its_own_items_what_pi_says():
    for pi, expected in ((0.0, 0), (1.0, 8)):
        updates, own = contributed(OPTIONS.model_copy(update={"pi": pi}))
        assert sorted(updates) == list(range(USERS))
        for user, update in updates.items():
            assert np.isin(update.rows, own[user]).sum() == expected
    sent = 0
    for round_ in range(30):
        updates, own = contributed(OPTIONS.model_copy(update={"pi": 0.3}), round_=round_)
        sent += sum(int(np.isin(update.rows, own[user]).sum()) for user, update in updates.items())
    assert 0.25 < sent / (30 * USERS * 8) < 0.35


@pytest.mark.parametrize(("disclose", "all_sent"), [("updates", True), ("items", False)])
def test_over_many_rounds_only_a_choice_of_items_keeps_the_others(disclose, all_sent):
    options = OPTIONS.model_copy(update={"pi": 0.5, "disclose": disclose})
    seen = [set() for _ in range(USERS)]
    for round_ in range(30):
        updates, own = contributed(options, round_=round_)
        for user, update in updates.items():
            seen[user] |= set(update.rows[np.isin(update.rows, own[user])].tolist())
    shares = np.array([len(each) / 8 for each in seen])
    assert (shares == 1).all() if all_sent else 0.2 < shares.mean() < 0.8


def test_users_draw_their_own_shares_around_pi_within_0_and_1():
    options = FplSettings(pi=0.8, pi_spread=0.5)
    found = [disclosure(options, key, ITEMS).pi for key in range(200)]
    assert min(found) >= 0.3
    assert max(found) <= 1
    assert 0.6 < np.mean(found) < 0.7
    assert len(set(found)) == 200
    assert found[7] == disclosure(options, 7, ITEMS).pi
    assert {disclosure(FplSettings(pi=0.4), key, ITEMS).pi for key in range(9)} == {0.4}


def test_users_draw_shares_of_a_mix_in_its_parts():
    options = FplSettings(pi_mix=((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)))
    found = np.array([disclosure(options, key, ITEMS).pi for key in range(2000)])
    assert set(found) == {0.0, 0.5, 1.0}
    for share, part in options.pi_mix:
        assert (found == share).mean() == pytest.approx(part, abs=0.04)
    assert found[7] == disclosure(options, 7, ITEMS).pi


@pytest.mark.parametrize("options", [{}, {"pi": 0.4, "pi_spread": 0.3}, {"pi_mix": ((0.5, 1.0),)}])
@pytest.mark.parametrize("own", [0.0, 0.9, 1.0])
def test_a_users_own_share_holds_whatever_the_settings_say(options, own):
    assert {disclosure(FplSettings(**options), key, ITEMS, own).pi for key in range(50)} == {own}


@pytest.mark.parametrize("own", [-0.1, 1.1, np.inf])
def test_a_users_own_share_out_of_range_is_refused_and_not_clipped(own):
    with pytest.raises(ValueError, match="expected 0 to 1"):
        disclosure(OPTIONS, 0, ITEMS, own)


@pytest.mark.parametrize(("each", "expected"), [(0, 1), (1, 8), (3, 24)])
def test_a_user_has_one_triple_or_a_multiple_of_its_items(each, expected):
    options = OPTIONS.model_copy(update={"triples_per_item": each, "ridge": 0.0})
    updates, _ = contributed(options, users=1)
    # Without a ridge and with small factors a triple moves the two biases by about one half.
    assert np.abs(updates[0].change[:, 0]).sum() == pytest.approx(expected, rel=0.1)
    assert len(updates[0].rows) <= 2 * expected


def test_closed_items_are_in_no_contribution_and_rank_last():
    allowed = np.arange(ITEMS) % 3 > 0
    updates, _ = contributed(OPTIONS, allowed=allowed)
    for update in updates.values():
        assert allowed[update.rows].all()
    model = initial(OPTIONS, ITEMS, 0)
    found = scores(model, initial_factors(OPTIONS, [1, 2]), allowed)
    assert (found[:, ~allowed].max(axis=1) < found[:, allowed].min(axis=1)).all()


def test_a_user_without_items_or_with_all_of_them_sends_nothing_and_keeps_its_factor():
    own = [np.empty(0, np.int64), np.arange(ITEMS), np.array([3])]
    updates, _ = contributed(OPTIONS, items=own)
    keys = key_hash(["0", "1", "2"], 0)
    for user in (0, 1):
        assert not len(updates[user].rows)
        np.testing.assert_array_equal(updates[user].kept, initial_factors(OPTIONS, keys)[user])
    assert len(updates[2].rows) == 2


def test_users_of_a_batch_do_not_matter_to_one_another(monkeypatch):
    together, _ = contributed(OPTIONS)
    monkeypatch.setattr("coterie.systems.fpl.local_step._VALUES", 1)
    apart, _ = contributed(OPTIONS)
    for user in range(USERS):
        np.testing.assert_array_equal(together[user].change, apart[user].change)
        np.testing.assert_array_equal(together[user].kept, apart[user].kept)


# --- Sides ---------------------------------------------------------------------------------------------------------


def summed(sums):
    return Summed(Purpose.TRAIN, sums, USERS, 0, 0, np.ones(1), USERS)


def test_the_server_adds_the_sum_times_its_rate():
    options = OPTIONS.model_copy(update={"server_optimiser": "fedsgd", "server_rate": 0.25})
    server = FplServer(options, ITEMS, 0, 1)
    arrays = server.initial()
    change = np.random.default_rng(1).normal(size=(ITEMS, 1 + K))
    after = server.apply(arrays, summed({"items": change}))
    before = server.model(arrays)["items"]
    np.testing.assert_allclose(server.model(after)["items"], before + 0.25 * change, rtol=1e-5)
    assert (before[:, 0] == 0).all()
    assert np.unique(before[:, 1:]).size > 1


def host_of(options, own=None):
    rng = np.random.default_rng(2)
    taken = rng.random((USERS, ITEMS)) < 0.3
    user, item = np.nonzero(taken)
    part = np.where(rng.random(len(user)) < 0.2, TEST, TRAIN)
    rating = np.full(len(user), np.nan, np.float32)
    users, items = [f"u{n}" for n in range(USERS)], [f"i{n}" for n in range(ITEMS)]
    told = None if own is None else AttributeTable(("pi",), np.array(own, np.float32)[:, None])
    data = HostData(users, items, user, item, part, rating, preferences=told)
    return FplHost(options, data, key_hash(users, 0), 0, lambda made: made), data


def test_a_host_sends_the_sum_of_its_users_and_keeps_their_factors():
    host, data = host_of(OPTIONS)
    server = FplServer(OPTIONS, ITEMS, 0, 1)
    arrays = server.initial()
    arrays = {**arrays, "popularity": np.ones(ITEMS, np.float32)}
    plan = SimpleNamespace(purpose=Purpose.TRAIN.value, round=3, pass_number=0)
    before = host.private["factors"].copy()
    opened = np.ones((1, ITEMS), np.bool_)
    everybody = {0: [User(user, 0) for user in range(USERS)]}
    ((_, codes),) = host.contributions(plan, server.model(arrays), opened, everybody)
    moved = host.layout(Purpose.TRAIN).decode(codes, USERS)["items"]
    assert (host.private["factors"][:, 1:] != before[:, 1:]).any(axis=1).all()
    # Every update of a sampled item lowers a bias, every one of an own item raises one: they cancel out but for the
    # ridge and rounding, as first biases are 0.
    assert np.abs(moved[:, 0]).max() > 0.3
    assert abs(moved[:, 0].sum()) < 0.01 * np.abs(moved[:, 0]).sum()
    # No rating is needed: a held-out item is one to find.
    found = host.measure(server.model(arrays), np.arange(USERS))
    assert np.isfinite(found["ndcg@10"]).any()
    assert host.recommend(server.model(arrays), 0).shape == (ITEMS,)
    assert np.isnan(data.rating).all()


def sent_alone(host, options, user):
    """Return the sum of biases that a user raises in a round with the others silent."""
    server = FplServer(options, ITEMS, 0, 1)
    arrays = {**server.initial(), "popularity": np.ones(ITEMS, np.float32)}
    plan = SimpleNamespace(purpose=Purpose.TRAIN.value, round=3, pass_number=0)
    opened = np.ones((1, ITEMS), np.bool_)
    ((_, codes),) = host.contributions(plan, server.model(arrays), opened, {0: [User(user, 0)]})
    moved = host.layout(Purpose.TRAIN).decode(codes, 1)["items"][:, 0]
    return moved[moved > 0].sum()


def test_each_user_of_a_host_sends_by_its_own_share():
    options = OPTIONS.model_copy(update={"pi": 1.0})
    own = np.full(USERS, np.nan)
    own[:2] = 0.0, 1.0
    host, _ = host_of(options, own)
    assert sent_alone(host, options, 0) == 0
    assert sent_alone(host, options, 1) > 1
    assert sent_alone(host, options, 2) > 1


SMALL = {
    "system": "fpl",
    "data": {"synthetic": {"users": 60, "items": 80, "interactions": 1800}},
    "rounds": {"passes": 4, "evaluate_every": 2},
}


def run_of(**changes):
    return RunSettings.model_validate({**SMALL, **changes})


def trained(settings):
    feed = make_feed(settings, load(settings), 0)
    return train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None).known


def test_a_run_gives_the_same_numbers_masked_and_over_any_hosts():
    one = trained(run_of(federation={"hosts": 1}))
    for changes in ({"federation": {"hosts": 3}}, {"federation": {"hosts": 3}, "secure_sum": "masked"}):
        assert [each["metrics"] for each in trained(run_of(**changes))["history"]] == [
            each["metrics"] for each in one["history"]
        ]
    assert set(one["chosen"]["metrics"]) == set(FIGURES)


def test_with_a_floor_of_one_user_nobody_is_asked_for_its_items():
    asked, open_to_all = trained(run_of()), trained(run_of(fpl={"min_touch": 1}))
    assert [one["rounds"][0]["purpose"] for one in (asked, open_to_all)] == ["supports", "evaluate"]
    assert open_to_all["phase"] == "done"
    assert open_to_all["history"][-1]["metrics"]["ndcg@10"] > 0


ALONE = {"cohorts": "random", "cohort": 1, "min_cohort": 1, "min_sum": 1, "passes": 1, "evaluate_every": 1}


@pytest.mark.parametrize(
    ("rounds", "each", "label"),
    [(ALONE, 0, "sFPL"), (ALONE, 1, "sFPL+"), (SMALL["rounds"], 0, "pFPL"), (SMALL["rounds"], 2, "pFPL+")],
)
def test_the_four_forms_are_settings_of_a_run(rounds, each, label):
    settings = run_of(rounds=rounds, fpl={"triples_per_item": each, "server_optimiser": "fedsgd"})
    assert settings.own.label(settings) == label
    found = trained(settings)
    expected = 60 if label.startswith("s") else 4
    assert (found["phase"], found["history"][-1]["version"], found["abandoned"]) == ("done", expected, 0)


@pytest.mark.parametrize("key", ["pi", "pi_spread"])
@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "half"])
def test_a_share_that_is_no_number_from_0_to_1_is_refused(key, share):
    with pytest.raises(ValueError, match=rf"(?s)fpl\.{key}.*(equal to [01]|finite|valid number)"):
        run_of(fpl={key: share})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pi_mix": [[0.5, 0.6], [1.0, 0.5]]}, "add up to 1.1; expected 1"),
        ({"pi_mix": [[1.5, 1.0]]}, "less than or equal to 1"),
        ({"pi_mix": [[0.5, 1.0]], "pi": 0.3}, "pi_mix beside fpl.pi"),
        ({"pi_mix": [[0.5, 1.0]], "pi_spread": 0.3}, "pi_mix beside fpl.pi"),
    ],
)
def test_a_mix_that_is_none_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        run_of(fpl=options)


def test_a_plan_without_a_mix_or_a_file_is_what_it_was_before_there_were_any(tmp_path):
    plain = FplSettings()
    assert not {"pi_mix", "preferences"} & set(json.loads(plain.to_json()))
    assert FplSettings.from_json(plain.to_json()) == plain
    assert FplSettings(preferences=tmp_path / "own.csv").to_json() == plain.to_json()
    mixed = FplSettings(pi_mix=((0.5, 1.0),))
    assert FplSettings.from_json(mixed.to_json()) == mixed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pi": 0.3}, "0.3 for all"),
        ({"pi": 0.8, "pi_spread": 0.5}, "drawn by each user, uniformly from 0.3 to 1"),
        (
            {"pi_mix": ((0.0, 0.2), (0.5, 0.8))},
            "drawn by each user: 0 for 20.0% of the users, 0.5 for 80.0% of",
        ),
        ({"preferences": Path("own.csv")}, "1 for all; users' own settings before it"),
    ],
)
def test_a_report_says_how_users_came_by_their_shares(options, words):
    report = FplReport(settings={"fpl": FplSettings(**options).model_dump(mode="json")})
    ((_, text),) = report.facts()
    assert words in text
    assert FplReport(settings={"fpl": {"pi": "other"}}).facts() == FplReport().facts() == []


def test_a_file_of_preferences_changes_a_run_as_the_plans_share_does(tmp_path):
    path = tmp_path / "own.csv"
    users = load(run_of()).users
    path.write_text("user,pi\n" + "".join(f"{user},0.25\n" for user in users))
    by_file, by_plan, all_sent = (
        [each["metrics"] for each in trained(run_of(fpl=options))["history"]]
        for options in ({"preferences": path}, {"pi": 0.25}, {})
    )
    assert by_file == by_plan
    assert by_file != all_sent


def test_a_masked_sum_over_one_user_is_refused():
    with pytest.raises(ValueError, match="a sum over one user protects nothing"):
        run_of(rounds=ALONE, secure_sum="masked")
    with pytest.raises(ValueError, match="cold-users"):
        run_of(split={"kind": "cold-users"})


def test_a_run_in_clear_warns_of_signs():
    clear, masked = run_of(), run_of(secure_sum="masked")
    assert any("sign" in one for one in clear.own.warnings(clear))
    assert not any("sign" in one for one in masked.own.warnings(masked))


def test_a_sum_of_which_many_rows_are_of_one_user_gets_a_warning():
    usual = run_of(secure_sum="masked")
    assert not usual.own.warnings(usual)
    one = run_of(secure_sum="masked", fpl={"triples_per_item": 0})
    assert any("rows of a sum are of one user" in each for each in one.own.warnings(one))
    drawn_anew = run_of(secure_sum="masked", rounds={**SMALL["rounds"], "cohorts": "random", "cohort": 20})
    assert any("cohorts are no groups" in each for each in drawn_anew.own.warnings(drawn_anew))


@pytest.mark.parametrize("secure_sum", ["clear", "masked", "encrypted", "shared-key"])
@pytest.mark.parametrize("form", ["hosts", "users"])
def test_who_may_see_what_is_declared_as_for_fedncf(form, secure_sum):
    assert matrix("fpl", form, secure_sum) == matrix("fedncf", form, secure_sum)


@pytest.mark.parametrize("kind", ["temporal", "random", "leave-last-out", "leave-random-out"])
def test_a_run_is_measured_by_any_held_out_items_of_users_that_it_learns_from(kind):
    assert set(trained(run_of(split={"kind": kind}))["chosen"]["metrics"]) == set(FIGURES)


def test_the_references_have_pairwise_factors_with_all_data_in_one_place():
    pytest.importorskip("implicit")
    settings = run_of()
    found = references(settings, make_feed(settings, load(settings), 0), 0)
    assert set(found) == {"bpr", "popularity", "item_knn", "ease_central", "random"}
    assert set(found["bpr"].metrics) == set(FIGURES)


# --- Attacks -------------------------------------------------------------------------------------------------------


def attacked(options, rounds, *, together=False):
    """Return the attack's figures on what users, or all of them together, send in some rounds."""
    received = []
    for round_ in range(rounds):
        updates, own = contributed(options, users=60, round_=round_)
        moves = np.zeros((60, ITEMS))
        for user, update in updates.items():
            moves[user, update.rows] = update.change[:, 0]
        if together:
            received.append(BiasMoves(np.arange(60), moves.sum(axis=0)))
        else:
            received += [BiasMoves(np.array([user]), moves[user]) for user in range(60)]
    pairs = np.array([(user, item) for user in range(60) for item in own[user]])
    truth = Truth(pairs[:, 0], pairs[:, 1], np.ones(len(pairs), np.bool_), 60, ITEMS)
    return attack_biases(received, truth)


def test_signs_read_the_items_of_users_that_send_everything():
    found = attacked(OPTIONS.model_copy(update={"pi": 1.0}), 1)["signs"]
    assert (found["auc"], found["precision"], found["recall"]) == (1, 1, 1)
    assert (found["users"], found["rounds"]) == (60, 1)


def test_a_lower_share_weakens_the_signs_of_a_round_but_not_the_absence_of_items_over_many():
    options = OPTIONS.model_copy(update={"pi": 0.0})
    once, often = attacked(options, 1), attacked(options, 40)
    assert once["signs"]["recall"] == 0
    assert once["signs"]["auc"] < 0.8
    assert often["absence"]["auc"] == 1
    assert often["absence"]["rounds"] == 40
    assert often["absence"]["precision"] > 0.9


def test_a_sum_over_everybody_tells_no_more_than_popularity():
    for found in attacked(OPTIONS.model_copy(update={"pi": 1.0}), 20, together=True).values():
        assert found["auc"] < found["popularity_auc"] + 0.02
        assert found["precision"] < 0.5


def test_disclosures_are_of_a_user():
    one = disclosure(OPTIONS.model_copy(update={"disclose": "items", "pi": 0.5}), 3, ITEMS)
    assert isinstance(one, Disclosure)
    assert one.pi == 1
    assert 0 < one.items.sum() < ITEMS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pi": 0.3}, "0.3 for all"),
        ({"pi": 0.9, "pi_spread": 0.3}, "drawn by each user, uniformly from 0.6 to 1"),
        (
            {"pi_mix": [[0.0, 0.2], [0.5, 0.8]]},
            "drawn by each user: 0 for 20.0% of the users, 0.5 for 80.0% of the users",
        ),
        ({"pi": 0.3, "preferences": "own.csv"}, "0.3 for all; users' own settings before it"),
    ],
)
def test_a_run_says_how_users_come_by_their_shares(options, words):
    assert FplSettings.model_validate(options).share_in_words == words
