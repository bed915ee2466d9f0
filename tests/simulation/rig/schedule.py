"""Draw schedules from seeds, run them, and shorten the fault lists of failing ones."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.secure_sum.plan import Member
from tests.simulation.rig.faults import Drawn, Fault, Faults, Replayed
from tests.simulation.rig.sums import KEYED, halves, identity, layout_of
from tests.simulation.rig.watch import Watch
from tests.simulation.rig.world import Machines, World

__all__ = ["Found", "Scenario", "find", "run", "shorten"]


@dataclass(frozen=True)
class Scenario:
    """A schedule without its faults: cohort, secure sum, floors, number of rounds.

    Parameters
    ----------
    seed : int
        Seed of the vectors, and of the faults when they are drawn.
    secure_sum : str
        One of ``tests.simulation.rig.sums.SUMS``.
    hosts : tuple of tuple of int
        For each host, the number of users that each of its members covers.
    rounds : int
        Number of rounds, one after the other.
    min_sum : int
        Fewest users over which a sum is formed.
    sparse_floor : int
        Fewest users over which one place of a sparse sum is formed; 0 for a sum that is not sparse.
    repeats : bool
        Whether an abandoned sum is repeated, as for the items of a group; otherwise the next one is formed.
    """

    seed: int
    secure_sum: str
    hosts: tuple[tuple[int, ...], ...]
    rounds: int
    min_sum: int
    sparse_floor: int = 0
    repeats: bool = False

    @classmethod
    def drawn(cls, seed: int, secure_sum: str) -> Scenario:
        """Draw the scenario of a seed."""
        rng = random.Random(f"scenario {seed} {secure_sum}")
        if secure_sum == "clear":
            members = rng.choice((1, 2, 3, 3, 4, 5))
            rounds = rng.choice((2, 3, 4))
        else:
            members = rng.choice((2, 3, 3, 4, 4, 5, 6))
            rounds = rng.choice((1, 1, 2, 3))
        users = [1 if secure_sum == "masked" else rng.choice((1, 1, 1, 2, 5)) for _ in range(members)]
        hosts: list[list[int]] = []
        for one in users:
            # Add the member to an existing host, or give it a host of its own.
            if hosts and rng.random() < 0.3:
                rng.choice(hosts).append(one)
            else:
                hosts.append([one])
        floor = rng.randint(1, max(1, -(-2 * sum(users) // 3)))
        sparse = random.Random(f"sparse {seed}")
        each = sparse.choice((0, 1, 2, 4)) if secure_sum in KEYED else 0
        repeats = random.Random(f"repeats {seed}").random() < 0.5
        return cls(seed, secure_sum, tuple(tuple(host) for host in hosts), rounds, floor, each, repeats)

    def faults(self) -> Drawn:
        """Return faults drawn by the seed."""
        rng = random.Random(f"faults {self.seed} {self.secure_sum}")

        def rate(most: float) -> float:
            # No faults of a kind in a quarter of the schedules, so that the others get further.
            return 0.0 if rng.random() < 0.25 else most * rng.random() ** 2

        # Rounds whose sum is not clear have more steps, and so more occasions for faults.
        some = 1.0 if self.secure_sum == "clear" else 0.3
        rates = {
            "message": rate(0.4 * some),
            "cos": rate(0.15 * some),
            "host": rate(0.15 * some),
            "presence": rate(0.1 * some),
            "train": rate(0.3 * some),
            "intruder": rate(0.5),
            "deceit": rate(0.1) if self.secure_sum != "clear" and rng.random() < 0.3 else 0.0,
        }
        if self.secure_sum in KEYED:
            rates["decrypt"] = rate(0.3)
        return Drawn(rng, rates)

    def members(self) -> list[Member]:
        """Return the cohort."""
        found: list[Member] = []
        for number, host in enumerate(self.hosts):
            for users in host:
                found.append(Member(identity(len(found)).participant_id, f"h{number}", users))
        return found


def run(scenario: Scenario, faults: Faults, machines: Machines | None = None) -> Watch:
    """Run one schedule to its end.

    Returns
    -------
    Watch
        The watch, with the rounds that were applied, and the reasons of abandoned ones.

    Raises
    ------
    Violation
        When an invariant was violated.
    """
    server_half, member_half = halves(scenario.secure_sum)
    world = World(
        scenario.members(),
        layout_of(scenario.secure_sum),
        server_half,
        member_half,
        faults,
        np.random.default_rng(scenario.seed),
        scenario.rounds,
        scenario.min_sum,
        scenario.sparse_floor,
        machines,
        repeats=scenario.repeats,
    )
    world.run()
    return world.watch


@dataclass(frozen=True)
class Found:
    """A failing schedule: its failure, and the shortest list of faults with which it still fails."""

    scenario: Scenario
    faults: tuple[Fault, ...]
    what: str

    def __str__(self) -> str:
        """Return the finding as readable lines."""
        lines = [f"seed {self.scenario.seed}, {self.scenario}", self.what, f"{len(self.faults)} faults:"]
        return "\n".join([*lines, *(f"  {fault}" for fault in self.faults)])

    def again(self, machines: Machines | None = None) -> str | None:
        """Run the schedule again; return its failure, or None."""
        return _failure(self.scenario, Replayed(self.faults), machines)

    def to_json(self) -> str:
        """Return the finding as JSON, for the tests' corpus."""
        plain = {
            "scenario": dataclasses.asdict(self.scenario),
            "faults": [fault.plain() for fault in self.faults],
            "what": self.what,
        }
        return json.dumps(plain, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Found:
        """Parse a finding that ``to_json`` wrote."""
        plain = json.loads(text)
        scenario = plain["scenario"]
        scenario["hosts"] = tuple(tuple(host) for host in scenario["hosts"])
        return cls(Scenario(**scenario), tuple(Fault(**fault) for fault in plain["faults"]), plain["what"])


def find(scenario: Scenario, machines: Machines | None = None) -> Found | None:
    """Run a scenario with its drawn faults; return a finding with the shortest failing list, or None."""
    faults = scenario.faults()
    what = _failure(scenario, faults, machines)
    if what is None:
        return None

    def fails(some: Sequence[Fault]) -> bool:
        return _failure(scenario, Replayed(some), machines) is not None

    shortest = shorten(faults.recorded, fails)
    return Found(scenario, tuple(shortest), _failure(scenario, Replayed(shortest), machines) or what)


def _failure(scenario: Scenario, faults: Faults, machines: Machines | None) -> str | None:
    try:
        run(scenario, faults, machines)
    except Exception as error:  # any error of a machine is a finding
        return f"{type(error).__name__}: {error}"
    return None


def shorten(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> list[Fault]:
    """Shorten a failing list of faults as far as it still fails (Zeller and Hildebrandt 2002, ddmin).

    Returns
    -------
    list of Fault
        A failing list that no longer fails without any one of its faults; the given list if that does not fail again,
        as it then depends on more than its faults.
    """
    kept = list(faults)
    if not fails(kept):
        return kept
    parts = 2
    while kept:
        size = max(len(kept) // parts, 1)
        for first in range(0, len(kept), size):
            fewer = kept[:first] + kept[first + size :]
            if fails(fewer):
                kept, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return kept
