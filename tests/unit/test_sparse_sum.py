"""Sparse contributions: what is left out costs nothing and changes no sum; nobody is decrypted below the floor."""

import dataclasses
import hashlib

import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier import from_bytes
from coterie.crypto.paillier.elements import join, split
from coterie.crypto.paillier.format import HEADER_BYTES
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.encrypted import EncryptedMember, packing_of
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined, Step
from coterie.secure_sum.sparse import pack_places, unpack_places
from coterie.secure_sum.statements import list_hash
from coterie.studies.local_rounds import Holder, Members, run_round
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.sums import (
    HOLDERS,
    SUBJECT,
    added,
    halves,
    held_by_all,
    identity,
    key_holder,
    obfuscators,
    opened,
)

LAYOUT = Layout((Segment("values", (300,), 1.0, 12), Segment.whole("counts", (5,), 3)))
PUBLIC = held_by_all().secret.public
CIPHERTEXT_BYTES = 2 * PUBLIC.modulus_bytes


def plan_of(users=(1, 1, 1, 1), floor: int = 2, secure_sum: str = "encrypted", **changed) -> SumPlan:
    server = halves(secure_sum)[0]()
    members = tuple(Member(identity(n).participant_id, "h", count) for n, count in enumerate(users))
    found = SumPlan(
        "run",
        1,
        "train",
        secure_sum,
        hashlib.sha256(b"model").digest(),
        layout_hash(LAYOUT),
        members,
        sparse_floor=floor,
        **server.plan_fields(len(users), LAYOUT)._asdict(),
    )
    return dataclasses.replace(found, **changed)


PACKING = packing_of(plan_of(), PUBLIC)
COUNT = PACKING.ciphertexts(LAYOUT.size)


def codes_in(plan: SumPlan, member: int, places, seed: int = 0) -> np.ndarray:
    """Return codes of a member that has something in some ciphertexts only."""
    users = plan.members[member].users
    rng = np.random.default_rng([seed, member])
    codes = LAYOUT.zeros(users).copy()
    slots = packing_of(plan, PUBLIC).slots
    for place in places:
        inside = slice(place * slots, min((place + 1) * slots, LAYOUT.size))
        drawn = rng.integers(1, 4, (users, inside.stop - inside.start)).sum(axis=0)
        codes[inside] = drawn.astype(np.uint32)
    return codes


def member_half(plan: SumPlan, member: int) -> EncryptedMember:
    return EncryptedMember(plan, member, identity(member), obfuscators(), LAYOUT)


def submitted(plan: SumPlan, member: int, codes) -> bytes:
    return member_half(plan, member).answer(Step.SUBMIT, b"", codes)


def outcome(plan: SumPlan, codes):
    members = Members(member_half, lambda plan, asked: [(n, codes[n]) for n in asked])
    kept = {f"k{n}": Holder(lambda plan, n=n: key_holder(plan, n)) for n in range(HOLDERS)}
    return run_round(plan, LAYOUT, halves(plan.secure_sum)[0](), {"h": members, **kept}, subject=SUBJECT)


# --- the sum ---------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    there=st.lists(st.sets(st.integers(0, COUNT - 1)), min_size=1, max_size=6),
    users=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    floor=st.integers(1, 5),
)
def test_the_sum_is_that_of_the_codes_where_enough_users_have_something(there, users, floor):
    plan = plan_of(tuple(users[: len(there)]), floor)
    # Of few users a slot is narrower, and there may be fewer ciphertexts.
    count = packing_of(plan, PUBLIC).ciphertexts(LAYOUT.size)
    codes = {n: codes_in(plan, n, {place for place in own if place < count}) for n, own in enumerate(there)}
    result = outcome(plan, codes)
    assert result.reason == ""
    assert np.array_equal(result.total, added(plan, LAYOUT, codes))
    LAYOUT.decode(result.total, result.users)


