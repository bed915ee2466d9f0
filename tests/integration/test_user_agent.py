"""A client host with real data owners: recording, delivery through absences and backups, recommendation, receipts."""

import asyncio
import contextlib
import csv
import itertools
import shutil
import sqlite3
import time
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from coterie.crypto.sealed import RECORD_DTYPE
from coterie.errors import PeerError
from coterie.net.authorisation import ALLOWED
from coterie.net.enrolment import saved_bundles
from coterie.parties.party import Registrant
from coterie.wire.tensor import from_wire, to_wire
from coterie.wire.v1 import client_pb2 as wire
from coterie.wire.v1 import orchestrator_pb2 as orchestrator
from coterie.wire.v1.client_pb2_grpc import UserAgentStub
from coterie.wire.v1.common_pb2 import Tensor
from coterie.wire.v1.operator_pb2 import StopRunRequest
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest

STANDS = itertools.count()
"""Numbers of stands: a worker that takes over tests of this module later sets up another one at the same server."""

SOON_S = 90.0
"""Bound for what happens at once, or within the few seconds after which somebody tries again."""

OWNERS = {
    "drama": [f"d{n}" for n in range(8)] + ["both"],
    "news": [f"n{n}" for n in range(8)] + ["both"],
}
USERS = [f"user-{n:02}" for n in range(80)]
"""More than fit into one message of a delivery."""


def histories_of(users, run_seed):
    """Return (user, item, positive, time, part) rows, in the order of time; some are for validation and test."""
    rng = np.random.default_rng(run_seed)
    items = sorted({item for held in OWNERS.values() for item in held})
    rows = []
    for user in users:
        for at, item in enumerate(rng.choice(items, 5, replace=False)):
            rows.append((user, str(item), int(rng.random() < 0.5), 1000 + at, [0, 0, 0, 1, 2][at]))
    return rows


def write_histories(path, rows):
    path.touch(mode=0o600)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "positive", "time", "part"])
        writer.writerows(rows)
    return path


def query(service, database, text):
    with contextlib.closing(sqlite3.connect(service.state / database)) as connection:
        return connection.execute(text).fetchall()


@dataclass
class Stand:
    """Two processes with a data owner each, a host of many users, and a run that stays in its first epoch."""

    run: str
    cos: object
    owners: dict
    host: object
    rows: list
    catalogue: list

    def agent(self, certificates):
        return self.host.channel(certificates["operator"]).stub(UserAgentStub)

    def stored(self, owner):
        """Return what an owner has stored: by user the items in order of their numbers, which have no gap."""
        names = [name for (name,) in query(self.host, "client.db", 'SELECT name FROM users ORDER BY "user"')]
        ids = {
            one.participant_id: name for one, name in zip(saved_bundles(self.host.state), names, strict=True)
        }
        found: dict[str, list[str]] = {}
        for user, first, records in query(
            self.owners[owner], "data_owner.db", 'SELECT user, "first", records FROM batches ORDER BY number'
        ):
            held = found.setdefault(ids[user], [])
            assert first == len(held) + 1, "a record that is counted twice, or never came"
            held += [self.catalogue[item] for item in np.frombuffer(records, RECORD_DTYPE)["item"]]
        return found

    def sent(self, owner):
        """Return what the host has to send to an owner: by user the items of its training history, in order."""
        found: dict[str, list[str]] = {}
        for name, item in query(
            self.host,
            "client.db",
            'SELECT name, item FROM history JOIN users USING ("user") WHERE part = 0 ORDER BY row',
        ):
            if item in OWNERS[owner]:
                found.setdefault(name, []).append(item)
        return found

    async def everything_arrived(self):
        """Wait until every owner has exactly what the host has for it."""
        async with asyncio.timeout(SOON_S):
            while any(self.stored(owner) != self.sent(owner) for owner in self.owners):
                await asyncio.sleep(0.05)

    def restart_of(self, service):
        return asyncio.to_thread(service.start)


def copy_store(service, database, to):
    to.touch(mode=0o600)
    with (
        contextlib.closing(sqlite3.connect(service.state / database)) as live,
        contextlib.closing(sqlite3.connect(to)) as backup,
    ):
        live.backup(backup)


def restore_store(service, database, backup):
    for file in service.state.glob(f"{database}*"):
        file.unlink()
    shutil.copy(backup, service.state / database)


