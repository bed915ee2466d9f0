"""A federation of real processes whose COS lies."""

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.holdout import TRAIN
from coterie.launch.children import Child
from coterie.launch.parties import Laid
from coterie.process.runtime import PARENT_VARIABLE
from coterie.studies.run_data import Feed

from ..running import Running
from ..stores import rows
from .accomplice import Accomplice
from .lies import LIES, Lie
from .revealed import REVEALED, Revealed, read_revealed

ROOT = Path(__file__).parents[3]


@dataclass
class LyingChild(Child):
    """The process of a service that lies, or is lied to; ``arguments`` of its ``program`` come before usual ones."""

    arguments: Sequence[str] = field(default=())
    program: str = "tests.processes.lying.cos"

    def start(self, *sets: str) -> None:
        """Start the program, for the first time or after it has ended."""
        named = [f"--set={text}" for text in sets]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")}
        serving = [*named, "--config", str(self.folder / "config.toml")]
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.program, *self.arguments, *serving],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={
                    "OMP_NUM_THREADS": "1",
                    **inherited,
                    "PYTHONPATH": str(ROOT),
                    PARENT_VARIABLE: str(os.getpid()),
                },
            )


class Unlogged(Running):
    """A federation of real processes whose third party keeps the bundles of some parties from its log.

    Parameters
    ----------
    hidden : sequence of str
        These parties.
    checked : bool
        Whether client hosts check the log.
    """

    def __init__(
        self, settings: RunSettings, feed: Feed, folder: Path, hidden: Sequence[str], *, checked: bool
    ) -> None:
        super().__init__(settings, feed, folder)
        self._hidden = hidden
        self._checked = checked

    def _configure(self) -> Laid:
        laid = super()._configure()
        programs = {"thirdparty": ("tests.processes.lying.thirdparty", [",".join(self._hidden)])}
        if not self._checked:
            programs["client"] = ("tests.processes.lying.unchecked", [])
        for party, child in self.children.items():
            if child.role in programs:
                program, arguments = programs[child.role]
                self.children[party] = LyingChild(
                    child.role, child.name, child.folder, arguments=arguments, program=program
                )
        return laid


class Lied(Running):
    """A federation of real processes under a COS that lies.

    Parameters
    ----------
    lie : type of Lie
        In `LIES`.
    victim : str
        Party whose users' data the COS wants.
    thorough : bool
        As for `Lie`.
    """

    def __init__(
        self,
        settings: RunSettings,
        feed: Feed,
        folder: Path,
        lie: type[Lie],
        victim: str,
        *,
        thorough: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(settings, feed, folder, **options)
        self.victim = victim
        (name,) = [name for name, each in LIES.items() if each is lie]
        self.introduction = folder / "introduction.pb"
        self._arguments = [name, victim, "--introduction", str(self.introduction)]
        self._arguments += ["--thorough"] if thorough else []

    def _configure(self) -> Laid:
        laid = super()._configure()
        honest = self.cos
        self.children[honest.party] = LyingChild(
            honest.role, honest.name, honest.folder, arguments=self._arguments
        )
        return laid

    def accomplice(self, party: str) -> Accomplice:
        """Return a data owner that a party pretends to be, for a COS that introduces it to the victim."""
        children = self.children
        return Accomplice(children[party], children[self.victim], self._run_id, self.introduction)

    # --- what came of it ---------------------------------------------------------------------------------------

    def revealed(self) -> list[Revealed]:
        """Return the sums that the COS has seen so far."""
        return read_revealed(self.cos.state / REVEALED)

    def training_items(self) -> set[str]:
        """Return the training items of the victim's users: what an attack on the victim is to find."""
        data, host = self.feed.dataset, int(self.victim.rpartition("-")[2])
        theirs = (self.feed.host[data.user] == host) & (self.feed.split.part == TRAIN)
        return {data.items[item] for item in data.item[theirs].tolist()}

    def held_by(self, owner: str) -> set[str]:
        """Return the items that a data owner holds."""
        partition = self.feed.partition
        held = partition.member[:, partition.names.index(owner)]
        return {self.feed.dataset.items[item] for item in np.flatnonzero(held).tolist()}

    def open_items(self) -> set[str]:
        """Return the items that enough users of the run have in training for all to train them; FedNCF, one group."""
        data, least = self.feed.dataset, self.settings.fedncf.min_touch
        counts = np.bincount(data.item[self.feed.split.part == TRAIN], minlength=len(data.items))
        return {data.items[item] for item in np.flatnonzero(counts >= least).tolist()}

    def declined(self) -> dict[str, list[str]]:
        """Return why parties sat out a sum or stayed out of the run: of hosts by receipts, of key holders by logs."""
        found: dict[str, list[str]] = defaultdict(list)
        for party in self.parties("client"):
            store = self.children[party].state / "client.db"
            found[party] += [reason for (reason,) in rows(store, "SELECT reason FROM declined")]
        for party in self.parties("decrypting-client"):
            found[party] += [line["reason"] for line in self.log(party) if line["event"] == "sits out"]
        return {party: reasons for party, reasons in found.items() if reasons}

    def confirmed(self) -> set[str]:
        """Return the key holders that have signed a list of submitters."""
        holders = self.parties("decrypting-client")
        return {party for party in holders if (self.children[party].state / "journal.json").exists()}

    def abandoned(self) -> list[str]:
        """Return why rounds were abandoned, as the operator was told."""
        ended = [event.round for event in self.events if event.HasField("round")]
        return [one.reason for one in ended if one.reason]
