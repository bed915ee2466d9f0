"""The backup that a service makes before it migrates its store to a later revision."""

from __future__ import annotations

import tempfile
from pathlib import Path

import sqlalchemy as sa
import structlog

from coterie.config.base import ServiceSettings
from coterie.config.services import PartySettings
from coterie.errors import StoreError
from coterie.store.backup import STORES, back_up_before, copy_at_revision, remove_unfinished
from coterie.store.cos import holds_versions
from coterie.store.engine import BeforeMigration, failure
from coterie.store.postgres import DatabaseAddress
from coterie.wire.versions import release

__all__ = ["backed_up"]

_log = structlog.get_logger("coterie.process")


def backed_up(
    role: str, settings: ServiceSettings, database: DatabaseAddress | None = None
) -> BeforeMigration:
    """Return what a service does before it migrates its store: it writes its whole state into an archive.

    The archive is ``before-REVISION.tar`` in the state folder, and `coterie restore` takes it, that of an earlier
    release, too.  A release of the earlier revision refuses the migrated store, so that this is the only way back.

    Parameters
    ----------
    role : str
    settings : ServiceSettings
        Its state folder is locked: what a kill left there of earlier backups is removed.
        ``backup_before_migration`` says whether there is an archive at all.
    database : DatabaseAddress, optional
        A database in place of the store's file.
    """
    remove_unfinished(settings.state)

    def before(held: str, wanted: str) -> None:
        if not settings.backup_before_migration:
            _log.warning(
                "the store is migrated without a backup, and cannot go back", before=held, after=wanted
            )
            return
        try:
            with tempfile.TemporaryDirectory(prefix=".before-", dir=settings.state) as work:
                copy = None if database is None else _copied(role, database, held, Path(work))
                archive = back_up_before(
                    role,
                    settings.state,
                    wanted,
                    release(),
                    store=copy,
                    party=f"{role}/{settings.name}",
                    run=settings.run if isinstance(settings, PartySettings) else "",
                )
        except StoreError as error:
            raise StoreError(
                f"the store is of revision {held} and has to be migrated to {wanted}, which needs a backup first: "
                f"{error.message}",
                hint=f"{error.hint or 'mend it'}, or make a backup elsewhere and set backup_before_migration = false",
                trouble=error.trouble,
            ) from error
        _log.warning(
            "the store is migrated, and an earlier release cannot use it any more",
            before=held,
            after=wanted,
            backup=str(archive),
        )

    return before


def _copied(role: str, database: DatabaseAddress, revision: str, work: Path) -> Path:
    name, schema = STORES[role]
    source = database.engine()
    try:
        with source.connect() as connection:
            if role == "cos" and holds_versions(connection):
                # Only a COS with a standby has them, and its archive is refused for the same reason.
                raise StoreError(
                    "there are versions of models in the database, which the archive would lack",
                    hint="back the whole database up with pg_dump (docs/replicas.md)",
                )
        copy_at_revision(source, work / name, schema, revision)
    except sa.exc.DBAPIError as error:
        raise failure(error) from error
    finally:
        source.dispose()
    return work / name