def services_of(calls, third_party, cos, run, folder, rows, tag):
    """Return data owners and a host, not started."""
    at_cos = {"cos": {"address": cos.address, "name": cos.name}, "run": run}
    owners = {}
    for name, items in OWNERS.items():
        path = folder / f"{name}.csv"
        path.write_text("\n".join(["item", *items]) + "\n")
        held = [{"name": name, "items": path}]
        owners[name] = calls.Member(
            "data-owner", f"{name}-{tag}", third_party, folder, participants=1, owners=held, **at_cos
        )
    users = len({row[0] for row in rows})
    histories = write_histories(folder / f"{tag}.csv", rows)
    host = calls.Member(
        "client", f"host-{tag}", third_party, folder, participants=users, histories=histories, **at_cos
    )
    return owners, host


async def begin(calls, third_party, cos, operating, run, users):
    """Start a run that waits for one user more than the host has: that of a host which never delivers.

    So the run comes to its first epoch and stays there, with owners that wait for more and compute nothing.
    """
    await operating.start(run, owners=len(OWNERS), users=users + 1, epochs=1)
    silent = await third_party.enrol("client", f"silent-{run}", 1)
    member = Registrant(
        silent.identities[0], silent.bundles[0], orchestrator.ParticipantKind.PARTICIPANT_KIND_USER
    )
    party = calls.party_at(cos, silent, run)
    async with asyncio.timeout(SOON_S):
        while True:
            state = await operating.state(run)
            if state.users == users and state.owners_alive == len(OWNERS):
                break
            await asyncio.sleep(0.05)
    await party.register([member])
    _, payload = await party.fetch(orchestrator.FetchKind.FETCH_KIND_CATALOGUE)
    return list(orchestrator.Catalogue.FromString(payload).items)


@pytest.fixture(scope="module")
def shared_stand(shared_third_party, shared_cos, certificates, tmp_path_factory, calls):
    folder, run = tmp_path_factory.mktemp("agents"), f"agents-{next(STANDS)}"
    rows = histories_of(USERS, 3)
    owners, host = services_of(calls, shared_third_party, shared_cos, run, folder, rows, run)
    for service in (*owners.values(), host):
        service.start(healthy=False)

    async def prepare():
        operating = calls.Operating(shared_cos, certificates["operator"])
        catalogue = await begin(calls, shared_third_party, shared_cos, operating, run, len(USERS))
        await shared_cos.release()
        return catalogue

    catalogue = asyncio.run(prepare())
    host.wait_for_health(True)
    yield Stand(run, shared_cos, owners, host, rows, catalogue)
    for service in (host, *owners.values()):
        service.stop()


@pytest.fixture
async def stand(shared_stand):
    for service in (shared_stand.host, *shared_stand.owners.values()):
        if not service.running:
            await shared_stand.restart_of(service)
    await shared_stand.everything_arrived()
    yield shared_stand
    for service in (shared_stand.host, *shared_stand.owners.values()):
        await service.release()


@pytest.fixture
def agent(stand, certificates):
    return stand.agent(certificates)


UNUSED = iter(USERS[10:])
"""Users that no other test has done anything with."""


async def record(agent, user, item, *, positive=True):
    request = wire.RecordInteractionRequest(user=user, item=item, positive=positive)
    return (await agent.RecordInteraction(request, timeout=SOON_S)).owners


# --- Delivery ----------------------------------------------------------------------------------------------------


async def test_every_owner_gets_the_training_records_of_its_own_items_once_and_in_order(stand):
    expected = {
        owner: {
            user: held
            for user in USERS
            if (held := [row[1] for row in stand.rows if row[0] == user and row[4] == 0 and row[1] in items])
        }
        for owner, items in OWNERS.items()
    }
    for owner in OWNERS:
        stored = stand.stored(owner)
        for user in USERS[:10]:  # those for whom nothing was recorded since
            assert stored.get(user, []) == expected[owner].get(user, [])
    assert any("both" in held for held in expected["drama"].values())


