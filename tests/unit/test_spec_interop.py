"""Two implementations in one masked round: either one's members, either one's server, whoever is lost on the way.

And in one sum under encryption.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.crypto import masking
from coterie.crypto import paillier as product
from coterie.crypto.identity import Identity, countersign
from coterie.crypto.verified import Verified
from coterie.secure_sum.chains import Chains
from coterie.secure_sum.contribution import Layout, Segment
from coterie.secure_sum.graph import GraphFields, graph_fields
from coterie.secure_sum.masked import MaskedMember, MaskedServer
from coterie.secure_sum.plan import Member, SumPlan, layout_hash
from coterie.secure_sum.protocol import ClosedSteps, Declined, Failed, Step
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import common_pb2, data_owner_pb2, orchestrator_pb2, rounds_pb2
from coterie.wire.v1 import rounds_pb2 as wire

from ..paillier_keys import key, obfuscators
from ..reference import masked, messages, paillier, primitives, protobuf

NOW = 1_000_000
LAYOUT = Layout((Segment("rows", (4, 2), 1.0, 16), Segment.whole("instances", (), 100)))
DIRECTORY = Ed25519PrivateKey.generate()
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()
STEPS = MaskedServer.steps
MOST = 14
CHAINED_SUMS = 3


@cache
def person(number):
    """An enrolled participant as both implementations know it: secrets, identity, bundle."""
    identity = Identity.generate()
    seed = identity._signing.private_bytes_raw()
    return (
        seed,
        identity,
        countersign(identity.bundle(1, (0, 2 * NOW)), DIRECTORY, f"client/host-{number % 4}"),
    )


def plain(bundle):
    """Return a bundle as the second implementation has it."""
    return {name: getattr(bundle, name) for name in messages.KEY_BUNDLE}


def small_circulant(members):
    """A rule for graphs that are not complete, small enough to test."""
    return GraphFields(6, 5) if members > 7 else graph_fields(members)


def plan_of(members, rule=graph_fields, min_sum=1):
    """Return a plan; every third member covers two users."""
    return SumPlan(
        "run",
        3,
        "train",
        "masked",
        bytes(32),
        layout_hash(LAYOUT),
        tuple(
            Member(person(n)[1].participant_id, f"client/host-{n % 4}", 2 if n % 3 == 0 else 1)
            for n in range(members)
        ),
        *rule(members),
        min_sum,
    )


class ProductMember:
    """A member of the product behind bytes."""

    def __init__(self, plan, number, rule, chains=None):
        _, identity, bundle = person(number)
        given = {"verified": Verified(), "rule": rule, "chains": chains}
        self._half = MaskedMember(plan, number, identity, bundle, DIRECTORY_KEY, NOW, **given)

    def answer(self, step, briefing, codes):
        given = np.array(codes, np.uint32) if step is Step.SUBMIT else None
        return self._half.answer(step, briefing, given)


class SecondMember:
    """A member of the second implementation, which is shown the plan as bytes."""

    def __init__(self, plan, number, rule, chains=None):
        seed, _, bundle = person(number)
        shown = protobuf.read(messages.SUM_PLAN, plan.to_wire().SerializeToString())
        given = {"rule": rule, "chains": chains, "most": CHAINED_SUMS}
        self._half = masked.Member(shown, number, seed, plain(bundle), DIRECTORY_KEY, NOW, **given)

    def answer(self, step, briefing, codes):
        return self._half.answer(step.value, briefing, codes)


class ProductServer:
    """The product's server behind bytes."""

    def __init__(self, plan, rule):
        self._half = MaskedServer(rule, DIRECTORY_KEY, lambda: NOW)
        self._plan, self._closed, self._arrived = plan, ClosedSteps(), {}
        self._running = np.zeros(LAYOUT.size, np.uint32)
        self.step = STEPS[0]

    def expected(self):
        return list(self._half.expected(self._plan, self._closed, self.step))

    def briefing(self, member):
        return self._half.pieces(self._plan, self._closed, self.step, member).whole

    def take(self, member, message):
        kept = message
        if self.step is Step.SUBMIT:
            vector = self._half.vector(self._plan, self._closed, self._arrived, member, message, LAYOUT)
            self._running, kept = self._running + vector.addend, vector.note
        else:
            self._half.check(self._plan, self._closed, self.step, member, message)
        self._arrived[member] = kept

    def close(self):
        short = self._half.shortfall(self._plan, self._closed, self.step, self._arrived)
        if short:
            raise Failed(short)
        self._closed, self._arrived = self._closed.with_step(self.step, self._arrived), {}
        self.step = STEPS[min(STEPS.index(self.step) + 1, len(STEPS) - 1)]

    def total(self):
        return self._half.unmask(self._plan, self._closed, self._running).codes.tolist()


