"""Backup and restoration of one service's state, found by its configuration: state folder and database."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import sqlalchemy as sa
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from coterie.config.base import EnrolSettings, ServiceSettings
from coterie.config.services import (
    ClientSettings,
    CosSettings,
    DatabaseSettings,
    DataOwnerSettings,
    DecryptingClientSettings,
    PartySettings,
)
from coterie.crypto.restored import mark_restored
from coterie.errors import StoreError
from coterie.net.enrolment import HOLDER
from coterie.process.runtime import in_use
from coterie.store import cos
from coterie.store.backup import (
    ONLINE,
    STORES,
    Manifest,
    back_up,
    check_empty,
    copy_rows,
    read_manifest,
    restore,
)
from coterie.store.engine import failure, open_sqlite
from coterie.store.postgres import DatabaseAddress, open_postgres
from coterie.telemetry.audit_log import AuditLog

__all__ = ["back_up_service", "restore_service"]


def back_up_service(role: str, settings: ServiceSettings, archive: Path) -> Manifest:
    """Write the state of a service into an archive.

    Raises
    ------
    StoreError
        As `back_up`; there is no state folder; or the service is running and its role has to be stopped first.
    """
    state = settings.state
    if not state.is_dir():
        raise StoreError(f"there is no state folder {state}")
    if role not in ONLINE and in_use(state):
        raise StoreError(
            f"a service runs on {state}",
            hint="stop it first: its files do not belong together while it works",
        )
    with _taken(role, settings, archive.parent) as taken:
        return back_up(
            role,
            state,
            archive,
            version("coterie"),
            store=taken,
            party=f"{role}/{settings.name}",
            run=settings.run if isinstance(settings, PartySettings) else "",
        )


@contextlib.contextmanager
def _taken(role: str, settings: ServiceSettings, beside: Path) -> Iterator[Path | None]:
    """Copy the COS's PostgreSQL rows into a temporary SQLite file and yield its path; None without a database."""
    if not (isinstance(settings, CosSettings) and settings.database is not None):
        yield None
        return
    if settings.standby:
        raise StoreError(
            "a COS with standby = true keeps versions of the model in its database, which no archive would have",
            hint="back the whole database up with pg_dump (docs/replicas.md)",
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".backup.", dir=beside) as folder:
            path = Path(folder) / STORES[role][0]
            file = open_sqlite(path, STORES[role][1])
            source = DatabaseAddress(**settings.database.model_dump()).engine()
            # One snapshot, without the lock of a writing service: the service may run meanwhile.
            source = source.execution_options(isolation_level="REPEATABLE READ")
            try:
                with source.connect() as held, file.begin() as copy:
                    copy_rows(held, copy, cos.metadata)
                with file.connect() as copy:
                    copy.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                    copy.exec_driver_sql("PRAGMA journal_mode=DELETE")
            finally:
                source.dispose()
                file.dispose()
            yield path
    except sa.exc.DBAPIError as error:
        raise failure(error) from error


