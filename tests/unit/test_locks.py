"""Locks name installed packages to the byte: every lock gives one version and its hashes."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
LOCKS = sorted(path.name for path in REQUIREMENTS.glob("*.txt") if path.name != "torch.txt")
"""PyTorch is only what some tests compare with; its hash differs with the index that it comes from."""


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_one_version_and_a_hash(lock):
    text = (REQUIREMENTS / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert lines
    for line in lines:
        named = line.split()[0]
        assert re.fullmatch(r"[\w.-]+==[\w.!+]+( ;[^-]*)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", line), named


def test_what_images_install_stands_in_a_lock():
    dockerfile = (REQUIREMENTS.parent / "deploy/Dockerfile").read_text()
    named = set(re.findall(r"requirements/(\w+)\.txt", dockerfile))
    assert named
    assert {f"{name}.txt" for name in named} <= set(LOCKS)
