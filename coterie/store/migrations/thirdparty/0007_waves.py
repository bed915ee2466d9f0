"""Keep the waves of users by which populations of runs were extended."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0007"
down_revision = "thirdparty_0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "waves",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("population_sha256", sa.LargeBinary, nullable=False),
        sa.Column("from_pass", sa.Integer, nullable=False),
        sa.Column("beacon", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
