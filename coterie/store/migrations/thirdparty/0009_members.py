"""Keep the users of populations that waves extend, each to be looked up."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0009"
down_revision = "thirdparty_0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "members",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("participant", sa.LargeBinary, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.add_column("beacons", sa.Column("members", sa.Integer, nullable=False, server_default="0"))
