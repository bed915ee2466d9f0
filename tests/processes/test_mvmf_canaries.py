"""Visibility of FedMVMF on the bytes, by each of the sums: ratings, attributes, features, contributions.

The same federation is run for each.  What each host contributes is read off its own transcript of the run in clear, and
is searched for under masks and under encryption, too.
"""

import dataclasses

import numpy as np
import pytest

from coterie.crypto.custody import HeldKey
from coterie.crypto.paillier.format import HEADER_BYTES
from coterie.privacy.canaries import CanaryKit
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import decode, read_transcript
from coterie.privacy.visibility import Audit, observed
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedmvmf.server import layouts
from coterie.systems.fedmvmf.settings import FedMvmfPlan, FedMvmfSettings
from coterie.systems.visibility import matrix, rows_of
from coterie.wire.tensor import from_wire
from coterie.wire.v1.orchestrator_pb2 import ItemFactors, SubmitKind, SubmitRequest
from coterie.wire.v1.rounds_pb2 import SummedVector

from .planted import (
    Held,
    audit_everybody,
    names_at,
    plant_factors_of_ratings,
    plant_histories,
    plant_identities,
    plant_recommendations,
    plant_secrets,
)
from .recorded import SETTINGS, of_system

pytestmark = of_system("fedmvmf")

COS, OWNER = "cos/cos", "data-owner/catalogue"
PASSES = SETTINGS["fedmvmf"]["rounds"]["passes"]
OF_A_HOST = {Purpose.TRAIN: "host_update", Purpose.EVALUATE: "metric_sum", Purpose.SUPPORTS: "host_items"}


@dataclasses.dataclass
class Audited(Held):
    """A run whose private values are planted."""

    secure_sum: str
    sent: dict[str, list[tuple[int, int, bytes]]]
    """Submissions of each party: kind, number of the round, payload."""

    @property
    def purposes(self):
        return {one["round"]: Purpose(one["purpose"]) for one in self.report["rounds"]}


def submitted(running, party):
    """Return what a party submitted, read off its own transcript."""
    assembly, found = Assembly(), []
    for entry in read_transcript(running.children[party].state / "transcript.bin"):
        if (entry.rpc, entry.direction) != ("Submit", "sent"):
            continue
        message = decode(entry)
        whole = assembly.add(entry, message, message.chunk) if message.HasField("chunk") else None
        if whole is not None and isinstance(whole.first, SubmitRequest):
            found.append((whole.first.kind, whole.first.round.round, bytes(whole.data)))
    return found


@pytest.fixture(scope="module")
def runs(recorded):
    made = {}

    def make(secure_sum):
        if secure_sum not in made:
            held = recorded.run("fedmvmf", secure_sum)
            sent = {
                party: submitted(held.running, party) for party in (*held.running.parties("client"), OWNER)
            }
            made[secure_sum] = Audited(**vars(held), secure_sum=secure_sum, sent=sent)
        return made[secure_sum]

    return make


@pytest.fixture(scope="module")
def audited(runs):
    """Return a function that plants the private values of a run and audits everything that anybody held."""
    made = {}

    def make(secure_sum):
        if secure_sum not in made:
            held = runs(secure_sum)
            for plant in (plant_histories, plant_recommendations, plant_identities, plant_secrets):
                plant(held)
            plant_known(held)
            plant_learned(held)
            plant_contributions(held, runs("clear"))
            plant_paillier_keys(held)
            audit = Audit(held.kit, rows_of("fedmvmf", "hosts", secure_sum))
            made[secure_sum] = held, audit_everybody(held, audit).result()
        return made[secure_sum]

    return make


def plant_known(held):
    """Attributes and features, as text in files and as numbers."""
    feed = held.running.feed
    for kind, table, holders in (
        ("user_attributes", feed.attributes, [{f"client/host-{host}"} for host in feed.host]),
        ("item_features", feed.features, [{OWNER}] * len(feed.dataset.items)),
    ):
        for row, who in zip(table.values, holders, strict=True):
            held.kit.rows(kind, row, who)
            held.kit.plant(kind, ",".join(f"{value:.9g}" for value in row.tolist()), who)


def plant_learned(held):
    """Users' own factors, the model, supports, and what the owner told of its items."""
    plant_factors_of_ratings(held)
    told = [payload for kind, _, payload in held.sent[OWNER] if kind == SubmitKind.SUBMIT_KIND_ITEM_FACTORS]
    width = FedMvmfSettings(**SETTINGS["fedmvmf"]["mvmf"]).width
    assert len(told) == PASSES
    for payload in told:
        pull = from_wire(ItemFactors.FromString(payload).pull, np.float32, (None, width), field="pull")
        held.kit.rows("item_pull", pull, {OWNER})


