"""Create sets of meta-latents, encrypted vectors of key users, combinations."""

import sqlalchemy as sa
from alembic import op

revision = "expansion_0002"
down_revision = "expansion_0001"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "latent_sets",
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
    op.create_table(
        "latent_uploads",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("upload_id", sa.LargeBinary, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
        sa.Column("forgotten", sa.Boolean, nullable=False),
    )
    op.create_table(
        "latent_combinations",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
    )
