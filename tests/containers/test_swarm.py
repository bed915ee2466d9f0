"""Swarm stacks of deploy/stack.py: federations train over nodes as on one, and a COS bears the loss of a node."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ..postgres import authority
from .conftest import TRAINING
from .database_image import database_image
from .engine import DEPLOY, eventually
from .same_run import in_one_process
from .stack import Stack
from .swarm import swarm

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(
        not os.environ.get("COTERIE_SWARM"), reason="starts more engines, minutes each: COTERIE_SWARM=1"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of one's own take root"),
]

NAME = "coterie"
"""Name of the stack."""

NODES = [
    ("thirdparty", "cos", "owner-0", "host-0", "operator"),
    ("owner-1", "owner-2", "host-1"),
]
IMAGES = ("thirdparty", "cos", "data-owner", "client", "operator")
USER = 10001

COORDINATORS, INTAKES = ("coordinator-0", "coordinator-1"), ("intake-0", "intake-1")
PROCESSES = [
    ("thirdparty", "cos", "owner-0", "host-0", "host-1", "operator"),
    *zip(COORDINATORS, INTAKES, strict=True),
]
"""The first node has what must not fail; a coordinator and an intake are on each of the other two."""

DATABASE_USER = 999
PASSWORD = "of the test"  # pragma: allowlist secret
PASSES = 12


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="coterie-swarm-"))  # short: a socket's path has an end
    yield made
    shutil.rmtree(made)


def laid_out(example, folder, settings, *sets):
    """Lay out a federation in a folder, with the addresses that services of a stack have."""
    sets = [word for one in ("federation.attacks=false", *sets) for word in ("--set", one)]
    command = [
        sys.executable,
        "-m",
        "coterie.cli.main",
        "bootstrap",
        DEPLOY.parent / f"examples/{example}.toml",
    ]
    environment = {**os.environ, "COTERIE_REFERENCE": "false", **settings}
    subprocess.run([*command, "--into", folder, *sets], env=environment, check=True, capture_output=True)
    (folder / "report").mkdir()


def handed_over(folder):
    """Give folders to the user of the services, as their operator does."""
    folder.parent.chmod(0o755)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)


def written(stack, parties, *options):
    """Write the stack beside the folders, and return its file."""
    command = [sys.executable, DEPLOY / "stack.py", "--folders", parties, *options]
    ended = subprocess.run(command, input=stack.compose("config"), capture_output=True, text=True, check=True)
    path = parties.parent / "stack.yml"
    path.write_text(ended.stdout)
    return path


class Deployed:
    """A stack on the nodes of a swarm; the first is the manager, and has the operator."""

    def __init__(self, nodes, there):
        self.nodes, self._manager = nodes, nodes[0]
        for node, parties in zip(nodes, there, strict=True):
            labels = [word for party in parties for word in ("--label-add", f"coterie.{party}=true")]
            self._manager.docker("node", "update", *labels, node.name)

    def deploy(self, path):
        self._manager.docker("stack", "deploy", "--compose-file", str(path), "--resolve-image", "never", NAME)

    def until(self, wanted, what):
        return eventually(wanted, what, self._said)

    def _said(self):
        return "\n".join(
            f"{one.name}: {one.logs(tail=5).decode()}"
            for node in self.nodes
            for one in node.client.containers.list(all=True)
        )

    def tasks(self, service):
        """Return what the manager says of a service's tasks, the last one first."""
        return self._manager.docker(
            "service", "ps", "--format", "{{.CurrentState}} {{.Error}}", f"{NAME}_{service}"
        )

    def ended(self):
        return self.tasks("operator").startswith("Complete")

    def places(self):
        """Return the node of each service."""
        said = self._manager.docker(
            "stack", "ps", "--filter", "desired-state=running", "--format", "{{.Name}} {{.Node}}", NAME
        )
        return {line.split(".")[0].removeprefix(f"{NAME}_"): line.split()[1] for line in said.splitlines()}

    def container(self, service):
        """Return the container of a service and its node, None where none runs."""
        label = f"com.docker.swarm.service.name={NAME}_{service}"
        for node in self.nodes:
            for one in node.client.containers.list(filters={"label": label}):
                return one, node
        return None

    def serves(self, service):
        """Whether the process of a service says by gRPC that it serves."""
        if (found := self.container(service)) is None:
            return False
        status, _ = found[0].exec_run(["python3", "-I", "-S", "/opt/coterie/probe.py", "/party/state"])
        return not status

    def remove(self):
        self._manager.docker("stack", "rm", NAME)
        self.until(
            lambda: (
                not any(
                    one
                    for node in self.nodes
                    for one in node.client.containers.list(filters={"label": "com.docker.stack.namespace"})
                )
            ),
            "everything has stopped",
        )


