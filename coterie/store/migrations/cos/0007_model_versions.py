"""Keep versions of models in the database, where a standby finds them."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0007"
down_revision = "cos_0006"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "model_versions",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("round", _INTEGER, primary_key=True),
        sa.Column("part", _INTEGER, primary_key=True),
        sa.Column("version", _INTEGER, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
