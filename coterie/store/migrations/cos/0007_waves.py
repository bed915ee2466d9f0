"""Keep the waves of users by which the populations of runs are extended."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0007"
down_revision = "cos_0006"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "waves",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("number", _INTEGER, primary_key=True),
        sa.Column("from_pass", _INTEGER, nullable=False),
        sa.Column("slots", sa.LargeBinary, nullable=False),
        sa.Column("beacon", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
