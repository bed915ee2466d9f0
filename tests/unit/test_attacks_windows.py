"""The attacks of DRIFT's published form on what the COS receives in the shielded one."""

import hashlib

import numpy as np
import pytest

from coterie.privacy.attacks.scoring import Truth, mean_auc
from coterie.privacy.transcript import TranscriptWriter
from coterie.rounds.conductor import model_to_bytes
from coterie.secure_sum.contribution import Contribution
from coterie.systems.drift.blocks import BlockBuilder
from coterie.systems.drift.mathematics import apply as step_by
from coterie.systems.drift.mathematics import fetch, gradients, initial, wanted
from coterie.systems.drift.settings import DriftSettings
from coterie.systems.drift.shielded import HeldRows, visit
from coterie.systems.drift.study.exchanges import Exchange, SeenGradient
from coterie.systems.drift.study.gradient_sign import GradientSign
from coterie.systems.drift.study.requested_rows import RequestedRows
from coterie.systems.drift.study.windows_attacks import read_windows, report
from coterie.wire.chunks import split
from coterie.wire.v1.common_pb2 import RoundRef, SlotRange
from coterie.wire.v1.orchestrator_pb2 import FetchResponse, RunPlan, SubmitKind, SubmitRequest
from coterie.wire.v1.rounds_pb2 import SummedVector

USERS, ITEMS, DIM = 60, 80, 8
SETTINGS = DriftSettings(form="shielded", dim=DIM, rate=0.2, ridge=1e-3)


