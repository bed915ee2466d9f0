"""A real client host in the rounds of a real orchestration server: to the end, outside its consent, after crashes."""

import asyncio
import contextlib
import csv
import shutil
import sqlite3
import time

import numpy as np
import pytest

from coterie.cli.main import invoke
from coterie.crypto.beacon import beacon_statement, draw_beacon, population_hash, verify_beacon
from coterie.crypto.transparency import BEACON, entry_leaf
from coterie.net.enrolment import saved_bundles
from coterie.net.transparency import read_evidence, read_head
from coterie.parties.party import Registrant
from coterie.rounds.population import Population
from coterie.store.authority import load_secrets
from coterie.wire.v1 import client_pb2 as agent_wire
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import UserAgentStub
from coterie.wire.v1.common_pb2 import Population as PopulationMessage

from .hosting import HISTORY, ITEMS, NAMES, SEED, SOON_S, TRUSTING, World, query


@pytest.fixture
def world(calls, third_party, start_member, certificates, tmp_path, cos):
    return World(calls, third_party, start_member, certificates, tmp_path, cos)


MASKED = "masked: only the sum over the cohort"


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
async def test_users_of_a_host_are_members_to_the_end_and_each_has_a_receipt(world, certificates, secure_sum):
    await world.begin(secure_sum=secure_sum, per_user=True)
    host = await asyncio.to_thread(world.host, per_user_metrics=True, seed=SEED)
    report = await world.over()
    assert report["phase"] == "done", report["reason"]
    assert [(one["purpose"], one["summed"]) for one in report["rounds"]] == [
        ("supports", 5),
        ("evaluate", 5),
        ("train", 5),
        ("evaluate", 5),
    ]

    sent, declined = await world.receipt(host, NAMES[2])
    assert declined == []
    rounds = {
        f"items of the history ({secure_sum})": 1,
        f"metrics ({secure_sum})": 2,
        f"model update ({secure_sum})": 1,
    }
    steps = ["round keys", "sealed shares", "confirmation", "revealed shares"]
    expected = rounds | (dict.fromkeys(steps, 4) if secure_sum == "masked" else {})
    # The registration is the host's, for all its users.
    assert sent.pop("registration").count == len(NAMES)
    assert {kind: one.count for kind, one in sent.items()} == expected
    protections = {kind: sent[kind].protection for kind in rounds}
    protection = MASKED if secure_sum == "masked" else "in clear"
    assert set(protections.values()) == {f"{protection}; an experiment: floors count users, not devices"}
    assert all(one.bytes > 0 and one.last_ms >= one.first_ms > 0 for one in sent.values())

    rows = []
    async with asyncio.timeout(SOON_S):
        # Written when the sum has been sent, so the run may be over before.
        while {row["point"] for row in rows} != {"0", "1"}:
            with (host.state / "metrics.csv").open(newline="") as file:
                rows = list(csv.DictReader(file))
            await asyncio.sleep(0.02)
    for point, evaluation in enumerate(report["history"]):
        own = [
            float(row["value"])
            for row in rows
            if (row["point"], row["metric"]) == (str(point), "ndcg_all@10")
        ]
        assert len(own) == len(NAMES)
        assert np.mean(own) == pytest.approx(evaluation["metrics"]["ndcg_all@10"], abs=1e-4)

    agent = host.channel(certificates["operator"]).stub(UserAgentStub)
    answer = await agent.Recommend(agent_wire.UserRecommendRequest(user=NAMES[0], k=12))
    assert set(answer.items) == set(ITEMS) - set(HISTORY[NAMES[0]][:4])
    assert list(answer.scores) == sorted(answer.scores, reverse=True)
    assert answer.version == report["chosen"]["version"]
    async with asyncio.timeout(SOON_S):
        # The last round is closed: nothing of it is kept.
        while query(host, "SELECT DISTINCT joined, length FROM journal") != [(4, 0)]:
            await asyncio.sleep(0.05)


async def test_a_host_that_is_one_member_answers_for_all_its_users(world):
    await world.begin()
    host = await asyncio.to_thread(world.host)
    report = await world.over()
    assert [(one["members"], one["summed"]) for one in report["rounds"]] == [(1, 5)] * 4
    one, other = [await world.receipt(host, name) for name in NAMES[:2]]
    assert one == other
    assert one[0]["model update (clear)"].count == 1


