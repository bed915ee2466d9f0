"""Services as processes of other programs than the launcher starts: ones that lie or leak, or with another clock."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coterie.launch.children import Child
from coterie.process.runtime import PARENT_VARIABLE

ROOT = Path(__file__).parents[2]


@dataclass
class ProgramChild(Child):
    """The process of a service that a program of the tests serves, in an interpreter of its own.

    Parameters
    ----------
    program : sequence of str
        Module, and its arguments before the usual ones of ``coterie serve ROLE``.
    variables : mapping of str to str
        Environment beside what is inherited.
    """

    program: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def start(self, *sets: str) -> None:
        """Start the program, for the first time or after it has ended."""
        named = [f"--set={text}" for text in sets]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
        serving = [*named, "--config", str(self.folder / "config.toml")]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", *self.program, *serving],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={
                    "OMP_NUM_THREADS": "1",
                    **inherited,
                    "PYTHONPATH": str(ROOT),
                    PARENT_VARIABLE: str(os.getpid()),
                    **self.variables,
                },
            )
