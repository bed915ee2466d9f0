"""Create redeemed tokens, key bundles, revocations and the directory's revision."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tokens",
        sa.Column("token_hash", sa.LargeBinary, primary_key=True),
        sa.Column("party", sa.String, nullable=False),
        sa.Column("participants", sa.Integer, nullable=False),
        sa.Column("public_key_hash", sa.LargeBinary, nullable=False),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("redeemed", sa.Integer, nullable=False),
    )
    op.create_table(
        "bundles",
        sa.Column("participant", sa.LargeBinary, primary_key=True),
        sa.Column("party", sa.String, nullable=False),
        sa.Column("token_hash", sa.LargeBinary, nullable=False, index=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("message", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "revocations",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("subject", sa.LargeBinary, primary_key=True),
        sa.Column("revision", sa.Integer, nullable=False, index=True),
    )
    directory = op.create_table("directory", sa.Column("revision", sa.Integer, primary_key=True))
    op.bulk_insert(directory, [{"revision": 1}])


def downgrade() -> None:
    for table in ("directory", "revocations", "bundles", "tokens"):
        op.drop_table(table)
