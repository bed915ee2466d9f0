"""Encrypted sums over real processes: the numbers of sums in clear, decrypting clients that die, a server that does."""

import asyncio
import json
from typing import Any

import pytest

from coterie.crypto.custody import HeldKey
from coterie.net.enrolment import identities
from coterie.studies.in_process import train_in_process
from coterie.studies.run_data import load, make_feed
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

from .recorded import of_system

# Short keys, drawn quickly.  What long ones take, the benchmarks show.
KEY = {"bits": 1024, "comparison": True}
HOLDERS = [f"decrypting-client/key-{n}" for n in range(3)]
ROUNDS = {"cohort": 20, "group": 20, "passes": 2, "evaluate_every": 1}
BASE = {
    "secure_sum": "encrypted",
    "encryption": KEY,
    "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
KINDS = {
    "fedncf, hosts": {"system": "fedncf", "split": {"kind": "leave-last-out"}},
    "fedncf, users": {
        "system": "fedncf",
        "split": {"kind": "leave-last-out"},
        "rounds": {**ROUNDS, "party_per_user": True, "passes": 1},
        "encryption": {**KEY, "obfuscators": "short"},
    },
    "fedmf, users": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "rounds": {**ROUNDS, "party_per_user": True},
        "fedmf": {"factors": 8, "local_epochs": 2},
        "encryption": {**KEY, "obfuscators": "short"},
    },
    "fedmf, hosts, SCAFFOLD": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "fedmf": {"factors": 8, "local_epochs": 2, "scaffold": True},
        "encryption": {**KEY, "obfuscators": "short"},
    },
    # Items are open from as many raters on as a place of a sparse sum has to have: so nothing is dropped.
    "fedmf, users, sparse": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "rounds": {**ROUNDS, "party_per_user": True, "min_sum": 3},
        "fedmf": {"factors": 8},
        "encryption": {**KEY, "obfuscators": "short", "sparse": True},
    },
    "fedrec, users, sparse": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "rounds": {**ROUNDS, "party_per_user": True, "min_sum": 3},
        "fedmf": {"factors": 8, "samples": 1, "filling": "hybrid", "fill_after": 1},
        "encryption": {**KEY, "obfuscators": "short", "sparse": True},
    },
    "ials, hosts": {
        "system": "ials",
        "split": {"kind": "leave-last-out"},
        "rounds": {"passes": 2, "evaluate_every": 1},
        "ials": {"factors": 4, "min_touch": 5, "products": "item", "min_products": 10},
        "encryption": {**KEY, "obfuscators": "short"},
    },
    "fcf, hosts": {"system": "fcf", "split": {"kind": "random"}, "fcf": {"factors": 8}},
    "fpl, hosts": {"system": "fpl", "split": {"kind": "random"}, "fpl": {"factors": 8}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_encrypted_sum_changes_no_number(small, federation, kind):
    settings = small(**{**BASE, **KINDS[kind]})

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            return await running.finish()

    report = asyncio.run(to_the_end())
    assert report["phase"] == "done"
    clear = settings.model_copy(update={"secure_sum": "clear"})
    feed = make_feed(clear, load(clear), 0)
    alone = train_in_process(clear, feed, run_id="test", seed=0, see=lambda event: None)
    assert same_numbers(report, alone.known)


@of_system("fedmvmf")
def test_an_encrypted_sum_changes_no_number_of_a_recorded_run(recorded):
    assert same_numbers(recorded.run("fedmvmf", "encrypted").report, recorded.alone("fedmvmf").known)


def same_numbers(report, alone):
    """Check a report against what one process makes of sums in clear."""
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone["history"]]
    assert report["chosen"] == alone["chosen"]
    assert all(one["reason"] == "" and one["liars"] == one["dropped_places"] == 0 for one in report["rounds"])
    assert {"submit", "confirm", "decrypt"} <= set(report["rounds"][-1]["seconds"])
    return True


def lasting(small, **changes):
    """Return settings of a run with more passes than anybody waits for."""
    rounds = {**ROUNDS, "passes": 5000, "evaluate_every": 5000}
    return small(**{**BASE, **KINDS["fedncf, hosts"], "rounds": rounds, **changes})


@pytest.mark.long
async def test_a_decrypting_client_that_dies_is_done_without_and_without_a_majority_nothing_is_decrypted(
    small, federation
):
    settings = lasting(small, federation={"hosts": 3, "party_timeout_s": 3.0, "give_up_s": 25.0})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        running.children[HOLDERS[1]].kill()
        await running.a_round("a round while nobody knows that it is gone", reason="")
        await running.change(HOLDERS[1], "lost")
        await running.a_round("a round of the others", reason="")
        running.children[HOLDERS[1]].start()
        await running.change(HOLDERS[1], "returned")
        await running.a_round("a round of all of them", reason="")

        for party in HOLDERS:
            running.children[party].kill()
        await running.waits("0 of 3 key holders are present", *HOLDERS)
        for party in HOLDERS[1:]:
            running.children[party].start()
        await running.a_round("a round of the two that are back", reason="")
        for party in HOLDERS[1:]:
            running.children[party].kill()
        report = await running.finish()

    assert report["phase"] == "failed"
    assert report["reason"].startswith("no sum was formed for 25 s; ")
    assert "0 of 3 key holders are present" in report["reason"]
    formed = [one["version"] for one in report["rounds"] if one["purpose"] == "train" and not one["reason"]]
    assert report["version"] == formed[-1] == len(formed)


