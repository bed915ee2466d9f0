"""Optional packages are not needed by services: images have only the packages that their service uses."""

import subprocess
import sys

MODULES = (
    "coterie.launch.bootstrap",
    "coterie.launch.dashboard",
    "coterie.launch.federation",
    "coterie.launch.ray_cluster",
    "coterie.studies.experiment",
    "coterie.launch.operator_connection",
    "coterie.process.runtime",
    "coterie.web.live_run",
    "coterie_cos.service",
    "coterie_client.service",
    "coterie_data_owner.service",
    "coterie_thirdparty.service",
)
WITHOUT = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        optional = {
            *("scipy", "polars", "matplotlib", "implicit", "ranx", "torch"),
            *("gmpy2", "phe", "httpx", "jwt", "psycopg", "ray", "starlette", "uvicorn", "opentelemetry", "fsspec"),
        }
        if name.partition(".")[0] in optional:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        print(f"{module}: {error}")
"""


def test_a_module_of_a_service_or_of_its_launch_needs_no_optional_package() -> None:
    # One process for all: a module that an earlier one has imported already needed nothing then.
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *MODULES], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
