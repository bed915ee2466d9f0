"""The client of the key directory, against a directory that lies."""

import time

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.identity import Identity, countersign
from coterie.net.directory import Directory
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.wire.v1.common_pb2 import KeyBundle
from coterie.wire.v1.thirdparty_pb2 import DirectoryEntry, LookupResponse

KEY = Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()


class Answers:
    """A channel whose look-ups are answered from a dictionary."""

    peer = "thirdparty/directory"

    def __init__(self, entries):
        self.entries = entries
        self.asked = []

    def stub(self, factory):
        return factory(self)

    def unary_unary(self, method, request_serializer, response_deserializer, **_):
        async def call(request):
            self.asked.append(list(request.participants))
            found = [self.entries.get(one, DirectoryEntry(participant=one)) for one in request.participants]
            return LookupResponse(revision=4, entries=found)

        return call

    stream_unary = unary_stream = unary_unary


def entry(identity, *, version=1, key=KEY, validity=None, revoked=False):
    now = int(time.time())
    bundle = countersign(identity.bundle(version, validity or (now - 10, now + 100)), key, "client/host-0")
    return DirectoryEntry(participant=identity.participant_id, bundle=bundle_to_wire(bundle), revoked=revoked)


async def test_what_is_known_is_not_asked_again_and_what_is_unknown_is():
    known, unknown = Identity.generate(), Identity.generate()
    channel = Answers({known.participant_id: entry(known)})
    directory = Directory(channel, PUBLIC)
    both = [known.participant_id, unknown.participant_id]
    assert set(await directory.bundles(both)) == {known.participant_id}
    await directory.bundles(both)
    assert channel.asked == [both, [unknown.participant_id]]
    assert directory.revision == 4


async def test_at_most_a_thousand_are_asked_for_in_one_call_and_none_twice():
    channel = Answers({})
    participants = [n.to_bytes(32, "big") for n in range(2001)]
    assert await Directory(channel, PUBLIC).bundles(participants + participants) == {}
    assert [len(asked) for asked in channel.asked] == [1000, 1000, 1]


@pytest.mark.parametrize("lie", ["other directory", "no signature", "other participant", "expired"])
async def test_an_entry_that_does_not_verify_is_left_out_and_harms_no_other(lie):
    honest, victim = Identity.generate(), Identity.generate()
    forged = {
        "other directory": lambda: entry(victim, key=Ed25519PrivateKey.generate()),
        "no signature": lambda: DirectoryEntry(participant=victim.participant_id, bundle=KeyBundle()),
        "other participant": lambda: DirectoryEntry(
            participant=victim.participant_id, bundle=entry(Identity.generate()).bundle
        ),
        "expired": lambda: entry(victim, validity=(1, 2)),
    }[lie]()
    channel = Answers({honest.participant_id: entry(honest), victim.participant_id: forged})
    directory = Directory(channel, PUBLIC)
    found = await directory.bundles([victim.participant_id, honest.participant_id])
    assert set(found) == {honest.participant_id}


async def test_the_revoked_are_left_out_and_never_asked_for_again():
    identity = Identity.generate()
    channel = Answers({identity.participant_id: entry(identity, revoked=True)})
    directory = Directory(channel, PUBLIC)
    assert await directory.bundles([identity.participant_id]) == {}
    channel.entries = {identity.participant_id: entry(identity)}
    assert await directory.bundles([identity.participant_id]) == {}
    assert len(channel.asked) == 1
    assert directory.revoked == {identity.participant_id}


async def test_a_known_bundle_is_dropped_when_its_participant_is_revoked():
    identity = Identity.generate()
    directory = Directory(Answers({identity.participant_id: entry(identity)}), PUBLIC)
    assert len(await directory.bundles([identity.participant_id])) == 1
    directory.exclude([identity.participant_id])
    assert await directory.bundles([identity.participant_id]) == {}
