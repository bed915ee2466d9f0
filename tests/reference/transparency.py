"""The third party's log (docs/spec/transparency.md): recursive definitions of RFC 6962 over lists of leaves."""

from .explicit import encode
from .primitives import Refused, ed25519_check, ed25519_public, ed25519_sign, sha256


def leaf(kind, statement):
    """Return the leaf of an entry."""
    return sha256(b"\0" + encode("log-entry", kind, statement))


def root(leaves):
    """Return the root of the tree over some leaves."""
    if not leaves:
        return sha256(b"")
    if len(leaves) == 1:
        return leaves[0]
    cut = _cut(len(leaves))
    return sha256(b"\1" + root(leaves[:cut]) + root(leaves[cut:]))


def inclusion(index, leaves):
    """Return PATH(index, leaves)."""
    if len(leaves) == 1:
        return []
    cut = _cut(len(leaves))
    if index < cut:
        return [*inclusion(index, leaves[:cut]), root(leaves[cut:])]
    return [*inclusion(index - cut, leaves[cut:]), root(leaves[:cut])]


def joint(indices, leaves):
    """Return the joint proof of some entries, from left to right."""
    if not indices:
        return [root(leaves)]
    if len(leaves) == 1:
        return []
    cut = _cut(len(leaves))
    left, right = [at for at in indices if at < cut], [at - cut for at in indices if at >= cut]
    return [*joint(left, leaves[:cut]), *joint(right, leaves[cut:])]


def consistency(first, leaves, whole=True):
    """Return PROOF(first, leaves)."""
    if first in (0, len(leaves)):
        return [] if whole else [root(leaves)]
    cut = _cut(len(leaves))
    if first <= cut:
        return [*consistency(first, leaves[:cut], whole), root(leaves[cut:])]
    return [*consistency(first - cut, leaves[cut:], False), root(leaves[:cut])]


def root_by(leaf_, index, size, path):
    """Return the root that a proof of inclusion leads to, from the root down."""
    if size == 1:
        if path:
            raise Refused("a proof with more hashes than the tree has levels")
        return leaf_
    if not path:
        raise Refused("a proof with fewer hashes than the tree has levels")
    cut = _cut(size)
    if index < cut:
        return sha256(b"\1" + root_by(leaf_, index, cut, path[:-1]) + path[-1])
    return sha256(b"\1" + path[-1] + root_by(leaf_, index - cut, size - cut, path[:-1]))


def head(log_seed, directory_seed, size, root_, time_ms):
    """Return a head as a message."""
    log_key = ed25519_public(log_seed)
    return {
        "size": size,
        "root": root_,
        "time_ms": time_ms,
        "log_key": log_key,
        "certification": ed25519_sign(directory_seed, encode("log-key", log_key)),
        "signature": ed25519_sign(log_seed, encode("log-head", size, root_, time_ms)),
    }


def check_head(one, directory_public):
    """Refuse a head that the third party did not sign."""
    ed25519_check(
        directory_public, one["certification"], encode("log-key", one["log_key"]), "the key of the log"
    )
    message = encode("log-head", one["size"], one["root"], one["time_ms"])
    ed25519_check(one["log_key"], one["signature"], message, "a head")


def contradict(one, other):
    """Return whether two heads cannot be of one log."""
    small, large = sorted((one, other), key=lambda head_: head_["size"])
    if small["size"] == large["size"]:
        return small["root"] != large["root"]
    return small["time_ms"] >= large["time_ms"]


def _cut(count):
    power = 1
    while 2 * power < count:
        power *= 2
    return power
