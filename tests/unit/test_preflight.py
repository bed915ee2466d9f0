"""``coterie preflight``: each check passes where all is well, and says what is wrong and how to mend it elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import sqlite3
import sys
import time
from collections import namedtuple
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from coterie.cli.main import invoke
from coterie.config.base import EnrolSettings, Peer, ServiceSettings
from coterie.config.run import RunSettings
from coterie.config.services import (
    ClientSettings,
    CosSettings,
    DataOwnerSettings,
    DecryptingClientSettings,
    KeySettings,
    OwnerSettings,
    ThirdPartySettings,
    settings_model,
)
from coterie.crypto.authority import Authority, make_csr, new_tls_key, save_tls_key
from coterie.crypto.graph_key import GRAPH
from coterie.crypto.roster import PAILLIER, Roster, save_roster_key
from coterie.launch import preflight
from coterie.launch.authority import make_authority, make_token
from coterie.launch.finding import Finding
from coterie.launch.preflight_peer import Clock, check_clock
from coterie.net.credentials import TlsFiles
from coterie.net.enrolment import HOLDER, identities
from coterie.store.engine import open_sqlite
from tests.operators import KEYS

HOST = "127.0.0.1"
PATIENCE_S = 20.0
"""How long a peer that answers may take; a machine under load needs some of it."""
SHORT_S = 0.3
"""How long to wait for a peer that never answers."""

MB = 1 << 20
Usage = namedtuple("Usage", "total used free")


def found(findings: Sequence[Finding], check: str) -> Finding:
    """Return the only finding of a check; what is wrong says so and how to mend it, what is well says neither."""
    (finding,) = (one for one in findings if one.check == check)
    if finding.status == "ok":
        assert finding.note
        assert (finding.problem, finding.fix) == ("", "")
    else:
        assert finding.problem
        assert finding.fix
    return finding


def problems(findings: Sequence[Finding]) -> dict[str, str]:
    return {one.check: one.status for one in findings if one.status != "ok"}


@pytest.fixture
def bound() -> Iterator[str]:
    """An address that is taken and at which nobody answers."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        yield f"{HOST}:{taken.getsockname()[1]}"


@dataclass(frozen=True)
class Federation:
    """An authority, and parties whose state folders lie in one folder."""

    folder: Path
    authority: Authority

    def state(self, name: str) -> Path:
        return self.folder / name

    def enrolled(self, role: str, name: str, *, days: int = 30, begun_days_ago: float = 0) -> TlsFiles:
        """Give a party a certificate as enrolment does."""
        state = self.state(name)
        state.mkdir(mode=0o700, exist_ok=True)
        tls = TlsFiles(state / "tls")
        tls.folder.mkdir(exist_ok=True)
        key = new_tls_key()
        tls.key.unlink(missing_ok=True)
        save_tls_key(tls.key, key)
        begin = datetime.now(UTC) - timedelta(days=begun_days_ago)
        issued = self.authority.issue(make_csr(key), role, name, days, now=begin)
        tls.chain.write_bytes(issued + self.authority.certificate_pem)
        tls.authority.write_bytes(self.authority.certificate_pem)
        (state / "directory.key").write_bytes(bytes(32))
        return tls

    def enrolment(self, role: str, name: str, address: str = "127.0.0.1:1") -> EnrolSettings:
        """Give a party a token."""
        token = self.folder / f"{name}.token"
        make_token(self.folder / "thirdparty", role, name, 0, token)
        return EnrolSettings(
            address=address, ca_file=self.folder / "thirdparty" / "ca.pem", token_file=token, timeout_s=1
        )

    def cos(self, **others: Any) -> CosSettings:
        thirdparty = Peer(address="127.0.0.1:1", name="directory")
        values = {"name": "cos", "state": self.state("cos"), "listen": f"{HOST}:0", "thirdparty": thirdparty}
        return CosSettings(**{**values, **others})

    def owner(self, items: Path, **others: Any) -> DataOwnerSettings:
        peer = Peer(address="127.0.0.1:1", name="any")
        values = {
            "name": "films",
            "state": self.state("films"),
            "listen": f"{HOST}:0",
            "thirdparty": peer,
            "cos": peer,
            "operator_keys": KEYS,
            "owners": (OwnerSettings(name="drama", items=items),),
        }
        return DataOwnerSettings(**{**values, **others})

    def thirdparty(self, **others: Any) -> ThirdPartySettings:
        values = {"name": "directory", "state": self.state("thirdparty"), "listen": f"{HOST}:0"}
        return ThirdPartySettings(**{**values, "enrol_listen": "localhost:0", **others})


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    make_authority(tmp_path / "thirdparty")
    return Federation(tmp_path, Authority.load(tmp_path / "thirdparty"))


def check(role: str, settings: ServiceSettings, timeout_s: float = SHORT_S) -> list[Finding]:
    return asyncio.run(preflight.check_service(role, settings, timeout_s=timeout_s))


