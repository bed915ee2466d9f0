"""Tables of Paillier keys in the third party's store: public records, and secret keys sealed for their holders.

`coterie.store.thirdparty.ThirdPartyStore` runs these functions on its connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import sqlalchemy as sa

from coterie.wire.refusal import ErrorReason, Refusal

__all__ = ["KeptKey", "NewKey", "add_countersignature", "add_key", "metadata", "newest_key", "sealed_for"]

metadata = sa.MetaData()
"""Tables of the third party's whole store."""

keys = sa.Table(
    "paillier_keys",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("generator", sa.LargeBinary, nullable=False),
    sa.Column("needed", sa.Integer, nullable=False),
    sa.Column("record", sa.LargeBinary, nullable=False),
)

envelopes = sa.Table(
    "paillier_envelopes",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.LargeBinary, primary_key=True),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
)

countersignatures = sa.Table(
    "paillier_countersignatures",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", sa.LargeBinary, primary_key=True),
    sa.Column("signing_public", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)


class NewKey(NamedTuple):
    """A Paillier key as its generator publishes it."""

    run_id: str
    epoch: int
    generator: bytes
    """Id of the holder that made it, 32 bytes."""
    needed: int
    """Number of countersignatures that make the key complete."""
    record: bytes
    """``PaillierRecord`` without countersignatures, serialised."""


class KeptKey(NamedTuple):
    """A Paillier key as the directory keeps it."""

    epoch: int
    needed: int
    record: bytes
    """``PaillierRecord`` without countersignatures, serialised."""
    countersignatures: tuple[tuple[bytes, bytes], ...]
    """Signing key and signature of other holders, ascending by the holders' ids."""

    @property
    def complete(self) -> bool:
        """Whether enough holders have countersigned."""
        return len(self.countersignatures) >= self.needed


def add_key(connection: sa.Connection, key: NewKey, sealed: Mapping[bytes, bytes]) -> bool:
    """Keep a key and the envelopes for its holders.

    Parameters
    ----------
    connection : sqlalchemy.Connection
    key : NewKey
    sealed : mapping of bytes to bytes
        Envelope by holder.

    Returns
    -------
    bool
        Whether it is new; otherwise the same record was there.

    Raises
    ------
    Refusal
        CONFLICT when the epoch has another key, SEQUENCE_MISMATCH when it is not the next one.
    """
    newest = _newest_epoch(connection, key.run_id)
    if key.epoch <= newest:
        held = connection.execute(sa.select(keys.c.record).where(*_at(keys, key.run_id, key.epoch)))
        if held.scalar_one_or_none() == key.record:
            return False
        raise Refusal(
            ErrorReason.ERROR_REASON_CONFLICT,
            f"epoch {key.epoch} of the run has another key",
            field="record.epoch",
            expected=f"{newest + 1}",
        )
    if key.epoch != newest + 1:
        raise Refusal(
            ErrorReason.ERROR_REASON_SEQUENCE_MISMATCH,
            f"a key of epoch {key.epoch}, and the newest of the run is of epoch {newest}",
            field="record.epoch",
            expected=f"{newest + 1}",
        )
    connection.execute(keys.insert(), key._asdict())
    if sealed:
        connection.execute(
            envelopes.insert(),
            [
                {"run_id": key.run_id, "epoch": key.epoch, "holder": holder, "sealed": content}
                for holder, content in sealed.items()
            ],
        )
    if not key.needed:
        _forget_envelopes(connection, key.run_id, key.epoch)
    return True


def add_countersignature(
    connection: sa.Connection, run_id: str, epoch: int, holder: bytes, signing_public: bytes, signature: bytes
) -> bool:
    """Keep a holder's countersignature; once it completes the key, delete envelopes of lower epochs.

    Returns
    -------
    bool
        Whether enough holders have countersigned.

    Raises
    ------
    Refusal
        UNKNOWN_ROUND for a key that is not there, CONFLICT when the holder has another signature.
    """
    key = _kept(connection, run_id, epoch)
    if key is None:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_ROUND,
            f"the run has no key of epoch {epoch}",
            field="epoch",
            expected="that of a published key",
        )
    row = connection.execute(
        sa.select(countersignatures).where(
            *_at(countersignatures, run_id, epoch), countersignatures.c.holder == holder
        )
    ).one_or_none()
    if row is not None:
        if (row.signing_public, row.signature) != (signing_public, signature):
            raise Refusal(
                ErrorReason.ERROR_REASON_CONFLICT,
                "the holder has countersigned this key with other bytes",
                field="countersignature",
                expected="the same signature again",
            )
        return key.complete
    connection.execute(
        countersignatures.insert(),
        {
            "run_id": run_id,
            "epoch": epoch,
            "holder": holder,
            "signing_public": signing_public,
            "signature": signature,
        },
    )
    complete = len(key.countersignatures) + 1 >= key.needed
    if complete:
        _forget_envelopes(connection, run_id, epoch)
    return complete


def newest_key(connection: sa.Connection, run_id: str, *, complete: bool, epoch: int = 0) -> KeptKey | None:
    """Return the newest key of a run, or the key of a given epoch; None when there is none.

    Parameters
    ----------
    connection : sqlalchemy.Connection
    run_id : str
    complete : bool
        Whether to look at complete keys only.
    epoch : int, optional
        Epoch of the key; 0 for any.
    """
    which = [keys.c.run_id == run_id]
    if epoch:
        which.append(keys.c.epoch == epoch)
    epochs = connection.execute(sa.select(keys.c.epoch).where(*which).order_by(keys.c.epoch.desc()))
    for found in epochs.scalars().all():
        key = _kept(connection, run_id, found)
        if key is not None and (key.complete or not complete):
            return key
    return None


def sealed_for(connection: sa.Connection, run_id: str, epoch: int, holder: bytes) -> bytes:
    """Return the envelope for a holder; empty when there is none, or none any more."""
    found = connection.execute(
        sa.select(envelopes.c.sealed).where(*_at(envelopes, run_id, epoch), envelopes.c.holder == holder)
    ).scalar_one_or_none()
    return b"" if found is None else bytes(found)


def _kept(connection: sa.Connection, run_id: str, epoch: int) -> KeptKey | None:
    row = connection.execute(sa.select(keys).where(*_at(keys, run_id, epoch))).one_or_none()
    if row is None:
        return None
    signed = connection.execute(
        sa.select(countersignatures.c.signing_public, countersignatures.c.signature)
        .where(*_at(countersignatures, run_id, epoch))
        .order_by(countersignatures.c.holder)
    )
    return KeptKey(row.epoch, row.needed, row.record, tuple((one[0], one[1]) for one in signed))


def _newest_epoch(connection: sa.Connection, run_id: str) -> int:
    newest = connection.execute(sa.select(sa.func.max(keys.c.epoch)).where(keys.c.run_id == run_id)).scalar()
    return newest or 0


def _forget_envelopes(connection: sa.Connection, run_id: str, below: int) -> None:
    # So that a thief of a holder's long-term key finds only the envelopes still in use.
    connection.execute(sa.delete(envelopes).where(envelopes.c.run_id == run_id, envelopes.c.epoch < below))


def _at(table: sa.Table, run_id: str, epoch: int) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return table.c.run_id == run_id, table.c.epoch == epoch
