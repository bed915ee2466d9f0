"""Keep the population of each run."""

import sqlalchemy as sa
from alembic import op

revision = "client_0006"
down_revision = "client_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "populations",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("population", sa.LargeBinary, nullable=False),
    )
