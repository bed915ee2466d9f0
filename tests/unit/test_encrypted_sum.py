"""The encrypted sum: exact, decrypted by holders who see to it that nothing but a sum is decrypted."""

import dataclasses
import hashlib

import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto.paillier import Mode, Packing, RunningSum, encrypt, from_bytes, to_bytes
from coterie.crypto.paillier.decryption import decrypt
from coterie.crypto.paillier.elements import split
from coterie.crypto.paillier.pads import sums_hash
from coterie.rounds.holder_round import HolderRound
from coterie.rounds.member_round import Decline, Journal, Keep, Send, SitOut
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.encrypted import (
    EncryptedMember,
    EncryptedServer,
    Keyring,
    confirmations_in,
    packing_of,
    part_of,
)
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import Declined, Failed, Step
from coterie.secure_sum.statements import list_hash
from coterie.studies.local_rounds import Holder, Members, run_round
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import rounds_pb2 as wire
from tests.simulation.rig.intruder import false
from tests.simulation.rig.sums import HOLDERS, halves, held_by_all, identity, key_holder, obfuscators, pads_in

LAYOUT = Layout((Segment("values", (150,), 1.0, 12), Segment.whole("counts", (5,), 3)))
SERVER, MEMBER = halves("encrypted")


def plan_of(users=(1, 1, 1, 1), number: int = 1, min_sum: int = 1, model: bytes = b"model") -> SumPlan:
    members = tuple(Member(identity(n).participant_id, "h", count) for n, count in enumerate(users))
    return SumPlan(
        "run",
        number,
        "train",
        "encrypted",
        hashlib.sha256(model).digest(),
        layout_hash(LAYOUT),
        members,
        min_sum=min_sum,
        **SERVER().plan_fields(len(users), LAYOUT)._asdict(),
    )


