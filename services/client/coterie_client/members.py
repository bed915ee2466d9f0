"""A host's users as members of sums: which plans they accept, their contributions, their journals and receipts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from coterie.crypto import clocks
from coterie.crypto.beacon import beacon_statement
from coterie.crypto.identity import Bundle
from coterie.crypto.transparency import BEACON
from coterie.crypto.verification import VerificationError
from coterie.crypto.verified import Verified
from coterie.parties.denoising import AcceptedNoise
from coterie.parties.sum_party import Contributed, Seat, SumRecords
from coterie.rounds.inputs import OPEN_ITEMS, check_inputs
from coterie.rounds.last_layout import LastLayout
from coterie.rounds.membership import Membership, purpose_of
from coterie.rounds.policy import population_pass
from coterie.rounds.population import Ids, Population
from coterie.rounds.sides import HostSide, HostUsers, User, combining, expanding
from coterie.rounds.stance import Stance
from coterie.rounds.training import Purpose
from coterie.secure_sum.chains import chains_for
from coterie.secure_sum.contribution import Layout
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import Declined
from coterie.secure_sum.registry import KEYED, Signer
from coterie.store import client as store
from coterie.wire.refusal import Refusal
from coterie.wire.v1 import orchestrator_pb2 as wire
from coterie.wire.v1.common_pb2 import Population as PopulationMessage
from coterie.wire.v1.common_pb2 import Waves
from coterie_client.choice import Choice, Forgetting
from coterie_client.encryption import Encryption
from coterie_client.expansion import HostExpansion
from coterie_client.host import Host, read
from coterie_client.journals import Journals
from coterie_client.latents import HostLatents
from coterie_client.learner import Learner, Model
from coterie_client.receipts import refused_entry, sent_entry

if TYPE_CHECKING:
    from coterie.crypto.paillier import Obfuscators

__all__ = ["HostMembers"]

_log = structlog.get_logger("coterie.members")

_DAY_S = 24 * 3600


class HostMembers:
    """A host's users as members of the sums of a rounds-based system; `MemberDriver` drives them.

    Parameters
    ----------
    host : Host
        Registered.
    journals : Journals
        Journals of its members.
    learner : Learner
    """

    def __init__(self, host: Host, journals: Journals, learner: Learner) -> None:
        self._host = host
        self._plan = host.party.plan
        self._consent = host.consent
        self._journals = journals
        self._learner = learner
        self._verified = Verified(note=host.runtime.note)
        self._chains = chains_for(self._plan.rounds.channel_rounds)
        self._encryption = Encryption(host) if self._plan.secure_sum in KEYED else None
        self._expansion = HostExpansion(host)
        self._latents = HostLatents(host)
        self._choice = Choice(host.settings.state)
        self.forgetting = Forgetting(self._choice, self.forget_published)
        """Deletes at the third party what the users published, once the person wishes it."""
        # Nothing is published while what was is deleted.
        self._beside = asyncio.Lock()
        self._membership: Membership | None = None
        # Layouts, with the side that they are of.
        self._layouts: tuple[HostSide, LastLayout] | None = None
        # Last pass in whose population this host took part, where the population is open.
        self._pass = -1
        self._user = {one.participant_id: number for number, one in enumerate(host.bundles, start=1)}
        self.best = 0
        """Version of the best evaluation so far, as the COS says."""

    # --- accepting a plan ------------------------------------------------------------------------------------------

    async def accept(self, plan: SumPlan, version: int) -> _HostSum:
        """Check a plan and return the sum under it.

        Raises
        ------
        Declined
            When the plan is outside the run's plan, or names another model, layout or input than this host uses.
        """
        covered = await self._covered(plan)
        obfuscators = None if self._encryption is None else await self._encryption.for_plan(plan)
        purpose = Purpose(plan.purpose)
        side = await self._side()
        layout = self._layout(side, plan)
        denoisers = await self._keys_of_denoisers(plan)
        try:
            model = await self._learner.model(plan.model_version, plan.model_sha256)
        except VerificationError as error:
            raise Declined(f"the model of the plan does not open: {error.message}") from None
        if purpose is Purpose.TRAIN:
            await self._learner.train_on(model)
        names, opened = side.inputs(purpose), None
        if OPEN_ITEMS in names:
            opened = await self._learner.opened(model)
        check_inputs(plan, names, self._learner.inputs(model))
        seats = self._seats(plan, covered, layout, obfuscators, denoisers)
        await self._find_others(side, plan, model, covered, seats)
        return _HostSum(self._host, self._learner, self.best, plan, seats, covered, side, model, opened)

    async def forget_published(self) -> int:
        """Have what this host's users published in the run deleted at the third party; return how many users had some.

        Raises
        ------
        Refusal, PeerError
            The COS or the third party refuse, or cannot be reached.
        CertificateError
            What a user has published is not known any more: its file is damaged.
        """
        async with self._beside:
            return await self._latents.forget() + await self._expansion.forget()

    async def _side(self) -> HostSide:
        try:
            return await self._learner.side()
        except VerificationError as error:
            raise Declined(error.message) from None

    async def _find_others(
        self,
        side: HostSide,
        plan: SumPlan,
        model: Model,
        covered: Mapping[int, Sequence[User]],
        seats: Mapping[int, Seat],
    ) -> None:
        """Find anonymous neighbours or pseudo meta-latents for users who take part in a sum, where the run has them."""
        expands, combines = expanding(side), combining(side)
        if combines is None and expands is None:
            return
        users = [
            user.index
            for member, several in covered.items()
            if not seats[member].objections
            for user in several
        ]
        if not users and self._beside.locked():
            # Nobody of this host takes part, and the sum is told so at once.
            return
        async with self._beside:
            # The person may have left since the plan was looked at.
            users = [] if self._choice.objections() else users
            if combines is not None:
                await self._latents.before(combines, plan, model, users)
            if expands is not None and expands.graph_terms is not None:
                await self._expansion.before(
                    expands, expands.graph_terms, plan, model, self._learner.items, users
                )

    def _layout(self, side: HostSide, plan: SumPlan) -> Layout:
        """Return the layout of a sum as this host computes it; raises Declined when the plan names another."""
        if self._layouts is None or self._layouts[0] is not side:
            self._layouts = side, LastLayout(side.layout)
        layouts, purpose = self._layouts[1], Purpose(plan.purpose)
        if layouts.sha256(purpose) != plan.layout_sha256:
            raise Declined("the layout of the sum is not the one that this host computes")
        return layouts.layout(purpose)

    async def _keys_of_denoisers(self, plan: SumPlan) -> Mapping[bytes, Bundle]:
        """Return the verified keys of a plan's denoisers, by participant; none for a sum without noise."""
        directory = self._host.directory
        if not plan.noise_floor or directory is None:
            return {}
        if reason := plan.denoisers.shortfall:
            raise Declined(reason)
        found = await directory.bundles(plan.members[member].participant for member in plan.denoisers.ring)
        return {one: bundle for one, bundle in found.items() if one not in self._host.revoked()}

    # --- denoising for others --------------------------------------------------------------------------------------

    async def denoises(self, plan: SumPlan) -> AcceptedNoise:
        """Check the plan of a sum in which this host denoises; return the sum as it denoises in it.

        Raises
        ------
        Declined
            When the plan is outside the run's plan or this host's consent, or the host does not denoise in it.
        """
        covered = await self._covered(plan)
        layout = self._layout(await self._side(), plan)
        revoked = plan.positions(self._host.revoked().__contains__)
        # Rounds per day are those of single users: a host denoises in every round of the run.
        if objections := self._consent.objections_to_round(plan, 0, revoked):
            raise Declined("; ".join(objections))
        place = plan.denoisers.place_of(self._host.runtime.party)
        if place is None:
            raise Declined("the plan does not name this host as a denoiser")
        first = covered[plan.denoisers.ring[place]][0].index
        return AcceptedNoise(self._host.identities[first], [self._host.party.slots[first]], layout)

    def slots_of_first(self, plan: SumPlan) -> list[int]:
        """Return the slot of the host's first member in a plan; none where it has no member in it."""
        own = self._user
        found = (own[one.participant] - 1 for one in plan.members if one.participant in own)
        return [self._host.party.slots[index] for index in (next(found, None),) if index is not None]

    def _seats(
        self,
        plan: SumPlan,
        covered: Mapping[int, Sequence[User]],
        layout: Layout,
        obfuscators: Obfuscators | None,
        denoisers: Mapping[bytes, Bundle],
    ) -> dict[int, Seat]:
        stance, lost = self._choice.now()
        today, now = self._today(stance), clocks.now()
        gone = self._host.revoked()
        revoked = plan.positions(gone.__contains__)
        seats = {}
        for member, users in covered.items():
            journal = self._journals.of(plan.members[member].participant)
            # A round that was joined before a restart is counted already.
            fresh = journal.joined < plan.round
            most = max(today.get(user.index + 1, 0) for user in users) if fresh and today else 0
            first = users[0].index
            signer = Signer(
                self._host.identities[first],
                self._host.bundles[first],
                self._host.directory_key,
                now,
                self._verified,
                obfuscators,
                layout,
                gone,
                denoisers,
                self._chains,
            )
            slots = list(map(self._host.party.slots.__getitem__, HostUsers.of(users).indices.tolist()))
            objections = self._consent.objections_to_round(plan, most, revoked)
            objections += lost or stance.objections(most)
            seats[member] = Seat(slots, journal, signer, objections)
        return seats

    def _today(self, stance: Stance) -> dict[int, int]:
        """Return the number of today's rounds by user; empty unless consent or the person limits rounds per day."""
        if not self._consent.rounds_per_day and not stance.rounds_per_day:
            return {}
        with self._host.engine.connect() as connection:
            return store.load_taken_part(connection, clocks.now() // _DAY_S)

    async def _covered(self, plan: SumPlan) -> dict[int, Sequence[User]]:
        """Check a sum's plan; return this host's members in it and the users of each, as `Membership.covered`.

        The population is extended where the plan names one that this host does not know.  Where the population is open,
        the pass is kept before this host takes part in it.
        """
        if self._membership is None:
            self._membership = await self._find_population()
        if not self._plan.rounds.most_users:
            return self._membership.covered(plan)
        at = population_pass(purpose_of(plan), plan.pass_number)
        if not self._membership.knows(plan.population_sha256):
            self._membership = await self._extended(self._membership)
        covered = self._membership.covered(plan)
        if at > self._pass:
            run = self._plan.run_id
            await self._host.writer.run_when_possible(
                lambda connection: store.save_population_pass(connection, run, at)
            )
            self._pass = at
        return covered

    async def _extended(self, before: Membership) -> Membership:
        """Return the membership with the waves that the COS has beyond those which this host knows, once checked."""
        run, known = self._plan.run_id, len(before.population.waves)
        _, payload = await self._host.party.fetch(wire.FetchKind.FETCH_KIND_WAVES, version=known)
        if payload is None:
            raise AssertionError("a payload that nobody holds is always sent")
        found = await asyncio.to_thread(lambda: before.extended(read(Waves, payload), self._pass))
        if found is before:
            # The plan names a population that cannot follow the one of this host.
            return before
        await self._logged(found, known + 1)
        await self._host.writer.run_when_possible(
            lambda connection: store.extend_population(connection, run, known, payload)
        )
        _log.info(
            "population extended", run=run, users=found.users, before=before.users, pass_number=self._pass
        )
        return found

    async def _fetch_population(self) -> bytes:
        _, payload = await self._host.party.fetch(wire.FetchKind.FETCH_KIND_POPULATION)
        if payload is None:
            raise AssertionError("a payload that nobody holds is always sent")
        return payload

    async def _find_population(self) -> Membership:
        """Return the population of the run as this host has kept it or, the first time, as the COS gives it.

        It is kept before this host takes part under it, and no other one is taken for this run, but for one that
        extends it.  The beacons that the third party signed for it have to be in the third party's log.
        """
        run = self._plan.run_id
        kept = await asyncio.to_thread(self._kept_population, run)
        if kept is not None:
            self._pass = kept.pass_number
            return await self._logged(await asyncio.to_thread(self._member_of, kept.payload, *kept.waves))
        payload = await self._fetch_population()
        found = await self._logged(await asyncio.to_thread(self._member_of, payload))
        await self._host.writer.run_when_possible(
            lambda connection: store.save_population(connection, run, payload)
        )
        return found

    async def _logged(self, found: Membership, first: int = 0) -> Membership:
        """Require that beacons of the population, from a number on, are in the third party's log."""
        population, run = found.population, self._plan.run_id
        if population.signature:
            drawn = zip(population.hashes(run)[first:], population.beacons[first:], strict=True)
            statements = [beacon_statement(run, sha256, beacon) for sha256, (beacon, _) in drawn]
            await self._host.runtime.require_logged(BEACON, statements)
        return found

    def _kept_population(self, run: str) -> store.KeptPopulation | None:
        with self._host.engine.connect() as connection:
            return store.load_population(connection, run)

    def _member_of(self, payload: bytes, *later: bytes) -> Membership:
        try:
            population = Population.from_wire(read(PopulationMessage, payload))
            population = population.extended(*(read(Waves, one) for one in later))
        except Refusal as refusal:
            raise Declined(refusal.message) from None
        return Membership(
            self._plan,
            self._host.runtime.party,
            population,
            Ids.of(bundle.participant_id for bundle in self._host.bundles),
            self._host.directory_key,
        )

    # --- the store -------------------------------------------------------------------------------------------------

    def undisturbed(self) -> AbstractAsyncContextManager[object]:
        """Return a context that does nothing: only the local step changes what contributions are made of."""
        return nullcontext()

    async def keep(self, records: SumRecords[bytes]) -> None:
        """Store journals with private rows and entries of the receipts, once all bundles relied on are logged."""
        await self._host.runtime.settled()
        secure_sum = self._plan.secure_sum
        await self._journals.keep(
            records.journals,
            records.beside,
            [sent_entry(one, secure_sum, self._receipt_of(one.participant)) for one in records.leaving],
            [refused_entry(one, self._receipt_of(one.participant)) for one in records.sat_out],
            self._taking_part(records.joining),
            clocks.now() // _DAY_S,
        )

    def _taking_part(self, slots: Sequence[int]) -> list[int]:
        """Return the users for whom one more round counts today; empty unless rounds per day are limited."""
        if not self._consent.rounds_per_day and not self._choice.now()[0].rounds_per_day:
            return []
        wanted = set(slots)
        return [user for user, slot in enumerate(self._host.party.slots, start=1) if slot in wanted]

    def _receipt_of(self, participant: bytes) -> int:
        """Return the user on whose receipt a member's messages belong; 0 for all users of the host."""
        return self._user.get(participant, 0) if self._plan.rounds.party_per_user else 0


@dataclass(frozen=True, eq=False)
class _HostSum:
    """A sum in which users of a host take part.

    Parameters
    ----------
    host : Host
    learner : Learner
    best : int
        Version of the best evaluation before this sum.
    plan : SumPlan
    seats : mapping of int to Seat
    covered : mapping of int to sequence of User
        The users that each member covers.
    side : HostSide
    model : Model
        Version on which the sum is formed.
    opened : ndarray of bool, shape (groups, I), optional
        Items that each group may train.
    """

    host: Host
    learner: Learner
    best: int
    plan: SumPlan
    seats: Mapping[int, Seat]
    covered: Mapping[int, Sequence[User]]
    side: HostSide
    model: Model
    opened: NDArray[np.bool_] | None

    def contributions(self, members: Sequence[int]) -> Iterator[Contributed[bytes]]:
        """Yield each member's contribution, with the private rows that it changed."""
        activity = self.host.runtime.accounting.activity
        covered = {member: self.covered[member] for member in members}
        made = self.side.contributions(self.plan, self.model.arrays, self.opened, covered)
        while True:
            # An overflow is found and reported when the contribution is rounded.
            with activity("local step"), np.errstate(over="ignore", invalid="ignore"):
                found = next(made, None)
            if found is None:
                return
            member, codes = found
            yield Contributed(
                member, codes, self.learner.rows(self._users([member])) if self._trains else b""
            )

    async def conclude(self, members: Sequence[int]) -> None:
        """Keep private arrays of an evaluated version before its metrics are sent to the COS."""
        if self.plan.purpose != Purpose.EVALUATE.value:
            return
        await self.host.writer.files_when_possible(
            "write the private state", partial(self.learner.evaluated, self.model.version, self.best)
        )
        if self.host.settings.per_user_metrics:
            measured = dict(self.side.measured)
            await asyncio.to_thread(
                self.host.write_per_user, self.plan.pass_number, measured, self._users(members)
            )

    async def save(self, members: Sequence[int]) -> None:
        """Write private rows that training has changed to their files."""
        if self._trains:
            await self.host.writer.files_when_possible(
                "write the private state", partial(self.learner.save, self._users(members))
            )

    @property
    def _trains(self) -> bool:
        return self.plan.purpose == Purpose.TRAIN.value

    def _users(self, members: Sequence[int]) -> list[int]:
        """Return positions at the host of the users that some members cover."""
        return [user for member in members for user in HostUsers.of(self.covered[member]).indices.tolist()]
