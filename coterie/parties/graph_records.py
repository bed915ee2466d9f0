"""Conversion of graph key records between wire messages and the type that can be verified."""

from __future__ import annotations

from coterie.crypto.graph_key import GraphRecord, GraphTerms
from coterie.wire.v1 import expansion_pb2 as wire

__all__ = ["graph_record_from_wire", "graph_record_to_wire"]


def graph_record_to_wire(record: GraphRecord) -> wire.GraphRecord:
    """Return a graph record as a message."""
    return wire.GraphRecord(
        run_id=record.run,
        epoch=record.epoch,
        key_id=record.key_id,
        dimension=record.terms.dimension,
        most_tags=record.terms.most_tags,
        bucket_users=record.terms.bucket_users,
        most_neighbours=record.terms.most_neighbours,
        expiry=record.expiry,
        holders=record.holders,
        generator_public=record.generator_public,
        signature=record.signature,
    )


def graph_record_from_wire(message: wire.GraphRecord) -> GraphRecord:
    """Return the graph record of a message, unverified."""
    return GraphRecord(
        message.run_id,
        message.epoch,
        message.key_id,
        GraphTerms(message.dimension, message.most_tags, message.bucket_users, message.most_neighbours),
        message.expiry,
        tuple(message.holders),
        message.generator_public,
        message.signature,
    )
