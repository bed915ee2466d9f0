"""The compose file brings a federation up, and a crash in the middle of a training loses nothing."""

import base64
import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from coterie.crypto.authority import Authority, make_csr, new_tls_key

from .engine import DEPLOY
from .stack import OWNERS, PARTIES
from .stores import given, sent, stored

pytestmark = pytest.mark.containers

EPOCHS = 6


def _forged() -> tuple[str, str]:
    """Return a certificate of a host and its key, both PEM, of an authority that nobody knows."""
    key = new_tls_key()
    authority = Authority.create("forged", 1)
    chain = authority.issue(make_csr(key), "client", "host-0", 1) + authority.certificate_pem
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return chain.decode(), key.private_bytes(*form).decode()


_FORGED = _forged()

_HELD = """
import sqlite3
store = sqlite3.connect("file:/party/state/data_owner.db?mode=ro", uri=True)
print(*store.execute("SELECT count(*) FROM batches").fetchone())
"""


_CHAIN = "/party/state/tls/chain.pem"
_SAID = """
import json, socket, ssl, subprocess, sys

def said(address, name, ca, chain, key):
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    if chain:
        context.load_cert_chain(chain, key)
    try:
        with socket.create_connection(address, timeout=20) as plain:
            with context.wrap_socket(plain, server_hostname=name) as secured:
                secured.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                # Who is refused hears so with the first answer.
                return "taken" if secured.recv(1) else "refused"
    except (ssl.SSLError, ConnectionError):
        return "refused"
"""
_ATTACK = f"""{_SAID}
tls, forged = "/stolen/state/tls", ("/tmp/forged.pem", "/tmp/forged-key.pem")
open(forged[0], "w").write({_FORGED[0]!r})
open(forged[1], "w").write({_FORGED[1]!r})
own = (tls + "/chain.pem", tls + "/key.pem")
shown = {{"nothing": (None, None), "forged": forged, "stolen": own}}
found = {{
    role: {{
        what: said((role, 7443), name + "." + role + ".coterie.internal", tls + "/ca.pem", *files)
        for what, files in shown.items()
    }}
    for role, name in (("cos", "cos"), ("thirdparty", "directory"))
}}
serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
serving.load_cert_chain(*own)
serving.set_alpn_protocols(["h2"])
with socket.create_server(("", 7000)) as listening:
    print(json.dumps(found), flush=True)
    while True:
        plain, _ = listening.accept()
        try:
            with serving.wrap_socket(plain, server_side=True) as secured:
                secured.recv(24)
                secured.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        except OSError:
            pass
"""
"""Calls services with nothing, with a certificate of an authority of its own, and with a host's; then serves itself."""

_CALL = f"""{_SAID}
tls = "/party/state/tls"
address, name = (sys.argv[1], 7000), sys.argv[2] + ".coterie.internal"
print(said(address, name, tls + "/ca.pem", tls + "/chain.pem", tls + "/key.pem"))
"""


@dataclass(frozen=True)
class Trained:
    """A training with two crashes in it, as it ended."""

    held_at_crash: int
    running_at_second_crash: bool
    folders: dict[str, Path]
    report: dict
    page: str


@pytest.fixture(scope="module")
def trained(stack, tmp_path_factory):
    """Train; kill one owner while interactions arrive, another in an epoch; wait for the end; copy everything out."""
    stack.compose("up", "--detach", "operator")
    stack.until(lambda: "interactions arrive" in stack.logs("operator"), "interactions arrive")
    # A host that holds still keeps the intake open until the crash is over.
    let_go_on = stack.hold_still("host-1")
    try:
        held = int(stack.until(lambda: _held(stack, "owner-0"), "owner-0 holds interactions"))
        stack.crash("owner-0")
        stack.until(lambda: stack.came_back("owner-0"), "owner-0 is started again")
    finally:
        let_go_on()
    stack.until(lambda: "epoch 2/" in stack.logs("operator"), "the second epoch ends")
    # The next evaluation waits for a host that holds still, so that owner-1 comes back before the last epoch.
    let_go_on = stack.hold_still("host-1")
    try:
        stack.crash("owner-1")
        running = stack.state("operator")["Running"]
        stack.until(lambda: stack.came_back("owner-1"), "owner-1 is started again")
    finally:
        let_go_on()
    stack.until(lambda: not stack.state("operator")["Running"], "the run ends")
    assert stack.state("operator")["ExitCode"] == 0, stack.logs("operator")

    into = tmp_path_factory.mktemp("parties")
    folders = {party: stack.copy(party, "/party", into / party) for party in (*PARTIES, "operator")}
    report = stack.copy("operator", "/report", into)
    return Trained(
        held,
        running,
        folders,
        json.loads((report / "report.json").read_text()),
        (report / "report.html").read_text(),
    )


