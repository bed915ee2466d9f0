"""Build the light installation of a person's device: `coterie serve client --once`, and what it needs beside Python.

    deploy/device/build.py FOLDER [--numpy WHEEL]

The packages are those of ``requirements/device.txt``, with their hashes.  NumPy is built from its locked source without
OpenBLAS, which is half of its size: that takes a C compiler, and minutes, here and not on the device.
``--numpy`` takes a wheel that was built before.  Modules are compiled, and sources left behind: a device compiles
nothing.  All modules are in one archive, ``modules.zip``, and libraries beside it.  ``contents.txt`` lists every part
with its bytes.  Exit status 1: the installation is larger than it may be.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 49_500_000
"""Size that the installation must stay below, bytes; docs/device.md says what it is made of."""
NUMPY = ("-Dallow-noblas=true", "-Dblas=none", "-Dlapack=none", "-Dcpu-dispatch=none", "-Doptimization=s")
"""How NumPy is built: with its own routines, for every processor of the kind, and small rather than fast."""
LEFT_OUT = (
    "alembic/templates",
    "alembic/testing",
    "cffi",
    "coterie/api",
    "coterie/examples",
    "coterie/launch",
    "coterie/serving",
    "coterie/studies",
    "coterie/web",
    "coterie/evaluation/central",
    "coterie/privacy/attacks",
    "coterie_cos",
    "coterie_data_owner",
    "coterie_decrypting_client",
    "coterie_thirdparty",
    "google/api",
    "google/cloud",
    "google/gapic",
    "google/logging",
    "google/longrunning",
    "google/type",
    "grpc/_cython/_credentials",
    "grpc/beta",
    "numpy/ctypeslib",
    "numpy/distutils",
    "numpy/f2py",
    "numpy/fft",
    "numpy/lib/recfunctions.*",
    "numpy/polynomial",
    "numpy/testing",
    "numpy/linalg/lapack_lite*",
    "numpy/_core/*_tests*",
    "numpy/_core/lib",
    "numpy/_core/include",
    "numpy/random/lib",
    "pydantic/mypy.*",
    "pydantic/v1",
    "safetensors/flax.*",
    "safetensors/mlx.*",
    "safetensors/paddle.*",
    "safetensors/tensorflow.*",
    "safetensors/torch.*",
    "sqlalchemy/ext",
    "sqlalchemy/dialects/mssql",
    "sqlalchemy/dialects/mysql",
    "sqlalchemy/dialects/oracle",
    "sqlalchemy/dialects/postgresql",
    "sqlalchemy/orm",
    "sqlalchemy/testing",
    "bin",
)
"""What neither a wake nor the person's commands import, as patterns below the packages."""
TESTS = ("tests", "test")
SOURCES = (".pyi", ".pyx", ".pxd", ".c", ".h", ".proto", ".pyc", ".a", ".map", ".typed")
"""Files that only compilers and type checkers read, and what is compiled anew."""
COMPILED_ELSEWHERE = ("sqlalchemy", "markupsafe")
"""Packages whose compiled parts only make them faster."""
_MODE = py_compile.PycInvalidationMode.UNCHECKED_HASH
START = """#!{python} -ISB
import sys
from importlib.util import spec_from_file_location
from pathlib import Path
here = Path(__file__).resolve().parent.parent
library = here / "lib"
sys.path.insert(0, str(library / "modules.zip"))
libraries = {{".".join((*file.relative_to(library).parts[:-1], file.name.partition(".")[0])): file
             for file in library.rglob("*.so")}}
class Libraries:
    # An archive can hold no library: those of packages in it are found by their full names.
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, libraries[name]) if name in libraries else None
sys.meta_path.insert(0, Libraries)
from coterie.cli.main import main
main()
"""