class SecondServer:
    """The second implementation's server."""

    def __init__(self, plan, rule):
        shown = protobuf.read(messages.SUM_PLAN, plan.to_wire().SerializeToString())
        self._half = masked.Server(shown, LAYOUT.size)

    def expected(self):
        return self._half.expected()

    def briefing(self, member):
        return self._half.briefing(member)

    def take(self, member, message):
        self._half.take(member, message)

    def close(self):
        self._half.close()

    def total(self):
        return self._half.total()


def damaged(briefing, pair, member):
    """Return a member's inbox in which the share between it and another one does not open."""
    if member not in pair:
        return briefing
    inbox = wire.ShareInbox.FromString(briefing)
    for share in inbox.shares:
        if {member, share.member} == set(pair):
            share.sealed = bytes(81)
    return inbox.SerializeToString()


def play(plan, server, members, codes, lost, pair=()):
    """Play a round; returns the total and who submitted.

    ``lost`` names those that vanish before each step, ``pair`` two members whose shares for each other are damaged.
    """
    gone, submitted = set(), []
    for step in STEPS:
        gone |= lost.get(step, set())
        for member in server.expected():
            if member in gone:
                continue
            briefing = server.briefing(member)
            if step is Step.SUBMIT and pair:
                briefing = damaged(briefing, pair, member)
            server.take(member, members[member].answer(step, briefing, codes[member]))
            if step is Step.SUBMIT:
                submitted.append(member)
        server.close()
    return server.total(), submitted


def summed(codes, submitted):
    return [sum(column) % 2**32 for column in zip(*(codes[at] for at in submitted), strict=True)]


def codes_for(plan, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 2**32, LAYOUT.size, dtype=np.uint32).tolist() for _ in plan.members]


MEMBERS = {False: ProductMember, True: SecondMember}
SERVERS = {"product": ProductServer, "second": SecondServer}


