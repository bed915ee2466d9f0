"""Bind beacons to populations; beacons that were drawn for a run alone are of no use any more."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0006"
down_revision = "thirdparty_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("beacons")
    op.create_table(
        "beacons",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("population_sha256", sa.LargeBinary, nullable=False),
        sa.Column("beacon", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
