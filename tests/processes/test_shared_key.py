"""Sums under a key that the participants share, over real processes: the server never has the model."""

import asyncio
from typing import Any

import pytest
from safetensors.numpy import load, load_file

from coterie.crypto.custody import HeldKey
from coterie.crypto.sealed_model import open_model
from coterie.net.enrolment import HOLDER, identities
from coterie.studies import run_data as feeds
from coterie.studies.in_process import train_in_process
from coterie.wire.v1.rounds_pb2 import SealedModel
from coterie.wire.v1.thirdparty_pb2 import RevokeRequest
from coterie.wire.v1.thirdparty_pb2_grpc import KeyDirectoryStub

from .planted import ask
from .recorded import of_system

# Short keys, drawn quickly.  What long ones take, the benchmarks show.
KEY = {"bits": 1024, "comparison": True}
ROUNDS = {"cohort": 20, "group": 20, "passes": 2, "evaluate_every": 1}
BASE = {
    "system": "fedncf",
    "secure_sum": "shared-key",
    "split": {"kind": "leave-last-out"},
    "encryption": KEY,
    "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}},
    "rounds": ROUNDS,
    "federation": {"hosts": 3},
}
KINDS = {
    "users": {"rounds": {**ROUNDS, "party_per_user": True, "passes": 1}},
    "fedmf": {"system": "fedmf", "split": {"kind": "random"}, "fedmf": {"factors": 8, "local_epochs": 2}},
    "scaffold": {
        "system": "fedmf",
        "split": {"kind": "random"},
        "fedmf": {"factors": 8, "local_epochs": 2, "scaffold": True},
    },
    "fedrec": {"system": "fedmf", "split": {"kind": "random"}, "fedmf": {"factors": 8, "samples": 1}},
    "fcf": {"system": "fcf", "split": {"kind": "random"}, "fcf": {"factors": 8}},
    "ials": {
        "system": "ials",
        "rounds": {"passes": 2, "evaluate_every": 1},
        "ials": {"factors": 4, "min_touch": 5, "products": "item", "min_products": 10},
        "encryption": {**KEY, "obfuscators": "short"},
    },
    "fpl": {"system": "fpl", "split": {"kind": "random"}, "fpl": {"factors": 8}},
    "exact counts": {"fedncf": {"touch": "exact", "model": "neumf"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_participants_share_changes_no_number(small, federation, kind):
    settings = small(**{**BASE, **KINDS[kind]})

    async def to_the_end():
        async with federation(settings) as running:
            await running.start()
            return await running.finish()

    report = asyncio.run(to_the_end())
    assert report["phase"] == "done", report["reason"]
    clear = settings.model_copy(update={"secure_sum": "clear"})
    feed = feeds.make_feed(clear, feeds.load(clear), 0)
    alone = train_in_process(clear, feed, run_id="test", seed=0, see=lambda event: None)
    assert same_numbers(report, alone.known)


@of_system("fedncf")
def test_a_key_that_hosts_share_changes_no_number_of_a_recorded_run(recorded):
    assert same_numbers(recorded.run("fedncf", "shared-key").report, recorded.alone("fedncf").known)


def same_numbers(report, alone):
    """Check a report against what one process makes of sums in clear."""
    assert [one["metrics"] for one in report["history"]] == [one["metrics"] for one in alone["history"]]
    assert report["chosen"] == alone["chosen"]
    assert all(one["reason"] == "" and one["liars"] == 0 for one in report["rounds"])
    assert {"submit", "confirm", "decrypt", "compare models"} <= set(report["rounds"][-1]["seconds"])
    return True


def lasting(small, cohort=20, **changes):
    """Return settings of a run with more passes than anybody waits for, in which a host may be missing."""
    rounds = {**ROUNDS, "min_cohort": 5, "min_sum": 5, "passes": 5000, "evaluate_every": 5000}
    return small(**{**BASE, "rounds": {**rounds, "cohort": cohort, "group": cohort}, **changes})


def held_by(running, party, terms):
    """Return the keys that a host holds, newest last."""
    folder = running.children[party].state / HOLDER / "keys"
    found = [HeldKey.load(path, terms) for path in folder.glob("*.key")]
    return sorted(found, key=lambda held: held.epoch)


async def test_a_host_that_dies_is_done_without_and_reads_the_model_again_when_it_is_back(small, federation):
    settings = lasting(small, federation={"hosts": 3, "party_timeout_s": 3.0})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round of everybody", reason="", dropped=0)
        running.children["client/host-1"].kill()
        await running.change("client/host-1", "lost")
        await running.a_round("a round of the others", reason="")
        before = (await running.run_state()).version
        running.children["client/host-1"].start()
        await running.change("client/host-1", "returned")
        await running.a_round("a round of everybody again", reason="", dropped=0)
        assert (await running.run_state()).version > before
        await running.stop()


async def test_a_server_that_dies_goes_on_with_a_model_that_it_cannot_open(small, federation):
    settings = lasting(small, federation={"hosts": 3, "transcripts": True})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        before = (await running.run_state()).version
        running.cos.kill()
        running.cos.start()
        await running.a_round("a round after the restart", reason="")
        assert (await running.run_state()).version > before
        names = list(running.feed.dataset.users)
        host = f"client/host-{running.feed.host[0]}"
        items = await ask(running, host, names[0])
        assert items, "who holds the key recommends by the model"
        held = held_by(running, host, settings.encryption.terms)[-1]
        await running.stop()

    # What the server keeps, and everything that it sent and received, has no row of any version in it.
    folder = running.cos.state
    versions = sorted((folder / "models" / "test").glob("*.safetensors"))
    payload = load_file(versions[-1])["sealed"].tobytes()
    version = SealedModel.FromString(payload)
    arrays = load(open_model(held, "test", version.round, version.sealed))
    rows = arrays["model.items"]
    assert rows.shape == (60, 12)
    needles = [row.tobytes()[:16] for row in rows if row.any()]
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert any(payload[:64] in path.read_bytes() for path in kept), "the search finds what is there"
    for path in kept:
        content = path.read_bytes()
        assert not any(needle in content for needle in needles), path.name


async def test_another_key_is_made_after_so_many_rounds_and_what_is_under_the_old_one_is_still_read(
    small, federation
):
    settings = lasting(small, encryption={**KEY, "rotate_every": 4})
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round under the first key", reason="")
        while not held_by(running, "client/host-0", settings.encryption.terms)[-1].epoch >= 3:
            await running.a_round("a round", reason="")
        await running.a_round("a round under the last of them", reason="")
        epochs = [held.epoch for held in held_by(running, "client/host-0", settings.encryption.terms)]
        # Not those of a round from which the hosts went because this test stops them.
        reasons = [event.round.reason for event in running.events if event.HasField("round")]
        await running.stop()
        warned = [
            line for party in running.children for line in running.log(party) if line["level"] != "info"
        ]
    assert epochs[:3] == [1, 2, 3]
    assert [reason for reason in reasons if reason] == [], warned


@pytest.mark.long
async def test_a_host_whose_holder_is_revoked_is_done_without_and_reads_no_later_version(small, federation):
    # Everybody is in each cohort: of drawn ones, one or the other would lack more users than its floor allows.
    settings = lasting(small, cohort=40)
    gone = "client/host-2"
    async with federation(settings) as running:
        await running.start()
        await running.a_round("a round", reason="")
        (revoked,) = identities(running.children[gone].state / HOLDER, 1)
        channel = running.channel("thirdparty/directory")
        stub: Any = channel.stub(KeyDirectoryStub)
        await stub.Revoke(RevokeRequest(participants=[revoked.participant_id]))
        await channel.close()
        terms = settings.encryption.terms

        def another():
            return all(held_by(running, f"client/host-{n}", terms)[-1].epoch == 2 for n in (0, 1))

        await running.comes_true(another, "the others hold another key")
        await running.a_round("a round that may still be under the old one")
        for _ in range(2):
            await running.a_round("a round under the new one", reason="", liars=0)
        await running.stop()
    assert [held.epoch for held in held_by(running, gone, terms)] == [1]


def test_two_hosts_at_least_share_a_key(small):
    with pytest.raises(ValueError, match="2 hosts have to come to the same model"):
        small(**{**BASE, "rounds": {**ROUNDS, "party_per_user": True}, "federation": {"hosts": 1}})