@pytest.mark.parametrize("server", SERVERS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_members_of_both_implementations_sum_under_either_server(server, data):
    count = data.draw(st.integers(2, MOST), "members")
    rule = data.draw(st.sampled_from([graph_fields, small_circulant]), "rule")
    plan = plan_of(count, rule)
    which = data.draw(st.lists(st.booleans(), min_size=count, max_size=count), "second implementation")
    # As many as may be lost at once: where the graph is complete every one of them is everybody's neighbour.
    spare = plan.degree - plan.threshold
    gone = data.draw(st.lists(st.integers(0, count - 1), max_size=spare, unique=True), "lost")
    lost = {}
    for member in gone:
        lost.setdefault(data.draw(st.sampled_from(STEPS), f"before which step {member}"), set()).add(member)
    members = [MEMBERS[second](plan, number, rule) for number, second in enumerate(which)]
    codes = codes_for(plan, data.draw(st.integers(0, 2**32), "codes"))
    total, submitted = play(plan, SERVERS[server](plan, rule), members, codes, lost)
    early = set().union(*(lost.get(step, set()) for step in STEPS[:3]))
    assert set(submitted) == set(range(count)) - early
    assert total == summed(codes, submitted)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("which", [(False, True), (True, False), (True, True), (False, False)])
def test_members_of_both_implementations_leave_out_a_mask_that_one_could_not_be_told(server, which):
    plan = plan_of(10)
    members = [MEMBERS[number % 2 == 0](plan, number, graph_fields) for number in range(10)]
    pair = (2, 3)
    for number, second in zip(pair, which, strict=True):
        members[number] = MEMBERS[second](plan, number, graph_fields)
    codes = codes_for(plan, 1)
    playing = SERVERS[server](plan, graph_fields)
    total, submitted = play(plan, playing, members, codes, {Step.SUBMIT: {8}}, pair)
    assert submitted == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert total == summed(codes, submitted)


@pytest.mark.parametrize("server", SERVERS)
def test_members_of_both_implementations_go_along_the_same_chains(server, monkeypatch):
    agreed, agree = [], masking.RoundKey.agree
    monkeypatch.setattr(
        masking.RoundKey, "agree", lambda self, public: agreed.append(1) or agree(self, public)
    )
    kinds = [False, True, False, True, False]
    held = [{} if second else Chains(CHAINED_SUMS) for second in kinds]
    found = []
    for number in range(1, 5):
        plan = replace(plan_of(5), round=number)
        members = [MEMBERS[second](plan, at, graph_fields, held[at]) for at, second in enumerate(kinds)]
        codes = codes_for(plan, number)
        # The masks of nobody are undone here: no agreement is the server's.
        agreed.clear()
        total, submitted = play(plan, SERVERS[server](plan, graph_fields), members, codes, {})
        assert submitted == list(range(5))
        assert total == summed(codes, submitted)
        found.append(len(agreed))
    # Each of three members of the product with four others: masks and shares, or masks only.
    assert found == [24, 12, 12, 24]


def test_messages_of_both_implementations_are_the_same_bytes_but_for_their_secrets():
    plan = plan_of(4)
    of = {second: MEMBERS[second](plan, 0, graph_fields) for second in MEMBERS}
    adverts = {second: member.answer(Step.ADVERTISE, b"", None) for second, member in of.items()}
    parsed = {second: wire.Advert.FromString(advert) for second, advert in adverts.items()}
    for name in ("channel_public", "mask_public", "signature"):
        setattr(parsed[True], name, getattr(parsed[False], name))
    assert parsed[True].SerializeToString() == adverts[False]
    assert plan.hash == masked.sum_plan_hash(
        protobuf.read(messages.SUM_PLAN, plan.to_wire().SerializeToString())
    )


class Deceived:
    """A round of five in which member 0, of either implementation, is told something else than there is."""

    def __init__(self, second):
        self.plan = plan_of(5)
        kinds = [MEMBERS[second], *[ProductMember] * 4]
        self.members = [kind(self.plan, number, graph_fields) for number, kind in enumerate(kinds)]
        self.server = ProductServer(self.plan, graph_fields)
        self.codes = codes_for(self.plan, 2)

    def until(self, last):
        """Play the steps before one, honestly, and that one by all others; return what member 0 would be told."""
        for step in STEPS:
            for number in range(1 if step is last else 0, 5):
                self.server.take(number, self.ask(step, number, self.server.briefing(number)))
            if step is last:
                return self.server.briefing(0)
            self.server.close()
        raise AssertionError(last)

    def ask(self, step, number, briefing):
        return self.members[number].answer(step, briefing, self.codes[number])

    def refuses(self, step, briefing):
        with pytest.raises((Declined, primitives.Refused)):
            self.ask(step, 0, briefing)


@pytest.mark.parametrize("second", MEMBERS)
def test_keys_for_another_plan_are_refused(second):
    told = Deceived(second)
    shown = wire.Adverts.FromString(told.until(Step.SHARE))
    other = ProductMember(replace(told.plan, model_sha256=bytes([1]) * 32), 1, graph_fields)
    shown.adverts[0].MergeFromString(other.answer(Step.ADVERTISE, b"", None))
    told.refuses(Step.SHARE, shown.SerializeToString())


@pytest.mark.parametrize("second", MEMBERS)
def test_a_key_of_another_than_its_owner_is_refused(second):
    told = Deceived(second)
    shown = wire.Adverts.FromString(told.until(Step.SHARE))
    shown.adverts[0].mask_public = bytes(range(32))
    told.refuses(Step.SHARE, shown.SerializeToString())


@pytest.mark.parametrize("second", MEMBERS)
def test_too_few_neighbours_are_refused_in_each_step(second):
    told = Deceived(second)
    shown = wire.Adverts.FromString(told.until(Step.SHARE))
    del shown.adverts[: len(shown.adverts) - told.plan.threshold + 1]
    told.refuses(Step.SHARE, shown.SerializeToString())
    told = Deceived(second)
    inbox = wire.ShareInbox.FromString(told.until(Step.SUBMIT))
    del inbox.shares[: len(inbox.shares) - told.plan.threshold + 1]
    told.refuses(Step.SUBMIT, inbox.SerializeToString())
    told = Deceived(second)
    told.until(Step.CONFIRM)
    told.refuses(Step.CONFIRM, wire.Submitters(members=[0, 1, 2, 3]).SerializeToString())
    told = Deceived(second)
    confirmed = wire.Confirmations.FromString(told.until(Step.UNMASK))
    del confirmed.confirmations[: len(confirmed.confirmations) - told.plan.threshold + 1]
    told.refuses(Step.UNMASK, confirmed.SerializeToString())


@pytest.mark.parametrize("second", MEMBERS)
def test_a_list_without_the_member_or_out_of_order_is_refused(second):
    for members in ([1, 2, 3, 4], [0, 2, 1, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 1, 2, 3, 4]):
        told = Deceived(second)
        told.until(Step.CONFIRM)
        told.refuses(Step.CONFIRM, wire.Submitters(members=members).SerializeToString())


@pytest.mark.parametrize("second", MEMBERS)
def test_a_confirmation_of_another_list_is_refused(second):
    told = Deceived(second)
    shown = wire.Confirmations.FromString(told.until(Step.UNMASK))
    first = shown.confirmations[0]
    others = masked.list_hash([0, 1, 2, 3])
    first.signature = person(first.member)[1].sign("confirm", told.plan.hash, others)
    told.refuses(Step.UNMASK, shown.SerializeToString())


@pytest.mark.parametrize("second", MEMBERS)
def test_what_is_told_in_these_tests_would_be_answered_if_it_were_left_alone(second):
    for step in STEPS:
        told = Deceived(second)
        told.server.take(0, told.ask(step, 0, told.until(step)))


@pytest.mark.parametrize("second", SERVERS)
def test_a_vector_with_the_signature_of_another_is_refused_by_either_server(second):
    plan = plan_of(4)
    members = [ProductMember(plan, number, graph_fields) for number in range(4)]
    server, codes = SERVERS[second](plan, graph_fields), codes_for(plan, 3)
    for step in (Step.ADVERTISE, Step.SHARE):
        for number in range(4):
            server.take(number, members[number].answer(step, server.briefing(number), None))
        server.close()
    vector = wire.SummedVector.FromString(members[0].answer(Step.SUBMIT, server.briefing(0), codes[0]))
    other = wire.SummedVector.FromString(members[1].answer(Step.SUBMIT, server.briefing(1), codes[1]))
    vector.signature = other.signature
    with pytest.raises((Refusal, primitives.Refused)):
        server.take(0, vector.SerializeToString())


@pytest.mark.parametrize("name", sorted(messages.NAMES))
def test_the_second_implementations_tables_are_those_of_the_contract(name):
    modules = (common_pb2, data_owner_pb2, orchestrator_pb2, rounds_pb2)
    descriptor = next(getattr(one, name) for one in modules if hasattr(one, name)).DESCRIPTOR
    assert {field.name: field.number for field in descriptor.fields} == {
        field: number for field, (number, _) in messages.NAMES[name].items()
    }


@pytest.mark.parametrize("mode", product.Mode)
def test_either_encrypts_adds_and_decrypts_what_the_other_does(mode):
    source = obfuscators(mode)
    secret, public = key(subgroup=source.public.subgroup), source.public
    record = {name: int(getattr(public, name)) for name in ("n", "bits", "base", "created")}
    record |= {"set_public": public.set_public, "run_id": public.run}
    paillier.check_record(record, least=1024)
    assert paillier.key_id(record) == public.key_id
    p, q, *orders = paillier.secret_key(record, secret.to_bytes())

    rule, count = (public.bits, 16, 32), 60
    packing = product.Packing(*rule)
    rng = np.random.default_rng(int(mode))
    codes = rng.integers(0, 2**16, (2, count), dtype=np.uint32)
    n = record["n"]
    pads = [[int.from_bytes(rng.bytes(144)) % n for _ in range(packing.ciphertexts(count))] for _ in codes]
    own = product.encrypt(codes[0], packing, source, pads=pads[0])
    packed = paillier.pack(codes[1].tolist(), rule)
    plaintexts = [(one + pad) % n for one, pad in zip(packed, pads[1], strict=True)]
    made = [paillier.encrypt(one, record["n"], paillier.fresh_obfuscator(record["n"])) for one in plaintexts]
    sent = paillier.write(1, rule, count, record, made)
    expected, sums = codes.sum(axis=0).tolist(), [sum(column) % n for column in zip(*pads, strict=True)]

    total = product.RunningSum(public, packing, count)
    total.add(own)
    total.add(product.from_bytes(sent, public, packing, count))
    assert product.decrypt_vector(total.total(), secret, sums).tolist() == expected
    found, theirs = paillier.read(product.to_bytes(own), record, rule, count)
    assert found == mode
    running = paillier.add(theirs, made, record["n"])
    assert running == list(total.total().residues)
    values = [(paillier.decrypt(one, p, q) - pad) % n for one, pad in zip(running, sums, strict=True)]
    assert paillier.unpack(values, count, 2, rule) == expected
    if mode is product.Mode.SUBGROUP:
        halves = [
            (paillier.decrypt(one, p, q, orders) - pad) % n for one, pad in zip(theirs, pads[0], strict=True)
        ]
        assert paillier.unpack(halves, count, 1, rule) == codes[0].tolist()