def restore_service(
    role: str,
    settings: ServiceSettings,
    archive: Path,
    *,
    nothing_since: bool = False,
    other_run: bool = False,
) -> Manifest:
    """Restore the state of a service from an archive, into its state folder and database.

    Parameters
    ----------
    role : str
    settings : ServiceSettings
    archive : Path
    nothing_since : bool
        Whether the service has not run since the archive was made.
    other_run : bool
        Whether an archive that was made in another run is taken.

    Raises
    ------
    StoreError
        As `restore`; the service runs; the database is not empty; or the archive is of another party, run or
        federation.
    """
    state = settings.state
    if in_use(state):
        raise StoreError(f"a service runs on {state}", hint="stop it first")
    database = settings.database if isinstance(settings, CosSettings) else None
    if database is not None:
        # Checked before anything is written.
        with _opened(database) as target, target.begin() as connection:
            check_empty(connection, cos.metadata)
    manifest = read_manifest(archive)
    if manifest.role == role:
        _check_whose(manifest, role, settings, archive, other_run=other_run)
    manifest = restore(role, state, archive, check=lambda made: _check_authority(made, settings, archive))
    in_rounds = DataOwnerSettings | ClientSettings | DecryptingClientSettings
    # An archive of another run does not hold what the party did in this one, whatever came after it.
    if isinstance(settings, in_rounds) and not (nothing_since and manifest.run in ("", settings.run)):
        for folder in (state, state / HOLDER):
            if folder.is_dir():
                mark_restored(folder, [settings.run], manifest.made)
    if database is not None:
        _put_back(database, state / STORES[role][0])
    if settings.audit_mb:
        log = AuditLog(state, f"{role}/{settings.name}", settings.audit_mb << 20)
        log.record("restore", {"made": manifest.made, "of_run": manifest.run, "nothing_since": nothing_since})
        log.close()
    return manifest


def _check_whose(
    manifest: Manifest, role: str, settings: ServiceSettings, archive: Path, *, other_run: bool
) -> None:
    """Check that an archive is of this party, and was made in this run; raise StoreError where it is not."""
    party = f"{role}/{settings.name}"
    if manifest.party not in ("", party):
        raise StoreError(
            f"{archive} is a backup of {manifest.party}, not of {party}",
            hint=f"restore a backup of {party}: two parties with the same keys would be taken for one",
        )
    run = settings.run if isinstance(settings, PartySettings) else ""
    if run and manifest.run not in ("", run) and not other_run:
        raise StoreError(
            f"{archive} is a backup of another run: {party} took part in {manifest.run!r} then, and its configuration "
            f"names {run!r}",
            hint=f"restore a backup made in {run!r}; if there is none, --other-run takes this one, and the party takes "
            "no part in protected sums of the run",
        )


def _check_authority(made: Path, settings: ServiceSettings, archive: Path) -> None:
    """Check that a state is of the federation whose authority the configuration names; raise StoreError if not."""
    enrolment = getattr(settings, "enrol", None)
    kept = made / "tls" / "ca.pem"
    if not isinstance(enrolment, EnrolSettings) or not kept.is_file() or not enrolment.ca_file.is_file():
        return
    try:
        named = {_fingerprint(one) for one in x509.load_pem_x509_certificates(enrolment.ca_file.read_bytes())}
        held = {_fingerprint(one) for one in x509.load_pem_x509_certificates(kept.read_bytes())}
    except (OSError, ValueError):
        # Damage of either is told by `coterie check` and at the start, with its remedy.
        return
    if not named & held:
        raise StoreError(
            f"{archive} is a backup of another federation: its authority has the SHA-256 {min(held)[:16]}, the one in "
            f"{enrolment.ca_file} {min(named)[:16]}",
            hint="restore a backup of this federation. If its authority was changed since the backup, name both in "
            "enrol.ca_file, restore, remove tls/chain.pem and start it with a new token",
        )


def _fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


@contextlib.contextmanager
def _opened(database: DatabaseSettings) -> Iterator[sa.Engine]:
    """Open a PostgreSQL database for writing; no service may be using it."""
    reading, writing = open_postgres(DatabaseAddress(**database.model_dump()), STORES["cos"][1])
    try:
        yield writing
    except sa.exc.DBAPIError as error:
        raise failure(error) from error
    finally:
        reading.dispose()
        writing.dispose()


def _put_back(database: DatabaseSettings, path: Path) -> None:
    """Copy the rows of an SQLite file into an empty database, then delete the file."""
    if not path.exists():
        return
    file = open_sqlite(path, STORES["cos"][1])
    try:
        with _opened(database) as writing, file.connect() as held, writing.begin() as target:
            copy_rows(held, target, cos.metadata)
    finally:
        file.dispose()
    for beside in path.parent.glob(f"{path.name}*"):
        beside.unlink()
