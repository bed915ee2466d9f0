from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import struct
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from coterie.crypto.explicit import encode
from coterie.crypto.identity import Bundle, Identity, Prekey
from coterie.crypto.sealed import (
    HEADER_SIZE,
    RECORD_DTYPE,
    Agreement,
    Decision,
    Direction,
    Header,
    OpeningSession,
    SealedBatch,
    SealingSession,
    SenderProcess,
    SequenceGate,
    decode_records,
    encode_records,
)
from coterie.crypto.verification import Reason, VerificationError
from coterie.errors import CryptoError, DataError

EXPIRY = 1_700_000_000


@dataclass(frozen=True)
class Pair:
    """One user and one owner with a prekey."""

    user: Identity
    owner: Identity
    prekey: Prekey
    bundle: Bundle

    @property
    def at_user(self) -> Agreement:
        return Agreement.of_user(self.user, self.owner.participant_id, self.prekey.public)

    @property
    def at_owner(self) -> Agreement:
        return Agreement.of_owner(self.prekey, self.owner.participant_id, self.bundle)


def make_pair(user: Identity, owner: Identity, run: str = "run") -> Pair:
    return Pair(user, owner, Prekey.generate(owner, run, EXPIRY), user.bundle(1, (0, EXPIRY)))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair(Identity.generate(), Identity.generate())


@pytest.fixture(scope="module")
def process() -> SenderProcess:
    return SenderProcess()


@pytest.fixture
def sealing(pair, process) -> SealingSession:
    return SealingSession(pair.at_user, Direction.TO_OWNER, process)


@pytest.fixture
def opening(pair) -> OpeningSession:
    return OpeningSession(pair.at_owner, Direction.TO_OWNER)


def reason_of(call, *arguments) -> Reason:
    with pytest.raises(VerificationError) as caught:
        call(*arguments)
    return caught.value.reason


# Published vectors of the primitives, called as the module calls them.


def test_hkdf_agrees_with_rfc_5869_test_case_1():
    okm = HKDF(SHA256(), 42, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA))).derive(b"\x0b" * 22)
    assert okm.hex() == (
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )


def test_aes_256_gcm_agrees_with_mcgrew_and_viega_test_case_14():
    sealed = AESGCM(bytes(32)).encrypt(bytes(12), bytes(16), None)
    assert sealed.hex() == "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"


def test_aes_256_gcm_agrees_with_mcgrew_and_viega_test_case_16():
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    plaintext = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    associated = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    nonce = bytes.fromhex("cafebabefacedbaddecaf888")
    sealed = AESGCM(key).encrypt(nonce, plaintext, associated)
    assert sealed.hex() == (
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
        "76fc6ece0f4e1768cddf8853bb2d551b"
    )
    assert AESGCM(key).decrypt(nonce, sealed, associated) == plaintext


# The scheme, derived a second time from its description.


def derive(pair: Pair, session_id: bytes, direction: str) -> bytes:
    shared = pair.prekey._private.exchange(X25519PublicKey.from_public_bytes(pair.user.agreement_public))
    info = encode(
        "sealed",
        pair.prekey.public.run,
        pair.user.participant_id,
        pair.owner.participant_id,
        pair.prekey.public.prekey_id,
        direction,
    )
    pseudorandom = hmac.digest(session_id, shared, "sha256")
    return hmac.digest(pseudorandom, info + b"\x01", "sha256")


