"""Holders of a Paillier key (docs/spec/custody.md)."""

from .explicit import encode
from .identities import CLOCK_SKEW_S, participant_id
from .paillier import key_id, secret_key
from .primitives import (
    Refused,
    ed25519_check,
    ed25519_public,
    ed25519_sign,
    gcm_open,
    gcm_seal,
    hkdf,
    x25519,
    x25519_public,
)


def roster_signature(seed, roster):
    """Return the operator's signature."""
    return ed25519_sign(seed, _roster(roster))


def check_roster(roster, public, purpose, run_id, now):
    """Refuse a roster that does not hold."""
    members = roster["members"]
    if not members or any(len(one) != 32 for one in members) or members != sorted(set(members)):
        raise Refused("a roster whose members are not ascending")
    ed25519_check(public, roster["signature"], _roster(roster), "roster")
    if roster["purpose"] != purpose or roster["run_id"] not in ("", run_id):
        raise Refused("a roster for something else")
    if not roster["issued"] - CLOCK_SKEW_S <= now < roster["expiry"] + CLOCK_SKEW_S:
        raise Refused("a roster at another time")


def roster_text(roster):
    """Return the content of a roster's file."""
    lines = [
        "-----BEGIN COTERIE ROSTER-----",
        "purpose: " + roster["purpose"],
        "run: " + (roster["run_id"] or "*"),
        "issued: " + str(roster["issued"]),
        "expires: " + str(roster["expiry"]),
    ]
    lines += ["member: " + one.hex() for one in roster["members"]]
    lines += ["signature: " + roster["signature"].hex(), "-----END COTERIE ROSTER-----", ""]
    return "\n".join(lines)


def record(key, epoch, holders, generator_seed):
    """Return a record without countersignatures."""
    found = {
        "key": key,
        "epoch": epoch,
        "holders": holders,
        "generator_public": ed25519_public(generator_seed),
    }
    found["signature"] = ed25519_sign(generator_seed, encode("paillier-record", *_fields(found)))
    found["countersignatures"] = {}
    return found


def countersigned(one, seed):
    """Return a record with another holder's signature."""
    message = encode("paillier-countersignature", *_fields(one), one["signature"])
    public = ed25519_public(seed)
    return {**one, "countersignatures": {**one["countersignatures"], public: ed25519_sign(seed, message)}}


def check_record(one, roster, revoked):
    """Refuse a record under whose key nobody encrypts; the roster is checked."""
    holders, generator = one["holders"], participant_id(one["generator_public"])
    if one["epoch"] < 1 or holders != sorted(set(holders)) or generator not in holders:
        raise Refused("a record of another form")
    if not set(holders) <= set(roster["members"]) - set(revoked):
        raise Refused("a holder who is not on the roster, or revoked")
    ed25519_check(
        one["generator_public"], one["signature"], encode("paillier-record", *_fields(one)), "record"
    )
    message = encode("paillier-countersignature", *_fields(one), one["signature"])
    for public, signature in one["countersignatures"].items():
        if participant_id(public) not in set(holders) - {generator}:
            raise Refused("a countersignature of somebody else")
        ed25519_check(public, signature, message, "countersignature")
    needed = min(2, len(set(roster["members"]) - set(revoked)) - 1)
    if len(one["countersignatures"]) < needed:
        raise Refused("too few countersignatures")


def seal(one, set_secret, secret, holder, agreement_public, ephemeral_secret):
    """Return an envelope."""
    public = x25519_public(ephemeral_secret)
    context = _context(one, holder, public, agreement_public)
    key = hkdf(x25519(ephemeral_secret, agreement_public), context)
    return public + gcm_seal(key, bytes(12), set_secret + secret, context)


def opened(one, sealed, holder, agreement_secret):
    """Return set secret, p, q, k_p, k_q, checked against the record."""
    public = sealed[:32]
    context = _context(one, holder, public, x25519_public(agreement_secret))
    content = gcm_open(hkdf(x25519(agreement_secret, public), context), bytes(12), sealed[32:], context)
    if x25519_public(content[:32]) != one["key"]["set_public"]:
        raise Refused("a set secret of another key")
    return content[:32], *secret_key(one["key"], content[32:])


def _roster(roster):
    members = b"".join(roster["members"])
    return encode("roster", roster["purpose"], roster["run_id"], roster["issued"], roster["expiry"], members)


def _fields(one):
    generator = participant_id(one["generator_public"])
    return key_id(one["key"]), one["epoch"], generator, b"".join(one["holders"])


def _context(one, holder, ephemeral, agreement):
    identity, epoch, generator, _ = _fields(one)
    run_id = one["key"]["run_id"]
    return encode("paillier-envelope", run_id, identity, epoch, generator, holder, ephemeral, agreement)