def plant_contributions(held, clear):
    """Each host's contribution in clear, and under masks the vector that really left."""
    plan = FedMvmfPlan.from_json(held.running.plan().settings)
    shape = layouts(plan, len(held.running.feed.dataset.items))
    assert held.purposes == clear.purposes
    for host in held.running.parties("client"):
        users = len(names_at(held.running.feed, host))
        for kind, number, payload in clear.sent[host]:
            assert kind == SubmitKind.SUBMIT_KIND_VECTOR
            codes = np.frombuffer(SummedVector.FromString(payload).codes, "<u4").astype(np.uint32)
            purpose = held.purposes[number]
            if purpose is Purpose.TRAIN:
                nothing = Contribution(shape.layout(purpose), users=users).codes()
                assert held.kit.codes(OF_A_HOST[purpose], codes, nothing, {host})
            else:
                held.kit.plant(OF_A_HOST[purpose], codes.astype("<u4").tobytes(), {host})
        for kind, _, payload in held.sent[host] if held.secure_sum in HIDDEN else ():
            if kind == SubmitKind.SUBMIT_KIND_VECTOR:
                vector = SummedVector.FromString(payload)
                hidden = vector.codes[:128] or vector.ciphertexts[HEADER_BYTES : HEADER_BYTES + 128]
                held.kit.plant(HIDDEN[held.secure_sum], hidden, {host})


def plant_paillier_keys(held):
    """The secret of the Paillier key, which every decrypting client has, and the set key's."""
    parties = held.running.parties("decrypting-client")
    for party in parties:
        for path in (held.running.children[party].state / "keys").glob("*.key"):
            key = HeldKey.load(path, held.running.settings.encryption.terms)
            for factor in key.secret.factors:
                held.kit.plant("secret_key", int(factor.prime).to_bytes(64), parties)


HIDDEN = {"masked": "masked_vector", "encrypted": "encrypted_vector"}
EACH = pytest.mark.parametrize("secure_sum", ["clear", "masked", "encrypted"])
FROM_USERS = {
    *OF_A_HOST.values(),
    "user_attributes",
    "private_state",
    "history",
    "interaction",
    "user_name",
    "recommendation",
}


@EACH
def test_nobody_holds_of_fedmvmf_what_it_may_not_see(audited, secure_sum):
    held, result = audited(secure_sum)
    assert result.violations == ()
    seen = {
        party: {name for name, how in kinds.items() if how == "seen"} for party, kinds in result.seen.items()
    }
    assert not seen["thirdparty/directory"] & {*FROM_USERS, "item_features", "item_pull", "item_factor"}
    assert not seen[OWNER] & FROM_USERS
    # The model that it fetched last is the one before the newest.
    assert seen[OWNER] >= {"item_features", "item_pull"}
    assert seen[COS] >= {"item_pull", "item_factor", "item_support"}
    assert not seen[COS] & {"item_features", "user_attributes", "private_state", "interaction"}
    assert seen[COS] & {*OF_A_HOST.values(), *HIDDEN.values()} == (
        set(OF_A_HOST.values()) if secure_sum == "clear" else {HIDDEN[secure_sum]}
    )
    for party in held.running.parties("decrypting-client"):
        assert not seen[party] & {*FROM_USERS, *HIDDEN.values(), "item_features", "item_pull", "item_factor"}
        assert "secret_key" in seen[party]
    for host in held.running.parties("client"):
        assert seen[host] >= {"user_attributes", "interaction", "history", "private_state", "item_factor"}
        assert not seen[host] & {"item_features", "item_pull"}


def test_the_audit_finds_features_and_attributes_where_they_may_not_be(audited):
    held, _ = audited("clear")
    kit = CanaryKit(8)
    feed = held.running.feed
    # As if the host had the owner's features, and another host its users' attributes.
    kit.rows("item_features", feed.attributes.values[0])
    kit.rows("user_attributes", feed.attributes.values[0], {"client/host-1"})
    text = ",".join(f"{value:.9g}" for value in feed.attributes.values[0].tolist())
    kit.plant("item_features", text)
    kit.plant("user_attributes", text, {"client/host-1"})
    audit = Audit(kit, rows_of("fedmvmf", "hosts", "clear"))
    audit.audit_tree("client/host-0", held.running.children["client/host-0"].folder)
    found = {(one.party, one.kind) for one in audit.result().violations}
    assert found == {("client/host-0", "item_features"), ("client/host-0", "user_attributes")}


@EACH
def test_logs_and_metrics_pages_of_fedmvmf_hold_nothing_private(audited, secure_sum):
    held, _ = audited(secure_sum)
    private = {canary.kind for canary in held.kit.canaries} - {"participant_id", "item_support"}
    for party, page in held.pages:
        assert not private & held.kit.search(held.running.children[party].log.read_bytes()), party
        assert held.kit.search(page.encode()) == set(), party


@EACH
def test_the_kinds_read_off_the_messages_of_fedmvmf_are_declared(audited, secure_sum):
    held, result = audited(secure_sum)
    transcripts = {party: [child.state / "transcript.bin"] for party, child in held.running.children.items()}
    declared, shown = matrix("fedmvmf", "hosts", secure_sum), observed(transcripts)
    for party, kinds in shown.items():
        for name, seen in kinds.items():
            assert not seen or declared[party.partition("/")[0]][name].allowed, (party, name)
    for name in (*OF_A_HOST.values(), *HIDDEN.values(), "item_pull"):
        if name in result.seen[COS]:
            assert shown[COS][name] == (result.seen[COS][name] == "seen"), name
    assert shown[OWNER]["item_pull"]
    for party in held.running.parties("decrypting-client"):
        assert shown[party]["encrypted_sum"]
        assert shown[party]["round_sum"]