@pytest.mark.parametrize(
    ("direction", "label", "number"),
    [(Direction.TO_OWNER, "to-owner", 1), (Direction.TO_USER, "to-user", 2)],
)
def test_a_sealed_batch_is_exactly_what_the_description_says(pair, process, direction, label, number):
    agreement = pair.at_user if direction is Direction.TO_OWNER else pair.at_owner
    session = SealingSession(agreement, direction, process)
    session.seal(1, b"first", 1)
    header, ciphertext = session.seal(2, b"second", 7)

    prekey_id = pair.prekey.public.prekey_id
    assert header == (
        bytes([1, number, 0, 0])
        + process.session_id
        + prekey_id
        + struct.pack(">Q", 1)
        + struct.pack(">Q", 2)
        + struct.pack(">I", 7)
    )
    assert len(header) == HEADER_SIZE == 64
    context = encode("sealed-context", "run", pair.user.participant_id, pair.owner.participant_id, label)
    key = derive(pair, process.session_id, label)
    associated = header + hashlib.sha256(context).digest()
    nonce = bytes(4) + (1).to_bytes(8, "big")
    assert AESGCM(key).decrypt(nonce, ciphertext, associated) == b"second"


def test_user_and_owner_agree_on_the_same_secret_without_exchanging_it(pair):
    assert pair.at_user == pair.at_owner


def test_what_the_user_seals_the_owner_opens_and_back(pair, process, sealing, opening):
    assert opening.open(*sealing.seal(1, b"records", 3)) == b"records"
    reply = SealingSession(pair.at_owner, Direction.TO_USER, SenderProcess())
    assert OpeningSession(pair.at_user, Direction.TO_USER).open(*reply.seal(1, b"reply", 1)) == b"reply"