@pytest.mark.parametrize(("item", "owners"), [("d0", 1), ("n0", 1), ("both", 2)])
async def test_a_new_interaction_goes_to_every_owner_of_its_item_and_to_no_other(stand, agent, item, owners):
    user = next(UNUSED)
    before = {owner: stand.stored(owner).get(user, []) for owner in OWNERS}
    assert await record(agent, user, item) == owners
    await stand.everything_arrived()
    for owner, items in OWNERS.items():
        assert stand.stored(owner).get(user, []) == before[owner] + ([item] if item in items else [])


async def test_an_item_that_nobody_holds_stays_in_the_history_and_goes_nowhere(stand, agent):
    user = next(UNUSED)
    before = {owner: stand.stored(owner).get(user, []) for owner in OWNERS}
    assert await record(agent, user, "held by nobody") == 0
    assert await record(agent, user, "both") == 2
    await stand.everything_arrived()
    for owner in OWNERS:
        assert stand.stored(owner)[user] == [*before[owner], "both"]


async def test_an_owner_that_is_away_holds_up_nothing_but_its_own_records(stand, agent):
    user, news = next(UNUSED), stand.owners["news"]
    before = stand.stored("drama").get(user, [])
    assert news.kill() == -9
    # The answer does not wait for the owner; the interaction is kept here.
    assert [await record(agent, user, item) for item in ("both", "n1", "d1")] == [2, 1, 1]
    async with asyncio.timeout(SOON_S):
        while stand.stored("drama").get(user, []) != [*before, "both", "d1"]:
            await asyncio.sleep(0.05)
    assert stand.stored("news") != stand.sent("news")
    await stand.restart_of(news)
    await stand.everything_arrived()
    assert stand.stored("news")[user][-2:] == ["both", "n1"]


async def test_a_killed_host_goes_on_with_what_was_not_acknowledged(stand, agent):
    user, news = next(UNUSED), stand.owners["news"]
    news.kill()
    for item in ("n2", "n3", "d2"):
        await record(agent, user, item)
    stand.host.kill()
    await stand.restart_of(news)
    await stand.restart_of(stand.host)
    await stand.everything_arrived()
    assert stand.stored("news")[user][-2:] == ["n2", "n3"]


async def test_an_owner_restored_from_a_backup_gets_back_what_it_lost_from_everybody(stand, agent, tmp_path):
    news = stand.owners["news"]
    copy_store(news, "data_owner.db", tmp_path / "backup.db")
    users = [next(UNUSED) for _ in range(5)]
    for user in users:
        assert await record(agent, user, "n4") == 1
    await stand.everything_arrived()
    held = stand.stored("news")
    news.stop()
    restore_store(news, "data_owner.db", tmp_path / "backup.db")
    assert stand.stored("news") != held
    # Nobody records anything new: to come back is enough.
    await stand.restart_of(news)
    await stand.everything_arrived()
    assert stand.stored("news") == held


async def test_an_owner_that_lost_everything_gets_everything_again(stand, agent, tmp_path):
    news = stand.owners["news"]
    held = stand.stored("news")
    assert len(held) > 64  # more than one message
    news.stop()
    for file in news.state.glob("data_owner.db*"):
        file.unlink()
    await stand.restart_of(news)
    await stand.everything_arrived()
    assert stand.stored("news") == held
    user = next(UNUSED)
    await record(agent, user, "n5")
    await stand.everything_arrived()


async def test_an_application_that_gives_up_waiting_finds_its_interaction_kept_once(stand, agent):
    user = next(UNUSED)
    call = record(agent, user, "d3")
    await stand.host.give_up_while_held("client.db", "RecordInteraction", call)
    # What comes afterwards is not taken for it.
    assert await record(agent, user, "d4") == 1
    await stand.everything_arrived()
    assert stand.stored("drama")[user][-2:] == ["d3", "d4"]


