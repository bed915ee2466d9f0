"""The options that the compiled kernels are built with, for tests that compile them again."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "native" / "c").glob("*.c"))


def options() -> list[str]:
    """Return the options of `native/build_kernels.py`, which needs cffi to be imported."""
    said = re.search(
        r"^OPTIONS = \[(.*)\]$", (ROOT / "native" / "build_kernels.py").read_text(), re.MULTILINE
    )
    assert said is not None
    return re.findall(r'"([^"]+)"', said[1])