def codes_for(plan: SumPlan, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    widths = np.repeat([segment.bits for segment in LAYOUT.segments], [s.size for s in LAYOUT.segments])
    return [
        rng.integers(1, 2**widths, (member.users, LAYOUT.size)).sum(axis=0).astype(np.uint32)
        for member in plan.members
    ]


class Unreachable:
    def answer(self, plan, step, briefings):
        return ()


class Liar(Holder):
    """Says that other numbers were in its part."""

    def answer(self, plan, step, briefings):
        for respondent, message in super().answer(plan, step, briefings):
            yield respondent, false(message) if step is Step.DECRYPT else message


def holders(plan: SumPlan, lost=(), liars=()):
    found = {}
    for n in range(HOLDERS):
        kind = Liar if n in liars else Holder
        found[f"k{n}"] = Unreachable() if n in lost else kind(lambda plan, n=n: key_holder(plan, n))
    return found


def outcome(plan: SumPlan, codes, there=None, lost=(), liars=(), kept=None):
    there = range(len(plan.members)) if there is None else there
    members = Members(MEMBER, lambda plan, asked: [(n, codes[n]) for n in asked if n in there])
    hosts = {"h": members, **(kept or holders(plan, lost, liars))}
    return run_round(plan, LAYOUT, SERVER(), hosts)


# --- the sum ---------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(
    users=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_sum_is_that_of_the_codes_of_whoever_submitted(users, seed, data):
    plan = plan_of(tuple(users))
    there = sorted(data.draw(st.sets(st.sampled_from(range(len(users))), min_size=1)))
    codes = codes_for(plan, seed)
    result = outcome(plan, codes, there)
    assert result.reason == ""
    assert result.submitters == tuple(there)
    assert np.array_equal(result.total, sum(codes[n] for n in there))
    assert LAYOUT.decode(result.total, result.users).keys() == {"values", "counts"}


@pytest.mark.parametrize(("lost", "liars"), [((0,), ()), ((1,), ()), ((), (2,)), ((), (0, 1)), ((2,), (0,))])
def test_the_parts_of_a_holder_that_is_gone_or_lies_are_decrypted_by_another_one(lost, liars):
    plan = plan_of()
    codes = codes_for(plan)
    result = outcome(plan, codes, lost=lost, liars=liars)
    assert np.array_equal(result.total, sum(codes))
    assert {plan.asked_of(number)[0] for number in result.wrong} == set(liars)


@pytest.mark.parametrize(
    ("lost", "liars", "words"),
    [
        ((0, 1), (), "1 of 3 key holders confirmed"),
        ((), (0, 1, 2), "what was decrypted is not what is in the sum"),
        ((1,), (0, 2), "what was decrypted is not what is in the sum"),
    ],
)
def test_without_a_majority_or_anybody_honest_the_round_is_abandoned(lost, liars, words):
    plan = plan_of()
    result = outcome(plan, codes_for(plan), lost=lost, liars=liars)
    assert result.total is None
    assert words in result.reason


def test_too_few_users_are_never_decrypted():
    plan = plan_of(min_sum=4)
    kept = holders(plan)
    result = outcome(plan, codes_for(plan), there=[0, 1, 2], kept=kept)
    assert "the plan's floor is 4" in result.reason
    assert all(holder.journal == Journal() for holder in kept.values())


def test_there_is_no_plan_without_a_key_or_without_anybody_who_decrypts():
    with pytest.raises(Failed, match="no key"):
        EncryptedServer().plan_fields(3, LAYOUT)
    keys = Keyring()
    keys.use(held_by_all().secret.public, ())
    with pytest.raises(Failed, match="nobody is there who could decrypt"):
        EncryptedServer(keys).plan_fields(3, LAYOUT)
    with pytest.raises(Failed, match="is not known"):
        EncryptedServer().begin(plan_of(), LAYOUT)


def test_the_running_sum_comes_back_from_its_bytes_and_is_one_product_for_each_ciphertext():
    plan, server = plan_of((1, 3)), SERVER()
    codes = codes_for(plan)
    running = server.begin(plan, LAYOUT)
    assert server.from_bytes(plan, LAYOUT, server.to_bytes(running)).addends == 0
    before = running
    for n in range(2):
        message = MEMBER(plan, n).answer(Step.SUBMIT, b"", codes[n])
        running = server.added(running, server.vector(plan, {}, {}, n, message, LAYOUT))
    assert before.addends == 0
    again = server.from_bytes(plan, LAYOUT, server.to_bytes(running))
    assert (again.addends, again.total()) == (4, running.total())
    assert len(again.total().units) == packing_of(plan, held_by_all().secret.public).ciphertexts(LAYOUT.size)


def test_parts_cover_all_ciphertexts_once():
    for count in range(12):
        places = [place for part in range(3) for place in part_of(count, part, 3)]
        assert places == list(range(count))


# --- contributions ---------------------------------------------------------------------------------------------------


def contribution(plan: SumPlan, member: int = 0) -> bytes:
    return MEMBER(plan, member).answer(Step.SUBMIT, b"", codes_for(plan)[member])


def resubmitted(message: bytes, change) -> bytes:
    content = bytearray(wire.SummedVector.FromString(message).ciphertexts)
    return wire.SummedVector(ciphertexts=bytes(change(content))).SerializeToString()


def with_number(place: int, number: int):
    def change(content):
        content[44 + 128 * place : 44 + 128 * (place + 1)] = int(number).to_bytes(128, "big")
        return content

    return change


N = int(held_by_all().secret.public.n)
P = int(held_by_all().secret.factors[0].prime)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_number(0, 0), "zero or not below n"),
        (with_number(0, N), "zero or not below n"),
        (with_number(1, N), "zero or not below n"),
        (with_number(0, P), "not invertible"),
        (lambda content: content[:-1], "bytes, expected"),
        (lambda content: content + bytes(256), "bytes, expected"),
        (lambda content: bytes([2]) + content[1:], "format 2"),
        (lambda content: content[:2] + bytes([content[2] + 1]) + content[3:], "w, b, C, N"),
        (lambda content: content[:12] + bytes(32) + content[44:], "under key"),
        (lambda content: content[:1] + bytes([4]) + content[2:], "mode 4"),
        (lambda content: b"", "shorter than its header"),
    ],
)
def test_a_contribution_that_is_no_vector_under_the_plans_key_is_refused_and_says_what_is_wrong(
    change, words
):
    plan, server = plan_of(), SERVER()
    message = resubmitted(contribution(plan), change)
    with pytest.raises(Refusal, match=words):
        server.vector(plan, {}, {}, 0, message, LAYOUT)
    with pytest.raises(Refusal, match="no SummedVector"):
        server.vector(plan, {}, {}, 0, b"\xff", LAYOUT)


