"""Keep what the first wave of a population follows: a hash that covers the tree over the users of the beginning."""

import sqlalchemy as sa
from alembic import op

revision = "thirdparty_0010"
down_revision = "thirdparty_0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("beacons", sa.Column("beginning_sha256", sa.LargeBinary, nullable=False, server_default=""))
    # Users of a population that grows are kept from its beginning on.
    op.drop_column("beacons", "members")