def test_what_covers_too_few_users_is_zero_in_the_sum_and_the_rest_is_there():
    plan = plan_of((1, 1, 1, 1), floor=3)
    places = [{0, 1}, {0, 1}, {0}, {2}]
    codes = {n: codes_in(plan, n, own) for n, own in enumerate(places)}
    result = outcome(plan, codes)
    assert result.dropped_places == 2
    values = LAYOUT.decode(result.total, 4)["values"]
    expected = LAYOUT.decode(sum(codes.values()), 4)["values"]
    slots = PACKING.slots
    assert np.array_equal(values[:slots], expected[:slots])
    assert values[:slots].any()
    assert not values[slots:].any()
    assert expected[slots:].any()


def test_what_one_member_alone_has_is_dropped_however_many_users_it_stands_for():
    plan = plan_of((5, 1, 5), floor=3)
    codes = {n: codes_in(plan, n, own) for n, own in enumerate(({0, 1}, {1}, {2}))}
    result = outcome(plan, codes)
    assert result.dropped_places == 2
    values = LAYOUT.decode(result.total, result.users)["values"]
    slots = packing_of(plan, PUBLIC).slots
    assert not values[:slots].any()
    assert values[slots : 2 * slots].any()
    assert not values[2 * slots :].any()


def test_a_member_sends_what_it_has_and_says_where():
    plan = plan_of()
    for own in ({0, 2}, set(), set(range(COUNT))):
        message = wire.SummedVector.FromString(submitted(plan, 0, codes_in(plan, 0, own)))
        assert len(message.ciphertexts) == HEADER_BYTES + len(own) * CIPHERTEXT_BYTES
        (sent,) = unpack_places(message.places, 1, COUNT)
        assert set(np.flatnonzero(sent).tolist()) == own
    whole = plan_of(floor=0)
    message = wire.SummedVector.FromString(submitted(whole, 0, codes_in(whole, 0, {0})))
    assert (len(message.ciphertexts), message.places) == (HEADER_BYTES + COUNT * CIPHERTEXT_BYTES, b"")


def test_the_running_sum_goes_on_after_a_restart():
    plan, first = plan_of(), halves("encrypted")[0]()
    codes = [codes_in(plan, n, {n % COUNT}) for n in range(4)]
    messages = [submitted(plan, n, own) for n, own in enumerate(codes)]
    running, notes = first.begin(plan, LAYOUT), {}
    for n in range(2):
        vector = first.vector(plan, {}, notes, n, messages[n], LAYOUT)
        running, notes[n] = first.added(running, vector), vector.note
    again = halves("encrypted")[0]()
    running = again.from_bytes(plan, LAYOUT, first.to_bytes(running))
    for n in range(2, 4):
        vector = again.vector(plan, {}, notes, n, messages[n], LAYOUT)
        running, notes[n] = again.added(running, vector), vector.note
    assert np.array_equal(opened(running, plan, notes), sum(codes))


@pytest.mark.parametrize("sent", [[[True, False, True]], [[False] * 9, [True] * 9], [[]]])
def test_who_sent_what_comes_back_from_its_bytes(sent):
    sent = np.array(sent, np.bool_)
    packed = pack_places(sent)
    assert len(packed) == len(sent) * -(-sent.shape[1] // 8)
    assert np.array_equal(unpack_places(packed, len(sent), sent.shape[1]), sent)
    assert not unpack_places(packed, len(sent))[:, sent.shape[1] :].any()


# --- what the server refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"places": b""}, "do not say what 1 members sent"),
        ({"places": bytes(2)}, "do not say what 1 members sent"),
        ({"places": b"\xff"}, "more than the"),
        ({"places": b"\x03"}, "bytes, expected"),
        ({"places": b"\x00"}, "bytes, expected"),
        ({"ciphertexts": b""}, "shorter than its header"),
    ],
)
def test_a_contribution_that_is_not_what_it_says_it_has_is_refused(change, words):
    plan, server = plan_of(), halves("encrypted")[0]()
    server.begin(plan, LAYOUT)
    message = wire.SummedVector.FromString(submitted(plan, 0, codes_in(plan, 0, {1})))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(Refusal, match=words):
        server.vector(plan, {}, {}, 0, message.SerializeToString(), LAYOUT)


