"""The COS as attacker on a small DRIFT run, simulated here with mathematics of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from coterie.errors import DataError
from coterie.privacy.attacks.scoring import Truth, flag_accuracies, mean_auc
from coterie.privacy.transcript import TranscriptWriter
from coterie.systems.drift.study.exchanges import SeenGradient, read_exchanges
from coterie.systems.drift.study.gradient_sign import solve
from coterie.systems.drift.study.published_attacks import report
from coterie.wire.refusal import ErrorReason
from coterie.wire.tensor import to_wire
from coterie.wire.v1.orchestrator_pb2 import (
    ExchangeManyRequest,
    ExchangeManyResponse,
    ExchangeRequest,
    ExchangeResponse,
    Gradient,
    OwnerProgress,
    RunPlan,
)

PLAN = RunPlan(
    run_id="run-1", system="drift", form="published", dim=16, rate=0.2, ridge=0.01, theta=2, epochs=2
)
USERS, ITEMS, OWNERS = 60, 240, 3


def an_interaction_history(seed: int) -> Truth:
    """Popular items are taken more often; items are liked or not by what they are, users agree now and then."""
    rng = np.random.default_rng(seed)
    weight = 1 / (np.arange(ITEMS) + 8)
    liked = rng.random(ITEMS) < 0.6
    users, items = [], []
    for user in range(USERS):
        taken = rng.choice(ITEMS, size=rng.integers(10, 26), replace=False, p=weight / weight.sum())
        users += [user] * len(taken)
        items += list(taken)
    flags = np.where(rng.random(len(items)) < 0.3, rng.random(len(items)) < 0.5, liked[items])
    return Truth(np.array(users), np.array(items), flags, USERS, ITEMS)


OWNER_OF = np.random.default_rng(3).integers(0, OWNERS, ITEMS)


def trained_on(history: Truth) -> Truth:
    """Without the records that never became part of a whole block."""
    pairs = {
        (user, item)
        for owner in range(OWNERS)
        for user, negatives, positives in blocks_of(history, owner == OWNER_OF)
        for item in negatives + positives
    }
    kept = np.array([pair in pairs for pair in zip(history.users, history.items, strict=True)])
    return Truth(history.users[kept], history.items[kept], history.positive[kept], USERS, ITEMS)


def blocks_of(truth: Truth, holds: npt.NDArray[np.bool_]) -> list[tuple[int, list[int], list[int]]]:
    """Alg. 2: negatives, then positives; a negative after a positive opens the next block."""
    blocks = []
    for user in range(truth.n_users):
        negatives: list[int] = []
        positives: list[int] = []
        for at in np.flatnonzero(truth.users == user):
            item = int(truth.items[at])
            if not holds[item]:
                continue
            if truth.positive[at]:
                positives.append(item)
            elif positives:
                blocks.append((user, negatives, positives))
                negatives, positives = [item], []
            else:
                negatives.append(item)
        blocks.append((user, negatives, positives))
    return [block for block in blocks if block[1] and block[2]]


@dataclass
class Run:
    """A COS, its owners, and the transcript that it keeps."""

    writer: TranscriptWriter
    truth: Truth
    shuffled: bool = False
    noise: float = 0.0
    plan: RunPlan = field(default_factory=lambda: PLAN)
    version: int = 0
    local_updates: int = 1

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        dim = self.plan.dim
        self.V = self.rng.normal(0, 0.3, (self.truth.n_users, dim)).astype(np.float32)
        self.P = self.rng.normal(0, 0.3, (self.truth.n_items, dim)).astype(np.float32)

    def train(self, owner_of: npt.NDArray[np.int64], owners: int) -> None:
        held = [blocks_of(self.truth, owner_of == owner) for owner in range(owners)]
        sequence = [0] * owners
        pending: list[list[Gradient]] = [[] for _ in range(owners)]
        for epoch in range(1, self.plan.epochs + 1):
            work = []
            for owner in range(owners):
                order = self.rng.permutation(len(held[owner]))
                step = self.plan.theta
                work.append([order[at : at + step] for at in range(0, len(order), step)])
            # Owners take turns: each computes on rows that the others have moved since.
            for turn in range(0, max(map(len, work)), self.local_updates):
                for owner in range(owners):
                    if turn < len(work[owner]):
                        sequence[owner] += 1
                        updates = [
                            [held[owner][block] for block in update]
                            for update in work[owner][turn : turn + self.local_updates]
                        ]
                        first = turn * self.plan.theta
                        pending[owner] = self.exchange(
                            owner, sequence[owner], pending[owner], updates, epoch, first
                        )
        for owner in range(owners):
            last = ExchangeRequest(run_id="run-1", owner=owner, sequence=10**6, gradient=pending[owner][0])
            last.further.extend(pending[owner][1:])
            self.record(owner, last)

    def exchange(self, owner, sequence, gradients, updates, epoch, first) -> list[Gradient]:
        users, items = named_by([block for update in updates for block in update])
        named = users
        if self.shuffled:
            others = np.setdiff1d(np.arange(self.truth.n_users), users)
            named = np.sort(self.rng.choice(others, len(users), replace=False))
        request = ExchangeRequest(
            run_id="run-1",
            owner=owner,
            sequence=sequence,
            users=to_wire(named.astype(np.uint32)),
            items=to_wire(items.astype(np.uint32)),
        )
        if gradients:
            request.gradient.CopyFrom(gradients[0])
            request.further.extend(gradients[1:])
        self.record(owner, request)
        at = OwnerProgress(sequence=sequence)
        for gradient in gradients:
            self.apply(gradient)
            self.version += 1
            at.epoch, at.blocks = gradient.epoch, gradient.first_block + gradient.blocks
        answer = ExchangeResponse(
            version=self.version,
            user_rows=to_wire(self.V[named]),
            item_rows=to_wire(self.P[items]),
            progress=at,
        )
        self.record(owner, answer, direction="sent")
        held = self.V.copy(), self.P.copy()
        found = []
        for update in updates:
            found.append(self.gradient(update, epoch, first, named if self.shuffled else None))
            first += len(update)
            # The owner goes on with its own rows; the server's move once it has the gradients.
            self.apply(found[-1])
        self.V, self.P = held
        return found

    def gradient(self, update, epoch, first, named) -> Gradient:
        users, items = named_by(update)
        dv, dp = self.gradients(users, items, update)
        if self.noise:
            dp += self.rng.normal(0, self.noise, dp.shape)
        return Gradient(
            rows_version=self.version,
            epoch=epoch,
            first_block=first,
            blocks=len(update),
            users=to_wire((users if named is None else named).astype(np.uint32)),
            items=to_wire(items.astype(np.uint32)),
            user_gradient=to_wire(dv.astype(np.float32)),
            item_gradient=to_wire(dp.astype(np.float32)),
        )

    def gradients(self, users, items, update):
        """Sum over blocks of the mean over pairs of -log sigma(v (psi_i - psi_j)), with ridge on what a pair has."""
        dv = np.zeros((len(users), self.plan.dim))
        dp = np.zeros((len(items), self.plan.dim))
        for user, negatives, positives in update:
            v = self.V[user].astype(float)
            row = np.searchsorted(users, user)
            share = 1 / (len(negatives) * len(positives))
            for i in positives:
                for j in negatives:
                    psi_i, psi_j = self.P[i].astype(float), self.P[j].astype(float)
                    g = 0.5 - 0.5 * np.tanh(v @ (psi_i - psi_j) / 2)
                    ridge = 2 * self.plan.ridge
                    dv[row] += share * (-g * (psi_i - psi_j) + ridge * v)
                    dp[np.searchsorted(items, i)] += share * (-g * v + ridge * psi_i)
                    dp[np.searchsorted(items, j)] += share * (g * v + ridge * psi_j)
        return dv, dp

    def apply(self, gradient: Gradient) -> None:
        rate = np.float32(self.plan.rate)
        for rows, ids, change in (
            (self.V, gradient.users, gradient.user_gradient),
            (self.P, gradient.items, gradient.item_gradient),
        ):
            step = np.frombuffer(change.data, "<f4").reshape(-1, self.plan.dim)
            rows[np.frombuffer(ids.data, "<u4")] -= rate * step

    def record(self, owner: int, message, direction: str = "received") -> None:
        # Two owners share a process, hence a connection.
        peer = f"data-owner/host-{owner // 2}"
        self.writer.record(
            rpc="Exchange", peer=peer, direction=direction, payload=message.SerializeToString(), side="server"
        )


def named_by(blocks):
    """Return users and items of blocks, ascending."""
    users = np.unique([user for user, _, _ in blocks])
    return users, np.unique([item for _, negatives, positives in blocks for item in negatives + positives])


def run_to(path: Path, truth: Truth, **options) -> Path:
    with TranscriptWriter(path, "cos/cos") as writer:
        Run(writer, truth, **options).train(OWNER_OF, OWNERS)
    return path


@pytest.fixture(scope="module")
def truth() -> Truth:
    return trained_on(an_interaction_history(1))


@pytest.fixture(scope="module")
def published(tmp_path_factory, truth):
    path = run_to(tmp_path_factory.mktemp("run") / "cos.bin", truth)
    return path, report([path], truth, PLAN)


def test_the_rows_named_in_requests_give_away_who_has_what(published):
    found = published[1]["requested_rows"]
    assert found["auc"] > 0.95
    assert found["auc"] > found["popularity_auc"] + 0.1
    assert found["users"] > USERS - 3


def test_item_gradients_give_away_who_has_what_and_who_liked_it(published):
    found = published[1]["gradient_sign"]
    assert found["auc"] > 0.95
    assert found["auc"] > found["popularity_auc"] + 0.1
    assert found["precision"] > 0.99
    assert found["coverage"] > 0.8
    assert found["flag_accuracy"] > 0.99
    assert found["flag_accuracy"] > max(found["majority_accuracy"], found["item_majority_accuracy"]) + 0.1
    assert found["unsolved"] == 0


def test_several_gradients_in_an_exchange_give_away_as_much(tmp_path, truth, published):
    path = run_to(tmp_path / "cos.bin", truth, local_updates=4)
    found, alone = report([path], truth, PLAN)["gradient_sign"], published[1]["gradient_sign"]
    assert (found["gradients"], found["unsolved"]) == (alone["gradients"], 0)
    for name in ("auc", "precision", "coverage", "flag_accuracy"):
        assert found[name] > alone[name] - 0.01


def test_where_records_left_no_trace_the_attacker_falls_back_on_popularity(published):
    everything = an_interaction_history(1)
    found = report([published[0]], everything, PLAN)["gradient_sign"]
    assert found["coverage"] < 0.8
    assert found["auc_with_popularity"] > found["auc"] + 0.02
    assert found["auc_with_popularity"] > found["popularity_auc"] + 0.05


def test_the_report_is_ready_for_json(published):
    assert json.loads(json.dumps(published[1])) == published[1]


def test_with_other_users_named_neither_attack_beats_popularity(tmp_path, truth):
    path = run_to(tmp_path / "cos.bin", truth, shuffled=True)
    found = report([path], truth, PLAN)
    popularity = found["requested_rows"]["popularity_auc"]
    for attack in ("requested_rows", "gradient_sign"):
        assert found[attack]["auc"] < popularity + 0.02
        assert found[attack]["auc_with_popularity"] < popularity + 0.02
    assert found["gradient_sign"]["coverage"] < 0.01


def test_gradients_of_noise_tell_neither_pairs_nor_flags(tmp_path, truth, published):
    path = run_to(tmp_path / "cos.bin", truth, noise=100.0)
    found = report([path], truth, PLAN)["gradient_sign"]
    assert found["coverage"] < 0.01
    assert found["flag_accuracy_all"] < found["majority_accuracy_all"] + 0.05
    # What is left of the AUC is who was named, which the other attack has already.
    assert found["auc"] < published[1]["requested_rows"]["auc"]


def test_flags_read_from_noise_are_right_half_the_time():
    rng = np.random.default_rng(0)
    right = []
    for _ in range(400):
        users = rng.normal(size=(2, 16)).astype(np.float32)
        items = rng.normal(size=(8, 16)).astype(np.float32)
        noise = rng.normal(size=(8, 16)).astype(np.float32)
        coefficients, _ = solve(
            SeenGradient(np.arange(2, dtype=np.uint32), np.arange(8, dtype=np.uint32), users, items, noise),
            ridge=True,
        )
        right.append(np.mean(coefficients < 0))
    assert abs(np.mean(right) - 0.5) < 0.03


def test_moderate_noise_lowers_the_evidence_but_not_to_nothing(tmp_path, truth, published):
    path = run_to(tmp_path / "cos.bin", truth, noise=0.05)
    found = report([path], truth, PLAN)["gradient_sign"]
    clean = published[1]["gradient_sign"]
    assert found["coverage"] < clean["coverage"]
    assert found["auc"] > found["popularity_auc"]
    # Sure of few pairs, yet right about most: the report does not hide a leak behind the noise.
    assert found["item_majority_accuracy_all"] < found["flag_accuracy_all"]


def test_a_repeated_request_is_counted_once(tmp_path, truth, published):
    once = published[1]["requested_rows"]
    path = tmp_path / "cos.bin"
    with TranscriptWriter(path, "cos/cos") as writer:
        run = Run(writer, truth)
        record = run.record

        def twice(*arguments, **options):
            record(*arguments, **options)
            record(*arguments, **options)

        run.record = twice
        run.train(OWNER_OF, OWNERS)
    again = report([path], truth, PLAN)
    assert again["requested_rows"] == once
    assert again["gradient_sign"]["auc"] == pytest.approx(published[1]["gradient_sign"]["auc"], abs=1e-6)


def test_exchanges_that_several_owners_make_in_one_message_show_the_same(tmp_path, truth, published):
    path = tmp_path / "cos.bin"
    with TranscriptWriter(path, "cos/cos") as writer:
        run = Run(writer, truth)

        def among_others(owner, message, direction="received"):
            if isinstance(message, ExchangeRequest):
                elsewhere = ExchangeRequest(run_id="run-2", owner=owner, sequence=message.sequence)
                many = ExchangeManyRequest(exchanges=[elsewhere, message])
            else:
                many = ExchangeManyResponse(answers=[ExchangeResponse(), message])
                many.refused.add(index=0, reason=ErrorReason.ERROR_REASON_UNKNOWN_ROUND)
            writer.record(
                rpc="ExchangeMany",
                peer=f"data-owner/host-{owner // 2}",
                direction=direction,
                payload=many.SerializeToString(),
                side="server",
            )

        run.record = among_others
        run.train(OWNER_OF, OWNERS)
    found = report([path], truth, PLAN)
    assert found["requested_rows"] == published[1]["requested_rows"]
    assert found["gradient_sign"]["gradients"] == published[1]["gradient_sign"]["gradients"] > 0
    assert found["gradient_sign"]["auc"] == pytest.approx(published[1]["gradient_sign"]["auc"], abs=1e-6)


def test_a_gradient_whose_rows_are_not_in_the_transcript_is_counted_as_unsolved(tmp_path, truth):
    users, items = to_wire(np.array([3], np.uint32)), to_wire(np.array([5, 9], np.uint32))
    gradient = Gradient(rows_version=4, epoch=1, blocks=1, users=users, items=items)
    gradient.item_gradient.CopyFrom(to_wire(np.ones((2, 16), np.float32)))
    request = ExchangeRequest(
        run_id="run-1", owner=0, sequence=1, gradient=gradient, users=users, items=items
    )
    with TranscriptWriter(tmp_path / "cos.bin", "cos/cos") as writer:
        for payload in [request.SerializeToString()] * 2:
            writer.record(rpc="Exchange", peer="data-owner/x", direction="received", payload=payload)
    found = report([tmp_path / "cos.bin"], truth, PLAN)
    assert (found["gradient_sign"]["gradients"], found["gradient_sign"]["unsolved"]) == (0, 1)
    assert found["requested_rows"]["exchanges"] == 1
    assert found["gradient_sign"]["flag_accuracy"] is None


def test_exchanges_of_another_run_are_left_out(published):
    assert list(read_exchanges([published[0]], "run-2", PLAN.rate)) == []


def test_a_request_that_cannot_be_read_teaches_nothing(tmp_path):
    broken = ExchangeRequest(run_id="run-1", owner=0, sequence=1, users=to_wire(np.ones(3, np.float32)))
    broken.items.CopyFrom(to_wire(np.array([1], np.uint32)))
    with TranscriptWriter(tmp_path / "cos.bin", "cos/cos") as writer:
        writer.record(
            rpc="Exchange", peer="data-owner/x", direction="received", payload=broken.SerializeToString()
        )
        for rpc in ("Exchange", "ExchangeMany"):
            writer.record(rpc=rpc, peer="data-owner/x", direction="received", payload=b"\xff\xff")
    assert list(read_exchanges([tmp_path / "cos.bin"], "run-1", PLAN.rate)) == []


def test_a_request_for_rows_that_do_not_exist_teaches_nothing(tmp_path, truth):
    request = ExchangeRequest(run_id="run-1", owner=0, sequence=1)
    request.users.CopyFrom(to_wire(np.array([USERS], np.uint32)))
    request.items.CopyFrom(to_wire(np.array([0], np.uint32)))
    with TranscriptWriter(tmp_path / "cos.bin", "cos/cos") as writer:
        writer.record(
            rpc="Exchange", peer="data-owner/x", direction="received", payload=request.SerializeToString()
        )
    assert report([tmp_path / "cos.bin"], truth, PLAN)["requested_rows"]["exchanges"] == 0


def seen(coefficients: npt.NDArray[np.float64], ridge: float, seed: int = 0) -> SeenGradient:
    """Item gradients with known coefficients, shape (m, n)."""
    rng = np.random.default_rng(seed)
    m, n = coefficients.shape
    V, P = rng.normal(size=(m, 16)).astype(np.float32), rng.normal(size=(n, 16)).astype(np.float32)
    G = (coefficients.T @ V.astype(float) + ridge * P).astype(np.float32)
    return SeenGradient(np.arange(m, dtype=np.uint32), np.arange(n, dtype=np.uint32), V, P, G)


def test_coefficients_are_found_with_and_without_a_ridge():
    true = np.array([[-0.4, 0.0, 0.2, 1e-4], [0.0, 0.3, 0.1, 0.0]])
    for ridge in (0.0, 0.02):
        coefficients, evidence = solve(seen(true, ridge), ridge=ridge > 0)
        np.testing.assert_allclose(coefficients, true, atol=1e-6)
        assert (evidence[true != 0] > 0.99).all()
        assert (evidence[true == 0] < 0.9).all()


def test_a_ridge_that_the_attacker_does_not_know_of_spoils_the_fit():
    _, evidence = solve(seen(np.array([[-0.02], [0.0]]), 0.5), ridge=False)
    assert (evidence < 0.99).all()


def test_an_update_with_as_many_users_as_dimensions_cannot_be_solved():
    assert solve(seen(np.ones((16, 2)), 0.0), ridge=False) is None
    assert solve(seen(np.ones((15, 2)), 0.0), ridge=False) is not None
    assert solve(seen(np.ones((15, 2)), 0.1), ridge=True) is None


def test_a_zero_gradient_is_evidence_of_nothing():
    _, evidence = solve(seen(np.zeros((2, 3)), 0.0), ridge=True)
    assert (evidence == 0).all()


def test_auc_is_one_for_the_truth_half_for_a_constant_and_zero_for_the_opposite():
    consumed = np.random.default_rng(2).random((5, 30)) < 0.3
    assert mean_auc(consumed.astype(np.float32), consumed) == (1.0, 5)
    assert mean_auc(np.zeros(30), consumed) == (0.5, 5)
    assert mean_auc(-consumed.astype(np.float32), consumed) == (0.0, 5)


def test_auc_counts_pairs_in_the_right_order_with_ties_as_half():
    rng = np.random.default_rng(4)
    scores = rng.integers(0, 4, (6, 20)).astype(np.float64)
    consumed = rng.random((6, 20)) < 0.4
    by_hand = []
    for row, has in zip(scores, consumed, strict=True):
        gaps = row[has][:, None] - row[~has][None, :]
        by_hand.append(np.mean((gaps > 0) + 0.5 * (gaps == 0)))
    assert mean_auc(scores, consumed)[0] == pytest.approx(np.mean(by_hand))


def test_users_with_nothing_or_everything_are_not_counted():
    consumed = np.array([[True, True], [False, False], [True, False]])
    assert mean_auc(np.array([2.0, 1.0]), consumed) == (1.0, 1)
    assert mean_auc(np.array([2.0, 1.0]), consumed[:2]) == (None, 0)


def test_the_item_majority_does_not_count_the_pair_it_guesses():
    truth = Truth(np.array([0, 1, 2, 0]), np.array([0, 0, 0, 1]), np.array([True, False, False, True]), 3, 2)
    votes = np.array([0.3, -0.1, 0.2, 0.0], np.float32)
    found = flag_accuracies(truth, votes, np.ones(4, bool))
    # Overall the flags are split, which counts as positive: so does the vote that cannot say.
    assert found.votes == 0.75
    assert found.majority == 0.5
    # Item 0: the others of the positive are both negative (wrong); those of a negative are split (wrong).
    # Item 1 has no other user: the commonest flag of all (right).
    assert found.item_majority == 0.25


def test_flag_accuracies_are_over_the_chosen_pairs_only():
    truth = Truth(np.array([0, 1]), np.array([0, 1]), np.array([True, False]), 2, 2)
    votes = np.array([1.0, 1.0], np.float32)
    assert flag_accuracies(truth, votes, np.array([True, False])).votes == 1
    assert flag_accuracies(truth, votes, np.array([False, True])).votes == 0
    assert flag_accuracies(truth, votes, np.zeros(2, bool)) == (None, None, None)


def test_a_truth_that_does_not_fit_is_refused():
    with pytest.raises(DataError, match="item"):
        Truth(np.array([0]), np.array([7]), np.array([True]), 3, 7)
    with pytest.raises(DataError, match="flags"):
        Truth(np.array([0]), np.array([1, 2]), np.array([True]), 3, 7)
