"""What must hold before a run or a service starts: each rule says what is wrong and how to put it right.

Nothing is changed: a store is not migrated, a token is not redeemed, a port is given back at once.
"""

from __future__ import annotations

import asyncio
import csv
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata, resources, util
from pathlib import Path
from typing import Any, Literal

import grpc
import sqlalchemy as sa
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.config.base import EnrolSettings, Peer, ServiceSettings
from coterie.config.load import ROLES
from coterie.config.run import RunSettings
from coterie.config.services import ClientSettings, CosSettings, DataOwnerSettings, ThirdPartySettings
from coterie.crypto.authority import load_tls_key, logical_name, renewal_time, token_hash
from coterie.crypto.keyfile import read_private_file
from coterie.errors import CoterieError
from coterie.launch.children import free_port
from coterie.launch.feed import Feed, load, make_feed
from coterie.net.channel import connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.store.authority import load_secrets, secrets_exist

__all__ = ["Finding", "check_run", "check_service"]

Status = Literal["ok", "warn", "fail"]

_MB = 1 << 20
_OTHERS = 0o077
_PROCESS_MB = 120
"""Memory of one service process with little data, MiB: what small runs report as peak."""
_LEAST_DISK = 100 * _MB
_LITTLE_DISK = 1024 * _MB
_STORES = {
    "cos": ("cos.db", "cos"),
    "data-owner": ("data_owner.db", "data_owner"),
    "client": ("client.db", "client"),
    "thirdparty": ("directory.db", "thirdparty"),
}
"""File and migrations of each role's store."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes
    ----------
    check : str
        Its name.
    status : str
        ``"ok"``, ``"warn"`` (can start; read it) or ``"fail"``.
    problem : str
        What is wrong; empty when ok.
    fix : str
        How to put it right; empty when ok.
    note : str
        What was found, when ok.
    """

    check: str
    status: Status
    problem: str = ""
    fix: str = ""
    note: str = ""


def _ok(check: str, note: str) -> Finding:
    return Finding(check, "ok", note=note)


def _of(check: str, error: CoterieError, fix: str) -> Finding:
    return Finding(check, "fail", error.message, error.hint or fix)


# --- a run -----------------------------------------------------------------------------------------------------


def check_run(settings: RunSettings) -> list[Finding]:
    """Check that ``coterie run`` can carry out a run on this machine; the data set is read and divided."""
    findings = [*_services(), *_packages()]
    try:
        dataset = load(settings)
    except CoterieError as error:
        findings.append(_of("data", error, "`coterie data describe PATH` says how a data set is read"))
    except ImportError as error:
        findings.append(
            Finding("data", "fail", f"the data set needs {error.name}", "pip install 'coterie[data]'")
        )
    else:
        findings.append(
            _ok(
                "data",
                f"{dataset.name}: {len(dataset):,} interactions of {len(dataset.users):,} users "
                f"with {len(dataset.items):,} items",
            )
        )
        try:
            feed = make_feed(settings, dataset, settings.seeds[0])
        except CoterieError as error:
            findings.append(_of("split", error, "`[split]` and `[federation]` say how data is divided"))
        else:
            findings += [_split(settings, feed), _memory(settings, feed), _disk(settings, feed)]
    return [*findings, _output(settings.output), _loopback(settings)]


def _services() -> Iterator[Finding]:
    registered = metadata.entry_points(group="coterie.services").names
    missing = [role for role in ROLES if role not in registered]
    if missing:
        yield Finding(
            "services",
            "fail",
            f"no installed package provides {', '.join(missing)}",
            "install coterie again: services register as entry points when it is installed",
        )
    else:
        yield _ok("services", ", ".join(ROLES))


def _packages() -> Iterator[Finding]:
    for extra, modules, use in (
        ("report", ("matplotlib", "jinja2"), "report.html"),
        ("data", ("polars",), "data sets as Parquet, CSV or TSV"),
        ("fast", ("uvloop",), "a faster event loop"),
    ):
        missing = [name for name in modules if util.find_spec(name) is None]
        check = f"package {extra}"
        if not missing:
            yield _ok(check, ", ".join(modules))
        else:
            # Every run ends with its report; the others are missed only by those who use them.
            status: Status = "fail" if extra == "report" else "warn"
            yield Finding(
                check,
                status,
                f"{', '.join(missing)} not installed: no {use}",
                f"pip install 'coterie[{extra}]'",
            )


