"""DRIFT's shielded form over real processes: clear and masked come to the same; whatever is killed, visits count once.

Two sums say whether anything was lost or counted twice.  An item's row has moved by the rate times all gradients that
its owners ever computed, less what they still hold back; a user's row by all steps that owners ever answered.
"""

import asyncio
import contextlib
import sqlite3
from collections import defaultdict

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from coterie.data.keyed_order import key_hash
from coterie.privacy.canaries import CanaryKit, pack_records
from coterie.privacy.visibility import Audit, observed
from coterie.store.engine import open_sqlite
from coterie.systems.drift.mathematics import initial_item_rows
from coterie.systems.drift.shielded import initial_row
from coterie.systems.visibility import rows_of
from coterie.wire.v1.client_pb2 import DisclosureReceiptRequest, UserRecommendRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub
from coterie.wire.visit import Reply

from .stores import rows

of_the_clear_run = pytest.mark.xdist_group("shielded")
"""Reads the fixture `clear`, which is trained once."""

EPOCHS = 3
DIM = 8

KEEP_GRADIENTS = (
    "CREATE TABLE kept (owner BLOB, slot INTEGER, items BLOB, gradient BLOB)",
    """CREATE TRIGGER keep AFTER INSERT ON gradients BEGIN
    INSERT INTO kept SELECT NEW.owner, NEW.slot, NEW.items, NEW.gradient; END""",
)
"""The owner forgets gradients when their window is made; this keeps a copy of each, in the same transaction."""


def settings_of(small, secure_sum="clear", **drift):
    return small(
        secure_sum=secure_sum,
        drift={"form": "shielded", "dim": DIM, "epochs": EPOCHS, "k_min": 3, "window": 40, **drift},
        federation={"owners": 3, "hosts": 3},
    )


def one_window_an_epoch(small, secure_sum="clear"):
    """Make every visit of an epoch see the same model: then nothing depends on who is faster."""
    return settings_of(small, secure_sum, window=1_000_000, window_s=1e6, join_s=60.0)


@pytest.fixture(scope="module")
def make(federation):
    """Return a function that makes a federation whose owners join in one order and keep their gradients."""

    def made(settings, **options):
        running = federation(settings, **options)
        running.hold += [
            *(f"data-owner/{name}" for name in running.feed.partition.names),
            *(f"client/host-{number}" for number in range(settings.federation.hosts)),
        ]
        return running

    return made


async def begin(running):
    """Let the parties join one after the other: items are numbered as owners come."""
    await running.start()
    for party in running.parties("data-owner"):
        state = running.children[party].state
        state.mkdir(mode=0o700)
        open_sqlite(state / "data_owner.db", "data_owner").dispose()
        with contextlib.closing(sqlite3.connect(state / "data_owner.db")) as connection:
            for statement in KEEP_GRADIENTS:
                connection.execute(statement)
            connection.commit()
        running.release(party)
        await running.change(party, "joined")
    running.release(*running.parties("client"))


def of(running, party):
    child = running.children[party]
    return child.state / f"{child.role.replace('-', '_')}.db"


def visits(running, epoch):
    """Return how many visits owners have taken in an epoch."""
    query = "SELECT COUNT(*) FROM visits WHERE epoch = ?"
    return sum(rows(of(running, party), query, epoch)[0][0] for party in running.parties("data-owner"))


def model(running):
    """Return the items' rows as the COS has them."""
    folder = running.cos.state / "models" / "test"
    return load_file(max(folder.glob("version-*.safetensors")))["items"]


def held_back(running):
    """Return the gradients that owners hold back, by item."""
    found = np.zeros((len(running.stores.item_keys()), DIM))
    for party in running.parties("data-owner"):
        parts = [packed for (packed,) in rows(of(running, party), "SELECT rows FROM held")]
        # What was offered to a window that nobody heard of any more.
        parts += [
            packed for (packed,) in rows(of(running, party), "SELECT rows FROM windows WHERE offered > 0")
        ]
        for arrays in map(load, parts):
            found[arrays["items"]] += arrays["gradient"]
        for items, gradient in rows(of(running, party), "SELECT items, gradient FROM gradients"):
            add(found, items, gradient)
    return found