def test_a_member_encrypts_under_no_other_key_and_nothing_beyond_its_bits():
    plan = plan_of()
    with pytest.raises(Declined, match="accepted is"):
        MEMBER(dataclasses.replace(plan, key_id=bytes(32)), 0).answer(Step.SUBMIT, b"", codes_for(plan)[0])
    with pytest.raises(Declined, match="run into the next slot"):
        MEMBER(plan, 0).answer(Step.SUBMIT, b"", np.full(LAYOUT.size, 2**12, np.uint32))
    with pytest.raises(Declined, match="nothing to say"):
        MEMBER(plan, 0).answer(Step.CONFIRM, b"")
    gone = MEMBER(plan, 0)
    gone.forget()
    with pytest.raises(Declined):
        gone.answer(Step.SUBMIT, b"", codes_for(plan)[0])


def test_more_users_than_the_guard_of_a_slot_has_room_for_are_refused():
    plan = plan_of((1, 1))
    public = held_by_all().secret.public
    crowded = dataclasses.replace(
        plan, code_bits=31, members=(dataclasses.replace(plan.members[0], users=1 << 26),)
    )
    with pytest.raises(Declined, match="do not fit"):
        EncryptedMember(crowded, 0, identity(0), obfuscators()).answer(
            Step.SUBMIT, b"", np.ones(LAYOUT.size, np.uint32)
        )
    vector = from_bytes(
        wire.SummedVector.FromString(contribution(plan)).ciphertexts,
        public,
        packing_of(plan, public),
        LAYOUT.size,
    )
    full = RunningSum(public, packing_of(plan, public), LAYOUT.size).plus(vector).plus(vector)
    with pytest.raises(Exception, match="room for 1 to 2"):
        full.plus(vector)


def test_the_same_codes_never_look_alike_and_say_nothing_of_themselves():
    plan = plan_of()
    codes = codes_for(plan)[0]
    one, other = (MEMBER(plan, 0).answer(Step.SUBMIT, b"", codes) for _ in range(2))
    first, second = (
        np.frombuffer(wire.SummedVector.FromString(each).ciphertexts[44:], np.uint8) for each in (one, other)
    )
    assert (first == second).mean() < 0.02
    assert codes.astype("<u4").tobytes()[:12] not in one


# --- what holders refuse ---------------------------------------------------------------------------------------------


class Asked:
    """Holders that have confirmed a list, and what is sent to one of them to be decrypted."""

    def __init__(self, plan: SumPlan, members=None, unchanged: int = 0) -> None:
        self.plan, self.public = plan, held_by_all().secret.public
        self.members = list(range(len(plan.members))) if members is None else members
        self.codes = codes_for(plan)
        for codes in self.codes:
            codes[:unchanged] = LAYOUT.zeros(1)[:unchanged]
        self.packing = packing_of(plan, self.public)
        self.vectors = [
            from_bytes(
                wire.SummedVector.FromString(
                    MEMBER(plan, n).answer(Step.SUBMIT, b"", self.codes[n])
                ).ciphertexts,
                self.public,
                self.packing,
                LAYOUT.size,
            )
            for n in range(len(plan.members))
        ]
        shown = wire.Submitters(members=self.members).SerializeToString()
        self.half = key_holder(plan, 0)
        self.signed = [key_holder(plan, n).confirm(shown).message for n in range(HOLDERS)]
        self.agreed = list_hash(self.members)

    def residues(self, some=None) -> list[mpz]:
        """Return the ciphertexts of the sum of some contributions."""
        total = RunningSum(self.public, self.packing, LAYOUT.size)
        for n in self.members if some is None else some:
            total.add(self.vectors[n])
        return total.total().residues

    def decrypt(self, residues, members=None, signed=None, first=0, mode=1) -> wire.Decryption:
        """Ask for the first part, made of these ciphertexts."""
        units, shifts = split(residues[: len(part_of(len(residues), 0, 1))], self.public.n)
        task = wire.DecryptionTask(
            members=self.members if members is None else members,
            confirmations=[
                wire.Confirmation.FromString(one) for one in (self.signed if signed is None else signed)
            ],
            mode=mode,
            part=0,
            first=first,
            ciphertexts=b"".join(
                int(number).to_bytes(128, "big")
                for pair in zip(units, shifts, strict=True)
                for number in pair
            ),
        )
        message = self.half.decrypt(task.SerializeToString(), self.agreed)
        return wire.Decryption.FromString(message)


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked(plan_of())