def _split(settings: RunSettings, feed: Feed) -> Finding:
    owners, hosts = feed.partition.names, settings.federation.hosts
    users = [int((feed.host == host).sum()) for host in range(hosts)]
    floor = settings.federation.min_users
    below = sum(count < floor for count in users)
    sizes = f"{len(owners)} data owners, {min(users)} to {max(users)} users on each of {hosts} hosts"
    if below:
        return Finding(
            "split",
            "warn",
            f"{sizes}: {below} hosts have fewer than min_users = {floor} and will withhold their metric sums"
            + (", so that nothing is measured" if below == hosts else ""),
            f"federation.hosts at most {max(1, len(feed.dataset.users) // floor)} for so many users",
        )
    return _ok("split", sizes)


def _processes(settings: RunSettings) -> int:
    federation = settings.federation
    # Without a number there is one process for each owner, and about 20 genres in any data set here.
    owners = federation.owner_processes or federation.owners or 20
    return 2 + owners + federation.hosts


def _memory(settings: RunSettings, feed: Feed) -> Finding:
    users, items, d = len(feed.dataset.users), len(feed.dataset.items), settings.drift.dim
    hosts = settings.federation.hosts
    model = (users + items) * d * 4
    # A host scores 256 users at a time and holds about ten arrays of that shape; everybody holds the catalogue.
    evaluating = 256 * items * 8 * 10
    expected = (
        _processes(settings) * _PROCESS_MB * _MB
        + 4 * model
        + hosts * (evaluating + model)
        + 400 * len(feed.dataset)
    )
    free = _free_memory()
    if free is None:
        return _ok("memory", f"about {expected // _MB:,} MiB expected; what is free is not known here")
    text = f"about {expected // _MB:,} MiB expected, {free // _MB:,} MiB free"
    if expected > free:
        return Finding("memory", "warn", text, "fewer hosts, or federation.owner_processes = 1")
    return _ok("memory", text)


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _disk(settings: RunSettings, feed: Feed) -> Finding:
    d, seeds = settings.drift.dim, len(settings.seeds)
    model = (len(feed.dataset.users) + len(feed.dataset.items)) * d * 4
    # Histories and stores take some hundred bytes an interaction; one model is kept for each evaluation.
    expected = seeds * (500 * len(feed.dataset) + (settings.drift.epochs + 3) * model + 20 * _MB)
    free = shutil.disk_usage(_existing(settings.output)).free
    text = f"about {max(1, expected // _MB):,} MiB expected, {free // _MB:,} MiB free"
    if expected > free:
        return Finding("disk", "fail", text, "free space, or let `output` name a folder on another volume")
    return _ok("disk", text)


def _output(folder: Path) -> Finding:
    holder = _existing(folder)
    if not holder.is_dir():
        return Finding("output", "fail", f"{holder} is no folder", "let `output` name a folder")
    if not os.access(holder, os.W_OK | os.X_OK):
        return Finding("output", "fail", f"{holder} cannot be written", "let `output` name another folder")
    return _ok("output", str(folder))


