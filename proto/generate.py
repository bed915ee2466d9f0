"""Generate the stubs in ``coterie/wire`` from the contracts in ``proto/coterie``.

``python proto/generate.py`` writes them; ``--check`` compares what would be written with what is there and ends
with status 1 when they differ.  protoc names modules after the proto package (``coterie.v1``); the library keeps
them one floor lower (``coterie.wire.v1``), so imports are rewritten on the way.  ``coterie/v1`` is the contract of a
federation's services, ``coterie/serving/v1`` that of the server of exported models.

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
CONTRACTS = {"coterie.v1": "coterie.wire.v1", "coterie.serving.v1": "coterie.wire.serving"}
"""Package of the stubs by proto package."""
LOCK = ROOT / "fields.lock"
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
HEADER = '"""Generated from the contract in proto/{}; see proto/generate.py."""\n'


def sources(contract: str) -> list[str]:
    """Return the files of a contract."""
    return sorted(str(path) for path in ROOT.joinpath(*contract.split(".")).glob("*.proto"))


def generate(contract: str, package: str) -> dict[str, str]:
    """Return the text of every stub file of a contract by name."""
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
            *sources(contract),
        ]
        status = protoc.main(arguments)
        if status != 0:
            raise SystemExit(f"protoc ended with status {status}")
        files = {
            path.name: path.read_text()
            .replace(f"{contract} import", f"{package} import")
            .replace(f"{contract}.", f"{package}.")
            if path.suffix == ".pyi"
            else path.read_text().replace(f"from {contract} import", f"from {package} import")
            for path in Path(folder, *contract.split(".")).iterdir()
        }
    files["__init__.py"] = HEADER.format(contract.replace(".", "/"))
    return files


def published() -> list[str]:
    """Return every field, enum value and RPC of the contracts, a line each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "descriptors")
        given = [source for contract in CONTRACTS for source in sources(contract)]
        status = protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={path}", *given])
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
    status = 0
    for contract, package in CONTRACTS.items():
        stubs = ROOT.parent.joinpath(*package.split("."))
        wanted = generate(contract, package)
        held = {path.name: path.read_text() for path in stubs.glob("*.py*")} if stubs.exists() else {}
        different = sorted(name for name in wanted.keys() | held.keys() if wanted.get(name) != held.get(name))
        if check:
            for name in different:
                print(
                    f"{package}, {name}: not what the contract generates; run `make proto`", file=sys.stderr
                )
            status = 1 if different else status
            continue
        stubs.mkdir(parents=True, exist_ok=True)
        for name in held.keys() - wanted.keys():
            (stubs / name).unlink()
        for name, text in wanted.items():
            (stubs / name).write_text(text)
        print(f"{package}: {len(wanted)} files, {len(different)} changed")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
