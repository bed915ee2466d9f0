"""Create renewed certificates."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0004"
down_revision = "thirdparty_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "renewals",
        sa.Column("fingerprint", sa.LargeBinary, primary_key=True),
        sa.Column("after", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("token_hash", sa.LargeBinary, nullable=False, index=True),
        sa.Column("public_key_hash", sa.LargeBinary, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("renewed", sa.Integer, nullable=False),
    )
