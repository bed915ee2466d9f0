"""Create batches, flushes and passes."""

import sqlalchemy as sa
from alembic import op

revision = "data_owner_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batches",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("owner", sa.LargeBinary, nullable=False),
        sa.Column("user", sa.LargeBinary, nullable=False),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("records", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("owner", "user", "first"),
    )
    op.create_table(
        "flushes",
        sa.Column("owner", sa.LargeBinary, primary_key=True),
        sa.Column("after_batch", sa.Integer, primary_key=True),
    )
    op.create_table(
        "passes",
        sa.Column("owner", sa.LargeBinary, primary_key=True),
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True),
        sa.Column("blocks", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("passes", "flushes", "batches"):
        op.drop_table(table)
