"""Hosts whose users register together, with one signature, at a real server; and what a lying host tries with it."""

import asyncio
import itertools
import time
from dataclasses import replace

import grpc
import pytest

from coterie.crypto.identity import Identity, countersign
from coterie.crypto.merkle import Tree
from coterie.crypto.roll import RollDelegation, roll_of
from coterie.crypto.transparency import SignedHead
from coterie.net.transparency import _not_shown_together
from coterie.parties.party import Registrant
from coterie.secure_sum.bundles import bundle_to_wire
from coterie.store.authority import load_secrets
from coterie.wire.v1 import log_pb2 as log
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Delegation
from coterie.wire.v1.common_pb2 import RollDelegation as RollMessage
from coterie.wire.v1.orchestrator_pb2_grpc import OrchestratorStub

from .conftest import Operating, party_at

USER = wire.ParticipantKind.PARTICIPANT_KIND_USER
HOLDER = wire.ParticipantKind.PARTICIPANT_KIND_KEY_HOLDER
JOIN = wire.RegisterIntent.REGISTER_INTENT_JOIN
MANY, FEW = 40, 3
"""Users of a host whose bundles are looked up in the log, and of one whose signatures are checked."""
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def hosts(shared_third_party):
    async def enrol():
        return {
            "many": await shared_third_party.enrol("client", "roll-many", MANY, allowed=MANY),
            "few": await shared_third_party.enrol("client", "roll-few", FEW),
            "rival": await shared_third_party.enrol("client", "roll-rival", MANY, allowed=MANY),
        }

    return asyncio.run(enrol())


@pytest.fixture
async def run(operator):
    name = f"rolls-{next(NUMBERS)}-{time.monotonic_ns()}"
    await operator.start(name, users=2 * MANY)
    return name


def members(host):
    return [Registrant(one, b, USER) for one, b in zip(host.identities, host.bundles, strict=True)]


class Registration:
    """A registration of a host's users, to be spoiled and signed."""

    def __init__(self, host, run):
        self.signer, self.shown, self.run = host.identities[0], host.fingerprint, run
        self.expiry = int(time.time()) + 3600
        self.bundles = [bundle_to_wire(bundle) for bundle in host.bundles]
        self.signed_for = list(host.identities)
        self.claims = {}

    def message(self):
        roll = roll_of(one.participant_id for one in self.signed_for)
        signed = RollDelegation.sign(self.signer, self.shown, self.run, self.expiry, roll)
        claim = RollMessage(
            certificate_fingerprint=signed.certificate_fingerprint,
            run_id=signed.run_id,
            expiry=signed.expiry,
            root=signed.root,
            size=signed.size,
            signature=signed.signature,
        )
        for name, value in self.claims.items():
            setattr(claim, name, value)
        participants = [wire.Participant(bundle=bundle, kind=USER) for bundle in self.bundles]
        return wire.RegisterRequest(run_id=self.run, intent=JOIN, participants=participants, roll=claim)


async def test_all_users_of_a_host_register_with_one_signature_and_get_their_slots(cos, operator, hosts, run):
    for who, slots in (("many", range(MANY)), ("few", range(MANY, MANY + FEW))):
        party = party_at(cos, hosts[who], run)
        await party.register(members(hosts[who]))
        assert party.slots == list(slots)
    assert (await operator.state(run)).users == MANY + FEW
    again = party_at(cos, hosts["many"], run)
    await again.register(members(hosts["many"]))
    assert again.slots == list(range(MANY))


async def test_bundles_of_many_users_are_shown_by_the_log_in_one_answer(cos, third_party, hosts, run):
    def asked():
        return third_party.metric("coterie_rpc_calls_total", side="server", rpc="LogInclusion")

    before = asked()
    await party_at(cos, hosts["few"], run).register(members(hosts["few"]))
    assert asked() == before
    await party_at(cos, hosts["many"], run).register(members(hosts["many"]))
    # One more where users enrolled after the head that the server held.
    assert before < asked() <= before + 2


async def test_the_logs_proof_takes_the_place_of_signatures_of_many_users_and_of_few_nothing_does(
    cos, operator, hosts, run, calls
):
    for who, taken in (("many", True), ("few", False)):
        registration = Registration(hosts[who], run)
        for bundle in registration.bundles:
            # The log has what the directory signed; without its proof the registration rests on this signature.
            bundle.countersignature = bytes(64)
        at = cos.channel(hosts[who]).stub(OrchestratorStub)
        message = registration.message()
        if taken:
            answer = await at.Register(calls.each(message))
            assert [(part.first, part.count) for part in answer.slots] == [(0, MANY)]
        else:
            why = await calls.refused(lambda at=at, message=message: at.Register(calls.each(message)))
            assert why.reason == "BAD_SIGNATURE"
    assert (await operator.state(run)).users == MANY