async def test_a_revoked_user_is_left_out_and_the_others_of_its_host_are_not(
    start_member, third_party, cos, operator, certificates, calls, tmp_path
):
    run = f"revoked-{time.monotonic_ns()}"
    rows = histories_of(["anna", "berta"], 5)
    owners, host = services_of(calls, third_party, cos, run, tmp_path, rows, run)
    stand = Stand(run, cos, owners, host, rows, [])
    try:
        for service in (*owners.values(), host):
            service.start(healthy=False)
        stand.catalogue = await begin(calls, third_party, cos, operator, run, 2)
        await asyncio.to_thread(host.wait_for_health, True)
        await stand.everything_arrived()
        agent = stand.agent(certificates)
        revoked = saved_bundles(host.state)[0].participant_id
        before = stand.stored("drama").get("anna", [])
        await third_party.directory(certificates["operator"]).Revoke(RevokeRequest(participants=[revoked]))
        async with asyncio.timeout(SOON_S):
            while True:
                # One of them is refused once the owner has heard of it, and then the host sends no more.
                await record(agent, "anna", "d5")
                await record(agent, "berta", "d6")
                if "a user was revoked" in host.log.read_text():
                    break
                await asyncio.sleep(0.1)
        refused = stand.stored("drama").get("anna", [])
        await record(agent, "berta", "d7")
        async with asyncio.timeout(SOON_S):
            while stand.stored("drama").get("berta") != stand.sent("drama")["berta"]:
                await asyncio.sleep(0.05)
        assert stand.stored("drama").get("anna", []) == refused
        assert len(refused) < len(stand.sent("drama")["anna"])
        assert refused[: len(before)] == before
        assert host.healthy()
    finally:
        for service in (host, *owners.values()):
            await service.release()
            if service.running:
                await asyncio.to_thread(service.stop)


async def test_a_host_restored_from_a_backup_stops_before_it_gives_a_number_twice(
    third_party, cos, operator, certificates, calls, tmp_path
):
    run = f"behind-{time.monotonic_ns()}"
    rows = histories_of(["anna"], 6)
    owners, host = services_of(calls, third_party, cos, run, tmp_path, rows, run)
    stand = Stand(run, cos, owners, host, rows, [])
    try:
        for service in (*owners.values(), host):
            service.start(healthy=False)
        stand.catalogue = await begin(calls, third_party, cos, operator, run, 1)
        await asyncio.to_thread(host.wait_for_health, True)
        await stand.everything_arrived()
        copy_store(host, "client.db", tmp_path / "backup.db")
        agent = stand.agent(certificates)
        for item in ("d0", "d1", "d2"):
            await record(agent, "anna", item)
        await stand.everything_arrived()
        held = stand.stored("drama")
        await host.release()
        host.stop()
        restore_store(host, "client.db", tmp_path / "backup.db")
        # It may find out, and end, before anybody sees it healthy.
        await asyncio.to_thread(host.start, healthy=False)
        again = stand.agent(certificates)
        while host.running:
            # The next interaction would get a number that the owner knows for another one.
            with contextlib.suppress(grpc.aio.AioRpcError):
                await record(again, "anna", "d7")
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(host.wait_for_end) == PeerError.exit_code
        assert "OUTBOX_BEHIND" in host.log.read_text()
        assert stand.stored("drama") == held
    finally:
        for service in (host, *owners.values()):
            await service.release()
            if service.running:
                await asyncio.to_thread(service.stop)


# --- Recommendation ----------------------------------------------------------------------------------------------


async def recommend(agent, user, k):
    return await agent.Recommend(wire.UserRecommendRequest(user=user, k=k))


async def test_recommendations_leave_out_what_the_user_has_seen_best_first(stand, agent):
    user = next(UNUSED)
    everything = {item for held in OWNERS.values() for item in held}
    for newly in (None, "d0", "n0"):
        if newly is not None:
            await record(agent, user, newly)
        seen = {row[1] for row in stand.rows if row[0] == user and row[4] == 0}
        seen |= {"d0", "n0"} if newly == "n0" else {newly} if newly else set()
        answer = await recommend(agent, user, 1000)
        assert set(answer.items) == everything - seen
        assert len(answer.items) == len(answer.scores) == len(everything - seen)
        assert list(answer.scores) == sorted(answer.scores, reverse=True)
        few = await recommend(agent, user, 3)
        assert (list(few.items), list(few.scores)) == (list(answer.items)[:3], list(answer.scores)[:3])