def _existing(path: Path) -> Path:
    """Return the path, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _loopback(settings: RunSettings) -> Finding:
    wanted = _processes(settings) + 1  # the third party listens twice
    try:
        ports = {free_port() for _ in range(wanted)}
    except OSError as error:
        return Finding(
            "ports", "fail", f"127.0.0.1 has no free port: {error.strerror}", "stop what uses the ports there"
        )
    return _ok("ports", f"{len(ports)} free ports at 127.0.0.1, chosen when the run starts")


# --- a service -------------------------------------------------------------------------------------------------


async def check_service(role: str, settings: ServiceSettings, *, timeout_s: float = 5.0) -> list[Finding]:
    """Check that ``coterie serve`` can run a service here.

    Parameters
    ----------
    role : str
        Role of the service.
    settings : ServiceSettings
        Its configuration.
    timeout_s : float
        How long to wait for each peer, seconds.
    """
    tls = TlsFiles(settings.state / "tls")
    findings = [
        *_ports(settings),
        *_state(settings.state),
        _store(role, settings.state),
        *_inputs(settings),
    ]
    if isinstance(settings, ThirdPartySettings):
        findings += _authority(settings)
    else:
        findings += _certificate(role, settings, tls)
    findings += [finding async for finding in _peers(settings, tls, timeout_s)]
    return findings


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
            yield _ok(check, address)
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
    return _ok("advertise", address)


def _binds(address: str) -> str | None:
    """Return why nobody can listen at an address now; None when somebody can."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections that are closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _state(folder: Path) -> Iterator[Finding]:
    holder = _existing(folder)
    if not holder.is_dir():
        yield Finding("state", "fail", f"{holder} is no folder", "let `state` name a folder")
    elif not os.access(holder, os.R_OK | os.W_OK | os.X_OK):
        yield Finding(
            "state",
            "fail",
            f"{holder} cannot be written",
            "give the folder to the user that runs the service",
        )
    elif not folder.exists():
        yield _ok("state", f"{folder} will be made, mode 0700")
    elif (mode := folder.stat().st_mode & 0o777) & _OTHERS:
        yield Finding(
            "state",
            "warn",
            f"{folder} has mode {mode:04o}: others on this machine may look into it",
            f"chmod 700 {folder}",
        )
    else:
        yield _ok("state", f"{folder}, private")
    free = shutil.disk_usage(holder).free
    text = f"{free // _MB:,} MiB free below {holder}"
    if free < _LITTLE_DISK:
        status: Status = "fail" if free < _LEAST_DISK else "warn"
        yield Finding("disk", status, text, "free space: a store that is full refuses everything")
    else:
        yield _ok("disk", text)


def _store(role: str, state: Path) -> Finding:
    name, schema = _STORES[role]
    path = state / name
    if not path.exists():
        return _ok("store", f"{name} will be made")
    # Not `open_sqlite`: that one migrates.
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)
    try:
        with engine.connect() as connection:
            connection.execute(sa.text("SELECT count(*) FROM sqlite_master")).scalar()
            from alembic.runtime.migration import MigrationContext

            held = MigrationContext.configure(connection).get_current_revision()
    except sa.exc.DatabaseError as error:
        return Finding("store", "fail", f"{path} does not open: {error.orig}", "restore it from a backup")
    finally:
        engine.dispose()
    known, newest = _revisions(schema)
    if held == newest:
        return _ok("store", f"{name}, schema {held}")
    if held is None or held in known:
        return Finding(
            "store",
            "warn",
            f"{name} has schema {held or 'none'}, the newest is {newest}",
            "the service migrates it when it starts: make a backup first",
        )
    return Finding(
        "store",
        "fail",
        f"{name} has schema {held}, which this version does not know; the newest here is {newest}",
        "install the version of coterie that wrote it, or a later one; or is it another role's store?",
    )


def _revisions(schema: str) -> tuple[set[str], str | None]:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    folder = resources.files("coterie.store") / "migrations"
    config = Config()
    config.set_main_option("script_location", str(folder))
    config.set_main_option("version_locations", str(folder / schema))
    config.set_main_option("path_separator", "newline")
    scripts = ScriptDirectory.from_config(config)
    return {script.revision for script in scripts.walk_revisions()}, scripts.get_current_head()


def _inputs(settings: ServiceSettings) -> Iterator[Finding]:
    match settings:
        case DataOwnerSettings():
            for owner in settings.owners:
                yield _table(f"items of {owner.name}", owner.items, ("item",))
        case ClientSettings(histories=Path() as path):
            yield _table("histories", path, ("user", "item", "positive", "time", "part"))


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
    return _ok(check, str(path))


# --- certificates ----------------------------------------------------------------------------------------------


def _authority(settings: ThirdPartySettings) -> Iterator[Finding]:
    if not secrets_exist(settings.state):
        if (settings.state / _STORES["thirdparty"][0]).exists():
            yield Finding(
                "authority",
                "fail",
                f"{settings.state} holds a directory but no authority",
                "restore ca.pem, ca-key.pem and directory-signing.key from a backup",
            )
        else:
            yield _ok("authority", "will be made at the first start")
        return
    try:
        secrets = load_secrets(settings.state)
    except CoterieError as error:
        yield _of("authority", error, "restore it from a backup")
        return
    certificate = x509.load_pem_x509_certificate(secrets.authority.certificate_pem)
    yield _validity("authority", certificate, "a new authority is a new federation")
    path = settings.tokens or settings.state / "tokens.jsonl"
    if path.exists() and not os.access(path, os.R_OK):
        yield Finding("tokens", "fail", f"{path} cannot be read", "give it to the user that runs the service")
    elif path.exists():
        yield _ok("tokens", str(path))
    else:
        yield Finding(
            "tokens", "warn", f"{path} is not there: nobody can enrol yet", "`coterie certs token` makes it"
        )


