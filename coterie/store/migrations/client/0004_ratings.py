"""Add ratings to interactions, for systems that predict ratings."""

import sqlalchemy as sa
from alembic import op

revision = "client_0004"
down_revision = "client_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("history", sa.Column("rating", sa.Float, nullable=True))


def downgrade() -> None:
    op.drop_column("history", "rating")
