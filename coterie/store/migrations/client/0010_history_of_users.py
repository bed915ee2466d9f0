"""Find the history of some users without reading that of all."""

from alembic import op

revision = "client_0010"
down_revision = "client_0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("history_by_user", "history", ["user"])
