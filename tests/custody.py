"""Holders of a Paillier key for tests: identities, a roster, short keys, made once for each process that asks."""

import time
from functools import cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.crypto.custody import HeldKey
from coterie.crypto.identity import Identity
from coterie.crypto.key_record import KeyTerms
from coterie.crypto.roster import Roster

TERMS = KeyTerms(bits=1024, comparison=True)
OPERATOR = Ed25519PrivateKey.generate()
ROSTER_KEY = OPERATOR.public_key().public_bytes_raw()


@cache
def people(count, name=""):
    """Return identities, ascending by id."""
    return tuple(sorted((Identity.generate() for _ in range(count)), key=lambda one: one.participant_id))


def ids(identities):
    return tuple(one.participant_id for one in identities)


def bundle(identity, version=1):
    now = int(time.time())
    return identity.bundle(version, (now - 60, now + 3600))


def roster(identities, *, run="", expires_in=3600, issued_ago=60, purpose="paillier", key=OPERATOR):
    now = int(time.time())
    return Roster.sign(key, ids(identities), now - issued_ago, now + expires_in, purpose=purpose, run=run)


def held(run="a-run", epoch=1, name=""):
    """Return the secrets of a key."""
    return _held(run, epoch, name)


@cache
def _held(run, epoch, name):
    return HeldKey.generate(run, epoch, TERMS)
