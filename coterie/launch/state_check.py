"""Verify the state folder of a service that does not run: stores, keys, certificates, models, private arrays, journals.

Each finding names the file and what to do.  Only what loses nothing is repaired: indices of a store are made again from
its tables, if each of their entries has its row, and older versions of a model that are damaged are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError

from coterie.crypto.authority import Authority, load_tls_key
from coterie.crypto.keyfile import read_checked_json
from coterie.errors import CoterieError, CryptoError, PreflightError, StoreError
from coterie.launch.finding import Finding, failed, passed
from coterie.net.credentials import TlsFiles
from coterie.net.transparency import read_evidence, read_head
from coterie.process.runtime import alone_in
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.store.array_file import SUMS, load_arrays, sum_of_row
from coterie.store.indices import entries_without_row
from coterie.store.private_rows import known_sums, users_of
from coterie.store.seal import break_seal, check_pages, check_seal, seal
from coterie.wire.refusal import Refusal
from coterie.wire.v1.thirdparty_pb2 import PublishBundlesRequest

__all__ = ["check_state"]

_RESTORE = "restore the state folder from a backup (`coterie restore`)"
_PUT_BACK = "put it back from a backup, or restore the state folder from one (`coterie restore`)"
_CONTRIBUTIONS = "contributions.bin"
_MARK = b"coterie "
_MARKED = ("identities.key", "*-signing.key", "*-sealing.keys", "*.prekey", "keys/*.key")
"""Names of files that begin with the mark and end with a checksum."""
_CHECKSUM = 32
_MOST_KEY = 256 << 20


def check_state(state: Path, *, repair: bool = False, accept: bool = False) -> list[Finding]:
    """Verify a state folder.

    Parameters
    ----------
    state : Path
    repair : bool
        Whether to repair what loses nothing.
    accept : bool
        Whether stores that differ from their seals are as the operator wants them, if their pages fit together.

    Raises
    ------
    PreflightError
        There is no such folder, or a service uses it.
    """
    if not state.is_dir():
        raise PreflightError(f"{state} is no folder", hint="name the state folder of a service")
    with alone_in(state):
        found = [
            *_stores(state, repair=repair, accept=accept),
            *_certificates(state),
            *_secrets(state),
            *_models(state, repair=repair),
            *_private(state),
            *_journals(state),
        ]
    if not found:
        raise PreflightError(f"{state} holds nothing of a service", hint="name the state folder of a service")
    return found


# --- stores --------------------------------------------------------------------------------------------------------


def _stores(state: Path, *, repair: bool, accept: bool) -> Iterator[Finding]:
    for path in sorted(state.glob("*.db")):
        check = f"store {path.name}"
        try:
            sealed = check_seal(path)
        except StoreError as error:
            if not accept:
                yield failed(check, error, _RESTORE)
                continue
            sealed = "no"
        try:
            check_pages(path, fully=True)
        except StoreError as error:
            if error.trouble:
                yield failed(check, error, _RESTORE)
                continue
            if not repair:
                fix = f"`coterie check --repair {state}` makes its indices again; if that is not enough, {_RESTORE}"
                yield Finding(check, "fail", error.message, fix)
                continue
            try:
                _mend(path)
            except StoreError as why:
                yield Finding(check, "fail", f"{error.message}; not repaired: {why.message}", _RESTORE)
            else:
                yield Finding(
                    check,
                    "warn",
                    f"{error.message}; its indices were made again",
                    "nothing: no row was lost, since each entry of its indices had its row",
                )
            continue
        if accept and sealed != "yes":
            # Not before its pages are known to fit together: without a seal the service would open it.
            break_seal(path)
            if seal(path):
                yield passed(check, "its pages fit together; it is sealed as it is")
                continue
        elif sealed == "changed":
            yield Finding(
                check,
                "warn",
                f"{path} was written since its service stopped, by an earlier release or by hand; its pages fit",
                f"nothing, if you know of it: the service starts; `coterie check --accept {state}` seals it as it is",
            )
            continue
        yield passed(
            check,
            "as its service left it"
            if sealed == "yes"
            else "its pages fit together; changed values would not show",
        )


def _mend(path: Path) -> None:
    """Make the indices of a store again, in a copy that takes the store's place when it is whole.

    Raises
    ------
    StoreError
        An index has an entry without its row, which may be the last true copy of it, or the copy is not whole.
    """
    copy = path.with_name(f".{path.name}.mended")
    try:
        with (
            contextlib.closing(sqlite3.connect(path)) as held,
            contextlib.closing(sqlite3.connect(copy)) as made,
        ):
            if without := entries_without_row(held):
                raise StoreError(
                    f"its indices have what its tables lack, or cannot be compared: {', '.join(without)[:200]}"
                )
            held.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            held.backup(made)
            made.execute("REINDEX")
            made.commit()
            made.execute("PRAGMA journal_mode=DELETE")
        check_pages(copy, fully=True)
        copy.chmod(0o600)
        break_seal(path)
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        copy.replace(path)
        seal(path)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"its indices cannot be made again: {error}") from error
    finally:
        copy.unlink(missing_ok=True)


# --- certificates and secrets ----------------------------------------------------------------------------------------


def _certificates(state: Path) -> Iterator[Finding]:
    tls = TlsFiles(state / "tls")
    if tls.complete():
        again = "put it back from a backup; else the service enrols again with a token of the operator"
        damage = tls.damage()
        if damage is None:
            damage = _said(lambda: load_tls_key(tls.key))
        yield (
            passed("certificate", str(tls.identity()))
            if damage is None
            else Finding("certificate", "fail", damage, again)
        )
    if (state / "ca-key.pem").exists():
        damage = _said(lambda: Authority.load(state))
        yield (
            passed("authority", "ca.pem and its key")
            if damage is None
            else Finding("authority", "fail", f"{state / 'ca.pem'} or ca-key.pem: {damage}", _PUT_BACK)
        )


def _said(read: Callable[[], object]) -> str | None:
    try:
        read()
    except CoterieError as error:
        return error.message
    return None


def _secrets(state: Path) -> Iterator[Finding]:
    damaged, whole = list[Path](), 0
    for path in _below(state):
        if path.suffix in (".db", ".npy", ".bin", ".safetensors") or path.stat().st_size > _MOST_KEY:
            continue
        with path.open("rb") as file:
            if file.read(len(_MARK)) != _MARK:
                if any(path.match(pattern) for pattern in _MARKED):
                    damaged.append(path)
                continue
        content = path.read_bytes()
        if hashlib.sha256(content[:-_CHECKSUM]).digest() == content[-_CHECKSUM:]:
            whole += 1
        elif b"\n" in content[:64]:
            damaged.append(path)
    for path in damaged:
        yield Finding("secrets", "fail", f"{path} is damaged: its checksum does not match", _PUT_BACK)
    if whole:
        yield passed("secrets", f"{whole} files with their checksums")
    for path in (one for one in _below(state) if one.name == "journal.json"):
        damage = _said(partial(read_checked_json, path, "what its holder did last"))
        yield passed("journal", path.name) if damage is None else Finding("journal", "fail", damage, _RESTORE)
    if (state / "bundles.pb").exists():
        yield _bundles(state)
    try:
        head, _ = read_head(state)
        read_evidence(state)
    except StoreError as error:
        yield failed("log", error, _PUT_BACK)
    else:
        if head is not None:
            yield passed("log", f"a head of {head.size} entries")


def _bundles(state: Path) -> Finding:
    path, key = state / "bundles.pb", state / "directory.key"
    try:
        directory = key.read_bytes()
        message = PublishBundlesRequest.FromString(path.read_bytes())
        bundles = [bundle_from_wire(one) for one in message.bundles]
        written = PublishBundlesRequest(bundles=[bundle_to_wire(one) for one in bundles]).SerializeToString()
        if written != path.read_bytes():
            # A changed tag makes a field an unknown one, which a parser skips.
            raise CryptoError("it has something beside bundles")
        for bundle in bundles:
            # At its own time: whether it holds now is no matter of damage.
            bundle.verify(directory, bundle.not_before)
    except (OSError, DecodeError, Refusal, CryptoError) as error:
        said = error.message if isinstance(error, CoterieError) else str(error)
        return Finding("key bundles", "fail", f"{path} or {key.name} is damaged: {said}", _PUT_BACK)
    return passed("key bundles", f"{len(bundles)}, signed and countersigned")


# --- arrays and journals ---------------------------------------------------------------------------------------------


def _models(state: Path, *, repair: bool) -> Iterator[Finding]:
    whole = 0
    for folder in sorted({path.parent for path in _below(state) if path.suffix == ".safetensors"}):
        files = sorted(folder.glob("*.safetensors"))
        for path in files:
            try:
                load_arrays(path)
            except StoreError as error:
                older = path.name.startswith("version-") and path != files[-1]
                if older and repair:
                    path.unlink()
                    yield Finding(
                        "arrays", "warn", f"{error.message}; it was removed", "nothing: a newer one is kept"
                    )
                else:
                    yield failed("arrays", error, _PUT_BACK)
            else:
                whole += 1
    if whole:
        yield passed("arrays", f"{whole} files with models or factors")


def _private(state: Path) -> Iterator[Finding]:
    # After a crash these may be half written; the service takes them from the journal when it starts.
    again = {user for rows in _newest_contributions(state)[1] if rows for user in users_of(rows)}
    for sums in sorted(state.rglob(SUMS)):
        folder = sums.parent
        try:
            arrays = {
                path.stem: np.load(path, allow_pickle=False)
                for path in sorted(folder.glob("*.npy"))
                if not path.name.startswith("evaluated-")
            }
        except (OSError, ValueError, EOFError) as error:
            yield Finding(
                "private arrays",
                "fail",
                f"an array in {folder} cannot be read: {error}",
                f"{_PUT_BACK}; without it this host's users begin anew",
            )
            continue
        told = known_sums(folder)
        users = min([len(told), *map(len, arrays.values())]) if arrays else 0
        damaged = [
            row
            for row in range(users)
            if row not in again and told[row] and told[row] != sum_of_row(arrays, row)
        ]
        if damaged:
            yield Finding(
                "private arrays",
                "fail",
                f"the rows of {len(damaged)} of {users} users in {folder} are damaged",
                f"{_PUT_BACK}; without it these users begin anew when the service starts",
            )
        else:
            yield passed("private arrays", f"the rows of {users} users in {folder.name}")


def _journals(state: Path) -> Iterator[Finding]:
    newest, found = _newest_contributions(state)
    if newest is None:
        return
    if damaged := found.count(None):
        yield Finding(
            "journal",
            "warn",
            f"{damaged} of {len(found)} contributions to round {newest} in {state / _CONTRIBUTIONS} are damaged",
            "nothing: their members sit out the rest of that round",
        )
    else:
        yield passed("journal", f"{len(found)} contributions to round {newest}")


def _newest_contributions(state: Path) -> tuple[int | None, list[bytes | None]]:
    """Return the newest round of a host's journals, and the private rows of each contribution, None where damaged."""
    store, file = state / "client.db", state / _CONTRIBUTIONS
    if not (store.exists() and file.exists()):
        return None, []
    query = "SELECT joined, offset, length, private, checksum FROM journal WHERE length > 0"
    try:
        with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as held:
            rows = held.execute(query).fetchall()
    except sqlite3.Error:
        return None, []  # the finding of the store says why
    # Contributions of rounds before have been written over.
    newest = max((joined for joined, *_ in rows), default=0)
    found: list[bytes | None] = []
    with file.open("rb") as content:
        for joined, offset, length, private, checksum in rows:
            if joined == newest:
                held_bytes = os.pread(content.fileno(), length + private, offset)
                found.append(held_bytes[length:] if zlib.crc32(held_bytes) == checksum else None)
    return newest, found


def _below(state: Path) -> Iterator[Path]:
    return (path for path in sorted(state.rglob("*")) if path.is_file() and not path.is_symlink())
