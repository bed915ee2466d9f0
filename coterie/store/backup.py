"""Backup of a party's state to one archive, and its restoration after a check.

The file is a tar archive.  Its first member, ``MANIFEST.json``, names the role and for every other member its size,
mode and SHA-256.  A store is copied by SQLite's backup API, as of one moment, and so while the service runs (`ONLINE`).
A COS's tables in PostgreSQL are copied as of one moment, too, and are in the archive as a SQLite file.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import sqlalchemy as sa

from coterie.errors import StoreError
from coterie.store.engine import file_failure, migrate
from coterie.store.seal import ENDING, check_pages, check_seal

__all__ = [
    "ONLINE",
    "STORES",
    "Manifest",
    "back_up",
    "back_up_before",
    "check_empty",
    "copy_at_revision",
    "copy_rows",
    "read_manifest",
    "remove_unfinished",
    "restore",
]

STORES = {
    "cos": ("cos.db", "cos"),
    "data-owner": ("data_owner.db", "data_owner"),
    "client": ("client.db", "client"),
    "thirdparty": ("directory.db", "thirdparty"),
}
"""Name of the store's file and folder of its migrations, by role."""

ONLINE = frozenset({"cos", "data-owner", "thirdparty"})
"""Roles whose state may be copied while the service runs: their files besides the store are replaced as a whole."""

_FORMAT = 1
_MANIFEST = "MANIFEST.json"
_MOST_MANIFEST = 64 << 20
_LEFT_OUT = frozenset({"lock", "account.json", "transcript.bin", "expansion.db", "expansion-sealing.keys"})
"""Files of one process's life, and graphs of users: what was forgotten would come back with a backup."""
_BESIDE = ("-wal", "-shm", "-journal", ENDING)
_BEFORE = "before-{}.tar"
"""Name, in a state folder, of the backup that was made before the store was brought to a revision."""
_PIECE = 1 << 20
_MODE = 0o755


