"""Keep the populations of runs, and the beacons that the third party drew for them."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0003"
down_revision = "cos_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "populations",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("slots", sa.LargeBinary, nullable=False),
        sa.Column("beacon", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
