"""Create orders of operators to replace the graph key of a run."""

import sqlalchemy as sa
from alembic import op

revision = "expansion_0003"
down_revision = "expansion_0002"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "graph_orders",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("least_epoch", _INTEGER, nullable=False),
    )