def add(found, items, gradient):
    items = np.frombuffer(items, "<i4")
    found[items] += np.frombuffer(gradient, "<f4").reshape(len(items), -1)


def every_gradient_counted_once(running):
    computed = np.zeros((len(running.stores.item_keys()), DIM))
    for party in running.parties("data-owner"):
        for items, gradient in rows(of(running, party), "SELECT items, gradient FROM kept"):
            add(computed, items, gradient)
    drift = running.settings.drift
    before = initial_item_rows(len(computed), drift, 0)
    applied = (before - model(running)) / drift.rate
    np.testing.assert_allclose(applied + held_back(running), computed, atol=2e-3)
    assert np.abs(computed).max() > 0.1
    return True


def every_step_counted_once(running):
    steps = defaultdict(lambda: np.zeros(DIM))
    numbers = defaultdict(list)
    for party in running.parties("data-owner"):
        for owner, user, number, reply in rows(
            of(running, party), "SELECT owner, user, visit, reply FROM visits ORDER BY number"
        ):
            steps[user] += Reply.from_bytes(reply, DIM).step
            numbers[owner, user].append(number)
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
    names = {participant: name for name, participant in running.stores.user_names().items()}
    places = running.stores.users()
    for user, step in steps.items():
        party, number = places[user]
        ((row,),) = rows(of(running, party), "SELECT row FROM vectors WHERE user = ?", number)
        first = initial_row(int(key_hash([names[user]], 0)[0]), running.settings.drift)
        np.testing.assert_allclose(np.frombuffer(row, "<f4"), first + step, atol=1e-4)
    assert len(steps) == 60
    return True


def every_record_arrived_once(running):
    sent = running.stores.sent()
    keys = running.stores.item_keys()
    stored = defaultdict(list)
    for party in running.parties("data-owner"):
        for owner, user, length, records in rows(
            of(running, party), "SELECT owner, user, length, records FROM visits ORDER BY number"
        ):
            found = np.frombuffer(records, np.dtype([("item", "<u4"), ("flag", "u1")]))
            assert len(found) == length
            stored[owner, user] += [(keys[item], bool(flag)) for item, flag in found.tolist()]
    assert {pair: found for pair, found in stored.items() if found} == dict(sent)
    return True


def counted_once(running):
    return (
        every_record_arrived_once(running)
        and every_step_counted_once(running)
        and every_gradient_counted_once(running)
    )


def last(report):
    assert report["phase"] == "done", report["reason"]
    return report["history"][-1]["metrics"]


def run_of(make, settings):
    async def run():
        async with make(settings) as running:
            await begin(running)
            report = await running.finish()
        assert running.ended_well()
        assert counted_once(running)
        return report, model(running)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def clear(make, small):
    return run_of(make, one_window_an_epoch(small))


@of_the_clear_run
def test_a_run_learns_and_says_what_became_of_each_sum(clear):
    report, _ = clear
    purposes = [one["purpose"] for one in report["rounds"]]
    assert purposes == ["window", "evaluate"] * EPOCHS
    assert not report["abandoned"]
    assert {one["summed"] for one in report["rounds"] if one["purpose"] == "window"} == {3}
    assert {one["summed"] for one in report["rounds"] if one["purpose"] == "evaluate"} == {60}
    losses = [one["metrics"]["train_loss"] for one in report["history"]]
    assert losses == sorted(losses, reverse=True)
    assert report["visits"] >= 60 * EPOCHS


@of_the_clear_run
def test_masked_windows_come_to_the_same_within_quantisation(clear, make, small):
    report, items = run_of(make, one_window_an_epoch(small, "masked"))
    assert {tuple(one["seconds"])[:2] for one in report["rounds"]} == {("advertise", "share")}
    np.testing.assert_allclose(items, clear[1], atol=1e-3)
    # Rounding swaps items that are nearly level, and of so few users each swap shows in the metrics.
    assert last(report) == pytest.approx(last(clear[0]), abs=2e-2)


