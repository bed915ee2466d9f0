"""Keep in the population of which pass a host took part last."""

import sqlalchemy as sa
from alembic import op

revision = "client_0008"
down_revision = "client_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("populations", sa.Column("pass_number", sa.Integer, nullable=False, server_default="-1"))
