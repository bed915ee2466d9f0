"""Create users' own rows and their visits, for DRIFT's shielded form."""

import sqlalchemy as sa
from alembic import op

revision = "client_0003"
down_revision = "client_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "vectors",
        sa.Column("user", sa.Integer, primary_key=True),
        sa.Column("row", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "visited",
        sa.Column("user", sa.Integer, primary_key=True),
        sa.Column("owner", sa.LargeBinary, primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("durable", sa.Integer, nullable=False),
        sa.Column("held", sa.Integer, nullable=False),
        sa.Column("ran", sa.Integer, nullable=False),
        sa.Column("loss", sa.Float, nullable=False),
    )


def downgrade() -> None:
    for table in ("visited", "vectors"):
        op.drop_table(table)