def plan(secure_sum="clear"):
    return RunPlan(
        run_id="run", system="drift", form="shielded", secure_sum=secure_sum, dim=DIM, rate=SETTINGS.rate,
        settings=SETTINGS.for_plan(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def data():
    """Return interactions by user, popular items more often; and the truth about them."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, ITEMS + 1) ** 0.6
    by_user = []
    for _ in range(USERS):
        items = rng.choice(ITEMS, 16, replace=False, p=share / share.sum())
        flags = rng.random(16) < 0.5
        flags[0], flags[-1] = False, True
        by_user.append((items, flags))
    users = np.repeat(np.arange(USERS), 16)
    items = np.concatenate([one for one, _ in by_user])
    flags = np.concatenate([one for _, one in by_user])
    return by_user, Truth(users, items, flags, USERS, ITEMS)


def blocks_of(by_user):
    found = []
    for user, (items, flags) in enumerate(by_user):
        builder = BlockBuilder()
        found.append(builder.extend(user, items, flags) + builder.close(user))
    return found


def submitted(number, gradient, released):
    """Return what an owner submits in a window."""
    layout = SETTINGS.window_layout(ITEMS)
    contribution = Contribution(layout)
    contribution.add("gradient", gradient, np.random.default_rng(number), rows=released)
    contribution.count()
    payload = SummedVector(codes=contribution.codes().astype("<u4").tobytes()).SerializeToString()
    request = SubmitRequest(
        round=RoundRef(run_id="run", round=number),
        kind=SubmitKind.SUBMIT_KIND_VECTOR,
        slots=[SlotRange(first=USERS, count=1)],
        sha256=hashlib.sha256(payload).digest(),
    )
    for chunk in split(payload):
        request.chunk.CopyFrom(chunk)
        yield request
        request = SubmitRequest()


def model_at(version, Psi):
    payload = model_to_bytes({"items": Psi, "version": np.array([version], np.float32)})
    head = FetchResponse(version=version, total_bytes=len(payload))
    for chunk in split(payload):
        head.chunk.CopyFrom(chunk)
        yield head
        head = FetchResponse()


def shielded(path, by_user, *, k_min, window, epochs=3):
    """Run the shielded form over one owner, and record what the COS receives and sends."""
    rng = np.random.default_rng(1)
    Upsilon, Psi = initial(USERS, ITEMS, SETTINGS, 0)
    blocks, held, number, since = blocks_of(by_user), HeldRows(ITEMS, DIM), 0, 0
    with TranscriptWriter(path, "cos/cos") as writer:

        def record(rpc, direction, messages):
            for message in messages:
                writer.record(
                    rpc=rpc, peer="data-owner/one", direction=direction,
                    payload=message.SerializeToString(), side="server",
                )  # fmt: skip

        record("Fetch", "sent", model_at(0, Psi))
        for _ in range(epochs):
            for user in rng.permutation(USERS):
                made = visit(blocks[user], Upsilon[user], Psi, SETTINGS)
                held.add(int(user), made.items, made.gradient)
                Upsilon[user] += made.step
                since += 1
                if since >= window:
                    since, number = 0, number + 1
                    released = held.release(k_min)
                    record("Submit", "received", submitted(number, released.gradient, released.items))
                    Psi[released.items] -= np.float32(SETTINGS.rate) * released.gradient
                    record("Fetch", "sent", model_at(number, Psi))
    return number


def published(by_user, truth):
    """Run the published form, and attack what the COS sees of it."""
    Upsilon, Psi = initial(USERS, ITEMS, SETTINGS, 0)
    rows, sign = RequestedRows(USERS, ITEMS), GradientSign(USERS, ITEMS, ridge=True)
    blocks = [block for own in blocks_of(by_user) for block in own]
    rng = np.random.default_rng(2)
    for _ in range(3):
        order = rng.permutation(len(blocks))
        for first in range(0, len(blocks), 2):
            chunk = [blocks[n] for n in order[first : first + 2]]
            users, items = wanted(chunk)
            seen = fetch(Upsilon, Psi, users, items)
            update = gradients(chunk, seen, SETTINGS.ridge)
            gradient = SeenGradient(
                users.astype(np.uint32), items.astype(np.uint32), seen.user_rows, seen.item_rows,
                update.item_gradient,
            )  # fmt: skip
            rows.add(Exchange(0, gradient.users, gradient.items, True, gradient))
            sign.add(gradient)
            step_by(Upsilon, Psi, update, SETTINGS.rate)
    consumed = truth.consumed()
    return mean_auc(rows.scores, consumed)[0], mean_auc(sign.scores, consumed)[0]


def test_what_succeeds_on_the_published_form_tells_no_more_than_popularity_on_the_shielded_one(
    data, tmp_path
):
    by_user, truth = data
    popularity = mean_auc(truth.popularity(), truth.consumed())[0]
    assert popularity < 0.8
    assert min(published(by_user, truth)) > 0.95
    windows = shielded(tmp_path / "cos.bin", by_user, k_min=5, window=30)
    found = report([tmp_path / "cos.bin"], truth, plan())
    assert found["requested_rows"]["windows"] == windows
    for attack in found.values():
        assert attack["popularity_auc"] == pytest.approx(popularity)
        assert attack["auc"] <= popularity + 0.02
        assert attack["auc_with_popularity"] <= popularity + 0.02
    assert found["gradient_sign"]["rows"] > 100
    assert found["gradient_sign"]["traced"] <= 0.02


def test_without_the_floor_of_users_rows_are_traced_to_single_users(data, tmp_path):
    by_user, truth = data
    # Of one block the rows of the items that were passed over, and those liked, are parallel but for the ridge.
    shielded(
        tmp_path / "cos.bin",
        [(items[:], np.arange(16) > 7) for items, _ in by_user],
        k_min=1,
        window=1,
        epochs=1,
    )
    found = report([tmp_path / "cos.bin"], truth, plan())
    assert found["gradient_sign"]["traced"] > 0.9


def test_under_masks_the_steps_between_versions_are_all_there_is_to_read(data, tmp_path):
    by_user, truth = data
    windows = shielded(tmp_path / "cos.bin", by_user, k_min=5, window=30)
    clear = {one.number: one for one in read_windows([tmp_path / "cos.bin"], plan())}
    sums = list(read_windows([tmp_path / "cos.bin"], plan("masked")))
    assert len(sums) == windows
    for one in sums:
        np.testing.assert_allclose(one.gradient, clear[one.number].gradient, atol=1e-4)
        assert one.owner == -1
    found = report([tmp_path / "cos.bin"], truth, plan("masked"))
    assert all(attack["auc"] <= attack["popularity_auc"] + 0.02 for attack in found.values())


def test_a_window_that_is_sent_again_counts_once_and_other_runs_not_at_all(data, tmp_path):
    gradient, items = np.ones((3, DIM), np.float32), np.array([1, 5, 7])
    with TranscriptWriter(tmp_path / "cos.bin", "cos/cos") as writer:
        for peer, run in (("data-owner/one", "run"), ("data-owner/one", "run"), ("data-owner/one", "other")):
            for message in submitted(4, gradient, items):
                if message.round.run_id:
                    message.round.run_id = run
                writer.record(
                    rpc="Submit", peer=peer, direction="received",
                    payload=message.SerializeToString(), side="server",
                )  # fmt: skip
    (window,) = read_windows([tmp_path / "cos.bin"], plan())
    assert (window.number, window.owner) == (4, USERS)
    np.testing.assert_array_equal(np.flatnonzero(window.touched), items)
    np.testing.assert_allclose(window.gradient[items], gradient, atol=1e-4)
