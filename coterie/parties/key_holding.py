"""A key holder's whole part in a run: obtain the key, join, then sign and decrypt until the run has ended.

A decrypting client is a process that does only this.  If participants share the key, a client host does it in addition
to its users' part, over the same connection.

Needs ``gmpy2``; services import this module only where they hold keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from coterie.crypto import restored
from coterie.crypto.identity import Bundle, Identity
from coterie.crypto.operator_key import OperatorKeys
from coterie.errors import CertificateError, CoterieError, PeerError
from coterie.net.channel import Channel
from coterie.net.status import is_away
from coterie.parties.custody import Custody
from coterie.parties.decryption import Bundles, Decryption, MakeHalf, last_confirmed
from coterie.parties.party import Party, Registrant
from coterie.parties.public_keys import Trust
from coterie.parties.rotation import Rotation
from coterie.parties.signed_run import objections_to_signature
from coterie.parties.sum_tasks import Activity
from coterie.rounds.consent import Consent
from coterie.store.engine import Keeping, keep_files, trouble_of
from coterie.wire.v1 import orchestrator_pb2 as wire

__all__ = ["KeyHolding"]

_log = structlog.get_logger("coterie.key_holder")

_PAUSE_S = 2.0
"""Pause between two attempts to hold the run's first key, seconds."""


class KeyHolding:
    """A key holder in a run: its custody of keys, its registration, and its answers to tasks of sums.

    Parameters
    ----------
    party : Party
        The holder's own; other parties may speak over the same connection.
    thirdparty : Channel
    identity : Identity
        Keys of the holder, which is on the roster.
    bundle : Bundle
        Public keys of the holder, countersigned.
    trust : Trust
    bundles : callable
    operators : OperatorKeys
        Operators whose runs the holder accepts.
    consent : Consent
        Conditions under which the holder helps to form a sum.
    state : Path
        Folder for the holder's keys and journal.
    activity : callable
        Counts CPU time by activity.
    rotate_every : int, optional
        Rounds after which another key is made; 0 for never.  The first holder of the roster makes it.
    keeps : bool, optional
        Whether old secrets are kept until the end, because not only sums of rounds are encrypted under them.
    half : callable, optional
        Given the run's plan, returns the maker of this holder's half of a sum; that of the encrypted sum when absent.
    keeping : callable, optional
        Writes the holder's journal; on a full volume it waits for room.
    """

    def __init__(
        self,
        party: Party,
        thirdparty: Channel,
        identity: Identity,
        bundle: Bundle,
        trust: Trust,
        bundles: Bundles,
        operators: OperatorKeys,
        consent: Consent,
        state: Path,
        activity: Activity,
        *,
        rotate_every: int = 0,
        keeps: bool = False,
        half: Callable[[wire.RunPlan], MakeHalf] | None = None,
        keeping: Keeping = keep_files,
    ) -> None:
        self.custody = Custody(thirdparty, identity, trust, state / "keys", bundles)
        own = identity.participant_id
        self._rotation = Rotation(
            self.custody, rotate_every, lambda: trust.eligible()[:1] == (own,), keeps=keeps
        )
        self._party = party
        self._identity = identity
        self._bundle = bundle
        self._bundles = bundles
        self._operators = operators
        self._consent = consent
        self._journal = state / "journal.json"
        self._state = state
        self._activity = activity
        self._half = half
        self._keeping = keeping

    async def run(self, running: asyncio.TaskGroup, holds: Callable[[str], None]) -> None:
        """Take part in the run from its beginning to its end.

        A third party that is away, other holders that are, and a full volume are waited for.

        Parameters
        ----------
        running : TaskGroup
            Runs the holder's background tasks.
        holds : callable
            Called with ``"key"`` when the holder has the key, with ``"run"`` when it takes part in the run.
        """
        await self._first_key()
        holds("key")
        following = running.create_task(self.custody.follow(lambda holding: self._rotation.clear()))
        try:
            await self._take_part(running, holds)
        finally:
            following.cancel()

    async def _first_key(self) -> None:
        """Hold the run's key; while the third party or other holders are away, or there is no room, try again."""
        said = ""
        while True:
            try:
                await self.custody.ensure()
                return
            except (CertificateError, PeerError) as error:
                if not _passes(error):
                    raise
                if error.message != said:
                    _log.warning("no paillier key yet", reason=str(error))
                said = error.message
            await asyncio.sleep(_PAUSE_S)

    async def _take_part(self, running: asyncio.TaskGroup, holds: Callable[[str], None]) -> None:
        kind = wire.ParticipantKind.PARTICIPANT_KIND_KEY_HOLDER
        await self._party.wait_and_register([Registrant(self._identity, self._bundle, kind)])
        plan = self._party.plan
        objections = [
            *objections_to_signature(self._party, self._operators),
            *self._consent.objections(plan),
            *restored.objections(self._state, plan.run_id, plan.secure_sum, last_confirmed(self._journal)),
        ]
        if objections:
            _log.warning("outside this holder's consent", reasons=objections)
            await self._party.leave()
            return
        _log.info("joined", system=plan.system)
        decryption = Decryption(
            self._party,
            self._identity,
            self.custody.secrets,
            self.custody.holders,
            self._bundles,
            self._consent,
            self._journal,
            self._activity,
            self._rotation.serving,
            keeping=self._keeping,
            **({} if self._half is None else {"half": self._half(plan)}),
        )
        holds("run")
        working = running.create_task(decryption.run())
        async for tasks in self._party.tasks():
            decryption.hear(tasks)
            if self._party.end_in(tasks) is not None:
                _log.info("the run has ended")
                decryption.finish()
                await working
                return


def _passes(error: CoterieError) -> bool:
    """Return whether what kept a holder from its key may pass: a peer that is away or not ready, or a full volume."""
    # A holder that is not there in time is a PeerError without a call that failed.
    if is_away(error) or type(error) is PeerError:
        return True
    return error.__cause__ is not None and bool(trouble_of(error.__cause__))
