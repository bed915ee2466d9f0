"""Create visits, held-back gradients and the owner's journal of windows, for DRIFT's shielded form."""

import sqlalchemy as sa
from alembic import op

revision = "data_owner_0002"
down_revision = "data_owner_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "visits",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("owner", sa.LargeBinary, nullable=False),
        sa.Column("user", sa.LargeBinary, nullable=False),
        sa.Column("visit", sa.Integer, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("length", sa.Integer, nullable=False),
        sa.Column("records", sa.LargeBinary, nullable=False),
        sa.Column("reply", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("owner", "user", "visit"),
    )
    op.create_table(
        "gradients",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("owner", sa.LargeBinary, nullable=False),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("items", sa.LargeBinary, nullable=False),
        sa.Column("gradient", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "held",
        sa.Column("owner", sa.LargeBinary, primary_key=True),
        sa.Column("rows", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "windows",
        sa.Column("owner", sa.LargeBinary, primary_key=True),
        sa.Column("joined", sa.Integer, nullable=False),
        sa.Column("contribution", sa.LargeBinary, nullable=False),
        sa.Column("reveals", sa.String, nullable=False),
        sa.Column("offered", sa.Integer, nullable=False),
        sa.Column("rows", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    for table in ("windows", "held", "gradients", "visits"):
        op.drop_table(table)
