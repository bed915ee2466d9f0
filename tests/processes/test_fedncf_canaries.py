"""Visibility of FedNCF on the bytes: in clear with hosts and with users as members, under masks, under a shared key.

The same federation is run four times.  What each user contributed is read off its own host's transcript where users
are members in clear.  The users contribute the same where a host adds them up and where it masks them, which is
checked by the sums; so these bytes can be searched for also in runs in which nobody ever sends them.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from safetensors.numpy import load as load_arrays
from safetensors.numpy import load_file

from coterie.crypto.custody import HeldKey
from coterie.crypto.key_record import KeyTerms
from coterie.crypto.sealed_model import open_model
from coterie.data.keyed_order import key_hash
from coterie.evaluation.holdout import TRAIN
from coterie.net.enrolment import HOLDER
from coterie.privacy.canaries import CanaryKit
from coterie.privacy.payloads import Assembly
from coterie.privacy.transcript import decode, read_transcript
from coterie.privacy.visibility import Audit, observed
from coterie.rounds.training import Purpose
from coterie.secure_sum.contribution import Contribution
from coterie.systems.fedncf.mathematics import initial_private
from coterie.systems.fedncf.purposes import layout_of
from coterie.systems.fedncf.settings import FedNcfSettings
from coterie.systems.fedncf.study import attacks
from coterie.systems.visibility import matrix, rows_of
from coterie.wire.v1.orchestrator_pb2 import SubmitKind, SubmitRequest
from coterie.wire.v1.rounds_pb2 import SealedModel, SummedVector

from .planted import (
    Held,
    audit_everybody,
    names_at,
    plant_histories,
    plant_identities,
    plant_recommendations,
    plant_secrets,
)
from .recorded import FEDNCF_USERS_AT as USERS_AT
from .recorded import of_system

pytestmark = of_system("fedncf")

KINDS = {
    "users, clear": ("users", "clear"),
    "hosts, clear": ("hosts", "clear"),
    "hosts, masked": ("hosts", "masked"),
    "hosts, shared-key": ("hosts", "shared-key"),
}

ALONE = "client/host-2"
SAMPLED = 4
"""Every so many users' lists of items and trained contributions are searched for: each makes hundreds of patterns."""

ONE = {Purpose.TRAIN: "user_update", Purpose.EVALUATE: "user_metric", Purpose.SUPPORTS: "user_items"}
SEVERAL = {Purpose.TRAIN: "host_update", Purpose.EVALUATE: "metric_sum", Purpose.SUPPORTS: "host_items"}
COS = "cos/cos"


@dataclasses.dataclass
class Audited(Held):
    """A run whose private values are planted."""

    form: str
    secure_sum: str
    contributions: dict[tuple[int, tuple[str, ...]], np.ndarray]
    """Codes as they left the host, by round and the names of the users that they cover."""

    def auditing(self, kit=None):
        return Audit(kit or self.kit, rows_of("fedncf", self.form, self.secure_sum))

    @property
    def purposes(self):
        return {one["round"]: Purpose(one["purpose"]) for one in self.report["rounds"]}

    def host_of(self, name):
        feed = self.running.feed
        return f"client/host-{feed.host[feed.dataset.users.index(name)]}"


@pytest.fixture(scope="module")
def runs(recorded):
    made = {}

    def make(kind):
        if kind not in made:
            form, secure_sum = KINDS[kind]
            held = recorded.run("fedncf", secure_sum, form)
            contributions = contributions_of(held.running)
            made[kind] = Audited(**vars(held), form=form, secure_sum=secure_sum, contributions=contributions)
        return made[kind]

    return make