def test_an_honest_request_is_answered(asked):
    found = asked.decrypt(asked.residues())
    numbers, pads = (
        [mpz.from_bytes(content[at : at + 128], "big") for at in range(0, len(content), 128)]
        for content in (found.plaintexts, found.pads)
    )
    assert pads == pads_in(asked.plan, dict.fromkeys(asked.members, b""), len(pads))
    values = [(number - pad) % N for number, pad in zip(numbers, pads, strict=True)]
    assert np.array_equal(asked.packing.unpack(values, LAYOUT.size, 4), sum(asked.codes))


def times_constant(residues, exponent: int, public):
    return [residue * (1 + exponent * public.n) % public.n_squared for residue in residues]


def test_a_single_contribution_is_not_decrypted(asked):
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(asked.residues([0]))


@pytest.mark.parametrize("constant", [1, 2**40, 2**960])
def test_a_single_contribution_with_a_constant_is_not_decrypted(asked, constant):
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(times_constant(asked.residues([0]), constant, asked.public))


def test_a_power_of_a_contribution_is_not_decrypted(asked):
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt([pow(residue, 4, asked.public.n_squared) for residue in asked.residues([0])])


def test_a_contributor_that_is_there_twice_is_not_decrypted(asked):
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(asked.residues([0, 0, 1, 2]))
    with pytest.raises(Declined, match="does not ascend"):
        asked.decrypt(asked.residues([0, 0, 1, 2]), members=[0, 0, 1, 2])


def test_ciphertexts_in_other_places_are_not_decrypted(asked):
    residues = asked.residues()
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt([residues[1], residues[0], *residues[2:]])
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(residues, first=1)
    mixed = [asked.residues([0])[0], *residues[1:]]
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(mixed)


def test_contributions_to_another_round_are_not_decrypted(asked):
    other = Asked(plan_of(number=2))
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(other.residues())
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(
            [a * b % asked.public.n_squared for a, b in zip(asked.residues(), other.residues(), strict=True)]
        )


def test_a_second_list_in_one_round_is_neither_confirmed_nor_decrypted():
    plan = plan_of()
    both = Asked(plan), Asked(plan, [0, 1, 2])
    holder = HolderRound(plan, Journal(), lambda: key_holder(plan, 0))
    shown = [wire.Submitters(members=one.members).SerializeToString() for one in both]
    keep, send = holder.asked(Step.CONFIRM, shown[0])
    assert (keep, send.step) == (Keep(holder.journal), Step.CONFIRM)
    assert holder.asked(Step.CONFIRM, shown[0]) == [send]
    with pytest.raises(Declined, match="over others than it confirmed"):
        both[0].decrypt(both[0].residues([0, 1, 2]), members=[0, 1, 2], signed=both[1].signed)
    sat_out, declined = holder.asked(Step.CONFIRM, shown[1])
    assert "another list of submitters" in sat_out.reason
    assert declined == Decline()


def test_a_list_that_most_holders_did_not_sign_is_not_decrypted(asked):
    with pytest.raises(Declined, match="1 of 3 key holders confirmed the list"):
        asked.decrypt(asked.residues(), signed=asked.signed[:1])
    with pytest.raises(Declined, match="1 of 3 key holders confirmed the list"):
        asked.decrypt(asked.residues(), signed=[asked.signed[0]] * 3)
    stolen = wire.Confirmation.FromString(asked.signed[0])
    stolen.member = 1
    with pytest.raises(Declined, match="not that of key holder 1"):
        asked.decrypt(asked.residues(), signed=[asked.signed[0], stolen.SerializeToString()])
    forged = wire.Confirmation.FromString(asked.signed[1])
    forged.signature = bytes(64)
    with pytest.raises(Declined, match="signature"):
        asked.decrypt(asked.residues(), signed=[asked.signed[0], forged.SerializeToString()])
    forged.member = 7
    with pytest.raises(Declined, match="nobody who holds the key"):
        asked.decrypt(asked.residues(), signed=[forged.SerializeToString()])


def test_what_the_server_adds_to_the_whole_sum_it_knows_already(asked):
    # The book says so: pads do not show it, and nothing is learned by it.
    found = asked.decrypt(times_constant(asked.residues(), 5, asked.public))
    number = mpz.from_bytes(found.plaintexts[:128], "big")
    honest = mpz.from_bytes(asked.decrypt(asked.residues()).plaintexts[:128], "big")
    assert number == (honest + 5) % N


# --- forgeries that need to know some of the values ------------------------------------------------------------------


