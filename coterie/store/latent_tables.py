"""Tables of meta-latents in the third party's store of expansion services (`coterie.store.latents`)."""

from __future__ import annotations

import sqlalchemy as sa

__all__ = ["combinations", "metadata", "sets", "uploads"]

metadata = sa.MetaData()
"""Tables of the whole store, those of graph expansion included."""

# In SQLite every integer has 64 bits.
_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")

sets = sa.Table(
    "latent_sets",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("run_id", sa.String, nullable=False),
    sa.Column("epoch", _INTEGER, nullable=False),
    sa.Column("closes", _INTEGER, nullable=False),
    sa.Column("expiry", _INTEGER, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
    sa.Column("state", sa.Integer, nullable=False),
    sa.Column("key_users", _INTEGER, nullable=False),
    sa.UniqueConstraint("run_id", "epoch"),
)

uploads = sa.Table(
    "latent_uploads",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("upload_id", sa.LargeBinary, primary_key=True),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("vector", sa.LargeBinary, nullable=False),
    sa.Column("forgotten", sa.Boolean, nullable=False),
)
"""Uploads; one whose vector was combined or forgotten keeps id and digest only."""

combinations = sa.Table(
    "latent_combinations",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("vector", sa.LargeBinary, nullable=False),
)