def _certificate(role: str, settings: ServiceSettings, tls: TlsFiles) -> Iterator[Finding]:
    if not tls.complete():
        yield from _token(role, settings, "no certificate yet")
        return
    party = f"{role}/{settings.name}"
    again = f"remove {tls.folder} and enrol with a new token"
    try:
        held = tls.identity()
        certificate = x509.load_pem_x509_certificate(tls.chain.read_bytes())
        if str(held) != party:
            yield Finding(
                "certificate",
                "fail",
                f"the certificate in {tls.folder} is {held}'s, and this is {party}",
                "give every process a state folder of its own",
            )
            return
        if certificate.public_key() != load_tls_key(tls.key).public_key():
            yield Finding("certificate", "fail", f"{tls.key} is not the certificate's key", again)
            return
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(tls.authority.read_bytes()))
    except CoterieError as error:
        yield _of("certificate", error, again)
        return
    except (OSError, ValueError, TypeError, InvalidSignature):
        yield Finding(
            "certificate", "fail", f"the certificate in {tls.folder} is not of the authority in ca.pem", again
        )
        return
    validity = _validity("certificate", certificate, again, tls.chain.read_bytes(), party)
    if validity.status == "fail" and settings.enrol is not None:
        # An expired certificate is exchanged for a new one, if there is a token for it.
        yield Finding("certificate", "warn", validity.problem, "a new token in enrol.token_file renews it")
        yield from _token(role, settings, "the certificate does not hold")
    else:
        yield validity
    if not (settings.state / "directory.key").is_file():
        yield Finding(
            "directory key",
            "fail",
            f"{settings.state / 'directory.key'} is missing",
            "enrol again, with a new token",
        )


def _validity(
    check: str, certificate: x509.Certificate, fix: str, pem: bytes | None = None, whose: str = ""
) -> Finding:
    now = time.time()
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin.timestamp():
        return Finding(
            check,
            "fail",
            f"it is valid from {begin:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(now))} UTC",
            "set the clock of this machine, or of the one that made the certificate",
        )
    if now >= end.timestamp():
        return Finding(check, "fail", f"it expired at {end:%Y-%m-%d %H:%M} UTC", fix)
    text = f"{whose} until {end:%Y-%m-%d %H:%M} UTC".strip()
    if pem is not None and now >= renewal_time(pem):
        return Finding(
            check,
            "warn",
            f"{text}: more than half of its validity is over",
            "put a new token into enrol.token_file and remove tls/chain.pem before the next start",
        )
    return _ok(check, text)


def _token(role: str, settings: ServiceSettings, why: str) -> Iterator[Finding]:
    enrol: EnrolSettings | None = settings.enrol
    if enrol is None:
        yield Finding(
            "certificate",
            "fail",
            f"{why}, and the configuration does not say how to enrol",
            "add the section [enrol] with address, ca_file and token_file",
        )
        return
    yield _ok("certificate", f"{why}: enrols at {enrol.address}")
    make = f"`coterie certs token --role {role} --name {settings.name}` at the third party makes one"
    try:
        token_hash(read_private_file(enrol.token_file).decode().strip())
    except UnicodeDecodeError:
        yield Finding("token", "fail", f"{enrol.token_file} holds no token", make)
    except CoterieError as error:
        yield Finding("token", "fail", error.message, error.hint or make)
    else:
        yield _ok("token", f"{enrol.token_file}; whether it is unused only the third party knows")
    try:
        authority = x509.load_pem_x509_certificate(enrol.ca_file.read_bytes())
    except OSError as error:
        yield Finding(
            "ca_file",
            "fail",
            f"cannot read {enrol.ca_file}: {error.strerror}",
            "copy ca.pem of the third party",
        )
    except ValueError:
        yield Finding(
            "ca_file", "fail", f"{enrol.ca_file} is no certificate in PEM", "copy ca.pem of the third party"
        )
    else:
        yield _validity("ca_file", authority, "copy ca.pem of the third party again")