@given(st.binary(max_size=64), st.integers(1, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_any_payload_and_numbers_come_back(pair, process, payload, first, count):
    sealed = SealingSession(pair.at_user, Direction.TO_OWNER, process).seal(first, payload, count)
    assert OpeningSession(pair.at_owner, Direction.TO_OWNER).open(*sealed) == payload
    header = Header.parse(sealed.header)
    assert (header.first_sequence, header.count) == (first, count)
    assert header.last_sequence == first + count - 1


def test_nonces_count_up_from_zero_and_never_repeat(sealing):
    sealed = [sealing.seal(1, b"", 0) for _ in range(3)]
    many = sealing.seal_many(1, np.zeros(5, RECORD_DTYPE), 2)
    headers = [batch.header for batch in sealed] + many.headers + [sealing.seal(1, b"", 0).header]
    assert [Header.parse(header).counter for header in headers] == list(range(7))


def test_threads_that_share_a_session_never_share_a_nonce(sealing):
    counters: list[int] = []

    def work() -> None:
        mine = []
        for _ in range(300):
            mine.append(Header.parse(sealing.seal(1, b"", 0).header).counter)
            mine += [
                Header.parse(h).counter for h in sealing.seal_many(1, np.zeros(3, RECORD_DTYPE), 2).headers
            ]
        counters.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counters) == list(range(4 * 300 * 3))


# Everything that must not open.

FIELDS = {
    "session_id": (4, 36),
    "counter": (44, 52),
    "first_sequence": (52, 60),
    "count": (60, 64),
}


@pytest.mark.parametrize("position", [p for begin, end in FIELDS.values() for p in range(begin, end)])
def test_every_altered_byte_of_the_authenticated_fields_is_noticed(sealing, opening, position):
    header, ciphertext = sealing.seal(5, b"payload", 2)
    altered = bytearray(header)
    altered[position] ^= 1
    assert reason_of(opening.open, bytes(altered), ciphertext) is Reason.NOT_AUTHENTIC
    assert opening.open(header, ciphertext) == b"payload"


@pytest.mark.parametrize(
    ("position", "reason"),
    [
        (0, Reason.BAD_VERSION),
        (1, Reason.WRONG_DIRECTION),
        (2, Reason.BAD_VERSION),
        (3, Reason.BAD_VERSION),
        *((p, Reason.UNKNOWN_PREKEY) for p in range(36, 44)),
    ],
)
def test_every_altered_byte_of_version_direction_and_prekey_has_its_own_reason(
    sealing, opening, position, reason
):
    header, ciphertext = sealing.seal(5, b"payload", 2)
    altered = bytearray(header)
    altered[position] ^= 0x40
    assert reason_of(opening.open, bytes(altered), ciphertext) is reason


@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_every_altered_bit_of_the_ciphertext_and_tag_is_noticed(pair, process, position, bit):
    header, ciphertext = SealingSession(pair.at_user, Direction.TO_OWNER, process).seal(1, b"payload", 1)
    altered = bytearray(ciphertext)
    altered[position % len(altered)] ^= 1 << bit
    opening = OpeningSession(pair.at_owner, Direction.TO_OWNER)
    assert reason_of(opening.open, header, bytes(altered)) is Reason.NOT_AUTHENTIC


@pytest.mark.parametrize("length", [0, 1, 15, 16, 22])
def test_a_truncated_ciphertext_is_noticed(sealing, opening, length):
    header, ciphertext = sealing.seal(1, b"payload", 1)
    assert reason_of(opening.open, header, ciphertext[:length]) is Reason.NOT_AUTHENTIC


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_header_of_another_size_is_malformed(opening, length):
    assert reason_of(opening.open, bytes(length), bytes(20)) is Reason.MALFORMED


def test_header_and_ciphertext_of_two_batches_do_not_mix(sealing, opening):
    one, two = sealing.seal(1, b"one", 1), sealing.seal(2, b"two", 1)
    assert reason_of(opening.open, one.header, two.ciphertext) is Reason.NOT_AUTHENTIC


def test_a_batch_sent_back_to_its_sender_is_refused_as_of_the_wrong_direction(pair, sealing):
    at_user = OpeningSession(pair.at_user, Direction.TO_USER)
    assert reason_of(at_user.open, *sealing.seal(1, b"x", 1)) is Reason.WRONG_DIRECTION


def test_a_batch_whose_direction_was_rewritten_does_not_open(pair, sealing):
    header, ciphertext = sealing.seal(1, b"x", 1)
    turned = header[:1] + bytes([Direction.TO_USER]) + header[2:]
    at_user = OpeningSession(pair.at_user, Direction.TO_USER)
    assert reason_of(at_user.open, turned, ciphertext) is Reason.NOT_AUTHENTIC


def test_a_direction_that_does_not_exist_is_refused(sealing, opening):
    header, ciphertext = sealing.seal(1, b"x", 1)
    assert reason_of(opening.open, header[:1] + b"\x03" + header[2:], ciphertext) is Reason.WRONG_DIRECTION


def test_a_batch_for_another_prekey_of_the_same_owner_is_refused(pair, sealing):
    later = make_pair(pair.user, pair.owner)
    opening = OpeningSession(later.at_owner, Direction.TO_OWNER)
    assert reason_of(opening.open, *sealing.seal(1, b"x", 1)) is Reason.UNKNOWN_PREKEY


def test_a_prekey_under_the_id_of_another_opens_nothing(pair, sealing):
    later = make_pair(pair.user, pair.owner)
    posing = replace(later.at_owner, prekey_id=pair.prekey.public.prekey_id)
    opening = OpeningSession(posing, Direction.TO_OWNER)
    assert reason_of(opening.open, *sealing.seal(1, b"x", 1)) is Reason.NOT_AUTHENTIC


@pytest.mark.parametrize(
    "change",
    [{"run": "run-2"}, {"user": bytes(32)}, {"owner": bytes(32)}, {"secret": bytes(32)}],
    ids=["other run", "other user", "other owner", "other secret"],
)
def test_a_batch_opens_only_for_its_run_user_owner_and_secret(pair, sealing, change):
    opening = OpeningSession(replace(pair.at_owner, **change), Direction.TO_OWNER)
    assert reason_of(opening.open, *sealing.seal(1, b"x", 1)) is Reason.NOT_AUTHENTIC


def test_a_user_cannot_pose_as_another_with_its_own_keys(pair, process):
    thief = Identity.generate()
    posing = replace(make_pair(thief, pair.owner).at_user, user=pair.user.participant_id)
    posing = replace(
        posing, secret=thief.agree(pair.prekey.public.public), prekey_id=pair.prekey.public.prekey_id
    )
    forged = SealingSession(posing, Direction.TO_OWNER, process).seal(1, b"x", 1)
    assert reason_of(OpeningSession(pair.at_owner, Direction.TO_OWNER).open, *forged) is Reason.NOT_AUTHENTIC


# Sessions.


def test_a_restarted_sender_has_another_key_and_the_owner_follows(pair, sealing, opening):
    restarted = SealingSession(pair.at_user, Direction.TO_OWNER, SenderProcess())
    one, two = sealing.seal(1, b"same", 1), restarted.seal(1, b"same", 1)
    assert Header.parse(one.header).counter == Header.parse(two.header).counter == 0
    assert one.ciphertext != two.ciphertext
    assert [opening.open(*batch) for batch in (one, two, one)] == [b"same"] * 3


def test_a_forged_session_id_does_not_displace_the_session_in_use(sealing, opening):
    header, ciphertext = sealing.seal(1, b"x", 1)
    opening.open(header, ciphertext)
    in_use = opening._current
    forged = header[:4] + os.urandom(32) + header[36:]
    assert reason_of(opening.open, forged, ciphertext) is Reason.NOT_AUTHENTIC
    assert opening._current is in_use


def test_a_session_without_nonces_left_refuses_to_seal(sealing):
    sealing._next = 2**64 - 2
    assert reason_of(sealing.seal_many, 1, np.zeros(3, RECORD_DTYPE), 1) is Reason.EXHAUSTED
    batches = sealing.seal_many(1, np.zeros(2, RECORD_DTYPE), 1)
    assert [Header.parse(header).counter for header in batches.headers] == [2**64 - 2, 2**64 - 1]
    assert reason_of(sealing.seal, 1, b"", 0) is Reason.EXHAUSTED


def test_a_forked_child_has_another_session_id_and_cannot_use_inherited_sessions(pair, process, sealing):
    before = process.session_id
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                sealing.seal(1, b"x", 1)
                refusal = "none"
            except VerificationError as error:
                refusal = error.reason.value
            fresh = SealingSession(pair.at_user, Direction.TO_OWNER, process)
            header, ciphertext = fresh.seal(1, b"child", 1)
            os.write(writer, process.session_id + header + ciphertext + refusal.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    session_id, header, ciphertext = said[:32], said[32:96], said[96 : 96 + 21]
    assert said[117:].decode() == Reason.FORKED
    assert session_id != before
    assert Header.parse(header).session_id == session_id
    assert process.session_id == before
    assert OpeningSession(pair.at_owner, Direction.TO_OWNER).open(header, ciphertext) == b"child"
    assert sealing.seal(1, b"x", 1)


@pytest.mark.parametrize(("first", "count"), [(-1, 0), (2**64, 0), (1, -1), (1, 2**32)])
def test_numbers_that_do_not_fit_the_header_are_refused_and_cost_no_nonce(sealing, first, count):
    with pytest.raises(CryptoError, match="expected 0 to"):
        sealing.seal(first, b"", count)
    assert Header.parse(sealing.seal(1, b"", 0).header).counter == 0


def test_nothing_that_holds_a_secret_prints_or_pickles_it(pair, sealing, opening):
    agreement = pair.at_user
    for holder in (agreement, sealing, opening):
        assert agreement.secret.hex() not in repr(holder)
        assert repr(agreement.secret) not in repr(holder)
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(holder)


# Many messages at once.


@given(size=st.integers(0, 40), per=st.integers(1, 45), first=st.integers(1, 2**63), strided=st.booleans())
def test_sealing_many_does_what_sealing_one_by_one_does(pair, size, per, first, strided):
    generator = np.random.default_rng(size)
    records = np.empty(size, RECORD_DTYPE)
    records["item"] = generator.integers(0, 2**32, size, dtype=np.uint32)
    records["positive"] = generator.integers(0, 2, size)
    given_records = np.repeat(records, 2)[::2] if strided else records
    process = SenderProcess()
    fast = SealingSession(pair.at_user, Direction.TO_OWNER, process)
    slow = SealingSession(pair.at_user, Direction.TO_OWNER, process)
    batches = fast.seal_many(first, given_records, per)
    expected = [
        slow.seal(first + start, records[start : start + per].tobytes(), len(records[start : start + per]))
        for start in range(0, size, per)
    ]
    assert [SealedBatch(*batch) for batch in zip(*batches, strict=True)] == expected


@pytest.mark.parametrize(("size", "per"), [(1023, 1), (1024, 1), (1025, 1), (2 * 1024 * 3 + 2, 3)])
def test_numbering_runs_on_where_many_messages_are_sealed_in_parts(pair, process, size, per):
    records = np.zeros(size, RECORD_DTYPE)
    records["item"] = np.arange(size)
    session = SealingSession(pair.at_user, Direction.TO_OWNER, process)
    opening = OpeningSession(pair.at_owner, Direction.TO_OWNER)
    items, next_number = [], 10
    for counter, (header, ciphertext) in enumerate(zip(*session.seal_many(10, records, per), strict=True)):
        numbers = Header.parse(header)
        assert (numbers.counter, numbers.first_sequence) == (counter, next_number)
        items += decode_records(opening.open(header, ciphertext), numbers.count)[0].tolist()
        next_number += numbers.count
    assert items == list(range(size))
    assert next_number == 10 + size


@pytest.mark.parametrize(
    "records", [np.zeros(3, np.uint32), np.zeros((3, 1), RECORD_DTYPE), np.zeros(3, [("item", "<u4")])]
)
def test_an_array_that_holds_no_records_is_refused(sealing, records):
    with pytest.raises(CryptoError, match="expected 1-d"):
        sealing.seal_many(1, records, 1)


@pytest.mark.parametrize(("first", "per"), [(1, 0), (1, -1), (-1, 1), (2**64 - 1, 1)])
def test_numbers_out_of_range_are_refused_for_many_messages_too(sealing, first, per):
    with pytest.raises(CryptoError, match="expected"):
        sealing.seal_many(first, np.zeros(2, RECORD_DTYPE), per)


# Records.


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), max_size=30))
def test_records_come_back_as_they_were(records):
    items = np.array([item for item, _ in records], np.uint32)
    positive = np.array([flag for _, flag in records], np.bool_)
    payload = encode_records(items, positive)
    assert len(payload) == 5 * len(records)
    decoded_items, decoded_positive = decode_records(payload, len(records))
    assert (decoded_items.dtype, decoded_positive.dtype) == (np.uint32, np.bool_)
    np.testing.assert_array_equal(decoded_items, items)
    np.testing.assert_array_equal(decoded_positive, positive)


