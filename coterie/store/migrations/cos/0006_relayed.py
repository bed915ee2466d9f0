"""Keep how many requests of users each host had handed on to services of the third party."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0006"
down_revision = "cos_0005"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "relayed",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("service", sa.String, primary_key=True),
        sa.Column("party", sa.String, primary_key=True),
        sa.Column("request", sa.String, primary_key=True),
        sa.Column("refused", sa.String, primary_key=True),
        sa.Column("count", _INTEGER, nullable=False),
    )
