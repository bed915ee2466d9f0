from __future__ import annotations

import resource
import subprocess
import sys

import pytest

_ALLOW = """
import resource
from coterie.process.runtime import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_files({connections})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "allowed"),
    [(256, 4000, 2000, 2512), (256, 1000, 2000, 1000), (3000, 4000, 2000, 3000)],
    ids=["more", "what-there-is", "enough"],
)
def test_a_service_may_have_as_many_files_as_connections_as_far_as_the_system_lets_it(
    soft: int, hard: int, connections: int, allowed: int
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"fewer than {hard} open files are allowed here")
    program = _ALLOW.format(soft=soft, hard=hard, connections=connections)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{allowed} {hard}"
    assert ("fewer open files" in done.stdout) == (allowed < connections + 512)