async def test_a_host_leaves_a_run_outside_its_consent_and_each_user_is_told_every_reason(world):
    await world.begin(users=len(NAMES) + 1)
    consent = {
        "systems": ["drift"],
        "secure_sums": ["masked"],
        "min_cohort": 2,
        "min_sum": 3,
        "experiment": False,
        "metrics": ["hit_ratio@10"],
    }
    host = await asyncio.to_thread(world.host, healthy=False, consent=consent)
    async with asyncio.timeout(SOON_S):
        while not host.answers() or not query(host, "SELECT 1 FROM declined"):
            await asyncio.sleep(0.05)
        while (await world.operator.state(world.run)).hosts_alive:
            await asyncio.sleep(0.05)
    sent, declined = await world.receipt(host, NAMES[0])
    assert set(sent) == {"registration"}
    assert {one.recipient for one in declined} == {"cos"}
    reasons = " | ".join(one.reason for one in declined)
    for words in (
        "the system 'fedncf'",
        "sums are formed 'clear'",
        "floor of a cohort is 1; accepted is 2",
        "floor of a sum is 1; accepted is 3",
        "floors count users",
        "validation_ndcg_all@10",
    ):
        assert words in reasons
    assert not host.healthy()


async def test_a_host_that_comes_back_from_a_backup_stays_out_of_the_masked_run_that_was_going_on(world):
    await world.begin(secure_sum="masked", per_user=True, users=len(NAMES) + 1)
    host = await asyncio.to_thread(world.host)
    await asyncio.to_thread(host.stop)
    archive = host.folder / "host.tar"
    assert invoke(["backup", "client", str(archive), "--config", str(host.config)]) == 0
    keys = (host.state / "identities.key").read_bytes()
    shutil.rmtree(host.state)
    assert invoke(["restore", "client", str(archive), "--config", str(host.config)]) == 0
    assert (host.state / "identities.key").read_bytes() == keys
    await asyncio.to_thread(host.start, healthy=False)
    async with asyncio.timeout(SOON_S):
        while not host.answers() or not query(host, "SELECT 1 FROM declined"):
            await asyncio.sleep(0.05)
        while (await world.operator.state(world.run)).hosts_alive:
            await asyncio.sleep(0.05)
    _, declined = await world.receipt(host, NAMES[0])
    assert ["restored from a backup" in one.reason for one in declined] == [True]
    # One that has not run since the backup goes on.
    await asyncio.to_thread(host.stop)
    shutil.rmtree(host.state)
    again = ["restore", "client", str(archive), "--config", str(host.config), "--nothing-since"]
    assert invoke(again) == 0
    await asyncio.to_thread(host.start)
    assert (await world.operator.state(world.run)).hosts_alive == 1


async def test_a_host_sits_out_when_its_users_were_in_enough_rounds_today(world):
    # Nobody waits out the hour that a step may take: the host says that it takes no part.
    await world.begin()
    host = await asyncio.to_thread(world.host, consent={**TRUSTING, "rounds_per_day": 2})
    report = await world.over()
    assert [one["summed"] for one in report["rounds"]] == [5, 5, 0, 0]
    sent, declined = await world.receipt(host, NAMES[0])
    assert "model update (clear)" not in sent
    (one,) = declined
    assert one.reason == "a user has been in 2 rounds today; accepted are 2"
    assert one.count == 2


async def test_host_and_server_killed_in_a_round_lose_and_repeat_nothing(
    world, calls, third_party, start_member, certificates
):
    world.cos = await asyncio.to_thread(start_member, "cos", f"cos-{time.monotonic_ns()}", third_party)
    world.operator = calls.Operating(world.cos, certificates["operator"])
    # A second host that is silent keeps the first round open.
    await world.begin(users=len(NAMES) + 1, step_timeout_ms=3_600_000, passes=2)
    silent = await third_party.enrol("client", f"silent-{world.run}", 1)
    member = Registrant(silent.identities[0], silent.bundles[0], wire.ParticipantKind.PARTICIPANT_KIND_USER)
    party = calls.party_at(world.cos, silent, world.run)
    await party.register([member])
    host = await asyncio.to_thread(world.host)
    kept = "SELECT joined, offset, length, private, checksum FROM journal WHERE length > 0"
    async with asyncio.timeout(SOON_S):
        while not (before := query(host, kept)):
            await asyncio.sleep(0.02)
    host.kill()
    world.cos.kill()
    await world.cos.release()
    await asyncio.to_thread(world.cos.start)
    await asyncio.to_thread(host.start)
    world.operator = calls.Operating(world.cos, certificates["operator"])
    await calls.party_at(world.cos, silent, world.run).leave()
    report = await world.over()
    assert report["phase"] == "done", report["reason"]
    first = report["rounds"][0]
    assert (first["round"], first["summed"], first["dropped"]) == (1, 5, 1)
    assert first["refused"] == 0
    assert before[0][0] == 1
    sent, declined = await world.receipt(host, NAMES[0])
    assert declined == []
    assert sent["items of the history (clear)"].count == 1


