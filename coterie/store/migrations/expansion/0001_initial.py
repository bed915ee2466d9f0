"""Create graphs, envelopes of their keys, uploads, tags, counts of refusals."""

import sqlalchemy as sa
from alembic import op

revision = "expansion_0001"
down_revision = None
branch_labels = None
depends_on = None

_INTEGER = sa.Integer().with_variant(sa.BigInteger(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "graphs",
        sa.Column("graph", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("epoch", _INTEGER, nullable=False),
        sa.Column("generator", sa.LargeBinary, nullable=False),
        sa.Column("expiry", _INTEGER, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("run_id", "epoch"),
    )
    op.create_table(
        "graph_envelopes",
        sa.Column("graph", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("holder", sa.LargeBinary, primary_key=True),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "graph_uploads",
        sa.Column("upload", sa.Integer, primary_key=True),
        sa.Column("graph", sa.Integer, nullable=False),
        sa.Column("upload_id", sa.LargeBinary, nullable=False),
        sa.Column("sequence", _INTEGER, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("tags", sa.LargeBinary, nullable=False),
        sa.Column("embedding", sa.LargeBinary, nullable=False),
        sa.Column("questions", _INTEGER, nullable=False),
        sa.Column("given", _INTEGER, nullable=False),
        sa.Column("forgotten", sa.Boolean, nullable=False),
        sa.UniqueConstraint("graph", "upload_id"),
    )
    op.create_table(
        "graph_tags",
        sa.Column("graph", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("tag", sa.LargeBinary, primary_key=True),
        sa.Column("upload", sa.Integer, primary_key=True, autoincrement=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "graph_refusals",
        sa.Column("graph", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("reason", sa.String, primary_key=True),
        sa.Column("count", _INTEGER, nullable=False),
    )
