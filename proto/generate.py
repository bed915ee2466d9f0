"""Generate the stubs in ``coterie/wire/v1`` from the contract in ``proto/coterie/v1``.

``python proto/generate.py`` writes them; ``--check`` compares what would be written with what is there and ends
with status 1 when they differ.  protoc names modules after the proto package (``coterie.v1``); the library keeps
them one floor lower (``coterie.wire.v1``), so imports are rewritten on the way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
CONTRACT = ROOT / "coterie" / "v1"
STUBS = ROOT.parent / "coterie" / "wire" / "v1"
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
HEADER = '"""Generated from the contract in proto/coterie/v1; see proto/generate.py."""\n'


def generate() -> dict[str, str]:
    """Return the text of every stub file by name."""
    with tempfile.TemporaryDirectory() as folder:
        well_known = resources.files("grpc_tools") / "_proto"
        arguments = [
            "protoc",
            f"-I{ROOT}",
            f"-I{well_known}",
            *(f"--plugin={name}={Path(sys.executable).parent / name}" for name in PLUGINS),
            f"--python_out={folder}",
            f"--grpc_python_out={folder}",
            f"--mypy_out={folder}",
            f"--mypy_grpc_out={folder}",
            *sorted(str(path) for path in CONTRACT.glob("*.proto")),
        ]
        status = protoc.main(arguments)
        if status != 0:
            raise SystemExit(f"protoc ended with status {status}")
        files = {
            path.name: path.read_text().replace("coterie.v1 import", "coterie.wire.v1 import").replace(
                "coterie.v1.", "coterie.wire.v1."
            )
            if path.suffix == ".pyi"
            else path.read_text().replace("from coterie.v1 import", "from coterie.wire.v1 import")
            for path in Path(folder, "coterie", "v1").iterdir()
        }
    files["__init__.py"] = HEADER
    return files


def main() -> int:
    """Write or compare the stubs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    wanted = generate()
    held = {path.name: path.read_text() for path in STUBS.glob("*.py*")} if STUBS.exists() else {}
    different = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
    if check:
        for name in different:
            print(f"{name}: not what the contract generates; run `make proto`", file=sys.stderr)
        return 1 if different else 0
    STUBS.mkdir(parents=True, exist_ok=True)
    for name in held.keys() - wanted.keys():
        (STUBS / name).unlink()
    for name, text in wanted.items():
        (STUBS / name).write_text(text)
    print(f"{len(wanted)} files, {len(different)} changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