def _held(stack, owner):
    status, output = stack.execute(owner, "python3", "-I", "-S", "-c", _HELD)
    return 0 if status else int(output)


# --- before anybody trains ---------------------------------------------------------------------------------------


def test_every_party_runs_without_privileges_on_a_file_system_that_it_cannot_change(stack):
    for party in PARTIES:
        status, said = stack.execute(party, "sh", "-c", "cat /proc/1/status && touch /opt/anything")
        facts = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
        assert facts["Uid"].split() == ["10001"] * 4, party
        assert {facts[name] for name in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}, party
        assert facts["NoNewPrivs"] == "1", party
        assert status != 0, party
        assert "Read-only file system" in said, party


def test_the_federation_has_one_network_without_a_way_in_or_out(stack):
    (network,) = stack.client.networks.list(filters={"label": f"com.docker.compose.project={stack.project}"})
    assert network.attrs["Internal"] is True
    for party in PARTIES:
        attached = stack.container(party).attrs
        assert list(attached["NetworkSettings"]["Networks"]) == [network.name]
        assert not attached["HostConfig"]["PortBindings"]


def test_each_party_sees_only_its_own_volume(stack):
    for party in PARTIES:
        mounts = stack.container(party).attrs["Mounts"]
        assert [(mount["Name"], mount["Destination"]) for mount in mounts] == [
            (f"{stack.project}_{party}", "/party")
        ]


def test_every_container_has_limits_keeps_little_log_and_is_given_time_to_end(stack):
    for party in (*PARTIES, "bootstrap"):
        attached = stack.container(party).attrs
        limits = attached["HostConfig"]
        assert 256 << 20 <= limits["Memory"] <= 2 << 30, party
        assert limits["NanoCpus"] == 1_000_000_000, party
        assert limits["PidsLimit"] == 256, party
        assert limits["LogConfig"]["Config"] == {"max-file": "3", "max-size": "10m"}, party
        assert attached["Config"]["StopTimeout"] >= 5, party


def test_an_attacker_on_the_network_is_taken_for_nobody_and_for_no_service(stack):
    """A container beside the others, at first with nothing, then with the key and certificate of a host."""
    (network,) = stack.client.networks.list(filters={"label": f"com.docker.compose.project={stack.project}"})
    for host in ("host-0", "host-1"):
        stack.until(
            lambda host=host: not stack.execute(host, "test", "-f", _CHAIN)[0], f"{host} has enrolled"
        )
    name = f"{stack.project}-attacker"
    attacker = stack.client.containers.run(
        stack.container("host-0").image.id,
        entrypoint=["python3", "-I", "-S", "-c", _ATTACK],
        command=[],
        name=name,
        network=network.name,
        user="10001",
        volumes={f"{stack.project}_host-0": {"bind": "/stolen", "mode": "ro"}},
        detach=True,
    )
    try:
        told = stack.until(lambda: attacker.logs(stdout=True, stderr=False), "the attacker has tried")
        found = json.loads(told)
        assert set(found) == {"cos", "thirdparty"}
        for service, outcomes in found.items():
            # What a host may do with its certificate, and nobody without it.
            assert outcomes == {"nothing": "refused", "forged": "refused", "stolen": "taken"}, service
        for wanted, outcome in (("cos.cos", "refused"), ("host-0.client", "taken")):
            status, said = stack.execute("host-1", "python3", "-I", "-S", "-c", _CALL, name, wanted)
            assert (status, said.strip()) == (0, outcome), (attacker.logs(), said)
    finally:
        attacker.remove(force=True)


def test_health_waits_for_what_a_service_waits_for(stack):
    assert stack.healthy("thirdparty")
    assert stack.healthy("cos")
    # Nobody has started a run: the owners have nothing to take part in, and say so.
    for owner in OWNERS:
        assert not stack.healthy(owner)


