"""Graph keys for tests: rosters of the purpose, secrets, records, sealed requests, publications."""

import hashlib
import time

from coterie.crypto.graph_key import GRAPH, GraphSecrets, GraphTerms, sign_graph_record
from coterie.store.expansion import TagPublication

from .custody import ids, people, roster

TERMS = GraphTerms(dimension=4, most_tags=8, most_neighbours=16)


def graph_roster(identities, **how):
    return roster(identities, purpose=GRAPH, **how)


def signed(run="a-run", epoch=1, *, count=3, terms=TERMS, expires_in=1800, generator=0):
    """Return a record, its secrets, and the identities of its holders, ascending."""
    holders = people(count)
    secrets = GraphSecrets.generate(run, epoch)
    expiry = int(time.time()) + expires_in
    return sign_graph_record(holders[generator], secrets, terms, expiry, ids(holders)), secrets, holders


def tag(name):
    return hashlib.sha256(f"tag {name}".encode()).digest()


def tags(*names):
    return b"".join(sorted(tag(name) for name in names))


def publication(name, *names, sequence=1, embedding=None):
    """Return a publication of an upload that is called like this."""
    sealed = hashlib.sha512(f"{name} {sequence}".encode()).digest() if embedding is None else embedding
    return TagPublication(hashlib.sha256(name.encode()).digest(), sequence, tags(*names), sealed)
