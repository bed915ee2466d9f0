"""Conversion of latent records between wire messages and the type that can be verified."""

from __future__ import annotations

from coterie.crypto.latent_terms import LatentRecord, LatentTerms
from coterie.wire.v1 import latents_pb2 as wire

__all__ = ["latent_record_from_wire", "latent_record_to_wire"]


def latent_record_to_wire(record: LatentRecord) -> wire.LatentRecord:
    """Return a latent record as a message."""
    return wire.LatentRecord(
        run_id=record.run,
        epoch=record.epoch,
        key_id=record.key_id,
        closes=record.closes,
        expiry=record.expiry,
        opener_public=record.opener_public,
        signature=record.signature,
        **record.terms._asdict(),
    )


def latent_record_from_wire(message: wire.LatentRecord) -> LatentRecord:
    """Return the latent record of a message, unverified."""
    terms = LatentTerms(*(getattr(message, name) for name in LatentTerms._fields))
    return LatentRecord(
        message.run_id,
        message.epoch,
        message.key_id,
        terms,
        message.closes,
        message.expiry,
        message.opener_public,
        message.signature,
    )
