"""Compare packed Paillier with BFV, of SEAL: a FedNeuMF update of 44,824 values, CPU seconds of one thread and bytes.

BFV is no sum of Coterie; ``docs/bfv.md`` says why.  Its times are those of ``.venv-peers`` (``make peers``), as a child
process that measures its own CPU time; without it the rows have none.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench.rows import Ask, Row, cpu_seconds, lower
from coterie.crypto.paillier import (
    Packing,
    PublicObfuscators,
    RunningSum,
    decrypt_vector,
    encrypt,
    generate,
    to_bytes,
)
from coterie.crypto.paillier.pads import pads

__all__ = ["rows"]

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_PARAMETERS = {
    "n2048": "N 2,048, q 54 bits, t 22: room for codes alone",
    "n8192": "N 8,192, q 166 bits, t 60: room for a tag above each code",
}


def rows(ask: Ask) -> Iterator[Row]:
    """Measure encryption with the public key, addition and decryption of an update, and its bytes."""
    values, addends, rounds = ask.size((44_824, 20, 5), (60, 3, 1))
    ours = _paillier(ask.size(3072, 1024), values, addends, rounds)
    theirs = _bfv(values, addends, rounds)
    for name, note in _PARAMETERS.items():
        for what, unit in (("encrypt", "s"), ("aggregate", "s"), ("decrypt", "s"), ("bytes", "bytes")):
            found = theirs.get(name, {}).get(what)
            yield lower(f"bfv.{what}.{name}", ours[what], found, unit, f"Paillier; theirs is BFV, {note}")


def _paillier(bits: int, values: int, addends: int, rounds: int) -> dict[str, float]:
    key = generate("bench", bytes(32), bits=bits, comparison=bits < 2048)
    packing, source = Packing(bits, 16, 32), PublicObfuscators(key.public)
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 2**16, values, dtype=np.uint32)
    own = pads(bytes(32), bytes(32), key.public, packing.ciphertexts(values))
    vector = encrypt(codes, packing, source, pads=own)

    def total() -> None:
        running = RunningSum(key.public, packing, values)
        for _ in range(addends):
            running.add(vector)
        running.total()

    return {
        "encrypt": _median(lambda: encrypt(codes, packing, source, pads=own), rounds),
        "aggregate": _median(total, rounds),
        "decrypt": _median(lambda: decrypt_vector(vector, key, own), rounds),
        "bytes": float(len(to_bytes(vector))),
    }


def _median(work: Callable[[], object], rounds: int) -> float:
    return statistics.median(cpu_seconds(work) for _ in range(rounds))


def _bfv(values: int, addends: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return what the child process measured; nothing without ``.venv-peers``, or without a wheel for this machine."""
    if not _PYTHON.exists():
        return {}
    command = [str(_PYTHON), str(Path(__file__).parent / "peers" / "bfv.py"), "times"]
    options = {"--values": values, "--addends": addends, "--rounds": rounds}
    command += [str(part) for option in options.items() for part in option]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "No module named 'seal'" in asked.stderr:
        return {}
    if asked.returncode:
        raise RuntimeError(f"the other library failed: {asked.stderr.strip()[-500:]}")
    found: dict[str, dict[str, float]] = json.loads(asked.stdout)
    return found
