"""Create the transparency log: its entries, and the time of its newest head.

What was signed before is logged when the store is opened (`ThirdPartyStore`).
"""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0005"
down_revision = "thirdparty_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "log_entries",
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("statement", sa.LargeBinary, nullable=False),
        sa.Column("leaf", sa.LargeBinary, nullable=False, index=True),
    )
    clock = op.create_table(
        "log_clock", sa.Column("time_ms", sa.BigInteger, primary_key=True, autoincrement=False)
    )
    op.bulk_insert(clock, [{"time_ms": 0}])
