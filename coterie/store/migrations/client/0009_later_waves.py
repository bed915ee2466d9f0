"""Keep the waves by which a population was extended apart from the population."""

import sqlalchemy as sa
from alembic import op

revision = "client_0009"
down_revision = "client_0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "waves",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("after", sa.Integer, primary_key=True),
        sa.Column("waves", sa.LargeBinary, nullable=False),
    )
