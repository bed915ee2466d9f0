"""Create runs, registry, catalogue, log of updates, evaluations and events."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0001"
down_revision = None
branch_labels = None
depends_on = None

# In a file every integer has 64 bits.
_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("plan_hash", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("snapshot", _INTEGER, nullable=False, server_default="0"),
    )
    op.create_table(
        "participants",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("slot", _INTEGER, primary_key=True),
        sa.Column("participant", sa.LargeBinary, nullable=False),
        sa.Column("party", sa.String, nullable=False),
        sa.Column("message", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("run_id", "participant"),
    )
    op.create_table(
        "items",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("item", _INTEGER, primary_key=True),
        sa.Column("key", sa.String, nullable=False),
    )
    op.create_table(
        "holdings",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("slot", _INTEGER, primary_key=True),
        sa.Column("items", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "updates",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("version", _INTEGER, primary_key=True),
        sa.Column("gradient", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "progress",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("slot", _INTEGER, primary_key=True),
        sa.Column("sequence", _INTEGER, nullable=False),
        sa.Column("epoch", _INTEGER, nullable=False),
        sa.Column("blocks", _INTEGER, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "submissions",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("party", sa.String, primary_key=True),
        sa.Column("kind", _INTEGER, primary_key=True),
        sa.Column("place", sa.String, primary_key=True),
        sa.Column("sha256", sa.LargeBinary, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("number", _INTEGER, primary_key=True),
        sa.Column("message", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    for table in (
        "events",
        "submissions",
        "progress",
        "updates",
        "holdings",
        "items",
        "participants",
        "runs",
    ):
        op.drop_table(table)
