"""The wheel alone: examples are inside, and without any extra a run ends with a result; a project runs as written."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .patience import WAIT_S

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    "scipy",
    "polars",
    "h5py",
    "matplotlib",
    "jinja2",
    "implicit",
    "threadpoolctl",
    "gmpy2",
    "phe",
    "psycopg",
    "dp_accounting",
    "uvloop",
    "starlette",
    "uvicorn",
    "mlflow",
    "tensorboardX",
    "optuna",
    "jwt",
    "coterie_native",
    "pandas",
)
"""Packages of extras, and what they bring."""

HIDES = f"""
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {set(OPTIONAL)!r}
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that runs a command of the wheel, unpacked, where no package of an extra can be imported."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            ROOT,
        ],
        check=True,
        timeout=4 * WAIT_S,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    (folder / "hides").mkdir()
    (folder / "hides" / "sitecustomize.py").write_text(HIDES)
    path = os.pathsep.join(map(str, (folder / "hides", folder / "unpacked")))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
    (folder / "work").mkdir()

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "coterie", *arguments, "--json"],
            cwd=folder / "work",
            env={**environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=4 * WAIT_S,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    run.unpacked = folder / "unpacked"
    return run


@pytest.mark.long
def test_the_demo_of_a_plain_installation_ends_with_a_result_and_says_what_it_lacks(plain):
    status, found, said = plain("run", "--demo")
    assert status == 0, (found, said)
    report = found["result"]["report"]
    assert report["system"] == "fedncf"
    assert report["secure_sum"] == "masked"
    assert (
        report["metrics"]["hit_ratio@10"]["mean"]
        > report["reference"]["popularity"]["metrics"]["hit_ratio@10"]["mean"]
    )
    assert "warning: report.html needs jinja2" in said or "warning: report.html needs matplotlib" in said
    assert report["versions"]["coterie"]
    folder = Path(found["result"]["folder"])
    assert (folder / "report.json").is_file()
    assert not (folder / "report.html").exists()
    # The model and its card can be used, too.
    assert plain("runs", "model", "newest", "model")[0] == 0
    assert plain("runs", "export", "newest", "--to", "csv")[0] == 0
    status, found, _ = plain("runs", "compare", "newest", "newest", "--html", "page.html")
    assert (status, found["error"]["hint"]) == (
        11,
        "pip install 'coterie[report]'; without --html the comparison is complete",
    )


def test_every_example_is_in_the_wheel_and_found_by_its_name(plain):
    inside = {path.name: path.read_bytes() for path in (plain.unpacked / "coterie" / "examples").iterdir()}
    assert inside == {path.name: path.read_bytes() for path in (ROOT / "examples").glob("*.toml")}
    status, found, _ = plain("run", "examples/ease.toml", "--in-process", "--set", "reference=false")
    assert (status, found["result"]["report"]["system"]) == (0, "ease")


@pytest.mark.long
def test_a_project_runs_as_it_was_written(tmp_path):
    def run(*arguments, where):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "coterie", *arguments, "--json"],
            cwd=where,
            env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
            capture_output=True,
            text=True,
            timeout=4 * WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["result"]

    run("new", "shop", "--system", "ials", where=tmp_path)
    preflight = run("preflight", "run.toml", where=tmp_path / "shop")
    assert not [one for one in preflight["findings"] if one["status"] == "fail"]
    report = run("run", "run.toml", where=tmp_path / "shop")["report"]
    assert (report["system"], report["secure_sum"], report["dataset"]["users"]) == ("ials", "masked", 120)
    (listed,) = run("runs", "list", where=tmp_path / "shop")["runs"]
    assert listed["status"] == "finished"
    assert run("runs", "model", "newest", "model", where=tmp_path / "shop")["items"] > 100
