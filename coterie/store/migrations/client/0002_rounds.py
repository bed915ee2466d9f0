"""Create journals of rounds, the daily count of rounds and the account of refusals."""

import sqlalchemy as sa
from alembic import op

revision = "client_0002"
down_revision = "client_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "journal",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("participant", sa.LargeBinary, primary_key=True),
        sa.Column("joined", sa.Integer, nullable=False),
        sa.Column("reveals", sa.String, nullable=False),
        sa.Column("offset", sa.Integer, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("private", sa.Integer, nullable=False),
        sa.Column("checksum", sa.Integer, nullable=False),
    )
    op.create_table(
        "taken_part",
        sa.Column("user", sa.Integer, primary_key=True),
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("rounds", sa.Integer, nullable=False),
    )
    op.create_table(
        "declined",
        sa.Column("user", sa.Integer, primary_key=True),
        sa.Column("recipient", sa.String, primary_key=True),
        sa.Column("reason", sa.String, primary_key=True),
        sa.Column("times", sa.Integer, nullable=False),
        sa.Column("first_ms", sa.Integer, nullable=False),
        sa.Column("last_ms", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("declined", "taken_part", "journal"):
        op.drop_table(table)
