"""Preflight checks of one service before ``coterie serve``: ports, state folder, store, input files, roster."""

from __future__ import annotations

import csv
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from coterie.config.base import ServiceSettings
from coterie.config.services import (
    ClientSettings,
    ContributorSettings,
    CosSettings,
    DatabaseSettings,
    DataOwnerSettings,
    DecryptingClientSettings,
    GraphSettings,
    KeySettings,
    ObjectSettings,
    ThirdPartySettings,
)
from coterie.crypto.graph_key import GRAPH
from coterie.crypto.identity import load_many
from coterie.crypto.roster import PAILLIER, Roster, load_roster_key
from coterie.errors import CoterieError, PreflightError
from coterie.launch.finding import Finding, FindingStatus, passed
from coterie.launch.preflight_trust import check_authority, check_certificate, check_peers
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import HOLDER, IDENTITIES
from coterie.process.private_files import check_private
from coterie.store.backup import STORES
from coterie.store.engine import known_revisions
from coterie.store.newest import newest, revision_of
from coterie.store.objects import ObjectAddress
from coterie.store.postgres import DatabaseAddress, read_revision
from coterie.systems.registry import REMEDY, failures, systems

__all__ = ["check_service", "check_systems", "existing", "unwritable"]

_MB = 1 << 20
_OTHERS = 0o077
_LEAST_DISK = 100 * _MB
_LITTLE_DISK = 1024 * _MB


async def check_service(role: str, settings: ServiceSettings, *, timeout_s: float = 5.0) -> list[Finding]:
    """Check that ``coterie serve`` can run a service on this machine.

    Parameters
    ----------
    role : str
        Role of the service.
    settings : ServiceSettings
        The service's configuration.
    timeout_s : float
        How long to wait for each peer, seconds.
    """
    tls = TlsFiles(settings.state / "tls")
    findings = [
        *check_systems(),
        *_ports(settings),
        *_state(settings.state),
        _private(settings),
        *([_kept(role, settings)] if role in STORES else []),
        *_inputs(settings),
    ]
    if isinstance(settings, ThirdPartySettings):
        findings += check_authority(settings)
        if settings.expansion_database is not None:
            findings.append(_in_database("graphs", settings.expansion_database, "expansion"))
    else:
        findings += check_certificate(role, settings, tls)
    if isinstance(settings, CosSettings) and settings.objects is not None:
        findings.append(await _objects(settings.objects))
    findings += [finding async for finding in check_peers(settings, tls, timeout_s)]
    return findings


def check_systems() -> Iterator[Finding]:
    """Check the installed learning systems; one that cannot be loaded is a warning, since others still run."""
    yield passed("systems", ", ".join(systems()))
    for failure in failures():
        yield Finding("systems", "warn", str(failure), REMEDY)


def _ports(settings: ServiceSettings) -> Iterator[Finding]:
    wanted = {"listen": settings.listen, "metrics": settings.metrics}
    if isinstance(settings, ThirdPartySettings):
        wanted["enrol_listen"] = settings.enrol_listen
    taken: dict[str, str] = {}
    for key, address in wanted.items():
        if address is None:
            continue
        check = f"port {key}"
        if address in taken:
            yield Finding(check, "fail", f"{address} is also {taken[address]}", f"give {key} another port")
            continue
        taken[address] = key
        problem = _binds(address)
        if problem is None:
            yield passed(check, address)
        else:
            yield Finding(
                check,
                "fail",
                f"cannot listen on {address}: {problem}",
                f"stop what listens there, or set {key}",
            )
    if isinstance(settings, DataOwnerSettings):
        yield _advertised(settings)


def _advertised(settings: DataOwnerSettings) -> Finding:
    address = settings.advertise or settings.listen
    host = address.rpartition(":")[0].strip("[]")
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
        return Finding(
            "advertise",
            "fail",
            f"clients would be told to connect to {address}",
            "set `advertise` to the address at which clients reach this process",
        )
    return passed("advertise", address)


