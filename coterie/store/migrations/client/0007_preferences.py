"""Keep what users have set for themselves."""

import sqlalchemy as sa
from alembic import op

revision = "client_0007"
down_revision = "client_0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "preferences",
        sa.Column("user", sa.Integer, sa.ForeignKey("users.user"), primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.Float, nullable=False),
    )
