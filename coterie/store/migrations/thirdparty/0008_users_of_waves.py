"""Keep the users of each wave, for a server that has lost it."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0008"
down_revision = "thirdparty_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("waves", sa.Column("participants", sa.LargeBinary, nullable=False, server_default=""))
