"""Participants, bundles, delegations, prekeys (docs/spec/identities.md)."""

from . import transparency
from .explicit import encode
from .primitives import Refused, ed25519_check, ed25519_public, ed25519_sign, sha256, x25519_public

CLOCK_SKEW_S = 600
"""Difference between two clocks that disturbs nothing, seconds."""


def participant_id(signing_public):
    """Return the id of a participant."""
    return sha256(signing_public)


def bundle(signing_seed, agreement_secret, version, not_before, not_after):
    """Return a bundle as a message, not countersigned."""
    found = {
        "signing_public": ed25519_public(signing_seed),
        "agreement_public": x25519_public(agreement_secret),
        "version": version,
        "not_before": not_before,
        "not_after": not_after,
    }
    found["signature"] = ed25519_sign(signing_seed, encode("bundle", *_fields(found)))
    found["countersignature"] = b""
    found["party"] = ""
    return found


def countersigned(one, directory_seed, party):
    """Return a bundle with the directory's countersignature, which names the party that enrolled it."""
    message = encode("bundle-countersignature-2", *_fields(one), one["signature"], party)
    return {**one, "party": party, "countersignature": ed25519_sign(directory_seed, message)}


def check_bundle(one, directory_public, now):
    """Refuse a bundle on which nobody can rely."""
    if len(one["signing_public"]) != 32 or len(one["agreement_public"]) != 32:
        raise Refused("a bundle with keys of another size")
    numbers = (one["version"], one["not_before"], one["not_after"])
    if not all(0 <= number < 1 << 63 for number in numbers) or one["not_before"] >= one["not_after"]:
        raise Refused("a bundle with numbers out of range")
    ed25519_check(one["signing_public"], one["signature"], encode("bundle", *_fields(one)), "a bundle")
    if not one["party"]:
        raise Refused("a bundle whose countersignature names no party")
    message = encode("bundle-countersignature-2", *_fields(one), one["signature"], one["party"])
    ed25519_check(directory_public, one["countersignature"], message, "the directory's entry")
    if not one["not_before"] - CLOCK_SKEW_S <= now < one["not_after"] + CLOCK_SKEW_S:
        raise Refused("a bundle that is not valid now")


def role_of(one):
    """Return the role of the party that enrolled a participant."""
    return one["party"].rpartition("/")[0]


def _fields(one):
    names = ("signing_public", "agreement_public", "version", "not_before", "not_after")
    return [one[name] for name in names]


def delegation(signing_seed, fingerprint, run_id, expiry):
    """Return a delegation as a message."""
    message = encode("delegation", fingerprint, run_id, expiry)
    return {
        "certificate_fingerprint": fingerprint,
        "run_id": run_id,
        "expiry": expiry,
        "signature": ed25519_sign(signing_seed, message),
    }


def roll(signing_seed, users, fingerprint, run_id, expiry):
    """Return a delegation of all users of a host as a message."""
    root = transparency.root([sha256(b"\0" + user) for user in users])
    message = encode("roll-delegation", fingerprint, run_id, expiry, root, len(users))
    return {
        "certificate_fingerprint": fingerprint,
        "run_id": run_id,
        "expiry": expiry,
        "root": root,
        "size": len(users),
        "signature": ed25519_sign(signing_seed, message),
    }


def prekey(owner_signing_seed, run_id, prekey_id, secret, expiry):
    """Return a prekey as a message."""
    public = x25519_public(secret)
    message = encode("prekey", run_id, prekey_id, public, expiry)
    return {
        "prekey_id": prekey_id,
        "public": public,
        "expiry": expiry,
        "signature": ed25519_sign(owner_signing_seed, message),
    }
