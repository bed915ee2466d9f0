"""Create the table of users' slots."""

import sqlalchemy as sa
from alembic import op

revision = "data_owner_0004"
down_revision = "data_owner_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "slots",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("user", sa.LargeBinary, primary_key=True),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.UniqueConstraint("run_id", "slot"),
    )


def downgrade() -> None:
    op.drop_table("slots")