def contributions_of(running):
    """Return what left the hosts in SUBMIT, read off their own transcripts."""
    slots = running.stores.slots()
    name_of = {slots[participant]: name for name, participant in running.stores.user_names().items()}
    found = {}
    for host in running.parties("client"):
        assembly = Assembly()
        for entry in read_transcript(running.children[host].state / "transcript.bin"):
            if (entry.rpc, entry.direction) != ("Submit", "sent"):
                continue
            message = decode(entry)
            whole = assembly.add(entry, message, message.chunk) if message.HasField("chunk") else None
            if whole is None or not isinstance(whole.first, SubmitRequest):
                continue
            if whole.first.kind == SubmitKind.SUBMIT_KIND_VECTOR:
                covered = [
                    slot for part in whole.first.slots for slot in range(part.first, part.first + part.count)
                ]
                codes = SummedVector.FromString(bytes(whole.data)).codes
                key = whole.first.round.round, tuple(sorted(name_of[slot] for slot in covered))
                found[key] = np.frombuffer(codes, "<u4").astype(np.uint32)
    return found


@pytest.fixture(scope="module")
def of_users(runs):
    """Each user's contributions, codes by round and name."""
    return {
        (round_, names[0]): codes for (round_, names), codes in runs("users, clear").contributions.items()
    }


@pytest.fixture(scope="module")
def audited(runs, of_users):
    """Return a function that plants the private values of a run and audits everything that anybody held."""
    made = {}

    def make(kind):
        if kind not in made:
            held = runs(kind)
            for plant in (
                plant_histories,
                plant_recommendations,
                plant_identities,
                plant_secrets,
                plant_item_lists,
            ):
                plant(held)
            plant_private_state(held)
            plant_contributions(held, of_users)
            plant_model(held)
            made[kind] = held, audit_everybody(held, held.auditing()).result()
        return made[kind]

    return make


# --- private values ----------------------------------------------------------------------------------------------


def plant_item_lists(held):
    """Items that each user trains on, as arrays of catalogue indices."""
    feed, data = held.running.feed, held.running.feed.dataset
    index = {key: item for item, key in enumerate(held.running.stores.item_keys())}
    planted = 0
    for user in range(0, len(data.users), SAMPLED):
        own = (data.user == user) & (feed.split.part == TRAIN)
        items = [index[data.items[item]] for item in data.item[own]]
        planted += held.kit.item_lists(items, {held.host_of(data.users[user])})
    assert planted > 50


def plant_private_state(held):
    """Embeddings and the moments of their optimiser: as drawn, at each evaluation, and as they are at the end."""
    settings = FedNcfSettings.from_json(held.running.plan().settings)
    for host in held.running.parties("client"):
        names = names_at(held.running.feed, host)
        held.kit.rows("private_state", initial_private(settings, key_hash(names, 0)).embedding, {host})
        planted = 0
        for path in (held.running.children[host].state / "private").glob("*.npy"):
            if path.stem.endswith(("embedding", "first", "second")):
                rows = np.load(path)
                assert len(rows) == len(names)
                # Moments are zero before the first step.
                rows = rows[rows[:, :3].any(axis=1)]
                held.kit.rows("private_state", rows, {host})
                planted += len(rows)
        # Of version 0, of the last one, and of the one that counts, which is either; moments once trained.
        assert planted >= 5 * len(names), planted


def plant_contributions(held, of_users):
    """Each user's codes, the sums of each host, and in clear and masked what really left."""
    kit, purposes = held.kit, held.purposes
    settings = FedNcfSettings.from_json(held.running.plan().settings)
    n_items = len(held.running.stores.item_keys())
    trained = [number for number, purpose in purposes.items() if purpose is Purpose.TRAIN]
    for number, purpose in purposes.items():
        layout = layout_of(settings, purpose, n_items)
        by_name = {name: codes for (round_, name), codes in of_users.items() if round_ == number}
        same_purpose = [
            (name, codes) for (round_, name), codes in of_users.items() if purposes[round_] is purpose
        ]
        assert len(by_name) == sum(USERS_AT)

        def plant(kind, codes, users, holders, layout=layout, purpose=purpose):
            if purpose is Purpose.TRAIN:
                nothing = Contribution(layout, users=users).codes()
                assert kit.codes(kind, codes, nothing, holders)
            else:
                kit.plant(kind, codes.astype("<u4").tobytes(), holders)

        for host in held.running.parties("client"):
            names = sorted(names_at(held.running.feed, host))
            if held.form == "hosts" and len(names) > 1:
                total = sum(by_name[name] for name in names).astype(np.uint32)
                if purpose is not Purpose.TRAIN or number in (trained[0], trained[-1]):
                    plant(SEVERAL[purpose], total, len(names), {host})
            for name in names:
                codes = by_name[name]
                # Users whose metrics are alike, now or another time, cannot be told apart; of training some will do.
                alike = any(
                    other != name and np.array_equal(another, codes) for other, another in same_purpose
                )
                few = purpose is Purpose.TRAIN and (
                    number not in (trained[0], trained[-1]) or sorted(by_name).index(name) % SAMPLED
                )
                if alike or (few and host != ALONE):
                    continue
                holders = {host, COS} if host == ALONE else {host}
                plant(ONE[purpose], codes, 1, holders)
    if held.secure_sum == "masked":
        for (_, names), codes in held.contributions.items():
            kit.plant("masked_vector", codes[:32].astype("<u4").tobytes(), {held.host_of(names[0])})