def check_cos(federation: Federation, **others: Any) -> list[Finding]:
    return check("cos", federation.cos(**others))


# --- Ports -------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_with_the_key_to_set(federation: Federation, bound: str) -> None:
    findings = check_cos(federation, listen=bound)
    taken = found(findings, "port listen")
    assert taken.status == "fail"
    assert bound in taken.problem
    assert "in use" in taken.problem
    assert "set listen" in taken.fix


def test_an_address_of_another_machine_cannot_be_listened_on(federation: Federation) -> None:
    # 192.0.2.0/24 is for documentation: no machine has it.
    assert found(check_cos(federation, listen="192.0.2.7:7443"), "port listen").status == "fail"


def test_a_name_that_is_no_hosts_is_a_finding_and_no_fault(federation: Federation) -> None:
    assert found(check_cos(federation, listen=f"{'x' * 64}:7443"), "port listen").status == "fail"
    unknown = Peer(address=f"{'x' * 64}:7443", name="directory")
    peer = found(check_cos(federation, thirdparty=unknown), "peer thirdparty/directory")
    assert peer.status == "fail"


def test_two_keys_with_one_address_are_told_apart(federation: Federation, bound: str) -> None:
    twice = found(check_cos(federation, listen=f"{HOST}:7999", metrics=f"{HOST}:7999"), "port metrics")
    assert (twice.status, twice.problem) == ("fail", f"{HOST}:7999 is also listen")
    both = check("thirdparty", federation.thirdparty(enrol_listen=f"{HOST}:0"))
    assert found(both, "port enrol_listen").status == "fail"


def test_a_free_port_is_given_back(federation: Federation) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        free = f"{HOST}:{probe.getsockname()[1]}"
    for _ in range(2):
        assert found(check_cos(federation, listen=free), "port listen").status == "ok"


@pytest.mark.parametrize(
    ("listen", "advertise", "status"),
    [("0.0.0.0:0", None, "fail"), ("[::]:0", None, "fail"), ("0.0.0.0:0", "10.0.0.9:7443", "ok")],
)
def test_clients_are_not_told_to_connect_to_everywhere(
    federation: Federation, tmp_path: Path, listen: str, advertise: str | None, status: str
) -> None:
    settings = federation.owner(tmp_path / "items.csv", listen=listen, advertise=advertise)
    assert found(check("data-owner", settings), "advertise").status == status


# --- State folder and disk ---------------------------------------------------------------------------------------


def test_a_state_folder_is_not_made_by_the_check(federation: Federation) -> None:
    assert found(check_cos(federation), "state").status == "ok"
    assert not federation.state("cos").exists()


def test_a_file_in_place_of_the_state_folder_fails(federation: Federation, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for state in (file, file / "below"):
        wrong = found(check_cos(federation, state=state), "state")
        assert (wrong.status, wrong.problem) == ("fail", f"{file} is no folder")


def test_a_folder_into_which_nothing_can_be_written_fails_also_for_root(federation: Federation) -> None:
    wrong = found(check_cos(federation, state=Path("/proc/coterie")), "state")
    assert wrong.status == "fail"
    assert wrong.problem.startswith("/proc cannot be written")


def test_a_state_folder_that_others_may_look_into_is_a_warning(federation: Federation) -> None:
    state = federation.state("cos")
    state.mkdir(mode=0o700)
    assert found(check_cos(federation), "state").status == "ok"
    state.chmod(0o755)
    seen = found(check_cos(federation), "state")
    assert (seen.status, seen.fix) == ("warn", f"chmod 700 {state}")


@pytest.mark.parametrize(("free", "status"), [(50 * MB, "fail"), (500 * MB, "warn"), (5000 * MB, "ok")])
def test_little_space_is_a_warning_and_none_a_failure(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free, 0, free))
    assert found(check_cos(federation), "disk").status == status


# --- Stores and inputs -------------------------------------------------------------------------------------------


@pytest.fixture
def store(federation: Federation) -> Path:
    """The store of a COS, as the service makes it."""
    path = federation.state("cos") / "cos.db"
    path.parent.mkdir(mode=0o700)
    open_sqlite(path, "cos").dispose()
    return path


def test_a_store_that_is_not_there_will_be_made_and_one_of_today_is_well(federation: Federation) -> None:
    assert found(check_cos(federation), "store").note == "cos.db will be made"
    assert not (federation.state("cos") / "cos.db").exists()


def test_the_database_of_the_graphs_is_looked_for(federation: Federation) -> None:
    url = "postgresql+psycopg://nobody@127.0.0.1:1/graphs"
    settings = federation.thirdparty(expansion_database={"url": url, "tls": "disable"})
    seen = found(check("thirdparty", settings), "graphs")
    assert seen.status == "fail"
    assert "'graphs' at 127.0.0.1" in seen.problem
    assert "listen on that address" in seen.fix
    plain = check("thirdparty", federation.thirdparty())
    assert "graphs" not in {one.check for one in plain}