async def test_a_server_that_dies_goes_on_under_the_same_key(small, federation):
    settings = lasting(small)
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        before = (await running.run_state()).version
        running.cos.kill()
        running.cos.start()
        await running.a_round("a round after the restart", reason="")
        state = await running.run_state()
        assert state.version > before
        folders = {party: running.children[party].state for party in HOLDERS}
        await running.stop()
    held = [
        HeldKey.load(path, settings.encryption.terms)
        for folder in folders.values()
        for path in (folder / "keys").glob("*.key")
    ]
    assert len(held) == 3
    assert len({one.key_id for one in held}) == 1
    journals = [json.loads((folder / "journal.json").read_text()) for folder in folders.values()]
    assert all(one["joined"] > 0 and len(one["confirmed"]) == 128 for one in journals)


async def test_another_key_is_made_after_so_many_rounds_and_the_old_one_goes(small, federation):
    settings = lasting(small, encryption={**KEY, "rotate_every": 4})
    async with federation(settings) as running:
        await running.start()
        seen = set()
        while len(seen) < 3:
            await running.a_round("a round", reason="")
            seen |= {path.name for path in (running.children[HOLDERS[0]].state / "keys").glob("*.key")}
        await running.a_round("a round under the last of them", reason="")
        folders = [running.children[party].state / "keys" for party in HOLDERS]

        def gone():
            # A round's key, and perhaps the one after it, which no round has used yet.
            return all(1 <= len(list(folder.glob("*.key"))) <= 2 for folder in folders)

        # Rounds are faster than news of keys: what a holder has yet to hear of, it has not outlived.
        await running.comes_true(gone, "the keys before are gone")
        # Not those of a round from which the hosts went because this test stops them.
        reasons = [event.round.reason for event in running.events if event.HasField("round")]
        await running.stop()
        assert not any((folder / "test.1.key").exists() for folder in folders)
        warned = [
            line for party in running.children for line in running.log(party) if line["level"] != "info"
        ]
    # Who was about to hear of a key when a round under it began may have stayed away from that one.
    assert len([reason for reason in reasons if reason]) <= 1, (reasons, warned)


async def revoke(running, participant):
    """Revoke a participant, as the operator does."""
    channel = running.channel("thirdparty/directory")
    try:
        stub: Any = channel.stub(KeyDirectoryStub)
        await stub.Revoke(RevokeRequest(participants=[participant]))
    finally:
        await channel.close()


@pytest.mark.parametrize("which", [0, 2])
async def test_a_holder_that_is_revoked_takes_no_part_any_more_and_the_run_goes_on_under_another_key(
    small, federation, which
):
    settings = lasting(small)
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        gone, staying = HOLDERS[which], [party for n, party in enumerate(HOLDERS) if n != which]
        (revoked,) = identities(running.children[gone].state, 1)
        await revoke(running, revoked.participant_id)
        folders = {party: running.children[party].state / "keys" for party in HOLDERS}

        def another():
            return all(
                any(path.stem.endswith(".2") for path in folders[one].glob("*.key")) for one in staying
            )

        await running.comes_true(another, "the others hold another key")
        await running.a_round("a round that may still be under the old one", reason="")
        for _ in range(2):
            await running.a_round("a round under the new one", reason="", liars=0)
        await running.stop()
    assert not list(folders[gone].glob("*.2.key"))
    for party in staying:
        (kept,) = folders[party].glob("*.key")
        held = HeldKey.load(kept, settings.encryption.terms)
        assert held.epoch == 2


async def test_holders_decrypt_no_sum_that_may_be_solved_for_what_is_behind_it(small, federation):
    # 20 users, 12 factors: 20 / 12 unknowns for each value. Whoever starts the run is told before; a server that
    # forms such a sum all the same finds nobody to decrypt it.
    settings = lasting(small, system="fedmvmf", split={"kind": "random"}, mvmf={"factors": 12})
    settings = settings.model_copy(
        update={"rounds": settings.rounds.model_copy(update={"cohorts": "groups", "cohort": 20, "group": 20})}
    )
    async with federation(settings) as running:
        await running.start()
        await running.a_round("an abandoned round", version=0)
        await running.stop()
        (ended,) = [one.round for one in running.events if one.round.purpose == "train"][:1]
        assert "0 of 3 key holders confirmed" in ended.reason
        for party in HOLDERS:
            assert "20 users may be solved for them" in running.children[party].log.read_text()


def test_a_short_key_is_refused_outside_comparisons(small):
    with pytest.raises(ValueError, match="keys of fewer than 2048 bits are for comparisons"):
        small(**{**BASE, **KINDS["fedncf, hosts"], "encryption": {"bits": 1024, "comparison": False}})