def plant_model(held):
    """The items' rows, and how many users have each item."""
    arrays = load_newest(held.running)
    held.kit.rows("item_factor", arrays["model.items"])
    held.kit.plant("item_support", arrays["supports"].astype("<u4").tobytes())


def load_newest(running):
    """Return what the server keeps, opened by a host that holds the key where the server cannot."""
    arrays = load_file(max((running.cos.state / "models" / "test").glob("version-*.safetensors")))
    if "sealed" not in arrays:
        return arrays
    version = SealedModel.FromString(arrays["sealed"].tobytes())
    (key,) = (running.children[ALONE].state / HOLDER / "keys").glob("*.key")
    held = HeldKey.load(key, KeyTerms(bits=1024, comparison=True))
    return load_arrays(open_model(held, "test", version.round, version.sealed))


# --- the audit ---------------------------------------------------------------------------------------------------

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@EVERY_KIND
def test_nobody_holds_of_fedncf_what_it_may_not_see(audited, kind):
    held, result = audited(kind)
    assert result.violations == ()
    # Third party and owner hold nothing that comes from a user.
    for party in ("thirdparty/directory", *held.running.parties("data-owner")):
        from_users = {
            *ONE.values(),
            *SEVERAL.values(),
            "private_state",
            "history",
            "interaction",
            "user_name",
        }
        shown = {name for name, seen in result.seen[party].items() if seen == "seen"}
        assert not shown & (from_users | {"masked_vector", "item_support", "recommendation"}), party


@EVERY_KIND
def test_what_is_planted_is_found_where_it_may_be(audited, kind):
    held, result = audited(kind)
    seen = {
        party: {name for name, how in kinds.items() if how == "seen"} for party, kinds in result.seen.items()
    }
    at_hosts = {
        "user_name",
        "interaction",
        "history",
        "private_state",
        "recommendation",
        "item_key",
    }
    # Under a shared key nobody sends the model in clear, and hosts have it in memory only.
    model = set() if kind == "hosts, shared-key" else {"item_factor"}
    for host in held.running.parties("client"):
        assert seen[host] >= at_hosts | model, host
    assert seen[COS] >= {"participant_id", "delegation"}
    of_the_model = {"item_factor", "item_support"}
    assert seen[COS] & of_the_model == (of_the_model if model else set())
    of_a_contribution = seen[COS] & {*ONE.values(), *SEVERAL.values(), "masked_vector"}
    match kind:
        case "users, clear":
            assert of_a_contribution == set(ONE.values())
        case "hosts, clear":
            # The single user of the third host, and the sums of the others.
            assert of_a_contribution == {*ONE.values(), *SEVERAL.values()}
        case "hosts, masked":
            assert of_a_contribution == {"masked_vector"}
        case _:
            assert of_a_contribution == set()
            return
    # In clear a host keeps what it sends; under masks only the masked vector.
    for host in held.running.parties("client"):
        assert seen[host] & {*ONE.values(), *SEVERAL.values(), "masked_vector"}