def main() -> int:
    """Build, list and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numpy", type=Path, help="wheel of NumPy without OpenBLAS")
    asked = parser.parse_args()
    folder: Path = asked.folder
    if folder.exists():
        shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="coterie-device-") as work:
        packages = Path(work) / "packages"
        install(packages, asked.numpy, Path(work))
        prune(packages)
        lay_out(packages, folder)
    size = tell(folder)
    print(f"{size / 1e6:.1f} MB of {MOST_BYTES / 1e6:.1f} in {folder}")
    return int(size >= MOST_BYTES)


def pip(*arguments: object, python: str | Path = sys.executable) -> None:
    """Run pip; hashes are checked where a file of requirements has them."""
    # Tools of the build lie beside the interpreter that runs it.
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    command = [str(python), "-m", "pip", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PATH": path})  # noqa: S603


def install(packages: Path, numpy: Path | None, work: Path) -> None:
    """Install the locked packages and Coterie below a folder."""
    lock = (ROOT / "requirements" / "device.txt").read_text()
    entries = [entry for entry in lock.split("\n") if entry]
    # An entry goes on as long as its lines end with a backslash, or are remarks below it.
    ours, others, into = list[str](), list[str](), list[str]()
    for line in entries:
        if not line.startswith((" ", "#")):
            into = ours if line.startswith("numpy==") else others
        into.append(line)
    (work / "others.txt").write_text("\n".join(others) + "\n")
    (work / "numpy.txt").write_text("\n".join(ours) + "\n")
    target = ("install", "--no-compile", "--no-deps", "--target", packages)
    pip(*target, "--require-hashes", "-r", work / "others.txt")
    if numpy is None:
        numpy = build_numpy(work)
    pip(*target, numpy)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work, ROOT)
    (wheel,) = work.glob("coterie-*.whl")
    pip(*target, wheel)


def build_numpy(work: Path) -> Path:
    """Build a wheel of NumPy from its locked source, with locked tools; ``numpy.txt`` names the source."""
    tools = work / "tools"
    tool = tools / "bin" / "python"
    venv.create(tools, with_pip=True)
    pip("install", "--require-hashes", "-r", ROOT / "requirements" / "device-build.txt", python=tool)
    # For what a file of requirements names pip heeds the options of a build that stand there, and not its own.
    options = "".join(f' --config-settings="setup-args={option}"' for option in NUMPY)
    locked = work / "numpy.txt"
    named, rest = locked.read_text().split(" ", 1)
    locked.write_text(f"{named}{options} {rest}")
    # pip would take a wheel of the same version that it built before, whatever its options.
    pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--no-binary", "numpy"),
        *("--wheel-dir", work, "--require-hashes", "-r", locked),
        python=tool,
    )
    (wheel,) = work.glob("numpy-*.whl")
    return wheel


def prune(packages: Path) -> None:
    """Remove what a device does not need, and symbols of compiled code that only debuggers read."""
    found = [path for pattern in LEFT_OUT for path in packages.glob(pattern)]
    found += [path for path in packages.rglob("*") if path.is_dir() and path.name in TESTS]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in [*packages.rglob("*")]:
        only_faster = path.suffix == ".so" and path.relative_to(packages).parts[0] in COMPILED_ELSEWHERE
        if path.suffix in SOURCES or only_faster:
            path.unlink()
        elif path.suffix == ".so":
            subprocess.run(["strip", "--strip-unneeded", path], check=True)  # noqa: S603, S607 - binutils
    for information in packages.glob("*.dist-info"):
        for path in information.rglob("*"):
            licence = "licen" in str(path.relative_to(information)).lower()
            if path.is_file() and path.name not in ("METADATA", "entry_points.txt") and not licence:
                path.unlink()


def lay_out(packages: Path, folder: Path) -> None:
    """Compile all modules and put them into the archive, and libraries beside it."""
    library = folder / "lib"
    library.mkdir(parents=True)
    for path in packages.rglob("*.py"):
        # The help of commands is their docstrings; others are read by nobody on a device.
        helps = path.parent == packages / "coterie" / "cli"
        compileall.compile_file(
            path,
            quiet=1,
            legacy=True,
            optimize=0 if helps else 2,
            stripdir=str(packages),
            invalidation_mode=_MODE,
        )
    for path in packages.rglob("*.py"):
        # Alembic reads revisions as source.
        if "migrations" not in path.parts:
            path.unlink()
        else:
            path.with_suffix(".pyc").unlink(missing_ok=True)
    with zipfile.ZipFile(library / "modules.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(packages.rglob("*")):
            name = path.relative_to(packages)
            if path.suffix == ".so":
                (library / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, library / name)
                continue
            # Packages without a module of their own are found by their folders' entries.
            entry = zipfile.ZipInfo(f"{name}/" if path.is_dir() else str(name))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, b"" if path.is_dir() else path.read_bytes())
    start = folder / "bin" / "coterie"
    start.parent.mkdir()
    start.write_text(START.format(python=f"/usr/bin/env -S python{sysconfig.get_python_version()}"))
    start.chmod(0o755)


def tell(folder: Path) -> int:
    """Write ``contents.txt``, largest first, and return the bytes of everything."""
    sizes: dict[str, int] = {}
    library = folder / "lib"
    for path in folder.rglob("*"):
        if path.is_file():
            parts = path.relative_to(library if library in path.parents else folder).parts
            sizes[parts[0]] = sizes.get(parts[0], 0) + path.stat().st_size
    lines = [f"{size:>10,}  {name}" for name, size in sorted(sizes.items(), key=lambda one: -one[1])]
    with zipfile.ZipFile(library / "modules.zip") as archive:
        inside: dict[str, int] = {}
        for entry in archive.infolist():
            top = entry.filename.partition("/")[0]
            inside[top] = inside.get(top, 0) + entry.compress_size
    lines += ["", "in modules.zip:"]
    lines += [f"{size:>10,}  {name}" for name, size in sorted(inside.items(), key=lambda one: -one[1])]
    (folder / "contents.txt").write_text("\n".join(lines) + "\n")
    return sum(sizes.values()) + (folder / "contents.txt").stat().st_size


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