def test_places_of_a_contribution_that_is_whole_are_refused():
    plan, server = plan_of(floor=0), halves("encrypted")[0]()
    message = wire.SummedVector.FromString(submitted(plan, 0, codes_in(plan, 0, {1})))
    message.places = b"\x07"
    with pytest.raises(Refusal, match="not sparse"):
        server.vector(plan, {}, {}, 0, message.SerializeToString(), LAYOUT)


def test_a_member_that_does_not_know_its_layout_sends_nothing():
    plan = plan_of()
    with pytest.raises(Declined, match="without its layout"):
        EncryptedMember(plan, 0, identity(0), obfuscators()).answer(Step.SUBMIT, b"", LAYOUT.zeros(1))


# --- what holders refuse ---------------------------------------------------------------------------------------------


class Asked:
    """Holders that were shown a list of a sparse sum, and a server that has everybody's ciphertexts."""

    def __init__(self, plan: SumPlan, places) -> None:
        self.plan, self.sent = plan, np.array(places, np.bool_)
        self.members = list(range(len(plan.members)))
        self.vectors = []
        zeros = PACKING.pack(LAYOUT.zeros(1))
        for n in self.members:
            message = wire.SummedVector.FromString(submitted(plan, n, codes_in(plan, n, range(COUNT))))
            self.vectors.append(from_bytes(message.ciphertexts, PUBLIC, PACKING, LAYOUT.size))
        self.zeros = [len(self.members) * one for one in zeros]

    def confirmed(self, sent=None) -> list[bytes]:
        shown = wire.Submitters(
            members=self.members, places=pack_places(self.sent if sent is None else np.array(sent, np.bool_))
        ).SerializeToString()
        return [key_holder(self.plan, n).confirm(shown).message for n in range(HOLDERS)]

    def ciphertexts(self, of) -> list[tuple[mpz, mpz]]:
        """Return unit and shift of the sum of some members' ciphertexts in each place."""
        n, found = PUBLIC.n, []
        for place in range(COUNT):
            product, shift = mpz(1), mpz(0)
            for member in self.members:
                if of[member][place]:
                    product = product * self.vectors[member].units[place]
                    shift += self.vectors[member].shifts[place]
                else:
                    shift += self.zeros[place] // len(self.members)
            unit = product % n
            found.append((unit, (product % (n * n) // n * pow(unit, -1, n) + shift) % n))
        return found

    def decrypt(self, of=None, sent=None, signed=None):
        places = pack_places(self.sent if sent is None else np.array(sent, np.bool_))
        task = wire.DecryptionTask(
            members=self.members,
            places=places,
            confirmations=[wire.Confirmation.FromString(one) for one in signed or self.confirmed()],
            mode=1,
            ciphertexts=b"".join(
                int(number).to_bytes(PUBLIC.modulus_bytes, "big")
                for pair in self.ciphertexts(self.sent if of is None else of)
                for number in pair
            ),
        )
        agreed = list_hash(self.members, pack_places(self.sent))
        return key_holder(self.plan, 0).decrypt(task.SerializeToString(), agreed)


EVERYWHERE = [[True] * COUNT] * 4


@pytest.fixture(scope="module")
def asked() -> Asked:
    """Three of four in the first place, all in the second, nobody in the third."""
    first, second = [True, True, False], [False, True, False]
    assert COUNT > 3
    return Asked(plan_of(), [one + [True] * (COUNT - 3) for one in (first, first, first, second)])


def test_an_honest_request_is_answered(asked):
    assert wire.Decryption.FromString(asked.decrypt()).plaintexts


def test_a_list_that_says_that_all_others_left_theirs_out_is_not_signed(asked):
    alone = [[False] * COUNT for _ in range(4)]
    alone[2][1] = True
    with pytest.raises(Declined, match="1 ciphertexts are of too few, the floor of the plan is 2 users"):
        asked.confirmed(alone)
    # One member is too few, whatever the floor and however many users it stands for.
    plan = plan_of((3, 1, 1, 1))
    places = np.array([[True] * COUNT, *[[False] * COUNT] * 3])
    shown = wire.Submitters(members=[0, 1, 2, 3], places=pack_places(places)).SerializeToString()
    with pytest.raises(Declined, match="at least 2 members"):
        key_holder(plan, 0).confirm(shown)


def test_one_contribution_in_the_place_of_a_sum_is_not_decrypted(asked):
    everywhere = Asked(plan_of(), EVERYWHERE)
    alone = [[n == 2] * COUNT for n in range(4)]
    with pytest.raises(Declined, match="not the sum over those"):
        everywhere.decrypt(of=alone)
    two = [[n in (1, 2)] * COUNT for n in range(4)]
    with pytest.raises(Declined, match="over others than it confirmed"):
        everywhere.decrypt(of=two, sent=two)
    with pytest.raises(Declined, match="nobody in the list sent"):
        asked.decrypt(of=alone)


class Multiplied(Asked):
    """The same request with a multiple of one member's ciphertext in a sum of several."""

    def __init__(self, asked: Asked, scalar: mpz) -> None:
        vars(self).update(vars(asked))
        self.scalar = scalar

    def ciphertexts(self, of):
        n, square = PUBLIC.n, PUBLIC.n_squared
        first, *others = join(*zip(*super().ciphertexts(of), strict=True), n)
        forged = first * pow(self.vectors[0].residues[0], self.scalar, square) % square
        return list(zip(*split([forged, *others], n), strict=True))


@pytest.mark.parametrize(
    "scalar",
    [1, -1, 2**64, pow(2, -10 * PACKING.slot_bits, int(PUBLIC.n))],
    ids=["one", "minus one", "large", "quotient"],
)
def test_a_multiple_of_a_contribution_in_a_sparse_sum_is_not_decrypted(asked, scalar):
    with pytest.raises(Declined, match="not the sum over those"):
        Multiplied(asked, mpz(scalar)).decrypt()


def test_other_places_than_were_confirmed_are_not_decrypted(asked):
    with pytest.raises(Declined, match="over others than it confirmed"):
        asked.decrypt(of=EVERYWHERE, sent=EVERYWHERE)


def test_what_nobody_in_the_list_sent_is_not_decrypted(asked):
    hidden = asked.sent.copy()
    hidden[0, 2] = True
    with pytest.raises(Declined, match="nobody in the list sent"):
        asked.decrypt(of=hidden)


def test_a_list_with_fewer_places_than_the_sum_has_ciphertexts_is_not_confirmed():
    shown = wire.Submitters(members=[0, 1, 2, 3], places=b"\x07" * 4, ciphertexts=9).SerializeToString()
    with pytest.raises(Declined, match="9 ciphertexts, and the sum has 8 at most"):
        key_holder(plan_of(), 0).confirm(shown)


def test_places_that_are_none_of_the_sum_are_not_confirmed():
    for plan, places, words in (
        (plan_of(), bytes(5), "do not say what 4 members sent"),
        (plan_of(floor=0), bytes(4), "not sparse"),
    ):
        shown = wire.Submitters(members=[0, 1, 2, 3], places=places).SerializeToString()
        with pytest.raises(Declined, match=words):
            key_holder(plan, 0).confirm(shown)


def test_ciphertexts_beyond_the_places_of_the_list_are_not_decrypted():
    one = Asked(plan_of(), EVERYWHERE)
    shown = wire.Submitters(members=one.members).SerializeToString()
    signed = [key_holder(one.plan, n).confirm(shown).message for n in range(HOLDERS)]
    task = wire.DecryptionTask(
        members=one.members,
        confirmations=[wire.Confirmation.FromString(each) for each in signed],
        mode=1,
        ciphertexts=bytes(PUBLIC.modulus_bytes - 1) + b"\1" + bytes(PUBLIC.modulus_bytes),
    )
    with pytest.raises(Declined, match="that the list does not have"):
        key_holder(one.plan, 0).decrypt(task.SerializeToString(), list_hash(one.members))


def test_where_participants_share_the_key_sums_can_be_sparse_too():
    plan = plan_of((1, 2, 1), floor=2, secure_sum="shared-key")
    codes = {n: codes_in(plan, n, own) for n, own in enumerate(({0}, {0, 1}, {3}))}
    result = outcome(plan, codes)
    sealed = wire.SealedModel.FromString(result.total.model).sealed
    assert np.array_equal(np.frombuffer(sealed, np.uint32)[: LAYOUT.size], added(plan, LAYOUT, codes))