class Tagged(Asked):
    """The same contributions with tags of 96 bits above their slots in the place of pads, as they were before pads."""

    def __init__(self, asked: Asked) -> None:
        vars(self).update(vars(asked))
        rng, self.top = np.random.default_rng(7), asked.packing.slots * asked.packing.slot_bits
        tags = [[int.from_bytes(rng.bytes(12)) for _ in vector.units] for vector in asked.vectors]
        self.vectors = [
            encrypt(codes, self.packing, obfuscators(), pads=[mpz(tag) << self.top for tag in own])
            for codes, own in zip(self.codes, tags, strict=True)
        ]
        self.tags = [sum(column) for column in zip(*tags, strict=True)]

    def opens(self, residues) -> list[mpz] | None:
        """Return the plaintexts of ciphertexts that are accepted by their tags; None of others."""
        found = decrypt(held_by_all().secret, *split(residues, self.public.n), Mode.KEY_HOLDER)
        return found if [number >> self.top for number in found] == self.tags else None


class Bare(Tagged):
    """The same contributions with nothing above their slots."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self.vectors = [encrypt(codes, self.packing, obfuscators()) for codes in self.codes]
        self.tags = [0] * len(self.tags)


def scaled(asked: Asked, member: int, known: dict[int, int], scalar: mpz) -> list[mpz]:
    """Return the sum with, added to it, a member's first ciphertext less known slots, times a number."""
    n, square, width = asked.public.n, asked.public.n_squared, asked.packing.slot_bits
    taken = sum(int(code) << width * slot for slot, code in known.items())
    left = asked.residues([member])[0] * (1 - taken * n) % square
    first, *others = asked.residues()
    return [first * pow(left, scalar, square) % square, *others]


def quotient(asked: Asked, member: int, known) -> list[mpz]:
    """Return the sum with, added to it, a member's first ciphertext moved down by its known lowest slots."""
    moved = pow(mpz(2), -asked.packing.slot_bits * len(known), asked.public.n)
    return scaled(asked, member, dict(enumerate(known)), moved)


def short_multiple(one: mpz, other: mpz, n: mpz) -> tuple[mpz, mpz, mpz]:
    """Return a number by which two others become short modulo n, and what they become (Lagrange's reduction)."""
    short, long = (mpz(1), other * pow(one, -1, n) % n), (mpz(0), n)
    while True:
        norm = short[0] ** 2 + short[1] ** 2
        times = (2 * (short[0] * long[0] + short[1] * long[1]) + norm) // (2 * norm)
        long = long[0] - times * short[0], long[1] - times * short[1]
        if long[0] ** 2 + long[1] ** 2 >= norm:
            return short[0] * pow(one, -1, n) % n, *short
        short, long = long, short


@pytest.fixture(scope="module")
def partly_known() -> Asked:
    """Contributions whose eight first values nobody changed: their code is that of zero."""
    return Asked(plan_of(), unchanged=8)


def test_a_quotient_reads_a_contribution_by_tags_and_is_refused_with_pads(partly_known):
    # The tag is moved down below the field that is checked, as it is no longer than what is known.
    zero, width = LAYOUT.zeros(1)[:8], partly_known.packing.slot_bits
    tagged = Tagged(partly_known)
    number, *_ = tagged.opens(quotient(tagged, 0, zero))
    read = [int(number >> width * slot) % (1 << width) - 4 * int(zero[slot]) for slot in range(8)]
    assert read == partly_known.codes[0][8:16].tolist()
    with pytest.raises(Declined, match="not the sum over those"):
        partly_known.decrypt(quotient(partly_known, 0, zero))


def test_a_wrong_guess_of_the_lowest_values_is_refused_by_tags_and_with_pads(partly_known):
    wrong = LAYOUT.zeros(1)[:8]
    wrong[3] += 1
    tagged = Tagged(partly_known)
    assert tagged.opens(quotient(tagged, 0, wrong)) is None
    with pytest.raises(Declined, match="not the sum over those"):
        partly_known.decrypt(quotient(partly_known, 0, wrong))


