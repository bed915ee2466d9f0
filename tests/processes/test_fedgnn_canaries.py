"""Visibility of FedGNN with neighbours on the bytes of a run: what the third party, the COS and hosts hold of users."""

import contextlib
import sqlite3

import numpy as np
import pytest

from coterie.crypto.graph_key import GraphSecrets
from coterie.parties.expansion import UserUpload
from coterie.privacy.transcript import read_transcript
from coterie.privacy.visibility import Audit, observed
from coterie.systems.visibility import matrix, rows_of

from .planted import (
    audit_everybody,
    plant_factors_of_ratings,
    plant_histories,
    plant_identities,
    plant_recommendations,
    plant_secrets,
)
from .recorded import of_system

pytestmark = of_system("fedgnn")

COS, THIRD = "cos/cos", "thirdparty/directory"
FROM_USERS = {"interaction", "history", "private_state", "user_name", "recommendation"}


@pytest.fixture(scope="module")
def audited(recorded):
    """The run, with everything private planted, and the audit of everything that anybody held."""
    held = recorded.run("fedgnn", "masked")
    for plant in (
        plant_histories,
        plant_recommendations,
        plant_identities,
        plant_secrets,
        plant_factors_of_ratings,
        plant_embeddings,
        plant_tags,
    ):
        plant(held)
    audit = Audit(held.kit, rows_of("fedgnn", "hosts", "masked"))
    return held, audit_everybody(held, audit).result()


def kept(held, host, name):
    """Return all private arrays of one name that a host has files of."""
    paths = sorted((held.running.children[host].state / "private").glob(f"*{name}.npy"))
    assert paths
    return [np.load(path) for path in paths]


def uploads(held):
    """Yield each host, and what it keeps of each of its users' uploads."""
    for host in held.running.parties("client"):
        for number, path in enumerate(sorted((held.running.children[host].state / "graph").glob("*.user-*"))):
            yield host, UserUpload(path, number)


def plant_embeddings(held):
    """Embeddings without the biases beside them, as neighbours have them, and as the third party has them sealed."""
    for host in held.running.parties("client"):
        for rows in kept(held, host, "factors"):
            held.kit.rows("private_state", rows[:, 2:], {host})
        for known in kept(held, host, "neighbours"):
            held.kit.rows("private_state", known[np.abs(known).sum(axis=2) > 0])
    with contextlib.closing(sqlite3.connect(held.running.children[THIRD].state / "expansion.db")) as store:
        for (sealed,) in store.execute("SELECT embedding FROM graph_uploads"):
            held.kit.plant("sealed_embedding", sealed[:32])


def plant_tags(held):
    """Tags, ids of uploads, users' own secrets, and the keys that hosts share."""
    holders = {}
    for host, upload in uploads(held):
        held.kit.plant("upload_id", upload.upload_id, {host})
        held.kit.plant("secret_key", upload.user_secret, {host})
        for tag in upload.tags.values():
            holders.setdefault(tag, set()).add(host)
    for tag, hosts in holders.items():
        held.kit.plant("item_tag", tag, hosts)
    hosts = held.running.parties("client")
    for host in hosts:
        for path in (held.running.children[host].state / "graph").glob("*.graph"):
            secrets = GraphSecrets.load(path)
            for key in (secrets.tag_key, secrets._group_key):
                held.kit.plant("secret_key", key, set(hosts))


def test_nobody_holds_of_fedgnn_what_it_may_not_see(audited):
    held, result = audited
    assert result.violations == ()
    seen = {
        party: {name for name, how in kinds.items() if how == "seen"} for party, kinds in result.seen.items()
    }
    for party in (COS, THIRD, "data-owner/catalogue"):
        assert not seen[party] & FROM_USERS
    # What each is for, it has: the search finds what is there.
    assert seen[THIRD] >= {"item_tag", "upload_id", "sealed_embedding"}
    assert "item_key" not in seen[THIRD]
    assert seen[COS] >= {"item_factor", "upload_id", "item_key"}
    assert not seen[COS] & {"item_tag", "sealed_embedding"}
    for host in held.running.parties("client"):
        assert seen[host] >= FROM_USERS - {"recommendation"} | {"item_tag", "item_factor", "secret_key"}


def test_hosts_keep_embeddings_of_other_hosts_users_without_their_names(audited):
    held, _ = audited
    hosts = held.running.parties("client")
    own = {
        host: {row[2:].tobytes() for rows in kept(held, host, "factors") for row in rows} for host in hosts
    }
    for host in hosts:
        known = {row.tobytes() for users in kept(held, host, "neighbours") for user in users for row in user}
        assert len(known - own[host]) > 6
        names = {
            canary.pattern
            for canary in held.kit.canaries
            if canary.kind == "user_name" and host not in canary.holders
        }
        assert names
        for path in held.running.children[host].folder.rglob("*"):
            assert not path.is_file() or not any(name in path.read_bytes() for name in names), path


def test_the_kinds_read_off_the_messages_of_fedgnn_are_declared(audited):
    held, _ = audited
    transcripts = {party: [child.state / "transcript.bin"] for party, child in held.running.children.items()}
    declared, shown = matrix("fedgnn", "hosts", "masked"), observed(transcripts)
    for party, kinds in shown.items():
        for name, seen in kinds.items():
            assert not seen or declared[party.partition("/")[0]][name].allowed, (party, name)
    assert shown[THIRD]["item_tag"]
    assert shown[COS]["sealed_expansion"]
    asked = {
        one.rpc.rpartition("/")[2]
        for one in read_transcript(held.running.children[THIRD].state / "transcript.bin")
    }
    assert {"PublishTags", "Neighbours"} <= asked


def test_logs_and_metrics_pages_of_fedgnn_hold_nothing_private(audited):
    held, _ = audited
    private = {canary.kind for canary in held.kit.canaries} - {"participant_id", "item_support"}
    for party, page in held.pages:
        assert not private & held.kit.search(held.running.children[party].log.read_bytes()), party
        assert held.kit.search(page.encode()) == set(), party


def test_the_audit_of_fedgnn_finds_what_is_where_it_may_not_be(audited):
    held, _ = audited
    audit = Audit(held.kit, rows_of("fedgnn", "hosts", "masked"))
    _, upload = next(uploads(held))
    tag = next(iter(upload.tags.values()))
    embedding = kept(held, "client/host-0", "factors")[0][0, 2:].tobytes()
    audit.audit_bytes(COS, "planted", tag + upload.user_secret)
    audit.audit_bytes(THIRD, "planted", embedding)
    found = {(one.party, one.kind) for one in audit.result().violations}
    assert found == {(COS, "item_tag"), (COS, "secret_key"), (THIRD, "private_state")}
