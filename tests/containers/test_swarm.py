"""The Swarm stack of deploy/stack.py: a federation over two nodes trains as it does on one."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .conftest import TRAINING
from .engine import DEPLOY, eventually
from .stack import Stack
from .swarm import swarm

pytestmark = [
    pytest.mark.containers,
    pytest.mark.skipif(
        not os.environ.get("COTERIE_SWARM"), reason="starts two more engines, three minutes: COTERIE_SWARM=1"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="networks of one's own take root"),
]

NODES = [
    ("thirdparty", "cos", "owner-0", "host-0", "operator"),
    ("owner-1", "owner-2", "host-1"),
]
IMAGES = ("thirdparty", "cos", "data-owner", "client", "operator")
USER = 10001


@pytest.fixture
def folder():
    made = Path(tempfile.mkdtemp(prefix="coterie-swarm-"))  # short: a socket's path has an end
    yield made
    shutil.rmtree(made)


def laid_out(folder):
    """Lay out the federation of the compose file, with the addresses that services of a stack have."""
    settings = {**os.environ, **TRAINING, "COTERIE_REFERENCE": "false"}
    counts = [
        "--set",
        "federation.owners=3",
        "--set",
        "federation.hosts=2",
        "--set",
        "federation.attacks=false",
    ]
    example = DEPLOY.parent / "examples/drift.toml"
    command = [
        sys.executable,
        "-m",
        "coterie.cli.main",
        "bootstrap",
        str(example),
        "--into",
        str(folder),
        *counts,
    ]
    subprocess.run(command, env=settings, check=True, capture_output=True)
    (folder / "report").mkdir()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)


def test_a_federation_over_two_nodes_trains_and_leaves_its_report(engine, images, folder):
    parties = folder / "parties"
    laid_out(parties)
    folder.chmod(0o755)
    config = Stack(engine, images).compose("config")
    stack = subprocess.run(
        [sys.executable, DEPLOY / "stack.py", "--folders", parties],
        input=config,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (folder / "stack.yml").write_text(stack)
    saved = folder / "images.tar"
    engine.run(["docker", "save", "--output", str(saved), *(f"coterie-{name}:test" for name in IMAGES)])

    with swarm(folder, len(NODES)) as nodes:
        manager = nodes[0]
        for node, there in zip(nodes, NODES, strict=True):
            node.docker("load", "--quiet", "--input", str(saved))
            labels = [word for party in there for word in ("--label-add", f"coterie.{party}=true")]
            manager.docker("node", "update", *labels, node.name)
        manager.docker(
            "stack",
            "deploy",
            "--compose-file",
            str(folder / "stack.yml"),
            "--resolve-image",
            "never",
            "coterie",
        )

        def said():
            return "\n".join(
                f"{one.name}: {one.logs(tail=5).decode()}"
                for node in nodes
                for one in node.client.containers.list(all=True)
            )

        def ended():
            states = manager.docker(
                "service", "ps", "--format", "{{.CurrentState}} {{.Error}}", "coterie_operator"
            )
            return states.startswith("Complete")

        eventually(ended, "the run ends", said)
        where = manager.docker(
            "stack", "ps", "--filter", "desired-state=running", "--format", "{{.Name}} {{.Node}}", "coterie"
        )
        found = {line.split(".")[0].removeprefix("coterie_"): line.split()[1] for line in where.splitlines()}
        for node, there in zip(nodes, NODES, strict=True):
            assert {party for party, at in found.items() if at == node.name} == set(there) - {"operator"}
        report = json.loads((parties / "report/report.json").read_text())
        assert [entry["epoch"] for entry in report["history"]] == list(range(1, 7))
        manager.docker("stack", "rm", "coterie")
        eventually(
            lambda: not any(node.client.containers.list() for node in nodes), "everything has stopped", said
        )