def test_a_multiple_from_a_lattice_reads_a_value_by_tags_and_is_refused_with_pads(asked):
    # All values of a ciphertext but one are known: a number makes this value's place and the tag's short at once.
    slot, width, n = 20, asked.packing.slot_bits, asked.public.n
    known = {at: int(code) for at, code in enumerate(asked.codes[0][: asked.packing.slots]) if at != slot}
    tagged = Tagged(asked)
    scalar, of_value, of_tag = short_multiple(mpz(1) << width * slot, mpz(1) << tagged.top, n)
    total = tagged.opens(tagged.residues())[0]
    found = tagged.opens(scaled(tagged, 0, known, scalar))
    assert found is not None
    told = found[0] - total
    fitting = [
        value
        for value in range(1 << 12)
        if (told - of_value * value) % of_tag == 0 and 0 <= (told - of_value * value) // of_tag < 1 << 96
    ]
    assert fitting == [asked.codes[0][slot]]
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(scaled(asked, 0, known, scalar))


@pytest.mark.parametrize("scalar", [1, 2, -1, 2**64, 2**512 + 1])
def test_no_multiple_of_a_contribution_is_decrypted_though_all_its_values_are_known(asked, scalar):
    known = dict(enumerate(asked.codes[0][: asked.packing.slots].tolist()))
    bare = Bare(asked)
    assert bare.opens(scaled(bare, 0, known, mpz(scalar))) is not None
    with pytest.raises(Declined, match="not the sum over those"):
        asked.decrypt(scaled(asked, 0, known, mpz(scalar)))


def test_a_contribution_alone_twice_or_of_few_would_be_decrypted_without_pads(asked):
    bare = Bare(asked)
    for some in ([0], [0, 1], [0, 0, 1, 2]):
        assert bare.opens(bare.residues(some)) is not None
        with pytest.raises(Declined, match="not the sum over those"):
            asked.decrypt(asked.residues(some))


def test_a_multiple_of_the_whole_sum_is_not_decrypted(asked):
    for times in (2, 3):
        residues = [pow(residue, times, asked.public.n_squared) for residue in asked.residues()]
        with pytest.raises(Declined, match="not the sum over those"):
            asked.decrypt(residues)


# --- pads as holders tell them ---------------------------------------------------------------------------------------


def moved(sums: bytes, amount: int = 1) -> bytes:
    """Return sums of pads with an amount more in the first."""
    first = (int.from_bytes(sums[:128]) + amount) % N
    return first.to_bytes(128) + sums[128:]


class Mover(Holder):
    """Moves an amount from the values of its part to the pads; a thorough one says before that the pads are these."""

    def __init__(self, half, thorough=False):
        super().__init__(half)
        self.thorough = thorough

    def answer(self, plan, step, briefings):
        for respondent, message in super().answer(plan, step, briefings):
            if step is Step.DECRYPT:
                decryption = wire.Decryption.FromString(message)
                decryption.pads = moved(decryption.pads)
                yield respondent, decryption.SerializeToString()
            elif self.thorough:
                yield respondent, self.told(plan, message, step)
            else:
                yield respondent, message

    @staticmethod
    def told(plan, message, step):
        confirmation = wire.Confirmation.FromString(message)
        count = packing_of(plan, held_by_all().secret.public).ciphertexts(LAYOUT.size)
        sums, found = pads_in(plan, dict.fromkeys(range(len(plan.members)), b""), count), b""
        for part in range(HOLDERS):
            places = part_of(count, part, HOLDERS)
            own = sums[places.start : places.stop]
            found += sums_hash(plan.hash, places.start, [(own[0] + 1) % N, *own[1:]], 128)
        confirmation.pads = found
        return confirmation.SerializeToString()


def with_movers(plan, movers, lost=(), thorough=False):
    kept = holders(plan, lost)
    for n in movers:
        kept[f"k{n}"] = Mover(lambda plan, n=n: key_holder(plan, n), thorough)
    return kept


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("mover", range(HOLDERS))
def test_a_holder_that_moves_an_amount_between_values_and_pads_is_named_and_the_sum_is_right(mover, thorough):
    plan = plan_of()
    codes = codes_for(plan)
    result = outcome(plan, codes, kept=with_movers(plan, [mover], thorough=thorough))
    assert np.array_equal(result.total, sum(codes))
    assert {plan.asked_of(number)[0] for number in result.wrong} == {mover}


def test_two_holders_that_differ_about_the_pads_are_both_named_and_the_round_is_abandoned():
    plan = plan_of()
    result = outcome(plan, codes_for(plan), kept=with_movers(plan, [2], lost=[0], thorough=True))
    assert result.total is None
    assert "no majority of the key holders agrees on the pads of the sum: k1, k2" in result.reason


