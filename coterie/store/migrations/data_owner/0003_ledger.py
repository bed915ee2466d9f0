"""Keep a ledger of revealed sums in journals, in place of a count by model."""

from alembic import op

revision = "data_owner_0003"
down_revision = "data_owner_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE windows RENAME COLUMN reveals TO ledger")
    op.execute("UPDATE windows SET ledger = ''")


def downgrade() -> None:
    op.execute("UPDATE windows SET ledger = ''")
    op.execute("ALTER TABLE windows RENAME COLUMN ledger TO reveals")
