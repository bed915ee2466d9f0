"""Test files for which the kernel of BLAS can matter, and another kernel than the machine's own to run them under.

``python -m tests.kernels`` prints the files for `make test-kernels`; ``python -m tests.kernels --another`` prints the
kernel.  A file counts when it, or a module that it imports directly or through others, multiplies matrices or is part
of the second implementation of the protocol.  Imports within functions count, too.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT, *sorted((ROOT / "services").iterdir()))
"""Folders in which packages lie."""

PACKAGES = ("coterie", "bench", "tests", "coterie_*")
PRODUCTS = {"matmul", "dot", "vdot", "inner", "tensordot", "linalg"}
"""Names of NumPy and SciPy that lead to BLAS, beside the operator ``@``."""

REFERENCE = "tests.reference"
"""Package of the second implementation of the protocol: what it computes must not depend on the kernel either."""

CODE_OF = {"Zen": "Haswell"}
"""Kernels that multiply with the code of another one, by their names in OpenBLAS."""

CANDIDATES = ("Haswell", "Sandybridge", "Nehalem", "Prescott")
"""Kernels of OpenBLAS on x86-64 to choose from; each newer one needs a processor with more instructions."""

TAKEN = """
import numpy as np
from threadpoolctl import threadpool_info

a = np.linspace(0, 1, 64 * 64).reshape(64, 64)
assert np.isfinite(a @ a).all()
print(*{one["architecture"] for one in threadpool_info() if one["internal_api"] == "openblas"})
"""
"""Program that multiplies matrices, then prints the kernel that OpenBLAS took."""


def taken(asked: str | None = None) -> str | None:
    """Return the kernel that OpenBLAS takes in a new process; None where it cannot multiply with the one asked for.

    OpenBLAS takes its own choice where it has no kernel of the name that it is asked for.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    if asked is not None:
        environment["OPENBLAS_CORETYPE"] = asked
    done = subprocess.run(
        [sys.executable, "-c", TAKEN], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def another(taken: Callable[[str | None], str | None] = taken) -> str | None:
    """Return a kernel with other code than that of the machine's own, which this OpenBLAS has and the processor runs.

    None where there is no such kernel.
    """
    own = taken(None)
    if own is None:
        return None
    same = CODE_OF.get(own, own)
    for asked in CANDIDATES:
        found = None if asked == same else taken(asked)
        if found is not None and CODE_OF.get(found, found) != same:
            return asked
    return None


def modules() -> dict[str, Path]:
    """Return the files of our own modules by their names."""
    found = {}
    for source in SOURCES:
        for package in PACKAGES:
            for file in source.glob(f"{package}/**/*.py"):
                parts = file.relative_to(source).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(name: str, file: Path, tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports, of modules or of what is in them."""
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, node.module] if node.module else above)
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def multiplies(tree: ast.AST) -> bool:
    """Whether a module forms a product of matrices itself."""
    return any(
        (isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult))
        or (isinstance(node, ast.Attribute) and node.attr in PRODUCTS)
        for node in ast.walk(tree)
    )


def reaching(files: Mapping[str, Path], also: Collection[str] = ()) -> set[str]:
    """Return the modules from which imports lead to a product of matrices or to one of ``also``, these included."""
    trees = {name: ast.parse(file.read_text()) for name, file in files.items()}
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for other in imported(name, file, trees[name]):
            importers.get(other, set()).add(name)
    found: set[str] = set()
    waiting = [name for name, tree in trees.items() if multiplies(tree) or name in also]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += importers[name]
    return found


def chosen() -> list[str]:
    """Return the test files of ``tests/unit`` for which the kernel can matter, by path."""
    files = modules()
    reference = {name for name in files if name == REFERENCE or name.startswith(f"{REFERENCE}.")}
    found = reaching(files, reference)
    return sorted(str(files[name].relative_to(ROOT)) for name in found if name.startswith("tests.unit.test_"))


def main(arguments: Collection[str]) -> None:
    """Print the test files, or another kernel with ``--another``."""
    if "--another" not in arguments:
        print("\n".join(chosen()))
        return
    kernel = another()
    if kernel is None:
        sys.exit("NumPy has no OpenBLAS with another kernel that this processor runs; KERNEL= names one")
    print(kernel)


if __name__ == "__main__":
    main(sys.argv[1:])
