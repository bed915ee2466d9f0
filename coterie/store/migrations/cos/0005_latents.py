"""Keep which encrypted latent vector at the third party is whose, so that every user has one."""

import sqlalchemy as sa
from alembic import op

revision = "cos_0005"
down_revision = "cos_0004"
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "latent_uploads",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("slot", _INTEGER, primary_key=True),
        sa.Column("epoch", _INTEGER, primary_key=True),
        sa.Column("upload_id", sa.LargeBinary, nullable=False),
    )
