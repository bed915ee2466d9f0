"""Measure rounds of FedNCF on slow networks, by secure sum: with a one-way delay, or a slow shared link.

Each case runs in a process and a network namespace of its own, so that only its own loopback is slowed.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.encrypted import Measured, measure
from bench.rounds import COHORT_OF_FEW, FEW, data_set, settings_for
from bench.rows import Ask, Row
from coterie.errors import PreflightError
from coterie.telemetry.logs import configure

__all__ = ["rows"]

NETWORKS = {
    "0": [],
    "20ms": ["--delay", "20"],
    "80ms": ["--delay", "80"],
    "10mbit": ["--rate", "10"],
}
SUMS = ("clear", "masked", "encrypted")

_WAN = Path(__file__).parents[1] / "deploy" / "wan.py"
_NEW_NETWORK = 0x40000000


def _network_of_our_own() -> None:
    """Move this process into a new network namespace, which has only loopback."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise PreflightError(
            f"no network namespace: {os.strerror(ctypes.get_errno())}",
            hint="this benchmark takes root, on Linux",
        )
    with socket.socket() as any_:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_, 0x8913, request))
        fcntl.ioctl(any_, 0x8914, struct.pack("16sh14x", b"lo", flags | 1))


def _case(network: str, secure_sum: str, data: str | None, smallest: bool) -> Measured:
    """Measure one case, in this process."""
    _network_of_our_own()
    emulator = None
    if NETWORKS[network]:
        command = [sys.executable, str(_WAN), "--loopback", *NETWORKS[network]]
        emulator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert emulator.stdout is not None
        if not emulator.stdout.readline().startswith("emulating"):
            raise PreflightError(
                "the network cannot be emulated here", hint="docs/network.md says what it needs"
            )
    settings = settings_for(
        None if data is None else Path(data),
        "gmf",
        secure_sum,
        rounds={"passes": 1000, "step_timeout_s": 600.0, **(COHORT_OF_FEW if smallest else {})},
        synthetic=FEW if smallest else None,
    )
    try:
        return asyncio.run(measure(settings, 0) if smallest else measure(settings))
    finally:
        if emulator is not None:
            emulator.send_signal(signal.SIGTERM)
            emulator.wait()


def _measured(network: str, secure_sum: str, data: Path | None, smallest: bool) -> dict[str, Any]:
    asked = [network, secure_sum, data and str(data), smallest]
    command = [sys.executable, "-m", "bench.wan", json.dumps(asked)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise PreflightError(f"{network}, {secure_sum}: not measured", hint="see what it wrote above")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(ask: Ask) -> Iterator[Row]:
    """Measure rounds of 50 users at two hosts; ratios are against the same sum without a slowed network."""
    data = data_set(ask.data)
    where = "synthetic data" if data is None else data.name
    for secure_sum in ask.size(SUMS, SUMS[1:2]):
        without = None
        for network in ask.size([*NETWORKS], ["0", "20ms"]):
            found = _measured(network, secure_sum, data, ask.smallest)
            seconds = sum(found["phases"].values())
            without = without or seconds
            most = max(found["phases"], key=lambda name: found["phases"][name])
            phases = ", ".join(f"{name} {one:.3f}" for name, one in found["phases"].items())
            yield Row(
                f"wan.{network}.{secure_sum}",
                seconds,
                without,
                "s wall",
                without / seconds,
                f"{where}; s by phase: {phases}; most in {most}; {found['sent'] / 1e3:.0f} kB sent by a member",
            )


if __name__ == "__main__":
    configure("error", service="bench")
    print(json.dumps(asdict(_case(*json.loads(sys.argv[1])))))
