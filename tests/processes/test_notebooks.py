"""The notebooks of `examples/notebooks`, executed from the first cell to the last; and a kernel that is interrupted."""

import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

from .command import descendants, gone
from .patience import PAUSE_S, WAIT_S

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))

pytestmark = pytest.mark.xdist_group("notebooks")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep Jupyter's own files in the test's folder, and variables that configure a run away."""
    for name in [name for name in os.environ if name.startswith("COTERIE_")]:
        monkeypatch.delenv(name)
    for name in ("CONFIG_DIR", "RUNTIME_DIR"):
        monkeypatch.setenv(f"JUPYTER_{name}", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def test_there_are_two_notebooks_and_they_are_kept_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for name in NOTEBOOKS:
        notebook = nbformat.read(FOLDER / name, as_version=4)
        assert all(
            not cell.outputs and cell.execution_count is None for cell in notebook.cells if "outputs" in cell
        )


@pytest.mark.long
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_every_cell_shows_something(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / name, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=2 * int(WAIT_S),
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        kinds = {one.output_type for one in cell.outputs}
        assert kinds & {"execute_result", "stream"}, cell.source
        assert "error" not in kinds
    pages = [
        one.data["text/html"] for cell in code for one in cell.outputs if "text/html" in one.get("data", {})
    ]
    assert len(pages) >= 3
    assert all("<script" not in page for page in pages)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(startup_timeout=WAIT_S, kernel_name="python3", cwd=str(tmp_path))
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def reply(client: BlockingKernelClient, message: str) -> dict[str, Any]:
    """Return the kernel's reply to a request."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            found: dict[str, Any] = client.get_shell_msg(timeout=1)
        except queue.Empty:
            continue
        if found["parent_header"].get("msg_id") == message:
            return dict(found["content"])
    pytest.fail("the kernel did not answer")


def test_a_kernel_that_is_interrupted_in_fit_goes_on_and_leaves_no_service(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    pid = manager.provisioner.pid  # type: ignore[union-attr]
    before = set(descendants(pid))
    message = client.execute(
        "import coterie as ct\n"
        "split = ct.load(synthetic={'users': 60, 'items': 40, 'interactions': 1100}).split()\n"
        "rounds = {'passes': 100_000, 'patience': 0, 'cohort': 20, 'group': 20}\n"
        "run = ct.FedNCF(reference=False, rounds=rounds).fit(split)\n"
    )
    deadline = time.monotonic() + WAIT_S
    # Fork server, third party, COS, data owner and two hosts, and a first evaluation.
    while not list(tmp_path.glob("runs/*/host-1/state/private/*")):
        assert time.monotonic() < deadline, client.get_shell_msg(timeout=1)
        time.sleep(PAUSE_S)
    children = set(descendants(pid)) - before
    assert len(children) >= 6
    manager.interrupt_kernel()
    content = reply(client, message)
    assert (content["status"], content["ename"]) == ("error", "KeyboardInterrupt")
    assert len(set(descendants(pid)) - before) <= 1  # the fork server
    assert (
        reply(client, client.execute("assert ct.Popularity().fit(split).recommend('u1', 2).height == 2"))[
            "status"
        ]
        == "ok"
    )
    manager.shutdown_kernel()
    assert gone(children, WAIT_S)
