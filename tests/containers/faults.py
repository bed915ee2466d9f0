"""Faults of the machines and networks that services run on: a seeded schedule of them, and what each does."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..volumes import fill
from .stack import Stack

KINDS = ("crash", "pause", "cut", "slow", "full")
"""Killed; held still; off the network; almost without a processor; without room on its disk."""

PHASES = ("advertise", "share", "confirm", "submit", "unmask", "apply")
"""Phases of a round under the masked sum, as the operator is told them."""

_SLOW_SHARE = 0.04
_LONGEST_S = 6.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes
    ----------
    number : int
        From 1.
    service : str
        Whom it strikes.
    kind : str
        One of `KINDS`.
    phase : str
        The phase of a round in which it should strike.
    seconds : float
        How long it lasts; a crash is over when the engine starts the service again.
    """

    number: int
    service: str
    kind: str
    phase: str
    seconds: float

    def __str__(self) -> str:
        """Say it in a line."""
        lasting = "" if self.kind == "crash" else f" for {self.seconds:.1f} s"
        return f"{self.number}: {self.kind} of {self.service}{lasting} in {self.phase}"


def schedule(seed: int, count: int, services: Sequence[str]) -> list[Fault]:
    """Draw faults.

    Every kind strikes every service before any of these comes again.  They come in turns, each of which strikes every
    service once and has every kind, where there are no fewer services than kinds: so a few faults are of all kinds and
    everywhere, too.  Orders are the seed's; phases go round in the same way.

    Parameters
    ----------
    seed : int
        The same seed gives the same faults.
    count : int
    services : sequence of str
    """
    drawn = random.Random(seed)

    def in_turns() -> Iterator[tuple[str, str]]:
        while True:
            struck, kinds = drawn.sample(services, len(services)), drawn.sample(KINDS, len(KINDS))
            for shift in drawn.sample(range(len(kinds)), len(kinds)):
                pairs = [(service, kinds[(at + shift) % len(kinds)]) for at, service in enumerate(struck)]
                yield from drawn.sample(pairs, len(pairs))

    def again_and_again(choices: Sequence[str]) -> Iterator[str]:
        while True:
            yield from drawn.sample(choices, len(choices))

    pairs, phases = in_turns(), again_and_again(PHASES)
    return [
        Fault(number, service, kind, phase, round(drawn.uniform(0.5, _LONGEST_S), 1))
        for number, (service, kind), phase in zip(range(1, count + 1), pairs, phases, strict=False)
    ]


class SmallDisks:
    """A file system of few MiB for the volume of each service, so that one can be filled.

    Parameters
    ----------
    folder : Path
        Where they are mounted; takes root.
    sizes : mapping of str to int
        MiB by service.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self._folder, self._sizes = folder, sizes

    def __enter__(self) -> SmallDisks:
        """Mount them, owned by the user of the images."""
        for name, size in self._sizes.items():
            place, image = self._folder / name, self._folder / f"{name}.img"
            place.mkdir(parents=True)
            with image.open("wb") as file:
                file.truncate(size << 20)
            # Not in memory: what a service writes there would count as memory of its container.
            subprocess.run(
                ["mkfs.ext4", "-q", "-m", "0", "-E", "root_owner=10001:10001", str(image)], check=True
            )
            subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
            (place / "lost+found").rmdir()
        return self

    def __exit__(self, *_: object) -> None:
        """Take them away."""
        for name in self._sizes:
            subprocess.run(["umount", "--lazy", str(self._folder / name)], check=True)

    def volumes(self) -> dict[str, dict[str, object]]:
        """Return the compose file's volumes that lie on them."""
        return {
            name: {
                "driver": "local",
                "driver_opts": {"type": "none", "o": "bind", "device": str(self._folder / name)},
            }
            for name in self._sizes
        }

    def fill(self, service: str) -> Callable[[], None]:
        """Leave no room on a service's disk; return what gives it back."""
        return fill(self._folder / service).unlink


def strike(stack: Stack, disks: SmallDisks, fault: Fault) -> Callable[[], None]:
    """Let a fault happen; return what ends it."""
    match fault.kind:
        case "crash":
            stack.crash(fault.service)
            return lambda: None
        case "pause":
            return stack.hold_still(fault.service)
        case "cut":
            return stack.cut_off(fault.service)
        case "slow":
            return stack.slow_down(fault.service, _SLOW_SHARE)
        case _:
            return disks.fill(fault.service)