async def test_scores_are_those_of_the_users_own_factors(stand, agent, calls, certificates, third_party):
    """Two users of the host: each gets the scores of its own row and not of the other's."""
    answers = {user: await recommend(agent, user, 1000) for user in USERS[:2]}
    owner = calls.Enrolled.of(stand.owners["drama"])
    party = calls.party_at(stand.cos, owner, stand.run)
    _, payload = await party.fetch(orchestrator.FetchKind.FETCH_KIND_MODEL)
    model = from_wire(Tensor.FromString(payload), np.float32, (None, 4), field="model")
    slots = dict(
        query(stand.cos, "cos.db", f"SELECT participant, slot FROM participants WHERE run_id = '{stand.run}'")
    )
    bundles = saved_bundles(stand.host.state)
    names = [name for (name,) in query(stand.host, "client.db", 'SELECT name FROM users ORDER BY "user"')]
    index = {item: n for n, item in enumerate(stand.catalogue)}
    for user, answer in answers.items():
        request = orchestrator.ExchangeRequest(
            run_id=stand.run,
            owner=slots[saved_bundles(stand.owners["drama"].state)[0].participant_id],
        )
        slot = slots[bundles[names.index(user)].participant_id]
        request.users.CopyFrom(to_wire(np.array([slot], np.uint32)))
        request.items.CopyFrom(to_wire(np.zeros(0, np.uint32)))
        answered = await party.call(lambda request=request: party.stub.Exchange(request))
        row = from_wire(answered.user_rows, np.float32, (1, 4), field="rows")[0]
        expected = [float(model[index[item]] @ row) for item in answer.items]
        assert list(answer.scores) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("k", [0, 1001, 2**32 - 1])
async def test_a_number_of_items_out_of_range_is_refused(agent, calls, k):
    why = await calls.refused(agent.Recommend(wire.UserRecommendRequest(user=USERS[0], k=k)))
    assert (why.code, why.reason, why.field) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "k")
    assert (await recommend(agent, USERS[0], 1)).items


@pytest.mark.parametrize("name", ["", "nobody", "user-00 ", "USER-00", "1"])
async def test_a_user_of_another_host_is_refused_by_every_rpc_and_nothing_is_kept(stand, agent, calls, name):
    before = query(stand.host, "client.db", "SELECT count(*) FROM history")
    requests = [
        agent.RecordInteraction(wire.RecordInteractionRequest(user=name, item="d0", positive=True)),
        agent.Recommend(wire.UserRecommendRequest(user=name, k=3)),
    ]
    if name:  # an empty name asks for the receipt of the whole host
        requests.append(agent.DisclosureReceipt(wire.DisclosureReceiptRequest(user=name)))
    for request in requests:
        why = await calls.refused(request)
        assert (why.code, why.reason, why.field) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_PARTICIPANT", "user")
        assert why.says_nothing_of("user-0", "d0")
    assert query(stand.host, "client.db", "SELECT count(*) FROM history") == before


async def test_an_interaction_with_nothing_is_refused(stand, agent, calls):
    before = query(stand.host, "client.db", "SELECT count(*) FROM history")
    why = await calls.refused(agent.RecordInteraction(wire.RecordInteractionRequest(user=USERS[0])))
    assert (why.code, why.reason, why.field) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "item")
    huge = wire.RecordInteractionRequest(user=USERS[0], item="x" * (5 << 20))
    assert await calls.code_of(agent.RecordInteraction(huge)) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert query(stand.host, "client.db", "SELECT count(*) FROM history") == before


@pytest.mark.parametrize("role", ["cos", "data-owner", "client", "thirdparty", "operator"])
@pytest.mark.parametrize("method", [name for name in ALLOWED if "/coterie.v1.UserAgent/" in name])
async def test_each_rpc_is_for_its_roles_only(stand, certificates, calls, method, role):
    outcome = await calls.with_nothing(stand.host.channel(certificates[role]), method)
    assert (outcome == "WRONG_ROLE") == (role not in ALLOWED[method])


async def test_items_of_an_owner_that_came_after_the_end_are_recommended_too(
    third_party, cos, operator, certificates, calls, tmp_path
):
    run = f"ended-{time.monotonic_ns()}"
    rows = histories_of(["anna"], 7)
    owners, host = services_of(calls, third_party, cos, run, tmp_path, rows, run)
    try:
        for service in (*owners.values(), host):
            service.start(healthy=False)
        await begin(calls, third_party, cos, operator, run, 1)
        await asyncio.to_thread(host.wait_for_health, True)
        await operator.stub.StopRun(StopRunRequest(run_id=run))
        async with asyncio.timeout(SOON_S):
            while "the run has ended" not in host.log.read_text():
                await asyncio.sleep(0.05)
        # The host asks for no tasks any more, and does not hear of the new catalogue.
        rival = await third_party.enrol("data-owner", f"rival-{run}", 1)
        late = Registrant(
            rival.identities[0],
            rival.bundles[0],
            orchestrator.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER,
            name="late",
            address="127.0.0.1:1",
            tls_name="late.data-owner.coterie.internal",
            items=["late-0", "late-1"],
        )
        await calls.party_at(cos, rival, run).register([late])
        agent = host.channel(certificates["operator"]).stub(UserAgentStub)
        assert {"late-0", "late-1"} <= set((await recommend(agent, "anna", 1000)).items)
    finally:
        for service in (host, *owners.values()):
            await service.release()
            if service.running:
                await asyncio.to_thread(service.stop)


