"""Create beacons of runs."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0002"
down_revision = "thirdparty_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "beacons",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("beacon", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
