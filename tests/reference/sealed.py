"""Sealed records (docs/spec/sealed-records.md)."""

import struct

from .explicit import digest, encode
from .primitives import Refused, gcm_open, gcm_seal, hkdf

TO_OWNER, TO_USER = 1, 2
LABELS = {TO_OWNER: "to-owner", TO_USER: "to-user"}


class Channel:
    """The agreement of one user and one owner under one prekey."""

    def __init__(self, agreed, run_id, user, owner, prekey_id):
        self.agreed, self.run_id, self.user, self.owner = agreed, run_id, user, owner
        self.prekey_id = prekey_id

    def key(self, direction, session_id):
        """Return the key of a session."""
        info = encode("sealed", self.run_id, self.user, self.owner, self.prekey_id, LABELS[direction])
        return hkdf(self.agreed, info, salt=session_id)

    def context(self, direction):
        """Return what ends the associated data."""
        return digest("sealed-context", self.run_id, self.user, self.owner, LABELS[direction])

    def seal(self, direction, session_id, counter, first, payload, count):
        """Return header and ciphertext."""
        header = bytes([1, direction, 0, 0]) + session_id + self.prekey_id
        header += counter.to_bytes(8, "big") + first.to_bytes(8, "big") + count.to_bytes(4, "big")
        key = self.key(direction, session_id)
        return header, gcm_seal(key, _nonce(counter), payload, header + self.context(direction))

    def open(self, direction, header, ciphertext):
        """Return first number, count and payload."""
        if len(header) != 64 or header[:4] != bytes([1, direction, 0, 0]) or header[36:44] != self.prekey_id:
            raise Refused("a header of another form, direction or prekey")
        counter, first = (int.from_bytes(header[at : at + 8], "big") for at in (44, 52))
        key = self.key(direction, header[4:36])
        payload = gcm_open(key, _nonce(counter), ciphertext, header + self.context(direction))
        return first, int.from_bytes(header[60:], "big"), payload


def _nonce(counter):
    return bytes(4) + counter.to_bytes(8, "big")


def records(interactions):
    """Return interactions, pairs of item and flag, as bytes."""
    return b"".join(struct.pack("<IB", item, int(positive)) for item, positive in interactions)


def interactions(payload):
    """Return the interactions that bytes are."""
    if len(payload) % 5 or any(payload[at] > 1 for at in range(4, len(payload), 5)):
        raise Refused("no records")
    return [(item, bool(flag)) for item, flag in struct.iter_unpack("<IB", payload)]


def visit(number, epoch, complete, row):
    """Return a user's visit, which follows the records."""
    return struct.pack(f"<QIB{len(row)}f", number, epoch, int(complete), *row)


def reply_from(payload, dim):
    """Return number, blocks, blocks held, loss and step of a reply."""
    number, blocks, held, loss, *step = struct.unpack(f"<QIId{dim}f", payload)
    return number, blocks, held, loss, step