@dataclass(frozen=True)
class Manifest:
    """Table of contents of an archive.

    Parameters
    ----------
    role : str
    version : str
        Version of the package that made the archive.
    made : int
        Seconds since 1970.
    files : dict of str to (int, int, str)
        Size, mode and SHA-256 by path.
    party : str
        Role and name of the service; empty in archives of earlier releases.
    run : str
        Id of the run that the service took part in; empty for a COS and a third party, and in earlier archives.
    """

    role: str
    version: str
    made: int
    files: dict[str, tuple[int, int, str]]
    party: str = ""
    run: str = ""

    def to_json(self) -> bytes:
        """Return the manifest as the archive has it."""
        files = [
            {"path": path, "size": size, "mode": mode, "sha256": digest}
            for path, (size, mode, digest) in self.files.items()
        ]
        head = {"format": _FORMAT, "role": self.role, "version": self.version, "made": self.made}
        head |= {"party": self.party, "run": self.run}
        return json.dumps({**head, "files": files}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> Manifest:
        """Parse an archive's manifest.

        Raises
        ------
        StoreError
            When it is no valid manifest.
        """
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise StoreError(
                    f"{path} is of format {content['format']}",
                    hint=f"format {_FORMAT} is expected: was it made by a later version of coterie?",
                )
            files = {
                _inside(one["path"], path): (int(one["size"]), int(one["mode"]), str(one["sha256"]))
                for one in content["files"]
            }
            if len(files) != len(content["files"]) or any(size < 0 for size, _, _ in files.values()):
                raise _damaged(path, "its manifest names a file twice, or one of less than nothing")
            said = str(content.get("party", "")), str(content.get("run", ""))
            return cls(str(content["role"]), str(content["version"]), int(content["made"]), files, *said)
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(path, "its manifest cannot be read") from error


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is no backup, or damaged: {why}", hint="use another copy of it")


def _inside(name: Any, path: Path) -> str:
    """Return a member's path; raise when it would lie outside of the state folder."""
    parts = PurePosixPath(name).parts if isinstance(name, str) else ()
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or {"..", "."} & {*parts}:
        raise _damaged(path, "a file in it would lie outside of the state folder")
    if str(PurePosixPath(name)) != name:
        raise _damaged(path, "a file in it is named in two ways")
    return str(name)


# --- making one ------------------------------------------------------------------------------------------------------


def back_up(
    role: str,
    state: Path,
    archive: Path,
    version: str,
    *,
    store: Path | None = None,
    party: str = "",
    run: str = "",
) -> Manifest:
    """Write the state of a party into an archive, mode 0600; when this returns it is durable.

    Parameters
    ----------
    role : str
    state : Path
        State folder of the party.
    archive : Path
        File to write; it must not exist.
    version : str
        Version of this package.
    store : Path, optional
        A copy of the store, to be taken in place of the store in the folder.
    party, run : str, optional
        As in `Manifest`.

    Raises
    ------
    StoreError
        The folder has nothing, or something that is no file; the archive exists, lies in the folder, or cannot be
        written.
    """
    if archive.exists():
        raise StoreError(f"{archive} exists", hint="name another file: a backup replaces none")
    if archive.resolve().is_relative_to(state.resolve()):
        raise StoreError(f"{archive} lies in the state folder", hint="name a file elsewhere")
    with _made(role, state, archive, version, store, (party, run)) as (part, manifest):
        # A link fails when the archive exists, also when it was made meanwhile.
        os.link(part, archive)
        _flush(archive.parent)
    return manifest


def back_up_before(
    role: str,
    state: Path,
    revision: str,
    version: str,
    *,
    store: Path | None = None,
    party: str = "",
    run: str = "",
) -> Path:
    """Write a backup into the state folder itself, before the store there is brought to a revision.

    It takes the place of earlier ones of its kind, and no other backup holds it.  When this returns it is durable.

    Parameters
    ----------
    role : str
    state : Path
        State folder of the party, which no service works on.
    revision : str
        The revision to which the store will be brought.
    version : str
        Version of this package.
    store, party, run
        As for `back_up`.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    StoreError
        It cannot be written.
    """
    archive = state / _BEFORE.format(revision)
    with _made(role, state, archive, version, store, (party, run)) as (part, _):
        part.replace(archive)
        for earlier in state.glob(_BEFORE.format("*")):
            if earlier != archive:
                earlier.unlink()
        _flush(state)
    return archive


def remove_unfinished(state: Path) -> None:
    """Remove what a kill left of backups before a migration: copies of the whole state; the state lock is held.

    Raises
    ------
    StoreError
        They cannot be removed.
    """
    try:
        for folder in state.glob(".before-*"):
            if folder.is_dir():
                shutil.rmtree(folder)
    except OSError as error:
        raise file_failure(f"remove an unfinished backup in {state}", error) from error


@contextlib.contextmanager
def _made(
    role: str, state: Path, archive: Path, version: str, store: Path | None, whose: tuple[str, str]
) -> Iterator[tuple[Path, Manifest]]:
    """Yield an archive under a passing name beside its place, and its manifest."""
    name = STORES[role][0] if role in STORES else None
    try:
        with tempfile.TemporaryDirectory(prefix=f".{archive.name}.", dir=archive.parent) as work:
            # The store is copied first: the files that it names still exist shortly afterwards.
            copied = store
            if copied is None and name is not None and (state / name).exists():
                copied = Path(work) / name
                check_seal(state / name)
                _copy_store(state / name, copied)
            part = Path(work) / "archive"
            yield part, _write(role, state, part, version, name, copied, whose)
    except sqlite3.Error as error:
        raise StoreError(f"cannot copy the store {state / str(name)}: {error}") from error
    except OSError as error:
        raise file_failure(f"write the backup {archive}", error) from error


def _copy_store(source: Path, target: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as held,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        held.backup(copy)
        # So that the copy needs no files beside it.
        copy.execute("PRAGMA journal_mode=DELETE")
    target.chmod(0o600)


def _write(
    role: str,
    state: Path,
    part: Path,
    version: str,
    name: str | None,
    store: Path | None,
    whose: tuple[str, str],
) -> Manifest:
    found = {path: state / path for path in _files(state) if path != name}
    if name is not None and store is not None:
        found[name] = store
    if not found:
        raise StoreError(f"{state} has nothing to back up", hint="is it the state folder of the service?")
    with tempfile.TemporaryDirectory(dir=part.parent) as copies:
        files: dict[str, tuple[int, int, str]] = {}
        places: dict[str, Path] = {}
        for number, (path, source) in enumerate(sorted(found.items())):
            copy = Path(copies) / str(number)
            try:
                # Copied, then hashed: a running service may replace the file meanwhile.
                shutil.copyfile(source, copy, follow_symlinks=False)
                mode = source.stat().st_mode & _MODE
            except FileNotFoundError:
                # A version of a model that the service has deleted meanwhile.
                continue
            files[path] = (copy.stat().st_size, mode, _sha256(copy))
            places[path] = copy
        manifest = Manifest(role, version, int(time.time()), files, *whose)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                text = manifest.to_json()
                head = tarfile.TarInfo(_MANIFEST)
                head.size, head.mode, head.mtime = len(text), 0o600, manifest.made
                tar.addfile(head, io.BytesIO(text))
                for path, copy in places.items():
                    member = tarfile.TarInfo(path)
                    member.size, member.mode, _ = files[path]
                    member.mtime = manifest.made
                    with copy.open("rb") as content:
                        tar.addfile(member, content)
            out.flush()
            os.fsync(out.fileno())
    return manifest


def _files(state: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(state):
        # Those of unfinished work, such as an archive that is being written.
        folders[:] = [entry for entry in folders if not entry.startswith(".")]
        for entry in (*folders, *names):
            path = Path(folder) / entry
            if path.is_symlink():
                raise StoreError(
                    f"{path} is a link", hint="a backup holds files only: put the file itself there"
                )
        for entry in names:
            path = Path(folder) / entry
            where = path.relative_to(state).as_posix()
            passing = entry.startswith(".") or entry.endswith(_BESIDE)
            kept = fnmatch.fnmatchcase(where, _BEFORE.format("*"))
            if where in _LEFT_OUT or passing or kept or not path.is_file():
                continue
            yield where


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- taking one back -------------------------------------------------------------------------------------------------


def read_manifest(archive: Path) -> Manifest:
    """Return an archive's manifest.

    Raises
    ------
    StoreError
        When it is none.
    """
    with _opened(archive) as tar:
        return _manifest(tar, archive)


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive, mode="r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise _damaged(archive, "it is no tar archive, or cut short") from error
    except OSError as error:
        raise StoreError(f"cannot read {archive}: {error.strerror or 'it is cut short'}") from error


def _manifest(tar: tarfile.TarFile, archive: Path) -> Manifest:
    head = tar.next()
    content = tar.extractfile(head) if head is not None and head.isreg() else None
    if head is None or content is None or head.name != _MANIFEST or head.size > _MOST_MANIFEST:
        raise _damaged(archive, f"it does not begin with {_MANIFEST}")
    return Manifest.from_json(content.read(), archive)


def restore(
    role: str, state: Path, archive: Path, *, check: Callable[[Path], None] = lambda made: None
) -> Manifest:
    """Make a party's state folder from an archive, whole and after every byte was checked, or not at all.

    Parameters
    ----------
    role : str
    state : Path
        Its state folder: absent, or empty.
    archive : Path
    check : callable, optional
        Receives the folder before it gets its name, and raises where it is not to be taken.

    Raises
    ------
    StoreError
        The archive is none, damaged, or another role's; the folder has something; or there is no room.
    """
    manifest = read_manifest(archive)
    if manifest.role != role:
        raise StoreError(f"{archive} is the state of a {manifest.role}, not of a {role}")
    if state.is_symlink() or (state.exists() and not state.is_dir()):
        raise StoreError(f"{state} is no folder", hint="name the state folder itself")
    if state.exists() and {one.name for one in state.iterdir()} - {"lock"}:
        raise StoreError(f"{state} is not empty", hint="move what is there away: a restore replaces nothing")
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{state.name}.", dir=state.parent) as work:
            made = Path(work) / "state"
            made.mkdir(mode=0o700)
            with _opened(archive) as tar:
                _manifest(tar, archive)
                _extract(tar, manifest, made, archive)
            # An earlier release, which knows no seals, takes them along; the store in the archive is a copy.
            for earlier in made.rglob(f"*.db{ENDING}"):
                earlier.unlink()
            name = STORES[role][0] if role in STORES else None
            if name is not None and (made / name).exists():
                _check_store(made / name, archive)
            check(made)
            if state.exists():
                (state / "lock").unlink(missing_ok=True)
                state.rmdir()
            made.rename(state)
        _flush(state.parent)
    except OSError as error:
        raise file_failure(f"restore {state}", error) from error
    return manifest


def _extract(tar: tarfile.TarFile, manifest: Manifest, made: Path, archive: Path) -> None:
    missing = dict(manifest.files)
    while (member := tar.next()) is not None:
        stated = missing.pop(member.name, None)
        content = tar.extractfile(member) if member.isreg() else None
        if stated is None or content is None or member.issparse() or member.size != stated[0]:
            raise _damaged(archive, "a member of it is not what its manifest says")
        target = made / member.name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256()
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            while piece := content.read(_PIECE):
                digest.update(piece)
                out.write(piece)
            os.fchmod(out.fileno(), stated[1] & _MODE)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != stated[2]:
            raise _damaged(archive, "a file in it does not have the hash that its manifest names")
        _flush(target.parent)
    if missing:
        raise _damaged(archive, f"{len(missing)} of its files are missing")


def _check_store(path: Path, archive: Path) -> None:
    try:
        check_pages(path)
    except StoreError as error:
        if error.trouble:
            raise
        raise _damaged(archive, f"its store {path.name} is not whole") from error


# --- between a file and a database -----------------------------------------------------------------------------------


def check_empty(connection: sa.Connection, metadata: sa.MetaData) -> None:
    """Check that a role's tables have no rows.

    Raises
    ------
    StoreError
    """
    for table in metadata.sorted_tables:
        if connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first() is not None:
            raise StoreError(
                f"the database has rows in {table.name} already",
                hint="name an empty one: a restore replaces nothing",
            )


def copy_rows(source: sa.Connection, target: sa.Connection, metadata: sa.MetaData) -> int:
    """Copy every row of a role's tables into empty ones, some hundreds at a time; return how many.

    Raises
    ------
    StoreError
        When the tables have rows already.
    """
    check_empty(target, metadata)
    copied = 0
    for table in metadata.sorted_tables:
        rows = source.execution_options(yield_per=200).execute(sa.select(table))
        for some in rows.mappings().partitions():
            target.execute(table.insert(), [dict(row) for row in some])
            copied += len(some)
    return copied


def copy_at_revision(source: sa.Engine, path: Path, schema: str, revision: str) -> None:
    """Copy the rows of a database, whose tables are of an earlier revision, into a new SQLite file of that revision.

    Parameters
    ----------
    source : sqlalchemy.Engine
        The database.
    path : Path
        The file, which must not exist.
    schema : str
        Folder of the role's revisions.
    revision : str
        The revision of the database's tables.
    """
    file = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    try:
        migrate(file, schema, to=revision)
        metadata = sa.MetaData()
        metadata.reflect(file, only=lambda name, _: name != "alembic_version")
        held = source.execution_options(isolation_level="REPEATABLE READ")
        with held.connect() as rows, file.begin() as copy:
            copy_rows(rows, copy, metadata)
    finally:
        file.dispose()
    path.chmod(0o600)