def saved(engine, folder, *images):
    path = folder / f"{len(list(folder.glob('*.tar')))}.tar"
    engine.run(["docker", "save", "--output", str(path), *images])
    return str(path)


def test_a_federation_over_two_nodes_trains_and_leaves_its_report(engine, images, folder):
    parties = folder / "parties"
    laid_out("drift", parties, TRAINING, "federation.owners=3", "federation.hosts=2")
    handed_over(parties)
    stack = written(Stack(engine, images), parties)
    every = saved(engine, folder, *(f"coterie-{name}:test" for name in IMAGES))

    with swarm(folder, len(NODES)) as nodes:
        for node in nodes:
            node.docker("load", "--quiet", "--input", every)
        deployed = Deployed(nodes, NODES)
        deployed.deploy(stack)
        deployed.until(deployed.ended, "the run ends")
        found = deployed.places()
        for node, there in zip(nodes, NODES, strict=True):
            assert {party for party, at in found.items() if at == node.name} == set(there) - {"operator"}
        report = json.loads((parties / "report/report.json").read_text())
        assert [entry["epoch"] for entry in report["history"]] == list(range(1, 7))
        deployed.remove()


def database(manager, image, folder):
    """Start PostgreSQL on a network of its own, with TLS and a password; return the file of its authority."""
    trusted, sign = authority(folder, "database-ca")
    certificate, key = sign("database")
    files = {"server.crt": certificate, "server.key": key, "password": PASSWORD.encode()}
    files["hba.conf"] = b"local all all trust\nhostssl all all all scram-sha-256\n"
    for name, content in files.items():
        (folder / name).write_bytes(content)
        manager.docker("secret", "create", name, str(folder / name))
    owned = f"uid={DATABASE_USER},gid={DATABASE_USER},mode=0400"
    secrets = [word for name in files for word in ("--secret", f"source={name},target={name},{owned}")]
    variables = {
        "POSTGRES_USER": "coterie",
        "POSTGRES_DB": "coterie",
        "POSTGRES_HOST_AUTH_METHOD": "scram-sha-256",
        "POSTGRES_INITDB_ARGS": "--encoding=UTF8 --locale=C --pwfile=/run/secrets/password",  # pragma: allowlist secret
    }
    options = {
        "listen_addresses": "*",
        "hba_file": "/run/secrets/hba.conf",
        "ssl": "on",
        "ssl_cert_file": "/run/secrets/server.crt",
        "ssl_key_file": "/run/secrets/server.key",
    }
    manager.docker("network", "create", "--driver", "overlay", "--internal", "postgres")
    manager.docker(
        "service", "create", "--detach", "--name", "database", "--network", "postgres", "--no-resolve-image",
        "--endpoint-mode", "dnsrr", "--constraint", f"node.hostname=={manager.name}",
        "--user", f"{DATABASE_USER}:{DATABASE_USER}",
        "--mount", "type=volume,source=database,target=/var/lib/postgresql/data",
        *(word for pair in variables.items() for word in ("--env", "=".join(pair))), *secrets,
        image, "postgres", *(word for pair in options.items() for word in ("-c", "=".join(pair))),
    )  # fmt: skip
    return trusted


