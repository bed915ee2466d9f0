"""Versions of a model for those who share a key (docs/spec/shared-key.md)."""

import hmac

from .explicit import encode
from .primitives import gcm_open, gcm_seal, hkdf


def seal(secrets, run, key_id, epoch, round_, nonce, arrays):
    """Return a sealed version."""
    key = hkdf(secrets, encode("model-key", run, key_id, epoch))
    return nonce + gcm_seal(key, nonce, arrays, encode("sealed-model", run, key_id, round_))


def opened(secrets, run, key_id, epoch, round_, sealed):
    """Return a version's arrays, or refuse."""
    key = hkdf(secrets, encode("model-key", run, key_id, epoch))
    return gcm_open(key, sealed[:12], sealed[12:], encode("sealed-model", run, key_id, round_))


def agreement(secrets, run, key_id, epoch, plan_hash, told, made, measured):
    """Return what shows that two holders came to the same."""
    key = hkdf(secrets, encode("model-agreement", run, key_id, epoch))
    return hmac.digest(key, encode("applied-sum", plan_hash, told, made, measured), "sha256")
