"""Visibility of data on the bytes: private values of a real run are searched in everything that each party held.

Every service records what it received and sent.  Each kind of datum that has a recognisable form is looked for in
transcripts, stores, logs, given files and metrics pages of every party: it must be found with each party that
`coterie.privacy.visibility` lists as seeing it, and with no other.
"""

import csv
import itertools
import struct
from collections import defaultdict

import numpy as np
import pytest

from coterie.evaluation.holdout import TRAIN
from coterie.privacy.attacks.scoring import Truth
from coterie.privacy.canaries import CanaryKit, pack_records
from coterie.privacy.transcript import decode, read_transcript
from coterie.privacy.visibility import Audit, observed
from coterie.systems.drift.mathematics import initial
from coterie.systems.drift.study import published_attacks as attacks
from coterie.systems.visibility import matrix, rows_of
from coterie.wire.tensor import from_wire
from coterie.wire.v1.orchestrator_pb2 import MetricSums, SubmitKind

from .planted import (
    audit_everybody,
    names_at,
    plant_histories,
    plant_identities,
    plant_recommendations,
    plant_secrets,
)
from .recorded import of_system
from .stores import rows

pytestmark = of_system("drift")

SAMPLE = 60
"""Updates of which gradients and requests are searched: spread over the run."""

NOT_IN_THIS_RUN = {
    ("operator", "participant_id"): "it asks for nothing that names one",
}
"""Kinds that a role may see by the matrix, and does not see here."""


@pytest.fixture(scope="module")
def run(recorded):
    held = recorded.run("drift")
    for plant in PLANTED:
        plant(held)
    return held


# --- private values of the run, as they look on the wire and in stores -------------------------------------------


def parties_of(held):
    """Return hosts by user and owners' processes by owner."""
    running = held.running
    hosts = {participant: party for participant, (party, _) in running.stores.users().items()}
    owners = {
        participant: party
        for party in running.parties("data-owner")
        for participant in running.stores.participants(party)
    }
    return hosts, owners


def plant_interactions(held):
    """Records as an owner gets them from a user; at the host they stand in the file that it was given."""
    stores, kit = held.running.stores, held.kit
    hosts, owners = parties_of(held)
    index = {key: item for item, key in enumerate(stores.item_keys())}
    # An item may have several owners, and users may have the same three in a row.
    holders = defaultdict(set)
    for (owner, user), records in stores.stored().items():
        for first in range(len(records) - 2):
            keys, flags = zip(*records[first : first + 3], strict=True)
            holders[pack_records([index[key] for key in keys], flags)] |= {hosts[user], owners[owner]}
    for pattern, parties in holders.items():
        kit.plant("interaction", pattern, parties)
    plant_histories(held)


def plant_sealed_records(held):
    _, owners = parties_of(held)
    for host in held.running.parties("client"):
        for entry in read_transcript(held.running.children[host].state / "transcript.bin"):
            if (entry.rpc, entry.direction) == ("SubmitInteractions", "sent"):
                message = decode(entry)
                for batch in message.batches:
                    held.kit.plant("sealed_record", batch.ciphertext[:16], {host, owners[message.owner]})


def plant_factors(held):
    stores, kit = held.running.stores, held.kit
    hosts, owners = parties_of(held)
    holders = {user: {host} for user, host in hosts.items()}
    for owner, user in stores.stored():
        holders[user].add(owners[owner])
    users, items = stores.final()
    versions = stores.evaluated() | {0: initial(len(users), len(items), stores.learning(), 0)}
    for Upsilon, Psi in versions.values():
        for user, slot in stores.slots().items():
            if user in holders:
                kit.rows("user_factor", Upsilon[slot], holders[user])
        kit.rows("item_factor", Psi)


