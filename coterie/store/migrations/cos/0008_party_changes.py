"""Count events of parties that came or went which are kept no more."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0008"
down_revision = "cos_0007"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "party_changes",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("change", sa.String, primary_key=True),
        sa.Column("count", _INTEGER, nullable=False),
        sa.Column("until", _INTEGER, nullable=False),
    )
