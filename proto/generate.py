"""Generate the stubs in ``coterie/wire/v1`` from the contract in ``proto/coterie/v1``.

``python proto/generate.py`` writes them; ``--check`` compares what would be written with what is there and ends
with status 1 when they differ.  protoc names modules after the proto package (``coterie.v1``); the library keeps
them one floor lower (``coterie.wire.v1``), so imports are rewritten on the way.

``fields.lock`` lists every field, enum value and RPC that was ever published.  A change that removes or renumbers one
breaks peers of an older release: it is refused unless ``--breaking`` says that this is meant.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
CONTRACT = ROOT / "coterie" / "v1"
STUBS = ROOT.parent / "coterie" / "wire" / "v1"
LOCK = ROOT / "fields.lock"
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
            path.name: path.read_text()
            .replace("coterie.v1 import", "coterie.wire.v1 import")
            .replace("coterie.v1.", "coterie.wire.v1.")
            if path.suffix == ".pyi"
            else path.read_text().replace("from coterie.v1 import", "from coterie.wire.v1 import")
            for path in Path(folder, "coterie", "v1").iterdir()
        }
    files["__init__.py"] = HEADER
    return files


def published() -> list[str]:
    """Return every field, enum value and RPC of the contract, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "descriptors")
        sources = sorted(str(path) for path in CONTRACT.glob("*.proto"))
        status = protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={path}", *sources])
        if status != 0:
            raise SystemExit(f"protoc ended with status {status}")
        files = descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file
    lines: list[str] = []
    for file in files:
        for message in file.message_type:
            lines += [
                f"{message.name}.{field.name} = {field.number} {field.type} {field.label} {field.type_name}".rstrip()
                for field in message.field
            ]
        for enum in file.enum_type:
            lines += [f"{enum.name}.{value.name} = {value.number}" for value in enum.value]
        for service in file.service:
            lines += [
                f"{service.name}/{rpc.name} {rpc.input_type} {rpc.client_streaming} "
                f"{rpc.output_type} {rpc.server_streaming}"
                for rpc in service.method
            ]
    return sorted(lines)


def main() -> int:
    """Write or compare the stubs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--breaking", action="store_true", help="allow removed and renumbered fields")
    arguments = parser.parse_args()
    check = arguments.check
    now = published()
    before = LOCK.read_text().splitlines() if LOCK.exists() else []
    gone = sorted(set(before) - set(now))
    if gone and not arguments.breaking:
        for line in gone:
            print(f"removed or changed: {line}", file=sys.stderr)
        return 1
    if check and before != now:
        print("fields.lock does not name every field; run `make proto`", file=sys.stderr)
        return 1
    if not check:
        LOCK.write_text("\n".join(now) + "\n")
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
