"""The COS as attacker on systems that run in rounds: near certainty on the plain forms, popularity on the protected."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import DataError
from coterie.privacy.attacks import cluster, differencing, disaggregate
from coterie.privacy.attacks.rounds_view import RoundView, known_slots, view_of_sum
from coterie.privacy.attacks.scoring import Truth, mean_auc
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedncf import mathematics, networks
from coterie.systems.fedncf.local_step import UserUpdate, contribute, local_step
from coterie.systems.fedncf.networks import Architecture
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.fedncf.study.inversion import Judged, invert, judge

Ids = npt.NDArray[np.int64]


def histories(users: int, items: int, most: int, seed: int, skew: float = 1.0) -> Truth:
    """Popular items are taken more often."""
    rng = np.random.default_rng(seed)
    weight = 1 / (np.arange(items) + 10) ** skew
    taken = [
        rng.choice(items, rng.integers(most // 2, most + 1), replace=False, p=weight / weight.sum())
        for _ in range(users)
    ]
    user = np.repeat(np.arange(users), [len(each) for each in taken])
    return Truth(user, np.concatenate(taken), np.ones(len(user), bool), users, items)


class Federation:
    """FedNCF with GMF, as far as the COS sees it."""

    def __init__(self, truth: Truth, *, touch: str = "exact") -> None:
        self.truth = truth
        # Users' embeddings start as large as they soon become, so that few rounds do.
        self.settings = FedNcfSettings(model="gmf", touch=touch, user_bound=0.5, server_rate=0.01)
        self.model = mathematics.initial(self.settings, truth.n_items, seed=1)
        self.state = mathematics.initial_server_state(self.settings, self.model)
        self.private = mathematics.initial_private(self.settings, range(truth.n_users))
        self.layout = mathematics.layout(self.settings, truth.n_items)
        self.version = 0
        self.drawn = 0

    def updates(self, cohort: Ids, opened: npt.NDArray[np.bool_] | None, draw: int) -> Iterator[UserUpdate]:
        own = [self.truth.items[self.truth.users == user] for user in cohort]
        return local_step(
            self.model,
            self.private.take(cohort),
            own,
            self.settings,
            cohort.tolist(),
            seed=0,
            round_=draw,
            allowed=opened,
        )

    def ask(
        self,
        cohort: Ids,
        opened: npt.NDArray[np.bool_] | None = None,
        *,
        keep: bool = True,
        draw: int | None = None,
    ) -> RoundView:
        """Run a round over a cohort; without ``keep`` it is abandoned once its sum is known."""
        self.drawn += 1
        contribution = Contribution(self.layout)
        for update in self.updates(cohort, opened, self.drawn if draw is None else draw):
            contribute(update, contribution, self.settings)
            contribution.count()
            if keep:
                self.private.put(cohort[[update.index]], update.private)
        codes = contribution.codes()
        view = view_of_sum(self.layout, codes, cohort, self.version)
        if keep:
            sums = self.layout.decode(codes, len(cohort))
            self.model, self.state = mathematics.apply(
                self.model, self.state, sums, self.settings, users=len(cohort)
            )
            self.version += 1
        return view


def random_cohorts(users: int, size: int, global_rounds: int, seed: int) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [
        np.sort(cohort)
        for _ in range(global_rounds)
        for cohort in np.array_split(rng.permutation(users), users // size)
    ]


# Views


def test_a_view_is_what_the_layout_decodes() -> None:
    federation = Federation(histories(30, 60, 8, seed=0))
    cohort = np.arange(5, 15)
    expected_rows = np.zeros((60, 12))
    expected_touched = np.zeros(60)
    for update in federation.updates(cohort, None, draw=1):
        expected_rows[update.rows] += update.row_deltas
        expected_touched[update.rows] += 1

    view = federation.ask(cohort, keep=False, draw=1)

    assert view.rows is not None
    assert view.touched is not None
    assert np.array_equal(view.touched, expected_touched)
    assert np.abs(view.rows - expected_rows).max() <= len(cohort) * 2 * view.noise
    assert not view.rows[expected_touched == 0].any()
    assert Federation(federation.truth, touch="once").ask(cohort).touched is None


def test_a_view_without_participants_or_with_one_twice_is_refused() -> None:
    with pytest.raises(DataError, match="0 slots"):
        RoundView(0, np.array([], np.int64))
    with pytest.raises(DataError, match="none twice"):
        RoundView(0, np.array([3, 3]))
    with pytest.raises(DataError, match="5 rows but touch counts of 4 items"):
        RoundView(0, np.array([1]), np.zeros((5, 2), np.float32), np.zeros(4, np.float32))


def test_views_that_name_slots_beyond_the_users_are_left_out() -> None:
    views = [RoundView(0, np.array([0, 4])), RoundView(1, np.array([1, 5]))]
    assert known_slots(views, 5) == views[:1]


# Disaggregation


@pytest.fixture(scope="module")
def watched() -> Truth:
    return histories(60, 150, 14, seed=2)


def test_exact_counts_of_random_cohorts_give_everything_away(watched: Truth) -> None:
    consumed = watched.consumed().astype(np.float32)
    views = [
        RoundView(at, cohort, touched=consumed[cohort].sum(axis=0))
        for at, cohort in enumerate(random_cohorts(60, 6, 8, seed=0))
    ]
    found = disaggregate.report(views, watched)
    assert found["counts_auc"] is not None
    assert found["counts_auc"] > 0.999
    assert found["popularity_auc"] is not None
    assert found["popularity_auc"] < 0.85
    assert found["smallest_cohort"] == 6


def test_fewer_rounds_than_users_already_tell_more_than_popularity(watched: Truth) -> None:
    consumed = watched.consumed().astype(np.float32)
    views = [
        RoundView(at, cohort, touched=consumed[cohort].sum(axis=0))
        for at, cohort in enumerate(random_cohorts(60, 6, 4, seed=0))
    ]
    found = disaggregate.report(views, watched)
    assert found["auc"] is not None
    assert found["popularity_auc"] is not None
    assert found["auc"] > found["popularity_auc"] + 0.05


def test_row_changes_of_random_cohorts_give_away_what_counts_would(watched: Truth) -> None:
    federation = Federation(watched, touch="once")
    found = disaggregate.report(
        [federation.ask(cohort) for cohort in random_cohorts(60, 6, 20, seed=0)], watched
    )
    assert found["counts_auc"] is None
    assert found["rows_auc"] is not None
    assert found["rows_auc"] > 0.95


def test_fixed_groups_without_counts_tell_no_more_than_popularity() -> None:
    truth = histories(240, 100, 10, seed=5)
    federation = Federation(truth, touch="once")
    groups = random_cohorts(240, 120, 1, seed=1)
    supports = [truth.consumed()[group].sum(axis=0) for group in groups]
    views = [
        RoundView(0, group, touched=support.astype(np.float32))
        for group, support in zip(groups, supports, strict=True)
    ]
    for _ in range(8):
        views += [
            federation.ask(group, support >= 3) for group, support in zip(groups, supports, strict=True)
        ]
    found = disaggregate.report(views, truth)
    assert found["auc"] is not None
    assert found["popularity_auc"] is not None
    assert found["auc"] < found["popularity_auc"] + 0.02


def test_one_group_leaves_popularity_and_nothing_else(watched: Truth) -> None:
    consumed = watched.consumed().astype(np.float32)
    everybody = RoundView(0, np.arange(60), touched=consumed.sum(axis=0))
    found = disaggregate.report([everybody] * 5, watched)
    assert found["counts_auc"] == pytest.approx(found["popularity_auc"])


def test_nothing_seen_is_nothing_found(watched: Truth) -> None:
    found = disaggregate.report([], watched)
    assert found["auc"] is None
    assert found["popularity_auc"] is not None


# Clustering


def sparse_check_ins(users: int) -> Truth:
    return histories(users, 4000, 6, seed=7, skew=0.3)


def test_rows_of_one_sum_are_traced_to_participants_and_their_sign_tells() -> None:
    truth = sparse_check_ins(300)
    view = Federation(truth, touch="once").ask(np.arange(30))
    found = cluster.report([view], truth)
    assert found["explained"] is not None
    assert found["explained"] > 0.9
    assert found["auc"] is not None
    assert found["popularity_auc"] is not None
    assert found["auc"] > 0.97 > found["popularity_auc"] + 0.05


def test_a_participants_items_come_out_together() -> None:
    truth = sparse_check_ins(30)
    federation = Federation(truth, touch="once")
    clusters = cluster.cluster(federation.ask(np.arange(30), keep=False))
    embedding = federation.private.embedding * federation.model["network"][:12]
    truly = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    alignment = np.abs(clusters.directions @ truly.T).max(axis=0)
    assert np.mean(alignment > 0.999) > 0.9


def test_with_a_closed_list_and_groups_no_row_is_traced() -> None:
    truth = histories(120, 150, 10, seed=8)
    opened = truth.consumed().sum(axis=0) >= 3
    view = Federation(truth, touch="once").ask(np.arange(120), opened)
    clusters = cluster.cluster(view)
    assert clusters.touched.sum() > 50
    assert not clusters.explained.any()


def test_rows_below_their_rounding_noise_are_not_clustered() -> None:
    rows = np.zeros((50, 4), np.float32)
    rows[:10] = np.arange(1, 11)[:, None] * np.array([1, -1, 2, 1], np.float32)
    loud = cluster.cluster(RoundView(0, np.array([1, 2]), rows, noise=0.0))
    drowned = cluster.cluster(RoundView(0, np.array([1, 2]), rows, noise=10.0))
    assert len(loud.directions) == 1
    assert loud.explained.sum() == 10
    assert not len(drowned.directions)


@given(st.integers(0, 1000))
def test_rows_of_two_participants_are_taken_apart(seed: int) -> None:
    rng = np.random.default_rng(seed)
    directions = rng.normal(0, 1, (2, 12))
    amounts = np.zeros((12, 2))
    amounts[:5, 0] = [1, -1, -1, -2, -1]
    amounts[5:10, 1] = [1.5, -1, -1, -2, -1]
    amounts[10], amounts[11] = (1, -0.5), (-0.5, -0.7)
    found = cluster.cluster(RoundView(0, np.array([1, 2]), (amounts @ directions).astype(np.float32)))
    assert found.explained[:12].all()
    assert np.array_equal(
        np.sort(np.sign(found.amounts[10:]), axis=1), np.sort(np.sign(amounts[10:]), axis=1)
    )


def parallel_through_others(unit: npt.NDArray[np.float64], slack: npt.NDArray[np.float64]) -> list[int]:
    """Return what `cluster._parallel` does, pair by pair."""
    found = list(range(len(unit)))
    for first in range(len(unit)):
        for second in range(first + 1, len(unit)):
            if 1 - (unit[first] @ unit[second]) ** 2 <= slack[first] + slack[second] + 1e-12:
                roots = {found[first], found[second]}
                found = [min(roots) if label in roots else label for label in found]
    return found


@given(seed=st.integers(0, 1000), rows=st.integers(0, 40), block=st.sampled_from([1, 7, 1024]))
def test_rows_that_are_parallel_through_others_have_one_label(seed: int, rows: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    # Angles in steps, far from the limit: whether two are parallel does not hang on the order of a product's additions.
    angle = rng.integers(0, 120, rows) * np.pi / 120
    unit = np.stack([np.cos(angle), np.sin(angle)], axis=1) * rng.choice([-1.0, 1.0], (rows, 1))
    slack = rng.choice([0.0001, 0.0005, 0.001], rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_BLOCK", block)
        assert cluster._parallel(unit, slack).tolist() == parallel_through_others(unit, slack)


# Differencing


def test_two_sums_of_one_version_that_differ_by_one_give_its_contribution() -> None:
    truth = histories(40, 100, 10, seed=3)
    federation = Federation(truth)
    cohort = np.arange(20)
    views = [
        federation.ask(cohort, keep=False, draw=1),
        federation.ask(np.delete(cohort, 7), keep=False, draw=1),
    ]
    (found,) = differencing.differences(views, 40)
    alone = federation.ask(cohort[[7]], keep=False, draw=1)
    assert found.slot == 7
    assert found.versions == (0, 0)
    assert found.rows is not None
    assert found.touched is not None
    assert alone.rows is not None
    assert np.array_equal(found.touched, alone.touched)
    np.testing.assert_allclose(found.rows, alone.rows, atol=1e-5)


def test_the_sign_of_a_difference_tells_own_items_from_sampled_ones() -> None:
    truth = histories(40, 100, 10, seed=3)
    federation = Federation(truth)
    cohort = np.arange(20)
    views = [federation.ask(cohort, keep=False, draw=1)]
    views += [federation.ask(np.delete(cohort, k), keep=False, draw=1) for k in range(6)]
    found = differencing.report(views, truth)
    assert found["auc"] is not None
    assert found["auc"] > 0.99
    assert found["exposed"] == 6 / 40
    assert found["same_version"] == 6


def test_differences_of_rounds_with_dropouts_expose_who_dropped_out() -> None:
    consumed = (truth := histories(40, 100, 10, seed=3)).consumed().astype(np.float32)
    everybody = np.arange(40)
    views = [RoundView(0, everybody, touched=consumed.sum(axis=0))]
    for version, absent in enumerate((4, 9), start=1):
        stayed = np.delete(everybody, absent)
        views.append(RoundView(version, stayed, touched=consumed[stayed].sum(axis=0)))
    found = differencing.report(views, truth)
    assert found["auc"] == 1.0
    assert found["exposed"] == 2 / 40
    assert found["pairs"] == 2
    assert found["same_version"] == 0


def test_sums_over_whole_groups_have_no_difference() -> None:
    truth = histories(200, 60, 8, seed=3)
    federation = Federation(truth)
    groups = random_cohorts(200, 100, 1, seed=0)
    found = differencing.report([federation.ask(group) for _ in range(3) for group in groups], truth)
    assert found["auc"] is None
    assert found["exposed"] == 0
    assert found["pairs"] == 0


# Inversion


class Batch:
    """One batch of a participant, and the model that everybody knows."""

    def __init__(self, model: str, size: int, seed: int, *, items: int = 200) -> None:
        self.architecture = Architecture(model=model)
        rng = np.random.default_rng(seed)
        self.known = np.random.default_rng(0)
        self.rows = self.known.normal(0, 0.4, (items, self.architecture.width)).astype(np.float32)
        self.network = networks.initial_network(self.architecture, self.known)
        self.items = np.sort(rng.choice(items, size, replace=False))
        self.labels = np.zeros(size)
        self.labels[rng.choice(size, max(size // 5, 1), replace=False)] = 1
        self.user = rng.normal(0, 0.4, self.architecture.width)

    def gradient(
        self, user: npt.NDArray[np.float64], items: Ids, labels: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        n = len(items)
        rows = np.ones((1, self.architecture.width + 1, n))
        rows[0, :-1] = self.rows[items].T
        found = networks.gradients(
            self.architecture,
            np.asarray(user, np.float32)[None, :, None],
            rows.astype(np.float32),
            self.network,
            np.asarray(labels, np.float32)[None],
            np.full((1, n), 1 / n, np.float32),
        )
        return found.rows[0].T.astype(np.float64), found.network[0].astype(np.float64)

    def sent(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        rows, network = self.gradient(self.user, self.items, self.labels)
        dense = np.zeros(self.rows.shape)
        dense[self.items] = rows
        return dense, network

    def attacked(
        self, rows: npt.NDArray[np.float64], network: npt.NDArray[np.float64], starts: int = 8
    ) -> Judged:
        rng = np.random.default_rng(5)
        found = invert(rows, network, self.gradient, batch=len(self.items), bound=0.4, rng=rng, starts=starts)
        return judge(found, self.items, self.labels)


@pytest.mark.parametrize(
    ("model", "size"), [("gmf", 1), ("gmf", 2), ("gmf", 5), ("gmf", 8), ("neumf", 5), ("neumf", 8)]
)
def test_a_batch_in_clear_is_read_off_its_gradient(model: str, size: int) -> None:
    batch = Batch(model, size, seed=size)
    assert batch.attacked(*batch.sent()).exact


@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_a_batch_under_a_sum_over_a_cohort_is_not_found(model: str) -> None:
    others = [Batch(model, 5, seed) for seed in range(20)]
    sent = [batch.sent() for batch in others]
    rows, network = (sum(part) for part in zip(*sent, strict=True))
    judged = [batch.attacked(rows, network, starts=2) for batch in others[:2]]
    assert np.mean([each.labels for each in judged]) < 0.3
    assert not any(each.exact for each in judged)


def test_an_update_that_changes_no_row_holds_no_batch() -> None:
    batch = Batch("gmf", 2, seed=0)
    with pytest.raises(ValueError, match="no row"):
        batch.attacked(np.zeros((200, 12)), np.zeros(batch.architecture.network_size))


def test_sums_over_one_user_each_are_read_as_they_are_in_whatever_order_they_came() -> None:
    truth = histories(60, 80, 8, seed=0)
    consumed = truth.consumed()
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(60)
        views = [RoundView(0, np.array([user]), touched=consumed[user].astype(np.float32)) for user in order]
        assert disaggregate.report(views, truth)["auc"] == 1


def test_guessing_by_popularity_is_what_attacks_are_measured_against() -> None:
    truth = histories(50, 80, 10, seed=0)
    found = disaggregate.report([], truth)
    assert found["popularity_auc"] == mean_auc(truth.popularity(), truth.consumed())[0]
