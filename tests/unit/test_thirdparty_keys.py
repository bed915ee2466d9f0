"""Paillier keys in the third party's store: one key an epoch, whose party it is, what is forgotten when."""

import hashlib

import pytest

from coterie.store.thirdparty import Published, Redemption, ThirdPartyStore
from coterie.store.thirdparty_keys import NewKey
from coterie.wire.refusal import Refusal

RUN = "a-run"


def digest(text):
    return hashlib.sha256(text.encode()).digest()


def party(name):
    return f"client/{name}"


CHAIN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.fixture
async def store(tmp_path):
    opened = ThirdPartyStore(tmp_path / "directory.db")
    for name in ("anna", "berta", "carla"):
        bundle = Published(digest(name), 1, name.encode(), name.encode())
        token = Redemption(
            digest(f"token {name}"), party(name), 1, digest(f"key {name}"), digest(f"tls {name}"), CHAIN, 1
        )
        await opened.enrol(token, [bundle])
    yield opened
    opened.close()


def new(epoch=1, *, by="anna", run=RUN, needed=2, content=""):
    return NewKey(run, epoch, digest(by), needed, f"record {run} {epoch} {by} {content}".encode())


def sealed(epoch=1, names=("berta", "carla")):
    return {digest(name): f"sealed for {name} in {epoch}".encode() for name in names}


async def countersign(store, name, epoch=1, content="", run=RUN):
    signature = f"signature of {name} {content}".encode()
    return await store.countersign_key(party(name), run, epoch, digest(name), name.encode(), signature)


async def reason(call):
    with pytest.raises(Refusal) as refused:
        await call
    return refused.value.name


async def test_a_key_is_complete_once_enough_holders_have_countersigned(store):
    assert await store.publish_key(party("anna"), new(), sealed())
    assert await store.paillier_key(RUN) is None
    assert await countersign(store, "carla") is False
    assert await store.paillier_key(RUN) is None
    assert await countersign(store, "berta") is True
    kept = await store.paillier_key(RUN)
    assert (kept.epoch, kept.record, kept.complete) == (1, new().record, True)
    # In the order of ids, whoever came first.
    order = sorted(("berta", "carla"), key=digest)
    assert [signer.decode() for signer, _ in kept.countersignatures] == order


async def test_a_key_that_nobody_need_countersign_is_complete_at_once(store):
    await store.publish_key(party("anna"), new(needed=0), {})
    assert (await store.paillier_key(RUN)).epoch == 1


async def test_the_same_record_again_is_acknowledged_and_another_one_of_the_epoch_refused(store):
    await store.publish_key(party("anna"), new(), sealed())
    assert await store.publish_key(party("anna"), new(), sealed()) is False
    assert await reason(store.publish_key(party("anna"), new(content="other"), sealed())) == "CONFLICT"
    others = sealed(names=("anna", "carla"))
    assert await reason(store.publish_key(party("berta"), new(by="berta"), others)) == "CONFLICT"
    _, envelope = await store.paillier_envelope(party("berta"), RUN, digest("berta"))
    assert envelope == b"sealed for berta in 1"


async def test_epochs_have_no_gaps_and_each_run_counts_its_own(store):
    assert await reason(store.publish_key(party("anna"), new(2), sealed())) == "SEQUENCE_MISMATCH"
    assert await reason(store.publish_key(party("anna"), new(0), sealed())) == "CONFLICT"
    await store.publish_key(party("anna"), new(1), sealed())
    # The next epoch need not wait until the last one is complete: its generator may be gone.
    await store.publish_key(party("anna"), new(2), sealed())
    assert await reason(store.publish_key(party("anna"), new(4), sealed())) == "SEQUENCE_MISMATCH"
    await store.publish_key(party("anna"), new(1, run="b-run"), sealed())


async def test_only_the_generators_own_party_publishes_and_only_for_enrolled_holders(store):
    assert await reason(store.publish_key(party("berta"), new(), sealed())) == "UNKNOWN_PARTICIPANT"
    unknown = sealed(names=("berta", "nobody"))
    assert await reason(store.publish_key(party("anna"), new(), unknown)) == "UNKNOWN_PARTICIPANT"
    assert await store.paillier_key(RUN, 1) is None


async def test_whoever_is_revoked_neither_publishes_nor_gets_nor_countersigns_a_key(store):
    await store.publish_key(party("anna"), new(), sealed())
    await store.revoke([digest("berta")], [])
    assert await reason(store.paillier_envelope(party("berta"), RUN, digest("berta"))) == "REVOKED"
    assert await reason(countersign(store, "berta")) == "REVOKED"
    assert await reason(store.publish_key(party("anna"), new(2), sealed(2))) == "REVOKED"
    assert await store.publish_key(party("anna"), new(2, needed=1), sealed(2, ["carla"]))


async def test_an_envelope_is_handed_to_its_holders_party_only(store):
    await store.publish_key(party("anna"), new(), sealed())
    key, envelope = await store.paillier_envelope(party("carla"), RUN, digest("carla"))
    assert (key.epoch, envelope) == (1, b"sealed for carla in 1")
    assert await store.paillier_envelope(party("anna"), RUN, digest("anna")) == (key, b"")
    for thief in ("anna", "berta"):
        call = store.paillier_envelope(party(thief), RUN, digest("carla"))
        assert await reason(call) == "UNKNOWN_PARTICIPANT"


async def test_a_countersignature_is_kept_once_and_only_of_a_key_that_is_there(store):
    assert await reason(countersign(store, "berta")) == "UNKNOWN_ROUND"
    await store.publish_key(party("anna"), new(), sealed())
    assert await countersign(store, "berta") is False
    assert await countersign(store, "berta") is False
    assert await reason(countersign(store, "berta", content="other")) == "CONFLICT"
    stolen = store.countersign_key(party("berta"), RUN, 1, digest("carla"), b"carla", b"signature")
    assert await reason(stolen) == "UNKNOWN_PARTICIPANT"
    assert len((await store.paillier_key(RUN, 1)).countersignatures) == 1


async def test_envelopes_are_forgotten_when_a_later_key_is_complete_and_no_sooner(store, tmp_path):
    for epoch in (1, 2):
        await store.publish_key(party("anna"), new(epoch), sealed(epoch))
    for name in ("berta", "carla"):
        await countersign(store, name, 1)
    assert (await store.paillier_key(RUN)).epoch == 1
    await countersign(store, "berta", 2)
    assert await count(store, "envelopes") == 4
    await countersign(store, "carla", 2)
    assert (await store.paillier_key(RUN)).epoch == 2
    assert await count(store, "envelopes") == 2
    assert (await store.paillier_envelope(party("berta"), RUN, digest("berta")))[
        1
    ] == b"sealed for berta in 2"
    # What is public stays.
    assert (await store.paillier_key(RUN, 1)).complete


async def count(store, table):
    return await store._read(
        lambda connection: connection.exec_driver_sql(f"SELECT count(*) FROM paillier_{table}").scalar()
    )


async def test_keys_survive_a_restart(store, tmp_path):
    await store.publish_key(party("anna"), new(), sealed())
    await countersign(store, "berta")
    again = ThirdPartyStore(tmp_path / "directory.db")
    assert await again.publish_key(party("anna"), new(), sealed()) is False
    assert await countersign(again, "carla") is True
    assert (await again.paillier_key(RUN)).complete
    again.close()