# --- peers -----------------------------------------------------------------------------------------------------


async def _peers(settings: ServiceSettings, tls: TlsFiles, timeout_s: float) -> AsyncIterator[Finding]:
    wanted: list[tuple[str, Peer]] = []
    if isinstance(settings, CosSettings | DataOwnerSettings | ClientSettings):
        wanted.append(("thirdparty", settings.thirdparty))
    if isinstance(settings, DataOwnerSettings | ClientSettings):
        wanted.append(("cos", settings.cos))
    for role, peer in wanted:
        yield await _peer(role, peer, tls, timeout_s)
    if not tls.complete() and settings.enrol is not None and wanted:
        yield await _enrolment(settings.enrol, timeout_s)


async def _peer(role: str, peer: Peer, tls: TlsFiles, timeout_s: float) -> Finding:
    party = f"{role}/{peer.name}"
    check = f"peer {party}"
    problem = await _reaches(peer.address, timeout_s)
    if problem is not None:
        return Finding(
            check,
            "fail",
            f"nothing answers at {peer.address}: {problem}",
            f"start {party} there, or correct {role}.address; is a firewall between?",
        )
    if not tls.complete():
        return _ok(check, f"{peer.address} takes connections; who it is shows after enrolment")
    try:
        load_tls_key(tls.key)  # gRPC says of a bad key only that the handshake failed
        credentials = tls.channel_credentials()
        status = await _health(peer.address, role, peer.name, credentials, timeout_s)
    except CoterieError as error:
        return _of(check, error, "enrol first")
    except grpc.aio.AioRpcError as error:
        return _refused(check, party, peer.address, error)
    if status != health_pb2.HealthCheckResponse.SERVING:
        return Finding(
            check, "warn", f"{party} at {peer.address} is not ready yet", "its log says what it waits for"
        )
    return _ok(check, f"{peer.address}, mutual TLS, healthy")


def _refused(check: str, party: str, address: str, error: grpc.aio.AioRpcError) -> Finding:
    details = (error.details() or "").splitlines()[0][:200] if error.details() else ""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Finding(
            check,
            "fail",
            f"what listens at {address} is not {party} of this federation: {details}",
            "is the name right, the certificate of the same authority, and the clock of both machines?",
        )
    return Finding(
        check,
        "fail",
        f"{party} at {address} refused: {error.code().name}: {details}",
        "was this certificate revoked, or made for another role?",
    )


async def _enrolment(enrol: EnrolSettings, timeout_s: float) -> Finding:
    check = "enrolment"
    problem = await _reaches(enrol.address, timeout_s)
    if problem is not None:
        return Finding(
            check,
            "fail",
            f"nothing answers at {enrol.address}: {problem}",
            "start the third party there, or correct enrol.address",
        )
    try:
        credentials = grpc.ssl_channel_credentials(root_certificates=enrol.ca_file.read_bytes())
    except OSError as error:
        return Finding(check, "fail", f"cannot read {enrol.ca_file}: {error.strerror}", "copy ca.pem there")
    channel = grpc.aio.secure_channel(
        enrol.address,
        credentials,
        options=[("grpc.ssl_target_name_override", logical_name("thirdparty", enrol.name))],
    )
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        return Finding(
            check,
            "fail",
            f"what listens at {enrol.address} is not the third party {enrol.name!r} of {enrol.ca_file}",
            "is enrol.name right, and ca_file the third party's ca.pem?",
        )
    finally:
        await channel.close()
    return _ok(check, f"{enrol.address}, verified by {enrol.ca_file}")


async def _reaches(address: str, timeout_s: float) -> str | None:
    """Return why no connection is made to an address within the time; None when one is."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, OverflowError) as error:
        return os.strerror(error.errno) if getattr(error, "errno", None) else str(error)
    writer.close()
    return None


async def _health(
    address: str, role: str, name: str, credentials: grpc.ChannelCredentials, timeout_s: float
) -> int:
    channel = connect(
        address, credentials, tls_name=logical_name(role, name), peer=f"{role}/{name}", meter=Meter()
    )
    try:
        stub: Any = channel.stub(health_pb2_grpc.HealthStub)
        response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        return int(response.status)
    finally:
        await channel.close()