async def test_a_host_without_room_waits_for_it_and_is_in_the_round_then(world, calls, third_party):
    await world.begin(users=len(NAMES) + 1, step_timeout_ms=3_600_000)
    host = await asyncio.to_thread(world.host)
    silent = await third_party.enrol("client", f"silent-{world.run}", 1)
    member = Registrant(silent.identities[0], silent.bundles[0], wire.ParticipantKind.PARTICIPANT_KIND_USER)
    party = calls.party_at(world.cos, silent, world.run)
    with host.without_room():
        # The last one expected: the first round begins, and the host can keep nothing of it.
        await party.register([member])
        await asyncio.to_thread(host.wait_for_health, False)
        assert query(host, "SELECT count(*) FROM journal") == [(0,)]
    await asyncio.to_thread(host.wait_for_health, True)
    kept = "SELECT 1 FROM journal WHERE length > 0"
    async with asyncio.timeout(SOON_S):
        while not query(host, kept):
            await asyncio.sleep(0.02)
    await party.leave()
    report = await world.over()
    assert report["phase"] == "done", report["reason"]
    assert [(one["summed"], one["refused"]) for one in report["rounds"]] == [(5, 0)] * len(report["rounds"])


async def test_private_state_that_is_gone_is_begun_anew_and_said(world):
    await world.begin()
    host = await asyncio.to_thread(world.host)
    await world.over()
    host.stop()
    for path in (host.state / "private").iterdir():
        path.unlink()
    await asyncio.to_thread(host.start)
    agent = host.channel(world.certificates["operator"]).stub(UserAgentStub)
    assert (await agent.Recommend(agent_wire.UserRecommendRequest(user=NAMES[0], k=1))).items
    assert "private state of this host's users is lost" in host.log.read_text()


async def test_without_a_seed_the_randomness_of_the_users_is_kept_for_its_owner_alone(world):
    await world.begin()
    host = await asyncio.to_thread(world.host)
    await world.over()
    secret = host.state / "randomness.key"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert len(secret.read_bytes()) == 32
    for path in ("contributions.bin", "private/embedding.npy", "client.db"):
        assert (host.state / path).stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("secure_sum", ["clear", "masked"])
async def test_the_third_party_draws_the_groups_of_a_population_and_a_host_checks_and_keeps_both(
    world, secure_sum
):
    usual = {"cohorts": wire.CohortKind.COHORT_KIND_GROUPS, "experiment": False, "redraw": 50}
    await world.begin(secure_sum=secure_sum, per_user=secure_sum == "masked", beacon=b"", **usual)
    host = await asyncio.to_thread(world.host)
    report = await world.over()
    assert report["phase"] == "done", report["reason"]
    assert [one["summed"] for one in report["rounds"]] == [5] * 4
    sent, _ = await world.receipt(host, NAMES[0])
    assert not any("experiment" in one.protection for one in sent.values())
    ((kept,),) = query(host, "SELECT population FROM populations")
    population = Population.from_wire(PopulationMessage.FromString(kept))
    directory = (world.cos.state / "directory.key").read_bytes()
    sha256 = population.hash(world.run)
    verify_beacon(world.run, sha256, population.beacon, population.signature, directory)
    assert set(population.devices) == {f"client/{host.name}"}
    assert population.participants == sorted(population.participants)
    # The host remembers that the beacon is in the third party's log.
    _, shown = read_head(host.state)
    assert entry_leaf(BEACON, beacon_statement(world.run, sha256, population.beacon)) in shown
    # The operator's plan has no beacon, and the same request again is about the same run.
    assert (await world.operator.state(world.run)).plan.rounds.beacon == b""
    await world.begin(secure_sum=secure_sum, per_user=secure_sum == "masked", beacon=b"", **usual)