def stranger(signature=bytes(64)):
    """Return a user that nobody enrolled, with a bundle of its own making."""
    one = Identity.generate()
    bundle = replace(one.bundle(1, (0, 2**40)), countersignature=signature, party="client/roll-many")
    return one, bundle_to_wire(bundle)


def add(registration, one, bundle):
    registration.bundles.append(bundle)
    registration.signed_for.append(one)


def altered(registration, **fields):
    for name, value in fields.items():
        setattr(registration.bundles[7 % len(registration.bundles)], name, value)


SPOILT = {
    "a user that was not signed for": lambda r, h: r.signed_for.pop(),
    "a user that is missing": lambda r, h: r.bundles.pop(),
    "users in another order": lambda r, h: r.bundles.reverse(),
    "a user twice": lambda r, h: r.bundles.append(r.bundles[-1]),
    "a user that nobody enrolled": lambda r, h: add(r, *stranger()),
    "a user that only the host signed for": lambda r, h: add(r, *stranger(b"")),
    "a user of another host": lambda r, h: add(
        r, h["rival"].identities[0], bundle_to_wire(h["rival"].bundles[0])
    ),
    "another agreement key": lambda r, h: altered(r, agreement_public=Identity.generate().agreement_public),
    "another version": lambda r, h: altered(r, version=2),
    "a longer validity": lambda r, h: altered(r, not_after=2**40),
    "a time before all times": lambda r, h: altered(r, not_before=-5),
    "another signature of the user": lambda r, h: altered(r, signature=bytes(64)),
    "another party": lambda r, h: altered(r, party="client/roll-rival"),
    "no party": lambda r, h: altered(r, party=""),
    "a key of another length": lambda r, h: altered(r, signing_public=b"short"),
    "signed by a user of another host": lambda r, h: setattr(r, "signer", h["rival"].identities[0]),
    "signed by another user of the host": lambda r, h: setattr(r, "signer", r.signed_for[1]),
    "for another certificate": lambda r, h: setattr(r, "shown", h["rival"].fingerprint),
    "for another run": lambda r, h: setattr(r, "run", "other") or r.claims.clear(),
    "expired": lambda r, h: setattr(r, "expiry", 1),
    "a longer time than was signed": lambda r, h: r.claims.update(expiry=2**40),
    "another root than was signed": lambda r, h: r.claims.update(root=bytes(32)),
    "another size than was signed": lambda r, h: r.claims.update(size=2),
    "no signature": lambda r, h: r.claims.update(signature=b""),
}


@pytest.mark.parametrize("who", ["many", "few"])
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
async def test_a_roll_holds_for_exactly_the_users_whom_the_directory_knows_and_the_host_signed_for(
    cos, operator, hosts, run, calls, spoil, who
):
    registration = Registration(hosts[who], run)
    spoil(registration, hosts)
    message = registration.message()
    message.run_id = run
    at = cos.channel(hosts[who]).stub(OrchestratorStub)
    why = await calls.refused(lambda: at.Register(calls.each(message)))
    assert (why.code, why.reason) == (grpc.StatusCode.UNAUTHENTICATED, "BAD_SIGNATURE")
    assert why.field in ("participants", "bundle")
    assert (await operator.state(run)).users == 0
    await party_at(cos, hosts[who], run).register(members(hosts[who]))
    assert (await operator.state(run)).users == len(hosts[who].identities)


async def test_a_roll_of_one_host_is_worth_nothing_to_another(cos, operator, hosts, run, calls):
    stolen = Registration(hosts["many"], run).message()
    at = cos.channel(hosts["rival"]).stub(OrchestratorStub)
    why = await calls.refused(lambda: at.Register(calls.each(stolen)))
    assert why.reason == "BAD_SIGNATURE"
    # Not even where the users' own keys sign it for the other host: the directory says who enrolled them.
    both = Registration(hosts["many"], run)
    both.shown = hosts["rival"].fingerprint
    why = await calls.refused(lambda: at.Register(calls.each(both.message())))
    assert (why.reason, "is of" in why.text) == ("BAD_SIGNATURE", True)
    assert (await operator.state(run)).users == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.delegation.CopyFrom(Delegation(run_id="run")),
        lambda one: setattr(one, "kind", wire.ParticipantKind.PARTICIPANT_KIND_DATA_OWNER),
        lambda one: setattr(one, "kind", HOLDER),
    ],
)
async def test_only_users_delegate_together(cos, hosts, run, calls, change):
    message = Registration(hosts["few"], run).message()
    change(message.participants[1])
    at = cos.channel(hosts["few"]).stub(OrchestratorStub)
    why = await calls.refused(lambda: at.Register(calls.each(message)))
    assert (why.reason, why.field) == ("INVALID_FIELD", "participants.kind")


