"""Keep a ledger of revealed sums in journals, in place of a count by model."""

from alembic import op

revision = "client_0005"
down_revision = "client_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE journal RENAME COLUMN reveals TO ledger")
    op.execute("UPDATE journal SET ledger = ''")


def downgrade() -> None:
    op.execute("UPDATE journal SET ledger = ''")
    op.execute("ALTER TABLE journal RENAME COLUMN ledger TO reveals")