@pytest.mark.parametrize(
    "rounds",
    [
        {"beacon": bytes(32), "experiment": False},
        {"beacon": bytes(31)},
        {"beacon_signature": bytes(64)},
        {"redraw": 49, "experiment": False, "beacon": b"", "cohorts": wire.CohortKind.COHORT_KIND_GROUPS},
        {"redraw": 50},
        {"channel_rounds": 5},
        {"channel_rounds": 1001},
    ],
    ids=[
        "chosen beacon",
        "short beacon",
        "chosen signature",
        "often",
        "no groups",
        "chains in clear",
        "long chains",
    ],
)
async def test_a_run_whose_groups_somebody_chose_or_whose_rounds_cannot_be_is_refused(world, rounds, calls):
    refused = await calls.refused(lambda: world.begin(**rounds))
    assert refused.reason == "INVALID_FIELD"
    assert refused.field.startswith("plan.rounds.")


@pytest.mark.parametrize(
    ("optimiser", "words"),
    [
        ({"name": "adam", "rate": 0.1, "tau": 1e-8}, "server optimiser is 'adam'"),
        ({"name": "fedadam", "rate": 0.1}, "tau 0.0"),
    ],
    ids=["unknown", "no tau"],
)
async def test_a_run_with_an_optimiser_that_cannot_be_is_refused(world, optimiser, words, calls):
    refused = await calls.refused(lambda: world.begin(server_optimiser=wire.OptimiserPlan(**optimiser)))
    assert (refused.reason, refused.field) == ("INVALID_FIELD", "plan.rounds.server_optimiser")
    assert words in refused.text


async def test_groups_that_are_drawn_anew_are_asked_for_their_items_again(world):
    groups = {"cohorts": wire.CohortKind.COHORT_KIND_GROUPS, "cohort": 2, "group": 2, "redraw": 1}
    await world.begin(passes=3, evaluate_every=3, **groups)
    await asyncio.to_thread(world.host)
    report = await world.over()
    assert report["phase"] == "done", report["reason"]
    purposes = [one["purpose"] for one in report["rounds"]]
    asked = ["supports"] * 2
    training = ["train"] * 2
    assert purposes == [*asked, "evaluate", *training, *asked, *training, *asked, *training, "evaluate"]
    assert {one["reason"] for one in report["rounds"]} == {""}
    assert report["groups"] == 2


async def test_a_host_takes_part_in_no_run_whose_beacon_is_signed_but_not_logged(world, third_party):
    host = await asyncio.to_thread(world.host, healthy=False)
    async with asyncio.timeout(SOON_S):
        while not (host.log.exists() and '"enrolled"' in host.log.read_text()):
            await asyncio.sleep(0.05)
    device, users = f"client/{host.name}", sorted(one.participant_id for one in saved_bundles(host.state))
    sha256 = population_hash(world.run, users, [device] * len(users))
    beacon = draw_beacon(world.run, sha256, load_secrets(third_party.state).signing_key)
    with contextlib.closing(sqlite3.connect(third_party.state / "directory.db")) as connection:
        connection.execute(
            "INSERT INTO beacons (run_id, population_sha256, beacon, signature) VALUES (?, ?, ?, ?)",
            (world.run, sha256, beacon.value, beacon.signature),
        )
        connection.commit()
    usual = {"cohorts": wire.CohortKind.COHORT_KIND_GROUPS, "experiment": False, "redraw": 50}
    await world.begin(beacon=b"", **usual)
    assert await asyncio.to_thread(host.wait_for_end) == 31
    assert read_evidence(host.state).statement == beacon_statement(world.run, sha256, beacon.value)
    ((recipient, reason),) = query(host, "SELECT recipient, reason FROM declined")
    assert recipient == "thirdparty/directory"
    assert "'beacon' that is not in its log" in reason


@pytest.mark.parametrize(
    "terms",
    [
        {"rule": "mean", "byzantine": 0.1},
        {"rule": "krum", "byzantine": 0.5},
        {"rule": "norm-bound", "byzantine": 0.1},
        {"rule": "sum", "byzantine": 0.1, "norm_bound": float("nan")},
    ],
    ids=["unknown", "half", "no bound", "no number"],
)
async def test_a_run_whose_contributions_cannot_become_a_sum_on_its_terms_is_refused(world, terms, calls):
    refused = await calls.refused(lambda: world.begin(aggregation=wire.Aggregation(**terms)))
    assert (refused.reason, refused.field) == ("INVALID_FIELD", "plan.rounds.aggregation")