async def test_a_roll_comes_before_the_first_user(cos, hosts, run, calls):
    whole = Registration(hosts["few"], run).message()
    first = wire.RegisterRequest(run_id=run, intent=JOIN, participants=whole.participants[:1])
    rest = wire.RegisterRequest(participants=whole.participants[1:], roll=whole.roll)
    at = cos.channel(hosts["few"]).stub(OrchestratorStub)
    why = await calls.refused(lambda: at.Register(calls.each(first, rest)))
    assert why.reason == "BAD_SIGNATURE"


async def test_a_roll_comes_in_several_messages(cos, hosts, run, calls):
    whole = Registration(hosts["many"], run).message()
    parts = [
        wire.RegisterRequest(
            run_id=run,
            intent=JOIN,
            participants=whole.participants[first : first + 35],
            roll=None if first else whole.roll,
        )
        for first in range(0, MANY, 35)
    ]
    answer = await cos.channel(hosts["many"]).stub(OrchestratorStub).Register(calls.each(*parts))
    assert [(part.first, part.count) for part in answer.slots] == [(0, MANY)]


async def test_without_the_third_party_a_roll_is_checked_by_its_signatures(start_third_party, start_member):
    service = start_third_party()
    cos = start_member("cos", "alone", service)
    host = await service.enrol("client", "alone", MANY, allowed=MANY)
    operator = Operating(cos, service.issue(service.folder / "operator", "operator", "one"))
    await operator.start("alone", users=MANY)
    # Countersigned by the directory, and not in its log: as good as it was before there were proofs.
    one = Identity.generate()
    now = int(time.time())
    signing_key = load_secrets(service.state).signing_key
    unlogged = countersign(one.bundle(1, (now - 60, now + 3600)), signing_key, "client/alone")
    await service.release()
    await asyncio.to_thread(service.stop)
    try:
        party = party_at(cos, host, "alone")
        await party.register([*members(host), Registrant(one, unlogged, USER)])
        assert party.slots == list(range(MANY + 1))
    finally:
        await asyncio.to_thread(service.start)
    await cos.release()
    await asyncio.to_thread(cos.stop)
    await asyncio.to_thread(cos.start)
    operator = Operating(cos, service.issue(service.folder / "again", "operator", "one"))
    assert (await operator.state("alone")).users == MANY + 1
    again = party_at(cos, host, "alone")
    await again.register(members(host))
    assert again.slots == list(range(MANY))


def proof_of(tree, positions):
    path = tree.inclusions(sorted(positions), len(tree))
    return log.LogInclusionResponse(positions=[at + 1 for at in positions], path=b"".join(path))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: setattr(answer, "path", answer.path[:-32]),
        lambda answer: setattr(answer, "path", answer.path[:-1]),
        lambda answer: setattr(answer, "path", answer.path + bytes(32)),
        lambda answer: setattr(answer, "path", b""),
        lambda answer: answer.positions.__setitem__(0, 6),
        lambda answer: answer.positions.__setitem__(0, answer.positions[1]),
        lambda answer: answer.positions.__setitem__(0, 1000),
        lambda answer: answer.positions.pop(),
    ],
)
def test_a_truncated_or_altered_proof_shows_no_bundle(spoil):
    tree = Tree()
    leaves = [bytes([number]) * 32 for number in range(9)]
    for leaf in leaves:
        tree.append(leaf)
    head = SignedHead(len(tree), tree.root(), 1, b"", b"", b"")
    wanted = [leaves[4], leaves[2], leaves[7]]
    answer = proof_of(tree, [4, 2, 7])
    assert _not_shown_together(head, wanted, answer) == []
    spoil(answer)
    assert _not_shown_together(head, wanted, answer) == wanted


def test_a_bundle_that_the_log_lacks_is_not_shown_with_the_others():
    tree = Tree()
    leaves = [bytes([number]) * 32 for number in range(9)]
    for leaf in leaves:
        tree.append(leaf)
    head = SignedHead(len(tree), tree.root(), 1, b"", b"", b"")
    answer = proof_of(tree, [4, 2])
    answer.positions.insert(1, 0)
    forged = bytes([99]) * 32
    assert _not_shown_together(head, [leaves[4], forged, leaves[2]], answer) == [forged]
    answer.positions[1] = 6
    assert _not_shown_together(head, [leaves[4], forged, leaves[2]], answer) == [leaves[4], forged, leaves[2]]