def test_a_script_names_the_services_that_are_not_healthy_and_what_their_probes_said(stack):
    for owner in OWNERS:
        stack.until(lambda owner=owner: stack.state(owner)["Health"]["Log"], f"{owner} has been probed")
    command = [DEPLOY / "unhealthy.sh", "--project-name", stack.project, "--file", "docker-compose.yml"]
    ended = subprocess.run(command, cwd=DEPLOY, env=stack.environment, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    said = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    # Owners wait for a run; bootstrap has ended well.
    assert set(OWNERS) <= said.keys()
    assert "bootstrap" not in said
    for owner in OWNERS:
        # On a busy machine a probe may take too long, which the engine says in its place.
        answer = r"running, (starting|unhealthy): (not serving: |Health check exceeded)"
        assert re.match(answer, said[owner]), said


# --- a training with crashes -------------------------------------------------------------------------------------


def test_an_owner_that_crashes_is_started_again_by_the_engine_and_the_run_finishes(stack, trained):
    assert trained.held_at_crash > 0
    assert trained.running_at_second_crash
    for owner in ("owner-0", "owner-1"):
        assert stack.container(owner).attrs["RestartCount"] == 1
        events = [json.loads(line) for line in stack.logs(owner).splitlines() if line.startswith("{")]
        names = [event["event"] for event in events]
        assert names.count("joined") == 2
        # It went on with its own part: it passed over its blocks again after it had come back.
        assert "pass done" in names[len(names) - names[::-1].index("joined") :]
    assert [entry["epoch"] for entry in trained.report["history"]] == list(range(1, EPOCHS + 1))


def test_nothing_acknowledged_is_lost_and_nothing_counts_twice(trained):
    held = stored(trained.folders)
    assert held == sent(trained.folders)
    counted = Counter((*pair, *record) for pair, records in held.items() for record in records)
    assert counted == given(trained.folders)
    assert set(counted.values()) == {1}


def test_every_service_is_healthy_after_the_run(stack, trained):
    for party in PARTIES:
        stack.until(lambda party=party: stack.healthy(party), f"{party} is healthy")


def test_the_operator_prints_the_table_of_the_report_that_it_leaves(stack, trained):
    printed = stack.logs("operator")
    (row,) = (line for line in printed.splitlines() if line.strip().startswith("DRIFT  "))
    for metric in ("ndcg@10", "ndcg_test_items@10"):
        assert f"{trained.report['metrics'][metric]['mean']:.4f}" in row
    assert trained.report["run_id"] in printed
    assert trained.report["run_id"] in trained.page
    assert trained.report["dataset"]["users"] == 120


def test_no_log_and_no_description_of_a_container_holds_a_secret(stack, trained):
    everybody = (*PARTIES, "operator", "bootstrap")
    told = "".join(stack.logs(party) for party in everybody)
    assert told.count('"enrolled"') >= len(everybody) - 2  # the logs are those of a whole life
    told += json.dumps([stack.container(party).attrs for party in everybody])
    assert "PRIVATE KEY" not in told
    secrets = list(_secrets(trained.folders))
    assert {path.name for path, _ in secrets} >= {"token", "key.pem", "ca-key.pem", "identities.key"}
    assert len(secrets) > trained.report["dataset"]["users"]
    for path, forms in secrets:
        assert not any(form in told for form in forms), path


_MARKED = ("identities.key", "directory-signing.key", "log-signing.key")
"""Files of private keys behind a line that names the format."""


def _secrets(folders):
    """Yield the secrets of all parties, each with the forms in which it could appear."""
    for folder in folders.values():
        for path in folder.rglob("*"):
            if path.name == "token":
                yield path, [path.read_text().strip()]
            elif path.name.endswith("key.pem"):
                yield path, [line for line in path.read_text().splitlines() if "-----" not in line]
            elif path.name in _MARKED or path.suffix == ".prekey":
                # A line that names the format, then the private key; in a file of identities one after another.
                _, _, keys = path.read_bytes().partition(b"\n")
                count = len(keys) // 32 if path.name == "identities.key" else 1
                for key in (keys[n * 32 : (n + 1) * 32] for n in range(count)):
                    yield path, [key.hex(), base64.b64encode(key).decode()[:40]]