def plant_gradients(held):
    stores, kit = held.running.stores, held.kit
    _, owners = parties_of(held)
    party = {slot: owners[owner] for owner, slot in stores.slots().items() if owner in owners}
    applied, keys = stores.applied(), stores.item_keys()
    data, partition = held.running.feed.dataset, held.running.feed.partition
    held_by = {
        f"data-owner/{name}": {data.items[item] for item in np.flatnonzero(partition.member[:, owner])}
        for owner, name in enumerate(partition.names)
    }
    # Owners who share a user's items and compute at the same time, from the same rows, find the same gradient.
    computed = defaultdict(set)
    for one in applied:
        for _, row in gradients(one.gradient):
            computed[row.tobytes()].add(party[one.slot])
    for one in applied[:: len(applied) // SAMPLE]:
        sent, holders = one.gradient, {party[one.slot]}
        for kind, row in gradients(sent):
            kit.rows(kind, row, computed[row.tobytes()])
        kit.plant("block_loss", struct.pack("<d", sent.loss), holders)
        # Ids that follow each other without a gap stand in other lists too.
        if len(ids := np.frombuffer(sent.items.data, "<u4")) >= 5 and (np.diff(ids) > 1).all():
            # Whoever holds all of these items may ask for them as well, in one request.
            asked = {keys[item] for item in ids.tolist()}
            others = {owner for owner, own in held_by.items() if asked <= own}
            kit.plant("requested_rows", ids.tobytes(), holders | others)


def gradients(sent):
    """Yield kind and row of a gradient's rows."""
    for kind, tensor in (("user_gradient", sent.user_gradient), ("item_gradient", sent.item_gradient)):
        for row in from_wire(tensor, np.float32, (None, None), field=kind):
            yield kind, row


def plant_metrics(held):
    kit, cos = held.kit, held.running.cos.state / "cos.db"
    kind = int(SubmitKind.SUBMIT_KIND_METRICS)
    sums = defaultdict(set)
    for party, payload in rows(cos, "SELECT party, payload FROM submissions WHERE kind = ?", kind):
        message = MetricSums.FromString(payload)
        for value, _ in from_wire(message.sums, np.float64, (len(message.names), 2), field="sums"):
            sums[value].add(party)
    for value, senders in sums.items():
        # What two hosts happen to have in common tells neither apart.
        if telling(value) and len(senders) == 1:
            kit.plant("metric_sum", struct.pack("<d", value), senders)
    for event in held.running.events:
        # Over one user, a mean is the sum.
        for value in set(event.metrics.means) - sums.keys():
            if telling(value):
                kit.plant("metric_mean", struct.pack("<d", value))
    for host in held.running.parties("client"):
        with (held.running.children[host].state / "metrics.csv").open(newline="") as file:
            # Ranks are few, so that many users share a value; a loss is one's own.
            losses = [row["value"] for row in csv.DictReader(file) if row["metric"] == "test_loss"]
        for value in losses:
            if value != "nan":
                kit.plant("user_metric", value, {host})
                kit.plant("user_metric", struct.pack("<d", float(value)), {host})


def telling(value):
    """Whether a number is not one that stands everywhere, as counts, halves and tenths do."""
    return value * 1000 % 1 != 0


PLANTED = (
    plant_interactions,
    plant_sealed_records,
    plant_factors,
    plant_gradients,
    plant_metrics,
    plant_recommendations,
    plant_identities,
    plant_secrets,
)


# --- what each party held ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audited(run):
    """The audit of everything that anybody held."""
    return audit_everybody(run, Audit(run.kit, rows_of("drift", "published", "clear"))).result()


def test_nobody_holds_what_it_may_not_see(audited):
    assert audited.violations == ()


def test_everybody_holds_what_it_is_listed_to_see(audited):
    declared = matrix("drift", "published", "clear")
    missing, held = set(), set()
    for party, kinds in audited.seen.items():
        for kind, seen in kinds.items():
            if declared[role_of(party)][kind].allowed:
                (missing if seen == "not seen" else held).add((role_of(party), kind))
    # Which of the data owners names the rows of a user depends on the order in which they train.
    assert missing - held == NOT_IN_THIS_RUN.keys()
    assert missing - {("data-owner", "requested_rows")} == NOT_IN_THIS_RUN.keys()
    kinds = {kind for kinds in audited.seen.values() for kind in kinds}
    assert len(kinds) >= 19


def role_of(party):
    return party.partition("/")[0]


def test_the_audit_finds_what_is_where_it_may_not_be(run):
    # What is one host's is planted as another's: the same search must object.
    kit = CanaryKit(8)
    hosts = run.running.parties("client")
    for host, other in itertools.permutations(hosts):
        for name in names_at(run.running.feed, host):
            kit.plant("user_name", name, {other})
    audit = Audit(kit, rows_of("drift", "published", "clear"))
    for host in hosts:
        audit.audit_tree(host, run.running.children[host].folder)
    violations = audit.result().violations
    assert {(one.party, one.kind) for one in violations} == {(host, "user_name") for host in hosts}
    assert {one.source for one in violations} >= {"histories.csv", "state/client.db"}


def test_logs_and_metrics_pages_hold_no_name_no_key_and_no_interaction(run):
    private = {
        "user_name",
        "item_key",
        "interaction",
        "history",
        "user_metric",
        "secret_key",
        "enrolment_token",
    }
    for party, page in run.pages:
        log = run.running.children[party].log.read_bytes()
        assert not private & run.kit.search(log), party
        # Nor anything else: no label holds a participant, a number stands for many.
        assert run.kit.search(page.encode()) == set(), party


def test_the_kinds_read_off_the_messages_are_those_that_the_bytes_show(run, audited):
    transcripts = {party: [child.state / "transcript.bin"] for party, child in run.running.children.items()}
    declared = matrix("drift", "published", "clear")
    for party, kinds in observed(transcripts).items():
        for kind, seen in kinds.items():
            assert not seen or declared[role_of(party)][kind].allowed, (party, kind)
        # What was found in stores and files alone did not pass through a message.
        for kind in (
            "sealed_record",
            "user_factor",
            "item_factor",
            "item_gradient",
            "metric_sum",
            "delegation",
        ):
            assert kinds[kind] == (audited.seen[party][kind] == "seen"), (party, kind)


def test_the_cos_learns_from_its_transcript_who_interacted_with_what_far_beyond_popularity(run):
    running = run.running
    data, train = running.feed.dataset, running.feed.split.part == TRAIN
    slots, names = running.stores.slots(), running.stores.user_names()
    user = np.array([slots[names[name]] for name in data.users])
    index = {key: item for item, key in enumerate(running.stores.item_keys())}
    item = np.array([index[key] for key in data.items])
    truth = Truth(
        n_users=max(slots.values()) + 1,
        n_items=len(index),
        users=user[data.user[train]],
        items=item[data.item[train]],
        positive=running.feed.positive[train],
    )
    found = attacks.report([running.cos.state / "transcript.bin"], truth, running.plan())
    for attack in (found["requested_rows"], found["gradient_sign"]):
        assert attack["auc_with_popularity"] > attack["popularity_auc"] + 0.15
    sign = found["gradient_sign"]
    assert sign["precision"] > 0.95
    assert sign["flag_accuracy"] > sign["majority_accuracy"] + 0.1