def test_a_record_is_four_little_endian_bytes_and_a_flag():
    payload = encode_records(np.array([258], np.uint32), np.array([True]))
    assert payload == b"\x02\x01\x00\x00\x01"


def test_decoded_records_can_be_written_to():
    items, positive = decode_records(bytes(5), 1)
    items[0], positive[0] = 7, True
    assert (items[0], positive[0]) == (7, True)


@pytest.mark.parametrize(("size", "count"), [(4, 1), (6, 1), (5, 2), (0, 1), (5, 0), (5, -1)])
def test_records_of_another_size_than_their_count_are_refused(size, count):
    with pytest.raises(DataError, match="records take"):
        decode_records(bytes(size), count)


@given(st.integers(2, 255), st.integers(0, 2))
def test_a_flag_that_is_neither_zero_nor_one_is_refused(flag, position):
    payload = bytearray(15)
    payload[5 * position + 4] = flag
    with pytest.raises(DataError, match=f"flag of record {position} "):
        decode_records(bytes(payload), 3)


@pytest.mark.parametrize(
    ("items", "positive"),
    [
        (np.zeros(2, np.int64), np.zeros(2, np.bool_)),
        (np.zeros(2, np.uint32), np.zeros(2, np.uint8)),
        (np.zeros(2, np.uint32), np.zeros(3, np.bool_)),
        (np.zeros((2, 1), np.uint32), np.zeros((2, 1), np.bool_)),
    ],
)
def test_arrays_that_are_no_records_are_refused(items, positive):
    with pytest.raises(DataError, match="expected"):
        encode_records(items, positive)


