"""Conversion of rosters and Paillier key records between wire messages and the types that can be verified.

Reading a message verifies nothing: `Roster.verify` and `KeyRecord.verify` do that.
"""

from __future__ import annotations

from coterie.crypto.key_record import Countersignature, KeyFields, KeyRecord
from coterie.crypto.roster import Roster
from coterie.wire.v1 import thirdparty_pb2 as wire

__all__ = ["record_from_wire", "record_to_wire", "roster_from_wire", "roster_to_wire"]


def roster_to_wire(roster: Roster) -> wire.Roster:
    """Return a roster as a message."""
    return wire.Roster(
        purpose=roster.purpose,
        run_id=roster.run,
        issued=roster.issued,
        expiry=roster.expiry,
        members=roster.members,
        signature=roster.signature,
    )


def roster_from_wire(message: wire.Roster) -> Roster:
    """Return the roster of a message, unverified."""
    return Roster(
        message.purpose,
        message.run_id,
        tuple(message.members),
        message.issued,
        message.expiry,
        message.signature,
    )


def record_to_wire(record: KeyRecord) -> wire.PaillierRecord:
    """Return a key record as a message."""
    key = record.key
    return wire.PaillierRecord(
        key=wire.PaillierKey(
            run_id=key.run,
            bits=key.bits,
            modulus=key.modulus,
            set_public=key.set_public,
            created=key.created,
            base=key.base,
        ),
        epoch=record.epoch,
        holders=record.holders,
        generator_public=record.generator_public,
        signature=record.signature,
        countersignatures=[
            wire.PaillierCountersignature(signing_public=one.signing_public, signature=one.signature)
            for one in record.countersignatures
        ],
    )


def record_from_wire(message: wire.PaillierRecord) -> KeyRecord:
    """Return the key record of a message, unverified."""
    key = message.key
    return KeyRecord(
        KeyFields(key.run_id, key.bits, key.modulus, key.set_public, key.created, key.base),
        message.epoch,
        tuple(message.holders),
        message.generator_public,
        message.signature,
        tuple(Countersignature(one.signing_public, one.signature) for one in message.countersignatures),
    )
