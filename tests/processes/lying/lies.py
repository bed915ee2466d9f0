"""Lies of a COS: what it says to whom, and what it does with the sums that it gets.

`Lie` has the hooks and tells the truth.  A lie is a subclass in `LIES` that changes some of them; its docstring says
what the COS says to whom.  ``tests.processes.lying.cos`` runs the real COS with one of them.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from coterie_client.host import without_owners
from numpy.typing import NDArray

from coterie.rounds.conductor import model_from_bytes, model_to_bytes
from coterie.rounds.inputs import CATALOGUE, OPEN_ITEMS, named_inputs
from coterie.rounds.plan_hash import keys_hash, plan_hash
from coterie.rounds.sides import Arrays
from coterie.rounds.training import Purpose
from coterie.secure_sum.plan import Member, SumPlan
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Population

from .revealed import Revealed

KINDS = wire.FetchKind


class Next(enum.Enum):
    """Moves of the COS while no sum is in progress."""

    OPEN = "open the next sum"
    WAIT = "open none"
    LIST = (
        "ask key holders again, under the plan of the sum that was dropped, with another list of submitters"
    )


class Shown(Protocol):
    """The messages that a party is shown now, lies included."""

    def run_plan(self) -> wire.RunPlan:
        """Return the run's plan."""
        ...

    def payload(self, kind: wire.FetchKind.ValueType) -> bytes:
        """Return the payload that the party would fetch: the catalogue, the model or the open items."""
        ...


def fitted(plan: SumPlan, shown: Shown) -> SumPlan:
    """Return the plan of a sum with all fields as they follow from what a party is shown.

    The party then finds nothing wrong with its plan; only its hash is another than that of others' plans.
    """
    hashes = {
        CATALOGUE: keys_hash(wire.Catalogue.FromString(shown.payload(KINDS.FETCH_KIND_CATALOGUE)).items)
    }
    names = [one.name for one in plan.inputs]
    if OPEN_ITEMS in names:
        hashes[OPEN_ITEMS] = hashlib.sha256(shown.payload(KINDS.FETCH_KIND_OPEN_ITEMS)).digest()
    return dataclasses.replace(
        plan,
        run_plan_sha256=plan_hash(shown.run_plan()),
        model_sha256=hashlib.sha256(shown.payload(KINDS.FETCH_KIND_MODEL)).digest(),
        inputs=named_inputs(names, hashes),
    )