def test_most_holders_together_can_move_an_amount_and_the_book_says_so():
    plan = plan_of()
    codes = codes_for(plan)
    result = outcome(plan, codes, kept=with_movers(plan, [0, 1], thorough=True))
    assert (result.total.astype(int) - sum(codes).astype(int)).min() == -1
    assert {plan.asked_of(number)[0] for number in result.wrong} == {2}


def test_what_is_no_hash_for_each_part_or_no_pad_for_each_plaintext_is_refused():
    plan, server = plan_of(), SERVER()
    closed = {Step.SUBMIT: dict.fromkeys(range(4), bytes(32))}
    shown = wire.Submitters(members=range(4), ciphertexts=3).SerializeToString()
    confirmation = wire.Confirmation.FromString(key_holder(plan, 0).confirm(shown).message)
    own = plan.respondent(0, 0)
    server.check(plan, closed, Step.CONFIRM, own, confirmation.SerializeToString())
    for pads in (b"", bytes(32), bytes(97)):
        confirmation.pads = pads
        with pytest.raises(Refusal, match="bytes about pads"):
            server.check(plan, closed, Step.CONFIRM, own, confirmation.SerializeToString())
    short = wire.Decryption(plaintexts=bytes(256), pads=bytes(128), proof=bytes(128)).SerializeToString()
    with pytest.raises(Refusal, match="more or fewer pads"):
        server.check(plan, closed, Step.DECRYPT, own, short)


def test_pads_of_more_ciphertexts_than_a_sum_has_are_not_computed():
    shown = wire.Submitters(members=range(4), ciphertexts=1 << 20).SerializeToString()
    with pytest.raises(Declined, match="1048576 ciphertexts, and the sum has 131072 at most"):
        key_holder(plan_of(), 0).confirm(shown)


def test_a_holder_shows_other_holders_nothing_of_pads():
    plan = plan_of()
    shown = wire.Submitters(members=range(4), ciphertexts=3).SerializeToString()
    closed = {Step.CONFIRM: {plan.respondent(0, 0): key_holder(plan, 0).confirm(shown).message}}
    assert wire.Confirmation.FromString(closed[Step.CONFIRM][plan.respondent(0, 0)]).pads
    assert [one.pads for one in confirmations_in(closed)] == [b""]


# --- lists ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "does not ascend"),
        ([1, 0, 2, 3], "does not ascend"),
        ([0, 1, 2, 4], "does not ascend"),
        ([0, 1], "the plan's floor is 3"),
    ],
)
def test_a_list_that_cannot_be_is_not_confirmed(members, words):
    plan = plan_of(min_sum=3)
    with pytest.raises(Declined, match=words):
        key_holder(plan, 0).confirm(wire.Submitters(members=members).SerializeToString())


def test_a_contributor_that_is_not_enrolled_or_revoked_is_in_no_list():
    plan = plan_of()
    half = key_holder(plan, 0)
    half._bundles = {name: one for name, one in half._bundles.items() if name != plan.members[2].participant}
    shown = wire.Submitters(members=[0, 1, 2, 3]).SerializeToString()
    with pytest.raises(Declined, match="1 of those that submitted"):
        half.confirm(shown)


def test_a_contributor_of_another_party_than_the_plan_says_is_in_no_list():
    plan = plan_of()
    half = key_holder(plan, 0)
    member = plan.members[2].participant
    half._bundles = {**half._bundles, member: dataclasses.replace(half._bundles[member], party="elsewhere")}
    with pytest.raises(Declined, match="a participant of 'elsewhere' submitted as one of 'h'"):
        half.confirm(wire.Submitters(members=[0, 1, 2, 3]).SerializeToString())


def test_a_holder_serves_its_own_key_at_its_own_place_only():
    plan = plan_of()
    with pytest.raises(Declined, match="is not the one held"):
        key_holder(dataclasses.replace(plan, key_id=bytes(32)), 0)
    swapped = dataclasses.replace(plan, holders=plan.holders[::-1])
    with pytest.raises(Declined, match="another key holder in this position"):
        key_holder(swapped, 0)


