"""Create Paillier keys of runs: records, envelopes for their holders, countersignatures."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0003"
down_revision = "thirdparty_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "paillier_keys",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("generator", sa.LargeBinary, nullable=False),
        sa.Column("needed", sa.Integer, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "paillier_envelopes",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("holder", sa.LargeBinary, primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "paillier_countersignatures",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("holder", sa.LargeBinary, primary_key=True),
        sa.Column("signing_public", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
