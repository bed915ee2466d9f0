"""Create users, histories, outboxes and the account of data sent."""

import sqlalchemy as sa
from alembic import op

revision = "client_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("user", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
    )
    op.create_table(
        "history",
        sa.Column("row", sa.Integer, primary_key=True),
        sa.Column("user", sa.Integer, sa.ForeignKey("users.user"), nullable=False),
        sa.Column("item", sa.String, nullable=False),
        sa.Column("positive", sa.Boolean, nullable=False),
        sa.Column("time", sa.Integer, nullable=False),
        sa.Column("part", sa.Integer, nullable=False),
    )
    op.create_table(
        "outbox",
        sa.Column("entry", sa.Integer, primary_key=True),
        sa.Column("user", sa.Integer, sa.ForeignKey("users.user"), nullable=False),
        sa.Column("owner", sa.LargeBinary, nullable=False),
        sa.Column("first", sa.Integer, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("rows", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("user", "owner", "first"),
    )
    op.create_table(
        "sent",
        sa.Column("user", sa.Integer, primary_key=True),
        sa.Column("recipient", sa.String, primary_key=True),
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("acknowledged", sa.Integer, nullable=False),
        sa.Column("bytes", sa.Integer, nullable=False),
        sa.Column("first_ms", sa.Integer, nullable=False),
        sa.Column("last_ms", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("sent", "outbox", "history", "users"):
        op.drop_table(table)