@of_the_clear_run
@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
async def test_owner_host_and_server_killed_within_an_epoch_lose_nothing_and_count_nothing_twice(
    make, small, clear, secure_sum
):
    async with make(one_window_an_epoch(small, secure_sum)) as running:
        await begin(running)
        owner, host = running.parties("data-owner")[0], running.parties("client")[0]
        await running.comes_true(lambda: visits(running, 1) > 10, "visits")
        running.kill_and_restart(owner)
        await running.comes_true(lambda: visits(running, 2) > 10, "visits of the second epoch")
        running.kill_and_restart(host)
        await running.comes_true(lambda: visits(running, 3) > 10, "visits of the third epoch")
        running.kill_and_restart("cos/cos", owner)
        report = await running.finish()
    assert running.ended_well()
    assert counted_once(running)
    # A user who goes on after a restart takes the owners that are left in another order: rows differ, visits do not.
    assert report["visits"] == clear[0]["visits"]
    # A window that a death of the server or of an owner interrupts may be abandoned: it is formed again.
    formed = [
        [(one["purpose"], one["summed"]) for one in each["rounds"] if one["summed"]]
        for each in (report, clear[0])
    ]
    assert formed[0] == formed[1]
    losses = [one["metrics"]["train_loss"] for one in report["history"]]
    assert losses[-1] < losses[0]


async def test_many_small_windows_with_an_owner_killed_in_one_lose_nothing(make, small):
    async with make(settings_of(small, window=10, join_s=3.0)) as running:
        await begin(running)
        owner = running.parties("data-owner")[1]
        for epoch in (1, 2, 3):
            await running.comes_true(
                lambda epoch=epoch: visits(running, epoch) > 5, f"visits of epoch {epoch}"
            )
            running.kill_and_restart(owner)
            await running.up(owner)
        report = await running.finish()
    assert running.ended_well()
    assert last(report)["ndcg_test_items@10"] > 0.5
    assert len([one for one in report["rounds"] if one["purpose"] == "window"]) > EPOCHS
    assert counted_once(running)


async def test_with_unseen_items_of_all_owners_steps_and_gradients_count_once(make, small):
    drift = {"unseen": "all", "item_bias": True, "rate": 0.05}
    async with make(settings_of(small, **drift)) as running:
        await begin(running)
        owner = running.parties("data-owner")[0]
        await running.comes_true(lambda: visits(running, 2) > 10, "visits of the second epoch")
        running.kill_and_restart(owner)
        await running.ended()
        channel = running.channel("client/host-0")
        name = next(
            name
            for name, who in running.stores.user_names().items()
            if running.stores.users()[who][0] == "client/host-0"
        )
        best = await channel.stub(UserAgentStub).Recommend(UserRecommendRequest(user=name, k=5))
        await channel.close()
        report = await running.finish()
    assert running.ended_well()
    assert len(set(best.items)) == 5
    assert counted_once(running)
    losses = [one["metrics"]["train_loss"] for one in report["history"]]
    assert losses[-1] < losses[0]
    # Rows of users keep the constant 1 that the items' log-odds are multiplied by.
    for party in running.parties("client"):
        assert {
            np.frombuffer(row, "<f4")[-1] for (row,) in rows(of(running, party), "SELECT row FROM vectors")
        } == {1}


async def test_a_masked_window_that_two_owners_join_is_abandoned_and_said_so(make, small):
    async with make(settings_of(small, "masked", join_s=2.0)) as running:
        await begin(running)
        owner = running.parties("data-owner")[2]
        await running.comes_true(lambda: visits(running, 1) > 5, "visits")
        running.children[owner].kill()
        await running.until(
            lambda event: event.HasField("round") and event.round.purpose == "window" and event.round.reason,
            "a window that is abandoned",
        )
        assert not any(
            event.round.summed for event in running.events if event.HasField("round") and event.round.reason
        )
        running.children[owner].start()
        report = await running.finish()
    assert running.ended_well()
    assert report["abandoned"] >= 1
    assert counted_once(running)