def test_a_store_is_not_changed_by_the_check(federation: Federation, store: Path) -> None:
    before = store.read_bytes()
    assert found(check_cos(federation), "store").status == "ok"
    assert store.read_bytes() == before


def test_a_store_of_another_version_fails_and_says_which(federation: Federation, store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    foreign = found(check_cos(federation), "store")
    assert foreign.status == "fail"
    assert "schema 9999" in foreign.problem


def test_the_store_of_another_role_fails(federation: Federation, store: Path) -> None:
    store.unlink()
    open_sqlite(store, "client").dispose()
    assert found(check_cos(federation), "store").status == "fail"


def test_a_store_that_will_be_migrated_is_a_warning(federation: Federation, store: Path) -> None:
    store.unlink()
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("CREATE TABLE something (value INTEGER)")
    old = found(check_cos(federation), "store")
    assert old.status == "warn"
    assert "backup" in old.fix


def test_a_damaged_store_fails(federation: Federation, store: Path) -> None:
    store.write_bytes(b"no database at all, " * 100)
    damaged = found(check_cos(federation), "store")
    assert damaged.status == "fail"
    assert "does not open" in damaged.problem


def test_the_items_of_an_owner_must_be_there_with_their_column(
    federation: Federation, tmp_path: Path
) -> None:
    items = tmp_path / "items.csv"
    settings = federation.owner(items)

    def of_items() -> Finding:
        return found(check("data-owner", settings), "items of drama")

    assert "cannot read" in of_items().problem
    items.write_text("key\ni1\n")
    assert "no column item; found key" in of_items().problem
    items.write_text("item\ni1\n")
    assert of_items().status == "ok"


def test_histories_must_have_every_column(federation: Federation, tmp_path: Path) -> None:
    file = tmp_path / "histories.csv"
    file.write_text("user,item,time\n")
    peer = Peer(address="127.0.0.1:1", name="any")
    settings = ClientSettings(
        name="host",
        state=federation.state("host"),
        listen=f"{HOST}:0",
        cos=peer,
        thirdparty=peer,
        histories=file,
        operator_keys=KEYS,
    )
    short = found(check("client", settings), "histories")
    assert (short.status, "positive, part" in short.problem) == ("fail", True)


def test_a_decrypting_client_needs_a_roster_that_holds(federation: Federation, tmp_path: Path) -> None:
    operator = Ed25519PrivateKey.generate()
    names = {"roster": tmp_path / "roster.txt", "roster_key": tmp_path / "roster.pub"}
    peer = Peer(address="127.0.0.1:1", name="any")
    settings = DecryptingClientSettings(
        name="key-0",
        state=federation.state("key-0"),
        listen=f"{HOST}:0",
        cos=peer,
        thirdparty=peer,
        run="here",
        encryption=KeySettings(**names),
        operator_keys=KEYS,
    )

    def roster() -> Finding:
        return found(check("decrypting-client", settings), "roster")

    assert roster().status == "fail"
    now = int(time.time())
    for run, status in (("elsewhere", "fail"), ("here", "ok")):
        Roster.sign(operator, [bytes(32)], now - 1, now + 60, run=run).save(names["roster"])
        save_roster_key(names["roster_key"], operator.public_key().public_bytes_raw())
        assert roster().status == status, roster()
    save_roster_key(names["roster_key"], Ed25519PrivateKey.generate().public_key().public_bytes_raw())
    assert roster().status == "fail"


def test_a_host_of_a_run_with_meta_latents_needs_a_roster_that_holds(tmp_path: Path) -> None:
    operator, now = Ed25519PrivateKey.generate(), int(time.time())
    names = {"roster": tmp_path / "roster.txt", "roster_key": tmp_path / "roster.pub"}
    peer = Peer(address="127.0.0.1:1", name="any")
    settings = ClientSettings(
        name="host-0",
        state=tmp_path / "state",
        listen=f"{HOST}:0",
        cos=peer,
        thirdparty=peer,
        run="here",
        latents=KeySettings(**names),
        operator_keys=KEYS,
    )
    assert found(check("client", settings), "roster of meta-latents").status == "fail"
    save_roster_key(names["roster_key"], operator.public_key().public_bytes_raw())
    for run, purpose, status in (
        ("elsewhere", PAILLIER, "fail"),
        ("here", GRAPH, "fail"),
        ("here", PAILLIER, "ok"),
    ):
        Roster.sign(operator, [bytes(32)], now - 1, now + 60, run=run, purpose=purpose).save(names["roster"])
        assert found(check("client", settings), "roster of meta-latents").status == status


@pytest.mark.parametrize("role", ["decrypting-client", "client"])
def test_who_holds_a_key_is_on_the_roster(federation: Federation, tmp_path: Path, role: str) -> None:
    operator, now = Ed25519PrivateKey.generate(), int(time.time())
    names = {"roster": tmp_path / "roster.txt", "roster_key": tmp_path / "roster.pub"}
    save_roster_key(names["roster_key"], operator.public_key().public_bytes_raw())
    state = tmp_path / "state"
    folder = state / HOLDER if role == "client" else state
    given: dict[str, Any] = {"holds_key": True} if role == "client" else {}
    settings = settings_model(role).model_validate(
        {
            "name": "key-0",
            "listen": "127.0.0.1:0",
            "state": state,
            "cos": {"address": "127.0.0.1:1", "name": "cos"},
            "thirdparty": {"address": "127.0.0.1:1", "name": "directory"},
            "encryption": {**names, **given},
            "operator_keys": KEYS,
        }
    )

    def holder() -> list[Finding]:
        return [one for one in check(role, settings) if one.check == "key holder"]

    Roster.sign(operator, [bytes(32)], now - 1, now + 60).save(names["roster"])
    assert holder() == [], "before it has an identity nobody can say"
    folder.mkdir(parents=True, mode=0o700)
    (own,) = identities(folder, 1)
    (problem,) = holder()
    assert (problem.status, own.participant_id.hex()[:16] in problem.problem) == ("fail", True)
    Roster.sign(operator, [own.participant_id], now - 1, now + 60).save(names["roster"])
    (fine,) = holder()
    assert fine.status == "ok"


def test_a_private_file_that_others_can_read_fails(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    assert found(check_cos(federation), "private files").status == "ok"
    store = federation.cos().state / "cos.db-wal"
    store.touch()
    store.chmod(0o640)
    open_to_others = found(check_cos(federation), "private files")
    assert open_to_others.status == "fail"
    assert f"{store} has mode 0640" in open_to_others.problem
    assert f"chmod 600 {store}" in open_to_others.fix


# --- Certificate and token ---------------------------------------------------------------------------------------


def test_a_certificate_that_holds_is_well(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    findings = check_cos(federation)
    assert found(findings, "certificate").note.startswith("cos/cos until ")
    assert problems(findings) == {"peer thirdparty/directory": "fail"}


def test_no_certificate_and_no_way_to_enrol_fails(federation: Federation) -> None:
    missing = found(check_cos(federation), "certificate")
    assert missing.status == "fail"
    assert "[enrol]" in missing.fix


@pytest.mark.parametrize(("role", "name"), [("client", "cos"), ("cos", "other")])
def test_the_certificate_of_another_role_or_name_fails(federation: Federation, role: str, name: str) -> None:
    federation.enrolled(role, name)
    wrong = found(check_cos(federation, state=federation.state(name)), "certificate")
    assert wrong.status == "fail"
    assert f"{role}/{name}'s, and this is cos/cos" in wrong.problem


def test_a_certificate_of_another_authority_fails(federation: Federation) -> None:
    tls = federation.enrolled("cos", "cos")
    tls.authority.write_bytes(Authority.create("Another", 30).certificate_pem)
    wrong = found(check_cos(federation), "certificate")
    assert wrong.status == "fail"
    assert "not of the authority in ca.pem" in wrong.problem


def test_a_key_that_is_not_the_certificates_fails(federation: Federation) -> None:
    tls = federation.enrolled("cos", "cos")
    tls.key.unlink()
    save_tls_key(tls.key, new_tls_key())
    wrong = found(check_cos(federation), "certificate")
    assert (wrong.status, wrong.problem) == ("fail", f"{tls.key} is not the certificate's key")


def test_a_file_that_is_no_certificate_fails(federation: Federation) -> None:
    federation.enrolled("cos", "cos").chain.write_text("no certificate")
    assert found(check_cos(federation), "certificate").status == "fail"


def test_an_expired_certificate_fails_unless_a_token_can_renew_it(federation: Federation) -> None:
    federation.enrolled("cos", "cos", days=5, begun_days_ago=10)
    over = found(check_cos(federation), "certificate")
    assert over.status == "fail"
    assert "it expired at " in over.problem
    findings = check_cos(federation, enrol=federation.enrolment("cos", "cos"))
    statuses = [one.status for one in findings if one.check == "certificate"]
    assert statuses == ["warn", "ok"]
    assert found(findings, "token").status == "ok"


def test_a_certificate_from_the_future_points_at_the_clock(federation: Federation) -> None:
    federation.enrolled("cos", "cos", begun_days_ago=-5)
    early = found(check_cos(federation), "certificate")
    assert early.status == "fail"
    assert "clock" in early.fix


def test_a_certificate_that_is_due_for_renewal_is_a_warning(federation: Federation) -> None:
    federation.enrolled("cos", "cos", days=30, begun_days_ago=21)
    late = found(check_cos(federation), "certificate")
    assert late.status == "warn"
    assert "token" in late.fix


def test_the_directorys_key_must_be_there(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    (federation.state("cos") / "directory.key").unlink()
    assert found(check_cos(federation), "directory key").status == "fail"


def test_a_token_that_is_missing_malformed_or_open_to_others_fails(federation: Federation) -> None:
    enrol = federation.enrolment("cos", "cos")

    def of_token() -> Finding:
        return found(check_cos(federation, enrol=enrol), "token")

    assert of_token().status == "ok"
    enrol.token_file.chmod(0o644)
    assert of_token().status == "fail"
    enrol.token_file.chmod(0o600)
    for content in (b"no token", b"\xff\xfe", b"AAAA.AAAA.AAAA"):
        enrol.token_file.write_bytes(content)
        assert of_token().status == "fail"
    enrol.token_file.unlink()
    missing = of_token()
    assert missing.status == "fail"
    assert "--role cos --name cos" in missing.fix


def test_an_id_token_is_a_token_of_a_client_host_alone(federation: Federation) -> None:
    peer = {"address": "127.0.0.1:1", "name": "any"}
    enrol = federation.enrolment("client", "anna")
    settings = settings_model("client").model_validate(
        {
            "name": "anna",
            "listen": "127.0.0.1:0",
            "state": federation.state("anna"),
            "cos": peer,
            "thirdparty": peer,
            "operator_keys": KEYS,
            "enrol": enrol.model_dump(),
        }
    )
    for content, status in ((b"AAAA.AAAA.AAAA\n", "ok"), (b"AAAA.AAAA", "fail")):
        enrol.token_file.write_bytes(content)
        assert found(check("client", settings), "token").status == status


def test_the_authoritys_certificate_must_be_there_and_hold(federation: Federation, tmp_path: Path) -> None:
    file = tmp_path / "given-ca.pem"
    enrol = federation.enrolment("cos", "cos").model_copy(update={"ca_file": file})

    def of_authority() -> Finding:
        return found(check_cos(federation, enrol=enrol), "ca_file")

    assert "cannot read" in of_authority().problem
    file.write_text("no certificate")
    assert "no certificate in PEM" in of_authority().problem
    file.write_bytes(Authority.create("Old", 5, now=datetime.now(UTC) - timedelta(days=10)).certificate_pem)
    assert "expired" in of_authority().problem
    file.write_bytes(federation.authority.certificate_pem)
    assert of_authority().status == "ok"


# --- The third party ---------------------------------------------------------------------------------------------


def test_a_third_party_without_tokens_is_warned_that_nobody_can_enrol(federation: Federation) -> None:
    findings = check("thirdparty", federation.thirdparty())
    assert problems(findings) == {"tokens": "warn"}
    federation.enrolment("cos", "cos")
    assert problems(check("thirdparty", federation.thirdparty())) == {}


def test_a_third_party_makes_its_authority_but_never_beside_an_old_directory(
    federation: Federation, tmp_path: Path
) -> None:
    fresh = federation.thirdparty(state=tmp_path / "fresh")
    assert found(check("thirdparty", fresh), "authority").status == "ok"
    fresh.state.mkdir(mode=0o700)
    open_sqlite(fresh.state / "directory.db", "thirdparty").dispose()
    orphan = found(check("thirdparty", fresh), "authority")
    assert orphan.status == "fail"
    assert "directory-signing.key" in orphan.fix


def test_a_damaged_or_expired_authority_fails(federation: Federation) -> None:
    state = federation.state("thirdparty")
    Authority.create("Old", 5, now=datetime.now(UTC) - timedelta(days=10)).save(state)
    assert "expired" in found(check("thirdparty", federation.thirdparty()), "authority").problem
    (state / "ca.pem").write_text("no certificate")
    assert found(check("thirdparty", federation.thirdparty()), "authority").status == "fail"


# --- Peers -------------------------------------------------------------------------------------------------------


class Refusing(health_pb2_grpc.HealthServicer):
    """Answers nobody, as a server that knows of a revocation."""

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the contract's name
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this certificate was revoked")


@contextlib.asynccontextmanager
async def listening(
    tls: TlsFiles, servicer: Any = None, *, serving: bool = True, require_client: bool = True
) -> AsyncIterator[str]:
    """A server under a party's certificate that answers health checks; yields its address."""
    server = grpc.aio.server()
    if servicer is None:
        servicer = health_aio.HealthServicer()
        status = health_pb2.HealthCheckResponse
        await servicer.set("", status.SERVING if serving else status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_secure_port(f"{HOST}:0", tls.server_credentials(require_client=require_client))
    await server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(None)


def peer_found(federation: Federation, tls: TlsFiles, servicer: Any = None, **options: Any) -> Finding:
    """Let a COS look for its third party where somebody listens."""
    timeout_s = options.pop("timeout_s", PATIENCE_S)

    async def look() -> list[Finding]:
        async with listening(tls, servicer, **options) as address:
            settings = federation.cos(thirdparty=Peer(address=address, name="directory"))
            return await preflight.check_service("cos", settings, timeout_s=timeout_s)

    return found(asyncio.run(look()), "peer thirdparty/directory")


def test_a_peer_that_is_who_it_should_be_is_well(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    well = peer_found(federation, federation.enrolled("thirdparty", "directory"))
    assert well.note.endswith("mutual TLS, healthy")


def test_a_peer_that_waits_for_something_is_a_warning(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    waiting = peer_found(federation, federation.enrolled("thirdparty", "directory"), serving=False)
    assert waiting.status == "warn"


@pytest.mark.parametrize(("role", "name"), [("thirdparty", "another"), ("cos", "directory")])
def test_a_peer_under_another_name_or_role_fails(federation: Federation, role: str, name: str) -> None:
    federation.enrolled("cos", "cos")
    wrong = peer_found(federation, federation.enrolled(role, name), timeout_s=2)
    assert wrong.status == "fail"
    assert "is not thirdparty/directory" in wrong.problem
    assert f"it is {role}/{name}" in wrong.problem


def test_a_peer_of_another_authority_fails(federation: Federation, tmp_path: Path) -> None:
    federation.enrolled("cos", "cos")
    make_authority(tmp_path / "elsewhere" / "thirdparty")
    stranger = Federation(tmp_path / "elsewhere", Authority.load(tmp_path / "elsewhere" / "thirdparty"))
    wrong = peer_found(federation, stranger.enrolled("thirdparty", "directory"), timeout_s=2)
    assert wrong.status == "fail"
    assert "it is thirdparty/directory of another authority" in wrong.problem


@pytest.mark.parametrize(
    ("begun_days_ago", "said"), [(31, "with a certificate that ended at"), (-2, "that is valid from")]
)
def test_a_peer_whose_certificate_does_not_hold_now_is_told_with_the_clock(
    federation: Federation, begun_days_ago: int, said: str
) -> None:
    federation.enrolled("cos", "cos")
    peer = federation.enrolled("thirdparty", "directory", begun_days_ago=begun_days_ago)
    wrong = peer_found(federation, peer, timeout_s=2)
    assert wrong.status == "fail"
    assert said in wrong.problem
    assert "this machine's clock says" in wrong.problem


def test_a_peer_that_does_not_take_this_certificate_is_told_from_one_that_is_another(
    federation: Federation,
) -> None:
    federation.enrolled("cos", "cos", begun_days_ago=31)
    refused = peer_found(federation, federation.enrolled("thirdparty", "directory"), timeout_s=2)
    assert refused.status == "fail"
    assert "does not take this machine's certificate" in refused.problem


def test_who_listens_is_known_before_enrolment(federation: Federation) -> None:
    enrol = federation.enrolment("cos", "cos")

    async def look() -> list[Finding]:
        async with listening(federation.enrolled("cos", "elsewhere")) as address:
            settings = federation.cos(thirdparty=Peer(address=address, name="directory"), enrol=enrol)
            return await preflight.check_service("cos", settings, timeout_s=2)

    assert "it is cos/elsewhere" in found(asyncio.run(look()), "peer thirdparty/directory").problem


@pytest.mark.parametrize(
    ("ahead_s", "within_s", "status"),
    [
        (0.2, 0.1, "ok"),
        (-29.0, 0.1, "ok"),
        (45.0, 1.0, "warn"),
        (-45.0, 20.0, "ok"),
        (-600.0, 1.0, "warn"),
        (-602.0, 1.0, "fail"),
    ],
)
def test_a_clock_is_wrong_by_what_is_sure(ahead_s: float, within_s: float, status: str) -> None:
    finding = check_clock("cos/cos", Clock(ahead_s, within_s))
    assert finding.status == status
    said = finding.note or finding.problem
    assert f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's" in said
    assert f"within {within_s:.1f} s" in said


def test_a_peer_that_refuses_says_why(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    refused = peer_found(federation, federation.enrolled("thirdparty", "directory"), Refusing())
    assert refused.status == "fail"
    assert "PERMISSION_DENIED: this certificate was revoked" in refused.problem


def test_a_peer_before_enrolment_is_known_only_to_listen(federation: Federation) -> None:
    well = peer_found(federation, federation.enrolled("thirdparty", "directory"))
    assert "after enrolment" in well.note


def test_a_peer_that_is_not_there_fails(federation: Federation, bound: str) -> None:
    findings = check_cos(federation, thirdparty=Peer(address=bound, name="directory"))
    away = found(findings, "peer thirdparty/directory")
    assert away.status == "fail"
    assert "Connection refused" in away.problem
    assert "thirdparty.address" in away.fix


def test_a_peer_that_never_answers_fails_in_time(federation: Federation) -> None:
    federation.enrolled("cos", "cos")
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        peer = Peer(address=f"{HOST}:{silent.getsockname()[1]}", name="directory")
        assert found(check_cos(federation, thirdparty=peer), "peer thirdparty/directory").status == "fail"


def test_a_host_name_that_nobody_knows_is_said_in_words(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(host: str, *_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    settings = federation.cos(thirdparty=Peer(address="nowhere.example:7443", name="directory"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    away = found(check("cos", settings), "peer thirdparty/directory")
    assert "Name or service not known" in away.problem


def test_where_to_enrol_is_looked_at_before_there_is_a_certificate(
    federation: Federation, bound: str, tmp_path: Path
) -> None:
    away = check_cos(federation, enrol=federation.enrolment("cos", "cos", bound))
    assert found(away, "enrolment").status == "fail"

    async def look(authority: Path) -> Finding:
        tls = federation.enrolled("thirdparty", "directory")
        async with listening(tls, require_client=False) as address:
            enrol = federation.enrolment("cos", "cos", address).model_copy(update={"ca_file": authority})
            patience = PATIENCE_S if authority.parent.name == "thirdparty" else 2.0
            findings = await preflight.check_service("cos", federation.cos(enrol=enrol), timeout_s=patience)
            return found(findings, "enrolment")

    assert asyncio.run(look(federation.folder / "thirdparty" / "ca.pem")).status == "ok"
    other = tmp_path / "other.pem"
    other.write_bytes(Authority.create("Another", 30).certificate_pem)
    assert "is not the third party" in asyncio.run(look(other)).problem


# --- A run -------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"synthetic": {"users": 60, "items": 40, "interactions": 900, "genres": 4}}


def check_run(folder: Path, **others: Any) -> list[Finding]:
    values = {"output": folder / "runs", "data": SMALL, **others}
    return preflight.check_run(RunSettings.model_validate(values))


def test_a_run_for_which_everything_is_there_is_well_and_nothing_is_left(tmp_path: Path) -> None:
    findings = check_run(tmp_path)
    assert set(problems(findings)) <= {"package data", "package fast"}  # extras that a run does without
    assert found(findings, "split").note == "3 data owners, 30 users on each of 2 hosts"
    assert list(tmp_path.iterdir()) == []


def test_services_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        preflight.metadata, "entry_points", lambda **_: SimpleNamespace(names={"cos", "client"})
    )
    missing = found(check_run(tmp_path), "services")
    assert missing.status == "fail"
    assert "data-owner, decrypting-client, thirdparty" in missing.problem


@pytest.mark.parametrize(
    ("module", "extra", "status"),
    [("matplotlib", "report", "warn"), ("jinja2", "report", "warn"), ("polars", "data", "warn")],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str, status: str
) -> None:
    real = preflight.util.find_spec
    monkeypatch.setattr(preflight.util, "find_spec", lambda name: None if name == module else real(name))
    missing = found(check_run(tmp_path), f"package {extra}")
    assert missing.status == status
    assert (module in missing.problem, missing.fix) == (True, f"pip install 'coterie[{extra}]'")


@pytest.mark.parametrize("secure_sum", ["encrypted", "shared-key"])
def test_a_sum_under_a_key_needs_gmpy2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure_sum: str
) -> None:
    given = {"system": "fedncf", "secure_sum": secure_sum}
    assert found(check_run(tmp_path, **given), "package paillier").status == "ok"
    assert not [one for one in check_run(tmp_path) if one.check == "package paillier"]
    real = preflight.util.find_spec
    monkeypatch.setattr(preflight.util, "find_spec", lambda name: None if name == "gmpy2" else real(name))
    missing = found(check_run(tmp_path, **given), "package paillier")
    assert (missing.status, missing.fix) == ("fail", "pip install 'coterie[paillier]'")


def test_a_data_set_that_is_not_there_or_needs_polars_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ratings.csv"
    assert found(check_run(tmp_path, data={"path": path}), "data").status == "fail"
    path.write_text("user,item,rating,timestamp\n1,1,5,1\n")
    monkeypatch.setitem(sys.modules, "polars", None)
    without = found(check_run(tmp_path, data={"path": path}), "data")
    assert without.status == "fail"
    assert "coterie[data]" in without.fix


def test_more_owners_than_genres_fail(tmp_path: Path) -> None:
    wrong = found(check_run(tmp_path, federation={"owners": 9}), "split")
    assert wrong.status == "fail"
    assert "4 genres" in wrong.problem


def test_hosts_with_too_few_users_to_measure_are_a_warning(tmp_path: Path) -> None:
    few = found(check_run(tmp_path, federation={"hosts": 4}), "split")
    assert few.status == "warn"
    assert "nothing is measured" in few.problem
    assert "at most 3" in few.fix


def test_memory_that_will_not_do_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_free_memory", lambda: 10 * MB)
    assert found(check_run(tmp_path), "memory").status == "warn"
    monkeypatch.setattr(preflight, "_free_memory", lambda: None)
    assert found(check_run(tmp_path), "memory").status == "ok"


def test_memory_counts_the_contributions_that_a_robust_rule_keeps(tmp_path: Path) -> None:
    def expected(**aggregation: Any) -> int:
        rounds = {"party_per_user": True, "aggregation": aggregation}
        note = found(
            check_run(tmp_path, system="fedmf", fedmf={"factors": 400}, rounds=rounds), "memory"
        ).note
        return int(note.removeprefix("about ").partition(" MiB")[0].replace(",", ""))

    users, items = SMALL["synthetic"]["users"], SMALL["synthetic"]["items"]
    more = expected(rule="median") - expected(norm_bound=1.0)
    assert abs(more - 8 * users * items * 400 / MB) <= 1


def test_a_disk_that_will_not_do_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(MB, 0, MB))
    full = found(check_run(tmp_path), "disk")
    assert full.status == "fail"
    assert "another volume" in full.fix


def megabytes(tmp_path: Path, **changes: Any) -> int:
    note = found(check_run(tmp_path, **changes), "disk").note
    return int(note.removeprefix("about ").partition(" MiB")[0].replace(",", ""))


@pytest.mark.parametrize("system", ["drift", "fedncf"])
def test_the_disk_that_is_expected_counts_transcripts(system: str, tmp_path: Path) -> None:
    many = {"system": system, "rounds": {"passes": 4000}, "drift": {"epochs": 4000}}
    plain = megabytes(tmp_path, **many)
    recorded = megabytes(tmp_path, **many, federation={"transcripts": True})
    assert recorded > plain + 10
    assert megabytes(tmp_path, **many, federation={"attacks": True}) == recorded


def test_the_disk_that_is_expected_counts_the_second_federation(tmp_path: Path) -> None:
    plain = megabytes(tmp_path, system="fedncf")
    assert megabytes(tmp_path, system="fedncf", beside={"changes": ["rounds.passes=2"]}) == plain + 20


def test_a_run_is_refused_where_the_disk_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(MB, 0, MB))
    file = tmp_path / "run.toml"
    file.write_text(f'system = "fedncf"\noutput = "{tmp_path / "runs"}"\n')
    assert invoke(["run", str(file), "--in-process"]) == 11
    assert re.search(r"error: the disk of .*: about \d+ MiB expected, 1 MiB free", capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def test_a_folder_for_output_that_cannot_be_written_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for output in (file / "runs", Path("/proc/coterie")):
        assert found(check_run(tmp_path, output=output), "output").status == "fail"


def test_a_machine_without_free_ports_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> int:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(preflight, "free_port", none_left)
    assert found(check_run(tmp_path), "ports").status == "fail"


# --- The command -------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    sizes = ", ".join(f"{key} = {value}" for key, value in SMALL["synthetic"].items())
    file.write_text(f'output = "{tmp_path}/runs"\n[data]\nsynthetic = {{{sizes}}}\n')
    return file


def test_the_command_ends_with_0_where_nothing_fails(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["preflight", str(run_file), "--set", "federation.hosts=4", "--json"]) == 0
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["ok"], envelope["result"]["checks"]) == (True, "run")
    statuses = {one["check"]: one["status"] for one in envelope["result"]["findings"]}
    assert statuses["split"] == "warn"


def test_the_command_ends_with_11_and_shows_problem_and_fix(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # However long the path is, nothing of what is said is cut off.
    words = ["preflight", str(run_file), "--data", str(run_file.parent / ("far/" * 40) / "absent.csv")]
    assert invoke(words) == 11
    printed = capsys.readouterr()
    assert "absent.csvdoesnotexist" in "".join(printed.out.split())
    assert "see `coterie data fetch`" in printed.out
    assert "checks failed: data" in printed.err

    assert invoke([*words, "--json"]) == 11
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["ok"], envelope["error"]["code"]) == (False, "preflight")
    assert any(one["status"] == "fail" and one["fix"] for one in envelope["result"]["findings"])


def test_the_command_checks_a_service(
    federation: Federation, bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = federation.folder / "cos.toml"
    file.write_text(
        f'name = "cos"\nstate = "cos"\nlisten = "{bound}"\n'
        'thirdparty = {address = "127.0.0.1:1", name = "directory"}\n'
    )
    assert invoke(["preflight", str(file), "--role", "cos", "--timeout", "0.3", "--json"]) == 11
    result = json.loads(capsys.readouterr().out)["result"]
    failed = {one["check"] for one in result["findings"] if one["status"] == "fail"}
    assert failed == {"port listen", "certificate", "peer thirdparty/directory"}
    assert invoke(["preflight", str(file), "--role", "cos", "--data", "x", "--json"]) == 2