# The sequence gate.


@pytest.mark.parametrize(
    ("first", "last", "decision"),
    [
        (6, 6, Decision.ACCEPT),
        (6, 9, Decision.ACCEPT),
        (5, 5, Decision.DUPLICATE),
        (1, 5, Decision.DUPLICATE),
        (5, 6, Decision.MISMATCH),
        (1, 9, Decision.MISMATCH),
        (7, 7, Decision.MISMATCH),
    ],
)
def test_the_gate_accepts_the_next_batch_repeats_what_is_durable_and_refuses_the_rest(first, last, decision):
    gate = SequenceGate(5)
    assert gate.judge(first, last) is decision
    assert gate.expected == 6
    assert gate.after(first, last) == SequenceGate(last if decision is Decision.ACCEPT else 5)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 3), (-1, 1), (3, 2)])
def test_a_batch_without_records_or_numbered_below_one_is_malformed(first, last):
    assert reason_of(SequenceGate().judge, first, last) is Reason.MALFORMED


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 8)), max_size=60))
def test_whatever_arrives_each_record_is_accepted_once_and_in_order(offers):
    gate, accepted = SequenceGate(), []
    for first, more in offers:
        last = first + more
        if gate.judge(first, last) is Decision.ACCEPT:
            accepted += range(first, last + 1)
        gate = gate.after(first, last)
    assert accepted == list(range(1, gate.durable + 1))


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    disorder=st.randoms(use_true_random=False),
    copies=st.integers(1, 3),
)
def test_a_sender_that_retries_until_acknowledged_delivers_everything_exactly_once(sizes, disorder, copies):
    ends = np.cumsum(sizes).tolist()
    batches = [(end - size + 1, end) for size, end in zip(sizes, ends, strict=True)]
    gate, accepted = SequenceGate(), []
    while gate.durable < ends[-1]:
        # Replayed, reordered and lost messages; the next one due always gets through in the end.
        schedule = batches * copies
        disorder.shuffle(schedule)
        schedule = schedule[: disorder.randint(0, len(schedule))]
        schedule.append(next(batch for batch in batches if batch[0] == gate.expected))
        for first, last in schedule:
            if gate.judge(first, last) is Decision.ACCEPT:
                accepted += range(first, last + 1)
            gate = gate.after(first, last)
    assert accepted == list(range(1, ends[-1] + 1))


@given(disorder=st.randoms(use_true_random=False))
def test_replayed_reordered_and_missing_sealed_batches_store_each_record_once(pair, process, disorder):
    items = np.arange(12, dtype=np.uint32)
    records = np.zeros(12, RECORD_DTYPE)
    records["item"] = items
    session = SealingSession(pair.at_user, Direction.TO_OWNER, process)
    sealed = list(zip(*session.seal_many(1, records, 5), strict=True))
    opening = OpeningSession(pair.at_owner, Direction.TO_OWNER)
    schedule = [batch for batch in sealed * 3 if disorder.random() < 0.7]
    disorder.shuffle(schedule)
    gate, stored = SequenceGate(), []
    for header, ciphertext in [*schedule, *sealed]:
        numbers = Header.parse(header)
        payload = opening.open(header, ciphertext)
        if gate.judge(numbers.first_sequence, numbers.last_sequence) is Decision.ACCEPT:
            stored += decode_records(payload, numbers.count)[0].tolist()
        gate = gate.after(numbers.first_sequence, numbers.last_sequence)
    assert stored == items.tolist()