def at_the_database(parties, trusted):
    """Put the authority and the password into the folders of processes that use the database (docs/replicas.md)."""
    for name in (*COORDINATORS, *INTAKES):
        party = parties / name
        shutil.copy(trusted, party / "database-ca.pem")
        (party / "database-password").write_text(PASSWORD)  # pragma: allowlist secret
        (party / "database-password").chmod(0o600)  # pragma: allowlist secret
        config = (party / "config.toml").read_text()
        login = 'password_file = "database-password"'  # pragma: allowlist secret
        assert config.count("[database]\n") == 1
        (party / "config.toml").write_text(
            config.replace("[database]\n", f'[database]\nca_file = "database-ca.pem"\n{login}\n')
        )


def test_a_cos_of_several_processes_bears_the_loss_of_a_node(engine, images, folder):
    settings = {
        **TRAINING,
        "COTERIE_REFERENCE": "false",
        "COTERIE_SECURE_SUM": "masked",
        "COTERIE_ROUNDS__PASSES": str(PASSES),
        "COTERIE_ROUNDS__COHORT": "30",
        "COTERIE_ROUNDS__GROUP": "30",
        "COTERIE_ROUNDS__EVALUATE_EVERY": "1",
    }
    environment = {
        **images,
        **settings,
        "COTERIE_POSTGRES_IMAGE": database_image(engine, images["BASE_IMAGE"]),
        "BALANCER_IMAGE": engine.balancer_image(),
    }
    files = Stack(engine, environment, "docker-compose.fedncf.yml", "docker-compose.replicas.yml")
    files.compose("build", "cos", "coordinator-0")
    parties = folder / "parties"
    url = "postgresql+psycopg://coterie@database:5432/coterie"
    laid_out(
        "fedncf", parties, settings,
        "federation.hosts=2", "federation.coordinators=2", "federation.intakes=2", f"federation.database={url}",
    )  # fmt: skip
    stack = written(files, parties, "--database-network", "postgres")
    first = saved(
        engine, folder, environment["COTERIE_POSTGRES_IMAGE"], "coterie-balancer:test",
        *(f"coterie-{name}:test" for name in ("thirdparty", "data-owner", "client", "operator")),
    )  # fmt: skip
    other = saved(engine, folder, "coterie-cos-postgres:test")

    with swarm(folder, len(PROCESSES)) as nodes:
        nodes[0].docker("load", "--quiet", "--input", first)
        for node in nodes[1:]:
            node.docker("load", "--quiet", "--input", other)
        deployed = Deployed(nodes, PROCESSES)
        at_the_database(parties, database(nodes[0], environment["COTERIE_POSTGRES_IMAGE"], folder))
        handed_over(parties)
        deployed.deploy(stack)

        def reached(number):
            found = deployed.container("operator")
            return found is not None and f"pass {number}/{PASSES}" in found[0].logs().decode()

        deployed.until(lambda: reached(2), "the second pass ends")
        (before,) = [name for name in COORDINATORS if deployed.serves(name)]
        (after,) = set(COORDINATORS) - {before}
        lost = nodes[1 + COORDINATORS.index(before)]
        bring_back = lost.cut_off()
        assert not deployed.ended(), "the run ended before the node was lost"
        deployed.until(lambda: deployed.serves(after), "the standby serves")
        deployed.until(deployed.ended, "the run ends without the node")
        bring_back()
        # What runs there is in office no more, and its intake serves again.
        intake = INTAKES[COORDINATORS.index(before)]
        deployed.until(lambda: deployed.serves(intake), "the intake of the node serves again")
        assert deployed.serves(after)
        assert not deployed.serves(before)
        deployed.remove()

    report = json.loads((parties / "report/report.json").read_text())
    alone = in_one_process("fedncf", environment, sets=["federation.hosts=2", "secure_sum=clear"])
    assert (report["secure_sum"], report["abandoned"]) == ("masked", 0)
    found, wanted = (
        [(one["epoch"], one["version"], one["metrics"]) for one in history]
        for history in (report["history"], alone["history"])
    )
    assert found == wanted