# --- Receipts ----------------------------------------------------------------------------------------------------


async def receipt(agent, user=""):
    answer = await agent.DisclosureReceipt(wire.DisclosureReceiptRequest(user=user))
    return {(one.recipient, one.kind): one for one in answer.disclosures}


async def noted(stand, agent, user, bytes_over=0):
    """Return the receipt once the host has noted that everything arrived, which it does after the owner has it."""
    async with asyncio.timeout(SOON_S):
        while True:
            lines = await receipt(agent, user)
            held = {owner: lines.get((f"data-owner/{owner}", "interaction")) for owner in OWNERS}
            due = {owner: len(stand.sent(owner).get(user, [])) for owner in OWNERS}
            weight = sum(line.bytes for line in held.values() if line)
            counts = {owner: line.count if line else 0 for owner, line in held.items()}
            if counts == due and weight > bytes_over:
                return lines
            await asyncio.sleep(0.05)


async def test_a_receipt_says_what_has_left_for_whom_and_how_it_was_protected(stand, agent):
    user, started = next(UNUSED), time.time_ns() // 1_000_000
    before = await noted(stand, agent, user)
    for item in ("both", "d6"):
        await record(agent, user, item)
    await recommend(agent, user, 3)
    after = await noted(stand, agent, user)
    for owner in OWNERS:
        line = after[f"data-owner/{owner}", "interaction"]
        assert line.count == len(stand.stored(owner)[user])
        assert line.protection == "sealed to the owner"
        # 5 bytes a record, and for each batch its header of 64 and its tag of 16.
        assert line.bytes >= 5 * line.count + 80
        assert line.first_ms <= line.last_ms
        assert started <= line.last_ms <= time.time_ns() // 1_000_000
        held = before.get((f"data-owner/{owner}", "interaction"))
        grown = line.bytes - (held.bytes if held else 0)
        assert 5 * (2 if owner == "drama" else 1) + 80 <= grown <= 2 * (5 + 80)
    asked = after["cos", "recommendation request"]
    assert (asked.count, asked.protection) == (1, "clear")
    assert after["cos", "registration"].protection == "public keys and signatures"


async def test_the_receipt_of_the_host_is_the_sum_over_its_users(stand, agent):
    await stand.everything_arrived()
    for user in USERS:
        await noted(stand, agent, user)
    whole = await receipt(agent)
    for owner in OWNERS:
        line = whole[f"data-owner/{owner}", "interaction"]
        assert line.count == sum(map(len, stand.stored(owner).values()))
    for user in USERS[:3]:
        for key, line in (await receipt(agent, user)).items():
            assert line.count <= whole[key].count
            assert line.bytes <= whole[key].bytes


async def test_what_was_sent_again_to_a_restored_owner_counts_once_and_weighs_twice(stand, agent, tmp_path):
    user, news = next(UNUSED), stand.owners["news"]
    copy_store(news, "data_owner.db", tmp_path / "backup.db")
    for item in ("n6", "n7"):
        await record(agent, user, item)
    before = await noted(stand, agent, user)
    news.stop()
    restore_store(news, "data_owner.db", tmp_path / "backup.db")
    await stand.restart_of(news)
    await stand.everything_arrived()
    weight = sum(line.bytes for (_, kind), line in before.items() if kind == "interaction")
    after = await noted(stand, agent, user, bytes_over=weight)
    line = after["data-owner/news", "interaction"]
    assert line.count == before["data-owner/news", "interaction"].count == len(stand.stored("news")[user])
    assert line.bytes > before["data-owner/news", "interaction"].bytes
