"""The package itself: ``import coterie`` loads nothing beside it, whatever its modules need."""

import json
import subprocess
import sys

LOADED = """
import json, sys

before = set(sys.modules)
import coterie

tops = {name.partition(".")[0] for name in sys.modules.keys() - before}
print(json.dumps(sorted(tops - sys.stdlib_module_names)))
"""
"""Program that prints which packages outside the standard library an import loads."""


def test_import_coterie_loads_no_other_package() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED], capture_output=True, text=True, timeout=60, check=True
    )
    # No numpy, grpc, cryptography, torch, pydantic or sqlalchemy among them: each takes a while.
    assert json.loads(done.stdout) == ["coterie"]