class Lie:
    """The truth: no hook changes anything.

    Messages that hooks are given are copies, which they may change and return.

    Parameters
    ----------
    victim : str
        Party whose users' data the COS wants, as ``client/host-2``.
    thorough : bool
        Whether each party is shown plans of sums that fit what the party is shown beside them (`fitted`).
    """

    introduction: Path | None = None
    """File in which an `Accomplice` says how it is to be introduced; where the program of the COS is given one."""

    def __init__(self, victim: str, *, thorough: bool = False) -> None:
        self.victim = victim
        self.thorough = thorough

    def another_host(self, party: str) -> bool:
        """Return whether a party is a client host, and not the victim."""
        return party.startswith("client/") and party != self.victim

    # --- what a party is told ----------------------------------------------------------------------------------

    def run_plan(self, party: str, plan: wire.RunPlan) -> wire.RunPlan:
        """Return the run's plan that a party is shown when it registers; the hash beside it is always this plan's."""
        return plan

    def catalogue(self, party: str, catalogue: wire.Catalogue) -> wire.Catalogue:
        """Return the catalogue that a party is shown."""
        return catalogue

    def population(self, party: str, population: Population) -> Population:
        """Return the population that a host is shown."""
        return population

    def model(self, party: str, payload: bytes) -> bytes:
        """Return the model that a party is shown."""
        return payload

    def open_items(self, party: str, opened: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the open items that a party is shown, bool (groups, I)."""
        return opened

    def sum_plan(self, party: str, plan: SumPlan, shown: Shown) -> SumPlan:
        """Return the plan of a sum that a party is shown."""
        return fitted(plan, shown) if self.thorough else plan

    # --- who is in a sum ---------------------------------------------------------------------------------------

    def hears(self, party: str) -> bool:
        """Return whether a party is asked, and its messages count, in the sum in progress."""
        return True

    def holders(self, present: Sequence[Member]) -> Sequence[Member]:
        """Return the key holders that plans name, of those that are present."""
        return present

    def listed(self, party: str) -> bool:
        """Return whether a party's contribution is in the other list of `Next.LIST`."""
        return True

    # --- what becomes of sums ----------------------------------------------------------------------------------

    def applies(self, sum_: Revealed) -> bool:
        """Return whether a sum is applied; otherwise it is dropped without a word, and the run stays where it was."""
        return True

    def next(self) -> Next:
        """Return what the COS does when no sum is in progress."""
        return Next.OPEN

    def kept_model(self, arrays: Arrays) -> Arrays:
        """Return the arrays of the model that the COS goes on with, before it opens a sum."""
        return arrays

    def joined(self, party: str) -> None:
        """Take note that a party has registered, for the first or another time."""


class OtherItems(Lie):
    """All hosts but the victim are told a catalogue of as many items that nobody has."""

    def catalogue(self, party: str, catalogue: wire.Catalogue) -> wire.Catalogue:
        """Return other keys for the same number of items."""
        if self.another_host(party):
            catalogue.items[:] = [f"other-{key}" for key in catalogue.items]
        return catalogue


class OtherOrder(Lie):
    """All hosts but the victim are told the items in another order, each with its owner."""

    def catalogue(self, party: str, catalogue: wire.Catalogue) -> wire.Catalogue:
        """Return the same items backwards."""
        if self.another_host(party):
            catalogue.items[:] = catalogue.items[::-1]
        return catalogue


class OpenToOne(Lie):
    """The victim is told that all items are open for training, all other hosts that none is."""

    def open_items(self, party: str, opened: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return all items for the victim, none for others."""
        return np.full_like(opened, party == self.victim)


class NoRate(Lie):
    """All hosts but the victim are told a local rate of 1e-30, in a plan of the run with the hash of that plan.

    What they train is rounded to nothing.
    """

    def run_plan(self, party: str, plan: wire.RunPlan) -> wire.RunPlan:
        """Return the plan with another rate for all hosts but the victim."""
        if self.another_host(party):
            plan.settings = json.dumps({**json.loads(plan.settings), "local_rate": 1e-30})
        return plan


class AskedTwice(Lie):
    """The groups' items are asked for twice: of everybody, a sum that is dropped, then of everybody but the victim.

    The victim is told of no second sum.  For the others it is a further one with the same purpose, pass and part.
    """

    def __init__(self, victim: str, *, thorough: bool = False) -> None:
        super().__init__(victim, thorough=thorough)
        self._dropped = False
        self._again = False

    def hears(self, party: str) -> bool:
        """Return whether a party is not the victim, in the second sum."""
        return not (self._again and party == self.victim)

    def applies(self, sum_: Revealed) -> bool:
        """Return whether a sum is not the first one of items."""
        self._again = not self._dropped and sum_.purpose == Purpose.SUPPORTS.value
        self._dropped |= self._again
        return not self._again


class OtherModels(Lie):
    """The groups' items are asked for again and again, each time under another model, which all parties are told.

    All these sums are dropped but the last.
    """

    TIMES = 12

    def __init__(self, victim: str, *, thorough: bool = False) -> None:
        super().__init__(victim, thorough=thorough)
        self._asked = 0
        self._changes = False

    def applies(self, sum_: Revealed) -> bool:
        """Return whether a sum is another one than of items, or the last of these."""
        if sum_.purpose != Purpose.SUPPORTS.value:
            return True
        self._asked += 1
        self._changes = self._asked < self.TIMES
        return not self._changes

    def kept_model(self, arrays: Arrays) -> Arrays:
        """Return arrays with another bias of the network after each sum of items."""
        if not self._changes:
            return arrays
        self._changes = False
        network = arrays["model.network"].copy()
        network[-1] *= 1.001
        return {**arrays, "model.network": network}


class OtherRows(Lie):
    """The victim is told a model in which all rows of items are twice as long."""

    def model(self, party: str, payload: bytes) -> bytes:
        """Return the model with other rows for the victim."""
        if party != self.victim:
            return payload
        model = model_from_bytes(payload)
        return model_to_bytes({**model, "items": 2 * model["items"]})


class OneHolder(Lie):
    """Plans of sums name one holder of the key, to all; the other holders are not asked for anything."""

    def holders(self, present: Sequence[Member]) -> Sequence[Member]:
        """Return the first holder."""
        return present[:1]


class SecondList(Lie):
    """Holders are told of other submitters under a plan that they knew: all but the victim.

    The sum over everybody is dropped, and nothing happens until its first holder, which may have lost its journal,
    registers again.  The contributions are those that were sent for the first list.
    """

    def __init__(self, victim: str, *, thorough: bool = False) -> None:
        super().__init__(victim, thorough=thorough)
        self._holder = ""
        self._next = Next.OPEN

    def listed(self, party: str) -> bool:
        """Return whether a party is not the victim."""
        return party != self.victim

    def applies(self, sum_: Revealed) -> bool:
        """Return whether a sum is not the first one."""
        first = not self._holder
        if first:
            self._holder = sum_.holders[0]
        self._next = Next.WAIT if first else Next.OPEN
        return not first

    def next(self) -> Next:
        """Return what to do: wait after the first sum, and go on after the second list."""
        return self._next

    def joined(self, party: str) -> None:
        """Ask the holder again once it is back."""
        if self._next is Next.WAIT and party == self._holder:
            self._next = Next.LIST


class PosingAsOwner(Lie):
    """The victim is told that the first of the data owners, by name, has the keys and the address of an accomplice."""

    def catalogue(self, party: str, catalogue: wire.Catalogue) -> wire.Catalogue:
        """Return the catalogue with the accomplice in the place of an owner, under its name, and nowhere else."""
        if party == self.victim and self.introduction is not None:
            owner = min(catalogue.owners, key=lambda one: one.name)
            told = wire.CatalogueOwner.FromString(self.introduction.read_bytes())
            owner.bundle.CopyFrom(told.bundle)
            owner.address, owner.tls_name = told.address, told.tls_name
            itself = [
                n for n, one in enumerate(catalogue.owners) if one.bundle == told.bundle and one != owner
            ]
            return without_owners(catalogue, itself)
        return catalogue


class OneBehind(Lie):
    """Data owners are told that one user behind a row suffices for the row to leave them (DRIFT's shielded form)."""

    def run_plan(self, party: str, plan: wire.RunPlan) -> wire.RunPlan:
        """Return the plan with another floor for data owners."""
        if party.startswith("data-owner/"):
            plan.settings = json.dumps({**json.loads(plan.settings), "k_min": 1})
        return plan


LIES: dict[str, type[Lie]] = {
    "nothing": Lie,
    "other-items": OtherItems,
    "other-order": OtherOrder,
    "open-to-one": OpenToOne,
    "no-rate": NoRate,
    "asked-twice": AskedTwice,
    "other-models": OtherModels,
    "other-rows": OtherRows,
    "one-holder": OneHolder,
    "second-list": SecondList,
    "posing-as-owner": PosingAsOwner,
    "one-behind": OneBehind,
}
"""Lies by the name that the program of the COS is given."""
