"""Test files for which the kernel of BLAS can matter: ``python -m tests.kernels`` prints them for `make test-kernels`.

A file counts when it, or a module that it imports directly or through others, multiplies matrices.  Imports within
functions count, too.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT, *sorted((ROOT / "services").iterdir()))
"""Folders in which packages lie."""

PACKAGES = ("coterie", "bench", "tests", "coterie_*")
PRODUCTS = {"matmul", "dot", "vdot", "inner", "tensordot", "linalg"}
"""Names of NumPy and SciPy that lead to BLAS, beside the operator ``@``."""


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


def reaching(files: Mapping[str, Path]) -> set[str]:
    """Return the modules from which imports lead to a product of matrices, those with one included."""
    trees = {name: ast.parse(file.read_text()) for name, file in files.items()}
    importers: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for other in imported(name, file, trees[name]):
            importers.get(other, set()).add(name)
    found: set[str] = set()
    waiting = [name for name, tree in trees.items() if multiplies(tree)]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += importers[name]
    return found


def chosen() -> list[str]:
    """Return the test files of ``tests/unit`` and ``tests/reference`` for which the kernel can matter, by path."""
    files = modules()
    prefixes = ("tests.unit.test_", "tests.reference.test_")
    return sorted(str(files[name].relative_to(ROOT)) for name in reaching(files) if name.startswith(prefixes))


if __name__ == "__main__":
    print("\n".join(chosen()))