def _binds(address: str) -> str | None:
    """Return why no process can listen at an address now; None when one can."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections that are closing do not occupy the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no valid host name
        return getattr(error, "strerror", None) or str(error)
    return None


def _state(folder: Path) -> Iterator[Finding]:
    holder = existing(folder)
    if not holder.is_dir():
        yield Finding("state", "fail", f"{holder} is no folder", "let `state` name a folder")
    elif (problem := unwritable(holder)) is not None:
        yield Finding(
            "state",
            "fail",
            f"{holder} cannot be written: {problem}",
            "give the folder to the user that runs the service",
        )
    elif not folder.exists():
        yield passed("state", f"{folder} will be made, mode 0700")
    elif (mode := folder.stat().st_mode & 0o777) & _OTHERS:
        yield Finding(
            "state",
            "warn",
            f"{folder} has mode {mode:04o}: others on this machine may look into it",
            f"chmod 700 {folder}",
        )
    else:
        yield passed("state", f"{folder}, private")
    free = shutil.disk_usage(holder).free
    text = f"{free // _MB:,} MiB free below {holder}"
    if free < _LITTLE_DISK:
        status: FindingStatus = "fail" if free < _LEAST_DISK else "warn"
        yield Finding("disk", status, text, "free space: a store that is full refuses everything")
    else:
        yield passed("disk", text)


def _kept(role: str, settings: ServiceSettings) -> Finding:
    if isinstance(settings, CosSettings) and settings.database is not None:
        return _in_database("store", settings.database, STORES[role][1])
    return _store(role, settings.state)


def _in_database(check: str, database: DatabaseSettings, schema: str) -> Finding:
    try:
        place = DatabaseAddress(**database.model_dump())
        held = read_revision(place)
        if held is None:
            return passed(check, f"tables will be made in {place.name}")
        return replace(_of_revision(place.name, held, schema), check=check)
    except CoterieError as error:
        return Finding(check, "fail", error.message, error.hint or "see docs/configuration.md")


async def _objects(settings: ObjectSettings) -> Finding:
    """Check that an object can be written to the store, read back and removed; nothing stays there."""
    try:
        place = ObjectAddress(**settings.model_dump())
        await place.open().try_out()
    except CoterieError as error:
        fix = (
            error.hint
            or "let the address and the credentials of [objects] allow to write, read, list and remove"
        )
        return Finding("objects", "fail", error.message, fix)
    return passed("objects", f"{settings.url} takes an object and gives it back")


def _store(role: str, state: Path) -> Finding:
    name, schema = STORES[role]
    path = state / name
    if not path.exists():
        return passed("store", f"{name} will be made")
    # Not by `open_sqlite`, which migrates the store.
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            connection.execute(sa.text("SELECT count(*) FROM sqlite_master")).scalar()
            held = revision_of(connection)
    except sa.exc.DatabaseError as error:
        return Finding("store", "fail", f"{path} does not open: {error.orig}", "restore it from a backup")
    finally:
        engine.dispose()
    return _of_revision(name, held, schema)


def _of_revision(name: str, held: str | None, schema: str) -> Finding:
    last = newest(schema).revision
    if held == last:
        return passed("store", f"{name}, schema {held}")
    if held is None or held in known_revisions(schema):
        return Finding(
            "store",
            "warn",
            f"{name} has schema {held or 'none'}, the newest is {last}",
            "the service migrates it when it starts: make a backup first",
        )
    return Finding(
        "store",
        "fail",
        f"{name} has schema {held}, which this version does not know; the newest here is {last}",
        "install the version of coterie that wrote it, or a later one; or is it another role's store?",
    )


def _private(settings: ServiceSettings) -> Finding:
    try:
        check_private(settings.state, settings.private_files())
    except PreflightError as error:
        return Finding("private files", "fail", error.message, error.hint or "chmod 600")
    return passed("private files", "only this user can read stores, histories and keys")


def _inputs(settings: ServiceSettings) -> Iterator[Finding]:
    match settings:
        case DataOwnerSettings():
            for owner in settings.owners:
                yield _table(f"items of {owner.name}", owner.items, ("item",))
        case ClientSettings(histories=Path() as path):
            yield _table("histories", path, ("user", "item", "positive", "time", "part"))
    match settings:
        case ClientSettings(encryption=KeySettings() as key) | DecryptingClientSettings(encryption=key):
            yield _roster("roster", key, PAILLIER, settings.run)
    match settings:
        case ClientSettings(expansion=GraphSettings() as graph):
            yield _roster("graph roster", graph, GRAPH, settings.run)
    match settings:
        case ClientSettings(latents=KeySettings() as key):
            yield _roster("roster of meta-latents", key, PAILLIER, settings.run)
    match settings:
        case DecryptingClientSettings():
            yield from _on_the_roster(settings.encryption, settings.state)
        case ClientSettings(encryption=ContributorSettings(holds_key=True) as key):
            yield from _on_the_roster(key, settings.state / HOLDER)


def _roster(check: str, key: KeySettings | GraphSettings, secrets: str, run: str) -> Finding:
    fix = "get both files from the operator: `coterie certs roster`, `coterie certs roster-key`"
    try:
        roster = Roster.load(key.roster)
        roster.verify(load_roster_key(key.roster_key), purpose=secrets, run=run, now=int(time.time()))
    except CoterieError as error:
        return Finding(check, "fail", error.message, error.hint or fix)
    return passed(check, f"{key.roster}, {len(roster.members)} may hold the key")


def _on_the_roster(key: KeySettings, state: Path) -> Iterator[Finding]:
    """Check that the roster names this key holder; no finding before the holder has an identity."""
    path = state / IDENTITIES
    try:
        if not path.exists():
            return
        (own,) = load_many(path)
        named = own.participant_id in Roster.load(key.roster).members
    except (CoterieError, ValueError):
        # `_roster` reports errors of the roster; the service reports errors of the identity file when it starts.
        return
    who = own.participant_id.hex()[:16]
    if named:
        yield passed("key holder", f"participant {who} is on the roster")
    else:
        yield Finding(
            "key holder",
            "fail",
            f"participant {who} of {path} is not on the roster {key.roster}",
            "the operator signs one that names it: `coterie certs participants`, `coterie certs roster`",
        )


def _table(check: str, path: Path, columns: Iterable[str]) -> Finding:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            held = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        return Finding(check, "fail", f"cannot read {path}: {problem}", "put the file there")
    missing = [name for name in columns if name not in held]
    if missing:
        return Finding(
            check,
            "fail",
            f"{path} has no column {', '.join(missing)}; found {', '.join(held) or 'nothing'}",
            f"expected the columns {', '.join(columns)}",
        )
    return passed(check, str(path))


def existing(path: Path) -> Path:
    """Return the absolute path, or its nearest ancestor that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def unwritable(folder: Path) -> str | None:
    """Return why a folder cannot be written to; None when it can.  No file is left there."""
    try:
        # Not by `os.access`, which allows root even on a read-only file system.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)