@pytest.mark.parametrize("content", [b"\1" * 255, b"\xff" * 256, bytes(256)])
def test_what_are_no_ciphertexts_is_not_decrypted(asked, content):
    task = wire.DecryptionTask(
        members=asked.members,
        confirmations=[wire.Confirmation.FromString(one) for one in asked.signed],
        mode=1,
        ciphertexts=content,
    )
    with pytest.raises(Declined):
        asked.half.decrypt(task.SerializeToString(), asked.agreed)
    with pytest.raises(Declined, match="unknown mode 9"):
        asked.decrypt(asked.residues(), mode=9)
    with pytest.raises(Declined, match="no DecryptionTask"):
        asked.half.decrypt(b"\xff", asked.agreed)


# --- restarts --------------------------------------------------------------------------------------------------------


def test_a_holder_that_restarts_goes_on_with_the_list_that_it_signed_and_no_other():
    plan = plan_of()
    one = Asked(plan)
    shown = wire.Submitters(members=one.members).SerializeToString()
    first = HolderRound(plan, Journal(), lambda: key_holder(plan, 0))
    _, sent = first.asked(Step.CONFIRM, shown)
    again = HolderRound(plan, first.journal, lambda: key_holder(plan, 0))
    assert again.asked(Step.CONFIRM, shown) == [sent]
    server = SERVER()
    closed = {
        Step.SUBMIT: dict.fromkeys(range(4), bytes(32)),
        Step.CONFIRM: {plan.respondent(n, n): one.signed[n] for n in range(HOLDERS)},
    }
    running = RunningSum(one.public, one.packing, LAYOUT.size)
    for vector in one.vectors:
        running = running.plus(vector)
    task = server.pieces(plan, closed, Step.DECRYPT, plan.respondent(0, 1), running).whole
    restarted = HolderRound(plan, first.journal, lambda: key_holder(plan, 0))
    (decrypted,) = restarted.asked(Step.DECRYPT, task)
    assert isinstance(decrypted, Send)
    assert wire.Decryption.FromString(decrypted.message).part == 1
    assert restarted.asked(Step.DECRYPT, task) == [decrypted]
    other = wire.Submitters(members=[0, 1]).SerializeToString()
    assert isinstance(
        HolderRound(plan, first.journal, lambda: key_holder(plan, 0)).asked(Step.CONFIRM, other)[0], SitOut
    )


def test_a_holder_confirms_no_old_round_and_no_other_plan_of_one():
    plan = plan_of(number=5)
    shown = wire.Submitters(members=[0, 1, 2, 3]).SerializeToString()
    confirmed = HolderRound(plan, Journal(), lambda: key_holder(plan, 0))
    confirmed.asked(Step.CONFIRM, shown)
    for other, words in ((plan_of(number=4), "not above 5"), (plan_of((1, 1), number=5), "another plan")):
        one = HolderRound(other, confirmed.journal, lambda other=other: key_holder(other, 0))
        assert words in one.reason
        assert one.asked(Step.CONFIRM, shown) == [Decline()]
    early = HolderRound(plan, Journal(), lambda: key_holder(plan, 0))
    assert "before it confirmed" in early.asked(Step.DECRYPT, b"")[0].reason


def confirming(
    number: int, journal: Journal, members: tuple[int, ...], place: int = 0
) -> tuple[Journal, str]:
    """Ask a key holder to confirm a list; return its journal afterwards, and why it sits out, if it does."""
    plan = dataclasses.replace(plan_of(number=number), pass_number=place)
    one = HolderRound(plan, journal, lambda: key_holder(plan, 0))
    effects = one.asked(Step.CONFIRM, wire.Submitters(members=members).SerializeToString())
    assert isinstance(effects[-1], Decline) == bool(one.reason)
    return one.journal, one.reason


def test_a_key_holder_confirms_one_set_of_submitters_for_each_place_and_never_an_earlier_place():
    everybody = tuple(range(len(plan_of().members)))
    journal, reason = confirming(1, Journal(), everybody, place=2)
    assert not reason
    again, reason = confirming(2, journal, everybody, place=2)
    assert not reason, "the same members in another round"
    assert again.ledger == journal.ledger
    for number, members, place, words in (
        (3, everybody[1:], 2, "over other members"),
        (4, everybody, 1, "comes before"),
    ):
        after, reason = confirming(number, again, members, place)
        assert words in reason
        assert after == again
    _, reason = confirming(5, again, everybody[1:], place=3)
    assert not reason


def test_packings_of_plans_have_room_for_every_user():
    plan = plan_of((3, 5))
    assert packing_of(plan, held_by_all().secret.public) == Packing(1024, 12, 8)
    assert to_bytes(Asked(plan_of((1, 1))).vectors[0])[:1] == b"\1"