# --- who saw what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
async def test_nobody_saw_what_the_matrix_forbids(make, small, secure_sum):
    settings = settings_of(small, secure_sum)
    settings = settings.model_copy(
        update={"federation": settings.federation.model_copy(update={"transcripts": True})}
    )
    async with make(settings) as running:
        await begin(running)
        await running.ended()
        channel = running.channel("client/host-0")
        name = next(
            name
            for name, who in running.stores.user_names().items()
            if running.stores.users()[who][0] == "client/host-0"
        )
        stub = channel.stub(UserAgentStub)
        best = await stub.Recommend(UserRecommendRequest(user=name, k=5))
        receipt = await stub.DisclosureReceipt(DisclosureReceiptRequest(user=name))
        await channel.close()
        await running.finish()
    assert len(set(best.items)) == 5
    kinds = {(one.recipient.partition("/")[0], one.kind): one.protection for one in receipt.disclosures}
    assert kinds["data-owner", "user row"] == kinds["data-owner", "interaction"] == "sealed to the owner"
    assert ("cos", f"metrics ({secure_sum})") in kinds
    assert not any(kind in ("interaction", "user row") for to, kind in kinds if to == "cos")

    kit = CanaryKit(3)
    plant(running, kit)
    audit = Audit(kit, rows_of("drift", "shielded", secure_sum))
    transcripts = {
        party: sorted(child.state.glob("transcript*.bin")) for party, child in running.children.items()
    }
    for party, child in running.children.items():
        for path in transcripts[party]:
            audit.audit_transcript(party, path)
        audit.audit_tree(party, child.state)
    result = audit.result()
    assert result.violations == ()
    # The canaries work: each kind was found where it belongs.
    owner, host = running.parties("data-owner")[0], "client/host-0"
    assert result.seen[host]["user_factor"] == "seen"
    assert result.seen[owner]["item_gradient"] == result.seen[owner]["interaction"] == "seen"
    assert set(result.seen["cos/cos"].values()) == {"not seen"}
    shown = observed(transcripts)
    assert not shown["cos/cos"]["user_factor"]
    assert not shown["cos/cos"]["requested_rows"]
    assert shown["cos/cos"]["window_vector"] == (secure_sum == "clear")
    assert shown["cos/cos"]["masked_vector"] == (secure_sum == "masked")
    assert shown["cos/cos"]["round_sum"]
    assert not any(kinds["unclassified"] for kinds in shown.values())


def plant(running, kit):
    """Search for users' rows, their records, and the gradients of single visits."""
    hosts = {user: party for user, (party, _) in running.stores.users().items()}
    owners = running.parties("data-owner")
    for party in running.parties("client"):
        for (row,) in rows(of(running, party), "SELECT row FROM vectors"):
            kit.rows("user_factor", np.frombuffer(row, "<f4"), {party, *owners})
    # An item may have several owners, and users may have the same three in a row.
    holders = defaultdict(set)
    for party in owners:
        for user, length, records in rows(of(running, party), "SELECT user, length, records FROM visits"):
            found = np.frombuffer(records, np.dtype([("item", "<u4"), ("flag", "u1")]))
            for first in range(length - 2):
                run = found[first : first + 3]
                holders[pack_records(run["item"], run["flag"])] |= {party, hosts[user]}
        for items, gradient in rows(of(running, party), "SELECT items, gradient FROM kept"):
            table = np.frombuffer(gradient, "<f4").reshape(len(items) // 4, -1)
            kit.rows("item_gradient", table[:2][table[:2].any(axis=1)], {party})
    for pattern, parties in holders.items():
        kit.plant("interaction", pattern, parties)
