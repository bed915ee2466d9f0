"""Graph expansion: keys, tags, embeddings, sealed requests (docs/spec/expansion.md)."""

import hashlib
import hmac

from .explicit import digest, encode
from .primitives import ed25519_sign, gcm_open, gcm_seal, hkdf, x25519, x25519_public

ZERO = bytes(12)


def key_id(run_id, epoch, tag_key, group_key):
    """Return the id of the secrets of an epoch."""
    return digest("graph-key", run_id, epoch, tag_key, group_key)


def record_signature(seed, record, generator):
    """Sign a record as its generator."""
    names = (
        "run_id",
        "epoch",
        "key_id",
        "dimension",
        "most_tags",
        "bucket_users",
        "most_neighbours",
        "expiry",
    )
    fields = [record[name] for name in names]
    return ed25519_sign(seed, encode("graph-record", *fields, generator, b"".join(record["holders"])))


def envelope(record, generator, holder, agreement_public, ephemeral_secret, secrets):
    """Seal both secrets for a holder."""
    public = x25519_public(ephemeral_secret)
    people = generator, holder, public, agreement_public
    context = encode("graph-envelope", record["run_id"], record["epoch"], record["key_id"], *people)
    key = hkdf(x25519(ephemeral_secret, agreement_public), context)
    return public + gcm_seal(key, ZERO, secrets, context)


def tag(tag_key, user_secret, run_id, epoch, item, users, bucket_users):
    """Return bucket and tag of a user's item that so many users publish."""
    buckets = max(1, (users + bucket_users - 1) // bucket_users)
    drawn = hmac.digest(user_secret, encode("graph-bucket", run_id, epoch, item), "sha256")
    bucket = int.from_bytes(drawn, "big") % buckets
    return bucket, hmac.digest(tag_key, encode("graph-tag", run_id, epoch, item, bucket), "sha256")


def sealed_embedding(group_key, run_id, epoch, id_, salt, floats):
    """Seal an embedding's bytes under a salt."""
    info = encode("graph-embedding", run_id, epoch, id_)
    return salt + gcm_seal(hkdf(group_key, info, salt), ZERO, floats, info)


def padded(content):
    """Return a content behind its length, up to a power of two."""
    size = 4096
    while size < len(content) + 4:
        size *= 2
    return len(content).to_bytes(4, "big") + content + bytes(size - len(content) - 4)


def request(kind, run_id, epoch, upload_secret, sealing_key_id, sealing_public, ephemeral_secret, content):
    """Seal a request; return the upload's id and the sealed bytes."""
    upload_id, public = digest("graph-upload", upload_secret), x25519_public(ephemeral_secret)
    context = encode(
        "expansion-request", kind, run_id, epoch, upload_id, sealing_key_id, public, sealing_public
    )
    key = hkdf(x25519(ephemeral_secret, sealing_public), context)
    return upload_id, public + gcm_seal(key, ZERO, padded(content), context)


def answer(sealed, sealing_secret, salt, content):
    """Seal the answer to a request."""
    info = encode("expansion-answer", hashlib.sha256(sealed).digest())
    return salt + gcm_seal(hkdf(x25519(sealing_secret, sealed[:32]), info, salt), ZERO, padded(content), info)


def opened(sealed, ephemeral_secret, sealing_public, answered):
    """Open the padded answer to a request."""
    info = encode("expansion-answer", hashlib.sha256(sealed).digest())
    shared = x25519(ephemeral_secret, sealing_public)
    return gcm_open(hkdf(shared, info, answered[:32]), ZERO, answered[32:], info)