def test_the_audit_finds_a_contribution_where_it_may_not_be(runs, of_users):
    # What a user of the first host contributes is planted as if hosts added up: the COS of the other run has it.
    held = runs("users, clear")
    kit = CanaryKit(8)
    supports = next(number for number, purpose in held.purposes.items() if purpose is Purpose.SUPPORTS)
    name = names_at(held.running.feed, "client/host-0")[0]
    kit.plant("user_items", of_users[supports, name].astype("<u4").tobytes(), {"client/host-0"})
    for secure_sum, objected in (("clear", "only its own"), ("masked", "under masks")):
        audit = Audit(kit, rows_of("fedncf", "hosts", secure_sum))
        audit.audit_transcript(COS, held.running.cos.state / "transcript.bin")
        (violation,) = audit.result().violations
        assert (violation.party, violation.source) == (COS, "Submit received")
        assert objected in violation.why
    other = CanaryKit(9)
    for one, two in itertools.permutations(held.running.parties("client"), 2):
        for name in names_at(held.running.feed, one):
            other.plant("user_name", name, {two})
    audit = held.auditing(other)
    for host in held.running.parties("client"):
        audit.audit_tree(host, held.running.children[host].folder)
    assert {one.party for one in audit.result().violations} == set(held.running.parties("client"))


def test_a_host_sends_in_clear_the_sum_of_what_its_users_contribute(runs, of_users):
    sent = runs("hosts, clear").contributions
    assert {len(names) for _, names in sent} == set(USERS_AT)
    for (number, names), codes in sent.items():
        assert np.array_equal(codes, sum(of_users[number, name] for name in names).astype(np.uint32))


def test_the_sum_under_masks_is_that_of_what_users_contribute_in_clear(runs, of_users):
    held = runs("hosts, masked")
    settings = FedNcfSettings.from_json(held.running.plan().settings)
    n_items = len(held.running.stores.item_keys())
    # Read off the transcript of the COS, as the attacks do.
    views = attacks.views([held.running.cos.state / "transcript.bin"], held.running.plan(), n_items)
    revealed = [number for number, purpose in held.purposes.items() if purpose is not Purpose.EVALUATE]
    for number, view in zip(revealed, views, strict=True):
        codes = sum(codes for (round_, _), codes in of_users.items() if round_ == number)
        purpose = held.purposes[number]
        total = layout_of(settings, purpose, n_items).decode(codes.astype(np.uint32), sum(USERS_AT))
        assert len(view.slots) == sum(USERS_AT)
        if purpose is Purpose.SUPPORTS:
            assert np.array_equal(view.touched, total["supports"])
        else:
            assert np.array_equal(view.rows, total["items"].astype(np.float32))


@EVERY_KIND
def test_logs_and_metrics_pages_of_fedncf_hold_nothing_private(audited, kind):
    held, _ = audited(kind)
    private = {canary.kind for canary in held.kit.canaries} - {"participant_id", "item_support"}
    for party, page in held.pages:
        log = held.running.children[party].log.read_bytes()
        assert not private & held.kit.search(log), party
        assert held.kit.search(page.encode()) == set(), party


@EVERY_KIND
def test_the_kinds_read_off_the_messages_of_fedncf_are_those_that_the_bytes_show(audited, kind):
    held, result = audited(kind)
    transcripts = {party: [child.state / "transcript.bin"] for party, child in held.running.children.items()}
    declared = matrix("fedncf", held.form, held.secure_sum)
    shown = observed(transcripts)
    for party, kinds in shown.items():
        role = party.partition("/")[0]
        for name, seen in kinds.items():
            assert not seen or declared[role][name].allowed, (party, name)
    for name in (*ONE.values(), *SEVERAL.values(), "masked_vector"):
        if name in result.seen[COS]:
            assert shown[COS][name] == (result.seen[COS][name] == "seen"), name
    assert shown[COS]["round_sum"]
    assert shown[COS]["sealed_model"] == (kind == "hosts, shared-key")
    assert not any(kinds["unclassified"] for kinds in shown.values())
