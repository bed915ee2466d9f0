"""A federation of real processes whose COS lies."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.config.run import RunSettings
from coterie.evaluation.holdout import TRAIN
from coterie.launch.parties import Laid
from coterie.studies.run_data import Feed

from ..programs import ProgramChild
from ..running import Running
from ..stores import rows
from .accomplice import Accomplice
from .lies import LIES, Lie
from .revealed import REVEALED, Revealed, read_revealed


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
        programs = {"thirdparty": ["tests.processes.lying.thirdparty", ",".join(self._hidden)]}
        if not self._checked:
            programs["client"] = ["tests.processes.lying.unchecked"]
        for party, child in self.children.items():
            if child.role in programs:
                self.children[party] = ProgramChild(
                    child.role, child.name, child.folder, program=programs[child.role]
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
        self._program = ["tests.processes.lying.cos", name, victim, "--introduction", str(self.introduction)]
        self._program += ["--thorough"] if thorough else []

    def _configure(self) -> Laid:
        laid = super()._configure()
        honest = self.cos
        self.children[honest.party] = ProgramChild(
            honest.role, honest.name, honest.folder, program=self._program
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
