"""Create the tables of rounds: the sum in progress and the messages of its closed steps."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0002"
down_revision = "cos_0001"
branch_labels = None
depends_on = None

# In a file every integer has 64 bits.
_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "sums",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", _INTEGER, primary_key=True),
        sa.Column("plan", sa.LargeBinary, nullable=False),
        sa.Column("step", sa.String, nullable=False),
        sa.Column("phase", sa.String, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("running", sa.LargeBinary),
    )
    op.create_table(
        "sum_messages",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", _INTEGER, primary_key=True),
        sa.Column("step", sa.String, primary_key=True),
        sa.Column("member", _INTEGER, primary_key=True),
        sa.Column("message", sa.LargeBinary, nullable=False),
    )
