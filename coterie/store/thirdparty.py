"""The store of the third party: redeemed tokens, issued certificates, key bundles, revocations, Paillier keys, the log.

It holds public keys, hashes and envelopes sealed for others; it holds no secret keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import sqlalchemy as sa
from google.protobuf.message import DecodeError

from coterie.crypto import transparency
from coterie.crypto.authority import renewal_time
from coterie.crypto.beacon import Beacon, beacon_statement, population_hash, wave_hash
from coterie.errors import StoreError
from coterie.rounds.population import Ids, Population, Wave
from coterie.secure_sum.bundles import bundle_from_wire
from coterie.store import thirdparty_log as log
from coterie.store.engine import BeforeMigration, Writer, open_sqlite
from coterie.store.thirdparty_keys import (
    KeptKey,
    NewKey,
    add_countersignature,
    add_key,
    metadata,
    newest_key,
    sealed_for,
)
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.common_pb2 import KeyBundle

__all__ = ["DirectoryAnswer", "Published", "Redemption", "Renewed", "Revoked", "ThirdPartyStore", "metadata"]

T = TypeVar("T")

_ROWS = 10_000
"""Users of a population that are written with one statement."""

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("token_hash", sa.LargeBinary, primary_key=True),
    sa.Column("party", sa.String, nullable=False),
    sa.Column("participants", sa.Integer, nullable=False),
    sa.Column("public_key_hash", sa.LargeBinary, nullable=False),
    sa.Column("fingerprint", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("chain", sa.LargeBinary, nullable=False),
    sa.Column("redeemed", sa.Integer, nullable=False),
)

bundles = sa.Table(
    "bundles",
    metadata,
    sa.Column("participant", sa.LargeBinary, primary_key=True),
    sa.Column("party", sa.String, nullable=False),
    sa.Column("token_hash", sa.LargeBinary, nullable=False, index=True),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
)

# Renewed certificates, each with its predecessor and the token of the party's first certificate.
renewals = sa.Table(
    "renewals",
    metadata,
    sa.Column("fingerprint", sa.LargeBinary, primary_key=True),
    sa.Column("after", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("token_hash", sa.LargeBinary, nullable=False, index=True),
    sa.Column("public_key_hash", sa.LargeBinary, nullable=False),
    sa.Column("chain", sa.LargeBinary, nullable=False),
    sa.Column("renewed", sa.Integer, nullable=False),
)

revocations = sa.Table(
    "revocations",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("subject", sa.LargeBinary, primary_key=True),
    sa.Column("revision", sa.Integer, nullable=False, index=True),
)

beacons = sa.Table(
    "beacons",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("population_sha256", sa.LargeBinary, nullable=False),
    sa.Column("beacon", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
    # Whether the users up to the last wave are in ``members``.
    sa.Column("members", sa.Integer, nullable=False, server_default="0"),
)

# Users who came after a run had begun, with the hash of the population up to and with them.  ``participants`` are their
# ids, 32 bytes each; empty where an earlier release kept none.
waves = sa.Table(
    "waves",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("population_sha256", sa.LargeBinary, nullable=False),
    sa.Column("from_pass", sa.Integer, nullable=False),
    sa.Column("beacon", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
    sa.Column("participants", sa.LargeBinary, nullable=False, server_default=""),
)

# One row: the number of changes so far, counted from 1 so that 0 can mean "I hold nothing yet".
members = sa.Table(
    "members",
    metadata,
    sa.Column("run_id", sa.String, primary_key=True),
    sa.Column("participant", sa.LargeBinary, primary_key=True),
    sqlite_with_rowid=False,
)
"""Users of the populations that waves extend (``beacons.members``), among whom those of a wave are looked up."""

directory = sa.Table("directory", metadata, sa.Column("revision", sa.Integer, primary_key=True))

_PARTICIPANT = "participant"
_CERTIFICATE = "certificate"
_RENEWABLE_AT = 0.5
"""Share of its validity after which a certificate is followed by another."""
_HEAD_MS = 1000
"""Longest time for which a head is answered again while nothing is added, milliseconds."""


class Published(NamedTuple):
    """A key bundle as the directory keeps it."""

    participant: bytes
    """Id, 32 bytes."""
    version: int
    """Grows with every replacement."""
    message: bytes
    """The countersigned ``KeyBundle``, serialised."""
    statement: bytes
    """The bytes that the directory signed, for the log."""


class Redemption(NamedTuple):
    """The exchange of a token for a certificate."""

    token_hash: bytes
    """SHA-256 of the token."""
    party: str
    """``role/name``."""
    participants: int
    """Most participants whose bundles the token's holder may publish."""
    public_key_hash: bytes
    """SHA-256 of the public key in the certificate request."""
    fingerprint: bytes
    """SHA-256 of the certificate, 32 bytes."""
    chain: bytes
    """The certificate and the authority's, PEM."""
    redeemed: int
    """Unix seconds."""


class Renewed(NamedTuple):
    """A certificate that renews another."""

    fingerprint: bytes
    """SHA-256 of the certificate, 32 bytes."""
    public_key_hash: bytes
    """SHA-256 of its public key, 32 bytes."""
    chain: bytes
    """The certificate and the authority's, PEM."""
    renewed: int
    """Unix seconds."""


class DirectoryAnswer(NamedTuple):
    """The directory's answer to a look-up of bundles."""

    revision: int
    messages: dict[bytes, bytes]
    """Serialised ``KeyBundle`` by participant; unknown participants are absent."""
    revoked: frozenset[bytes]
    """Participants of the look-up that are revoked."""


class Revoked(NamedTuple):
    """All revocations so far."""

    revision: int
    """Revision of the directory."""
    newest: int
    """Revision at which something was revoked last; 0 when nothing ever was."""
    participants: tuple[bytes, ...]
    certificates: tuple[bytes, ...]


class ThirdPartyStore:
    """The store of one third party.

    Parameters
    ----------
    path : Path
        The SQLite file; made when absent.
    before : callable, optional
        Keeps a copy of what is there before it is migrated.

    Raises
    ------
    StoreError
        When the file cannot be opened.
    """

    def __init__(self, path: Path, before: BeforeMigration | None = None) -> None:
        self._engine = open_sqlite(path, "thirdparty", before=before)
        with self._engine.begin() as connection:
            _log_earlier(connection)
        self._writer = Writer(self._engine)
        self._log = log.LogReader()
        self._heads = asyncio.Lock()
        self._head: tuple[int, bytes, int] | None = None

    def close(self) -> None:
        """Finish pending writes and close the file."""
        self._writer.close()
        self._engine.dispose()

    async def redeemed(self, token_hash: bytes) -> Redemption | None:
        """Return the redemption of a token; None when it was not redeemed."""

        def read(connection: sa.Connection) -> Redemption | None:
            return _redemption(connection, tokens.c.token_hash == token_hash)

        return await self._read(read)

    async def enrol(self, redemption: Redemption, published: Sequence[Published]) -> bytes:
        """Redeem a token and publish the party's bundles in one transaction.

        Returns
        -------
        bytes
            The certificate chain of the redemption: the given one, or the first one when the same token and key
            were redeemed before.

        Raises
        ------
        Refusal
            BAD_TOKEN when the token was redeemed with another key; and as `publish`.
        """

        def write(connection: sa.Connection) -> bytes:
            held = _redemption(connection, tokens.c.token_hash == redemption.token_hash)
            if held is not None and held.public_key_hash != redemption.public_key_hash:
                raise Refusal(
                    ErrorReason.ERROR_REASON_BAD_TOKEN,
                    "this token was used before, with another key",
                    field="token",
                    expected="a new token, or the key that it was first used with",
                )
            if held is None:
                connection.execute(tokens.insert(), redemption._asdict())
                _log_certificate(connection, redemption.chain)
            _publish(connection, held or redemption, published)
            return redemption.chain if held is None else held.chain

        return await self._write(write)

    async def enrol_device(
        self, redemption: Redemption, published: Sequence[Published], names: Collection[str]
    ) -> bytes:
        """Enrol a device by an ID token, or renew what it has, and publish its bundles in one transaction.

        A device has one line of certificates, whatever number of ID tokens it shows, so that it speaks for no more
        participants than the first allowed and one revocation ends it.

        Parameters
        ----------
        redemption : Redemption
            The device's enrolment, with the hash of its ID token.
        published : sequence of Published
            Bundles of its participants.
        names : collection of str
            Parties that the same subject may have, this one among them.

        Returns
        -------
        bytes
            The chain of its newest certificate while that is of the present authority and has half of its validity
            left, the given chain otherwise.

        Raises
        ------
        Refusal
            REVOKED when a certificate of any of the subject's devices is revoked, BAD_TOKEN when the device's name
            belongs to another key; and as `publish`.
        """

        def write(connection: sa.Connection) -> bytes:
            rows = connection.execute(sa.select(tokens).where(tokens.c.party.in_(names))).all()
            revoked = _revoked_certificates(connection)
            if any(_line(connection, row.token_hash) & revoked for row in rows):
                raise Refusal(
                    ErrorReason.ERROR_REASON_REVOKED,
                    "a certificate of this subject was revoked, and its ID tokens enrol no device any more",
                    field="token",
                )
            held = _redemption(connection, tokens.c.party == redemption.party)
            if held is None:
                connection.execute(tokens.insert(), redemption._asdict())
                _log_certificate(connection, redemption.chain)
                _publish(connection, redemption, published)
                return redemption.chain
            newest = _newest(connection, held)
            if newest.public_key_hash != redemption.public_key_hash:
                raise Refusal(
                    ErrorReason.ERROR_REASON_BAD_TOKEN,
                    f"{redemption.party} is enrolled with another key",
                    field="token",
                    expected=f"the key of that device, or one of the {len(names)} names of this subject that is free",
                )
            chain = newest.chain
            replaced = _authority(chain) != _authority(redemption.chain)
            if replaced or redemption.redeemed >= renewal_time(chain, _RENEWABLE_AT):
                renewed = {
                    "fingerprint": redemption.fingerprint,
                    "after": newest.fingerprint,
                    "token_hash": held.token_hash,
                    "public_key_hash": redemption.public_key_hash,
                    "chain": redemption.chain,
                    "renewed": redemption.redeemed,
                }
                connection.execute(renewals.insert(), renewed)
                _log_certificate(connection, redemption.chain)
                chain = redemption.chain
            _publish(connection, held, published)
            return chain

        return await self._write(write)

    async def renew(self, after: bytes, renewed: Renewed) -> bytes:
        """Record the renewal of a certificate; each certificate is renewed at most once.

        Parameters
        ----------
        after : bytes
            SHA-256 of the party's current certificate.
        renewed : Renewed
            The new certificate.

        Returns
        -------
        bytes
            The given chain, or the first one when this certificate was renewed before for the same key.

        Raises
        ------
        Refusal
            WRONG_STATE for a certificate that was not issued for a token, REVOKED when any certificate of the same
            token is revoked, CONFLICT when it was renewed before for another key.
        """

        def write(connection: sa.Connection) -> bytes:
            token = _token_of(connection, after)
            if _line(connection, token.token_hash) & _revoked_certificates(connection):
                raise Refusal(
                    ErrorReason.ERROR_REASON_REVOKED, "this certificate was revoked", field="certificate"
                )
            held = connection.execute(sa.select(renewals).where(renewals.c.after == after)).one_or_none()
            if held is None:
                row = {"after": after, "token_hash": token.token_hash, **renewed._asdict()}
                connection.execute(renewals.insert(), row)
                _log_certificate(connection, renewed.chain)
                return renewed.chain
            if held.public_key_hash != renewed.public_key_hash:
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    "this certificate was renewed before, for another key",
                    field="certificate_request",
                    expected="the key that it was renewed for, or a new token",
                )
            chain: bytes = held.chain
            return chain

        return await self._write(write)

    async def publish(self, fingerprint: bytes, published: Sequence[Published]) -> None:
        """Add or replace bundles of a party, all or none.

        Publishing the same bundle again changes nothing.

        Parameters
        ----------
        fingerprint : bytes
            SHA-256 of the party's certificate, which names the token that allows it.
        published : sequence of Published
            The bundles.

        Raises
        ------
        Refusal
            INVALID_FIELD for a participant that comes twice, REVOKED, UNKNOWN_PARTICIPANT when another party
            published the participant, OLD_VERSION for a version that is lower, or the same with other
            content, TOO_LARGE beyond what the token allowed, WRONG_STATE for a certificate without a token.
        """

        def write(connection: sa.Connection) -> None:
            _publish(connection, _token_of(connection, fingerprint), published)

        await self._write(write)

    async def lookup(self, participants: Sequence[bytes]) -> DirectoryAnswer:
        """Return the bundles of participants (at most 1,000: one query)."""

        def read(connection: sa.Connection) -> DirectoryAnswer:
            # The revision is read first, so that the rows are at least as new.
            revision = _revision(connection)
            found = connection.execute(
                sa.select(bundles.c.participant, bundles.c.message).where(
                    bundles.c.participant.in_(participants)
                )
            )
            messages = {row.participant: row.message for row in found}
            return DirectoryAnswer(revision, messages, _revoked_among(connection, participants))

        return await self._read(read)

    async def revoke(self, participants: Iterable[bytes], certificates: Iterable[bytes]) -> int:
        """Revoke participants and certificates for good; a certificate with all others that go back to the same token.

        Returns
        -------
        int
            The directory's revision from which all of them are revoked.
        """
        people, shown = list(participants), list(certificates)

        def write(connection: sa.Connection) -> int:
            subjects = [(_PARTICIPANT, item) for item in people]
            subjects += [(_CERTIFICATE, item) for item in _with_their_lines(connection, shown)]
            held = {(row.kind, row.subject) for row in connection.execute(sa.select(revocations))}
            fresh = [subject for subject in dict.fromkeys(subjects) if subject not in held]
            if not fresh:
                return _revision(connection)
            revision = _next_revision(connection)
            connection.execute(
                revocations.insert(),
                [{"kind": kind, "subject": subject, "revision": revision} for kind, subject in fresh],
            )
            log.append_all(connection, [_logged_revocation(*subject, revision) for subject in fresh])
            return revision

        return await self._write(write)

    async def revocations(self) -> Revoked:
        """Return all revocations so far."""

        def read(connection: sa.Connection) -> Revoked:
            # The revision is read first, so that the rows are at least as new.
            revision = _revision(connection)
            rows = connection.execute(sa.select(revocations).order_by(revocations.c.revision)).all()
            return Revoked(
                revision,
                max((row.revision for row in rows), default=0),
                tuple(row.subject for row in rows if row.kind == _PARTICIPANT),
                tuple(row.subject for row in rows if row.kind == _CERTIFICATE),
            )

        return await self._read(read)

    async def commit_population(
        self,
        run_id: str,
        participants: Sequence[bytes],
        devices: Sequence[str],
        draw: Callable[[bytes], Beacon],
    ) -> Beacon:
        """Fix the population of a run that has none, and keep a beacon for it; return the run's beacon.

        Parameters
        ----------
        run_id : str
        participants : sequence of bytes
            Ids of the users' participants, in the population's order.
        devices : sequence of str
            The party that is said to speak for each.
        draw : callable
            Draws and signs a beacon for the hash of a population.

        Raises
        ------
        Refusal
            CONFLICT when the run has another population; for a new one UNKNOWN_PARTICIPANT when a user's keys are not
            enrolled, or by another party, and REVOKED.
        """

        def write(connection: sa.Connection) -> Beacon:
            sha256 = population_hash(run_id, participants, devices)
            row = connection.execute(sa.select(beacons).where(beacons.c.run_id == run_id)).one_or_none()
            if row is not None and row.population_sha256 != sha256:
                raise Refusal(
                    ErrorReason.ERROR_REASON_CONFLICT,
                    "this run has another population",
                    field="population",
                    expected="the population for which the beacon was drawn, or a new run",
                )
            if row is not None:
                return Beacon(row.beacon, row.signature)
            _check_enrolled(connection, participants, devices)
            fresh = draw(sha256)
            kept = {"beacon": fresh.value, "signature": fresh.signature}
            connection.execute(beacons.insert(), {"run_id": run_id, "population_sha256": sha256, **kept})
            log.append(connection, transparency.BEACON, beacon_statement(run_id, sha256, fresh.value))
            return fresh

        return await self._write(write)

    async def commit_wave(
        self, run_id: str, population: Population, draw: Callable[[bytes], Beacon]
    ) -> Beacon:
        """Extend the population of a run by the last wave of another, and keep a beacon for it; return that beacon.

        Parameters
        ----------
        run_id : str
        population : Population
            All users of the run, the wave's last; its form and order are checked.
        draw : callable
            As for `commit_population`.

        Raises
        ------
        Refusal
            CONFLICT when the users before the wave are not those of the run, in whatever they differ, or another wave
            has its number already; as for `commit_population` for the wave's users.
        """
        number, wave = len(population.waves), population.waves[-1]
        participants, devices = population.participants[wave.first :], population.devices[wave.first :]

        def write(connection: sa.Connection) -> Beacon:
            *before, sha256 = population.hashes(run_id)
            base = connection.execute(sa.select(beacons).where(beacons.c.run_id == run_id)).one_or_none()
            rows = connection.execute(
                sa.select(waves).where(waves.c.run_id == run_id).order_by(waves.c.number)
            ).all()
            held = [] if base is None else [base.population_sha256, *(row.population_sha256 for row in rows)]
            if held[:number] != before:
                raise _other_users(number)
            if len(held) > number:
                if held[number] != sha256:
                    raise _another_wave(number)
                return Beacon(rows[number - 1].beacon, rows[number - 1].signature)
            if base is not None and not base.members:
                # Further waves are looked up there.
                _add_members(connection, run_id, population.participants[: wave.first])
                connection.execute(beacons.update().where(beacons.c.run_id == run_id), {"members": 1})
            return _add_wave(
                connection, run_id, number, wave.from_pass, (participants, devices), sha256, draw
            )

        return await self._write(write)

    async def extend_population(
        self,
        run_id: str,
        number: int,
        before_sha256: bytes,
        wave: Population,
        draw: Callable[[bytes], Beacon],
    ) -> Beacon:
        """Extend the population of a run by a wave, as `commit_wave`, at the cost of the wave's users.

        Parameters
        ----------
        run_id : str
        number : int
            Number of the wave, from 1.
        before_sha256 : bytes
            Hash of the population before it.
        wave : Population
            Its users and the wave; form and order are checked.
        draw : callable
            As for `commit_population`.

        Raises
        ------
        Refusal
            As for `commit_wave`; INVALID_FIELD when a user is in the population already; WRONG_STATE when the users
            before are not known by name.
        """
        people = wave.participants, wave.devices
        from_pass = wave.waves[0].from_pass
        sha256 = wave_hash(run_id, number, from_pass, before_sha256, *people)

        def write(connection: sa.Connection) -> Beacon:
            base = connection.execute(sa.select(beacons).where(beacons.c.run_id == run_id)).one_or_none()
            near = (waves.c.run_id == run_id) & waves.c.number.in_((number - 1, number))
            columns = waves.c.number, waves.c.population_sha256, waves.c.beacon, waves.c.signature
            rows = {row.number: row for row in connection.execute(sa.select(*columns).where(near))}
            before = base if number == 1 else rows.get(number - 1)
            if base is None or before is None or before.population_sha256 != before_sha256:
                raise _other_users(number)
            if (held := rows.get(number)) is not None:
                if held.population_sha256 != sha256:
                    raise _another_wave(number)
                return Beacon(held.beacon, held.signature)
            if not base.members:
                raise Refusal(
                    ErrorReason.ERROR_REASON_WRONG_STATE,
                    "who the users before the wave are is not known here",
                    field="before_sha256",
                    expected="a first wave with the whole population, by CommitPopulation",
                )
            _check_no_members(connection, run_id, wave.participants)
            return _add_wave(connection, run_id, number, from_pass, people, sha256, draw)

        return await self._write(write)

    async def signed_waves(self, run_id: str, after: int) -> tuple[Ids, list[str], list[Wave]]:
        """Return the waves of a run that follow the first so many: users, their parties, and waves as `waves_to_wire`.

        Raises
        ------
        Refusal
            WRONG_STATE when an earlier release signed one of them, which kept no users.
        """

        def read(connection: sa.Connection) -> tuple[Ids, list[str], list[Wave]]:
            rows = connection.execute(
                sa.select(waves)
                .where(waves.c.run_id == run_id, waves.c.number > after)
                .order_by(waves.c.number)
            ).all()
            if not all(row.participants for row in rows):
                raise Refusal(
                    ErrorReason.ERROR_REASON_WRONG_STATE,
                    "the users of a wave are not known here: an earlier release signed it",
                    field="after",
                    expected="a later backup of the server, which has the wave",
                )
            parts = [Ids(row.participants) for row in rows]
            users = Ids(b"".join(row.participants for row in rows))
            party = _parties(connection, list(users))
            starts = accumulate(map(len, parts[:-1]), initial=0)
            found = [
                Wave(first, row.from_pass, row.beacon, row.signature)
                for first, row in zip(starts, rows, strict=False)
            ]
            return users, [party.get(one, "") for one in users], found

        return await self._read(read)

    async def publish_key(self, party: str, key: NewKey, sealed: Mapping[bytes, bytes]) -> bool:
        """Keep a Paillier key that a participant of the party made.

        Parameters
        ----------
        party : str
            ``role/name`` of the caller.
        key : NewKey
        sealed : mapping of bytes to bytes
            Envelopes with the secret key, by holder: one for each holder but the generator.

        Returns
        -------
        bool
            Whether the key is new.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT when the generator is not the party's, or a holder is not enrolled; REVOKED when a
            holder is revoked; CONFLICT or SEQUENCE_MISMATCH as `add_key`.
        """

        def write(connection: sa.Connection) -> bool:
            _check_speaks(connection, party, key.generator, "record.generator_public")
            holders = [key.generator, *sealed]
            known = _parties(connection, holders)
            if len(known) != len(holders):
                raise Refusal(
                    ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
                    f"{len(holders) - len(known)} holders are not enrolled",
                    field="record.holders",
                    expected="participants with bundles",
                )
            _check_not_revoked(connection, holders, "record.holders")
            return add_key(connection, key, sealed)

        return await self._write(write)

    async def countersign_key(
        self, party: str, run_id: str, epoch: int, holder: bytes, signing_public: bytes, signature: bytes
    ) -> bool:
        """Keep the verified countersignature of a participant of the party.

        Returns
        -------
        bool
            Whether the key is complete.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT, REVOKED; UNKNOWN_ROUND or CONFLICT as `add_countersignature`.
        """

        def write(connection: sa.Connection) -> bool:
            _check_speaks(connection, party, holder, "countersignature.signing_public")
            _check_not_revoked(connection, [holder], "countersignature.signing_public")
            return add_countersignature(connection, run_id, epoch, holder, signing_public, signature)

        return await self._write(write)

    async def paillier_key(self, run_id: str, epoch: int = 0) -> KeptKey | None:
        """Return the newest complete Paillier key of a run, or the key of a given epoch, complete or not."""
        return await self._read(
            lambda connection: newest_key(connection, run_id, complete=not epoch, epoch=epoch)
        )

    async def paillier_envelope(self, party: str, run_id: str, holder: bytes) -> tuple[KeptKey | None, bytes]:
        """Return the newest published Paillier key of a run, and the envelope for a participant of the party.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT or REVOKED.
        """

        def read(connection: sa.Connection) -> tuple[KeptKey | None, bytes]:
            _check_speaks(connection, party, holder, "participant")
            _check_not_revoked(connection, [holder], "participant")
            key = newest_key(connection, run_id, complete=False)
            return key, b"" if key is None else sealed_for(connection, run_id, key.epoch, holder)

        return await self._read(read)

    async def check_speaks(self, party: str, participant: bytes, field: str) -> None:
        """Check that a party speaks for a participant, which is not revoked.

        Parameters
        ----------
        party : str
            ``role/name``.
        participant : bytes
            Id, 32 bytes.
        field : str
            Name of the message field that names the participant.

        Raises
        ------
        Refusal
            UNKNOWN_PARTICIPANT or REVOKED.
        """

        def read(connection: sa.Connection) -> None:
            _check_speaks(connection, party, participant, field)
            _check_not_revoked(connection, [participant], field)

        await self._read(read)

    async def log_certificate(self, chain: bytes) -> None:
        """Add a certificate that was not issued for a token, the third party's own, to the log, unless it has it."""
        statement = transparency.certificate_statement(chain)

        def write(connection: sa.Connection) -> None:
            if not log.is_logged(connection, transparency.CERTIFICATE, statement):
                log.append(connection, transparency.CERTIFICATE, statement)

        await self._write(write)

    async def log_head(self) -> tuple[int, bytes, int]:
        """Return size and root of the log, and a time for its head, Unix milliseconds: no two heads have the same.

        Heads of one second and one size are the same.
        """
        # One after the other: a head with more entries never has an earlier time.
        async with self._heads:
            size, root = await self._read(self._log.head)
            held, now = self._head, time.time_ns() // 1_000_000
            if held is not None and held[0] == size and 0 <= now - held[2] < _HEAD_MS:
                return held
            self._head = size, root, await self._write(log.next_time)
            return self._head

    async def log_inclusion(self, leaves: Sequence[bytes], size: int) -> list[log.Inclusion | None]:
        """Return proofs that leaves are in the tree of the first ``size`` entries, as `LogReader.inclusion`."""
        return await self._read(lambda connection: self._log.inclusion(connection, leaves, size))

    async def log_inclusions(self, leaves: Sequence[bytes], size: int) -> tuple[list[int], list[bytes]]:
        """Return one proof for all of these leaves that are in the tree, as `LogReader.inclusions`."""
        return await self._read(lambda connection: self._log.inclusions(connection, leaves, size))

    async def log_consistency(self, first: int, second: int) -> list[bytes]:
        """Return the proof that the larger tree begins with the smaller, as `LogReader.consistency`."""
        return await self._read(lambda connection: self._log.consistency(connection, first, second))

    async def log_entries(self, first: int, count: int) -> list[tuple[str, bytes]]:
        """Return kinds and statements of entries from a position on; at most ``count`` and about 1 MiB."""
        return await self._read(lambda connection: log.page(connection, first, count))

    async def probe(self) -> None:
        """Check that the store can be written and read, without changing anything.

        Raises
        ------
        StoreError
            When the store cannot do either.
        """
        await self._write(
            lambda connection: connection.execute(directory.update().values(revision=directory.c.revision))
        )
        await self._read(_revision)

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        try:
            return await self._writer.run(work)
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store cannot be written: {type(error).__name__}") from error

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        def read() -> T:
            with self._engine.connect() as connection:
                return work(connection)

        try:
            return await asyncio.to_thread(read)
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the store cannot be read: {type(error).__name__}") from error


def _log_earlier(connection: sa.Connection) -> None:
    """Log what was signed before the log was there; of a replaced bundle only the newest version is known."""
    if log.size_of(connection):
        return
    chains = connection.execute(sa.select(tokens.c.chain).order_by(tokens.c.redeemed)).scalars().all()
    chains = [
        *chains,
        *connection.execute(sa.select(renewals.c.chain).order_by(renewals.c.renewed)).scalars(),
    ]
    for chain in chains:
        _log_certificate(connection, chain)
    found = connection.execute(sa.select(bundles.c.message).order_by(bundles.c.participant)).scalars()
    signed = [bundle_from_wire(KeyBundle.FromString(message)) for message in found]
    log.append_all(
        connection, [(transparency.BUNDLE, transparency.bundle_statement(bundle)) for bundle in signed]
    )
    revoked = connection.execute(
        sa.select(revocations).order_by(revocations.c.revision, revocations.c.subject)
    )
    log.append_all(connection, [_logged_revocation(row.kind, row.subject, row.revision) for row in revoked])
    drawn = connection.execute(sa.select(beacons).order_by(beacons.c.run_id)).all()
    log.append_all(
        connection,
        [
            (transparency.BEACON, beacon_statement(row.run_id, row.population_sha256, row.beacon))
            for row in drawn
        ],
    )


def _log_certificate(connection: sa.Connection, chain: bytes) -> None:
    log.append(connection, transparency.CERTIFICATE, transparency.certificate_statement(chain))


def _logged_revocation(kind: str, subject: bytes, revision: int) -> tuple[str, bytes]:
    return transparency.REVOCATION, transparency.revocation_statement(kind, subject, revision)


def _redemption(connection: sa.Connection, which: sa.ColumnElement[bool]) -> Redemption | None:
    row = connection.execute(sa.select(tokens).where(which)).one_or_none()
    return None if row is None else Redemption(**row._mapping)


def _token_hash_of(connection: sa.Connection, fingerprint: bytes) -> bytes | None:
    """Return the hash of the token that a certificate goes back to; None for a certificate not issued here."""
    renewed = sa.select(renewals.c.token_hash).where(renewals.c.fingerprint == fingerprint)
    first = sa.select(tokens.c.token_hash).where(tokens.c.fingerprint == fingerprint)
    found: bytes | None = connection.execute(renewed.union(first)).scalar_one_or_none()
    return found


def _token_of(connection: sa.Connection, fingerprint: bytes) -> Redemption:
    key = _token_hash_of(connection, fingerprint)
    token = None if key is None else _redemption(connection, tokens.c.token_hash == key)
    if token is None:
        raise Refusal(
            ErrorReason.ERROR_REASON_WRONG_STATE,
            "this certificate was not issued for a token",
            field="certificate",
            expected="a party that enrolled with a token",
        )
    return token


def _line(connection: sa.Connection, token_hash: bytes) -> set[bytes]:
    """Return the fingerprints of all certificates that go back to a token."""
    renewed = sa.select(renewals.c.fingerprint).where(renewals.c.token_hash == token_hash)
    first = sa.select(tokens.c.fingerprint).where(tokens.c.token_hash == token_hash)
    return set(connection.execute(renewed.union(first)).scalars())


def _newest(connection: sa.Connection, token: Redemption) -> Renewed:
    """Return the newest certificate of a token's line, which no other follows."""
    row = connection.execute(
        sa.select(renewals)
        .where(renewals.c.token_hash == token.token_hash)
        .where(renewals.c.fingerprint.not_in(sa.select(renewals.c.after)))
    ).one_or_none()
    if row is None:
        return Renewed(token.fingerprint, token.public_key_hash, token.chain, token.redeemed)
    return Renewed(row.fingerprint, row.public_key_hash, row.chain, row.renewed)


def _authority(chain: bytes) -> bytes:
    """Return the last certificate of a chain."""
    return chain[chain.rindex(b"-----BEGIN") :].strip()


def _with_their_lines(connection: sa.Connection, fingerprints: Iterable[bytes]) -> list[bytes]:
    found: dict[bytes, None] = {}
    for fingerprint in fingerprints:
        found[fingerprint] = None
        key = _token_hash_of(connection, fingerprint)
        if key is not None:
            found.update(dict.fromkeys(sorted(_line(connection, key))))
    return list(found)


def _revoked_certificates(connection: sa.Connection) -> set[bytes]:
    rows = connection.execute(sa.select(revocations.c.subject).where(revocations.c.kind == _CERTIFICATE))
    return set(rows.scalars())


def _revision(connection: sa.Connection) -> int:
    revision: int = connection.execute(sa.select(directory.c.revision)).scalar_one()
    return revision


def _next_revision(connection: sa.Connection) -> int:
    connection.execute(directory.update().values(revision=directory.c.revision + 1))
    return _revision(connection)


def _revoked_among(connection: sa.Connection, participants: Sequence[bytes]) -> frozenset[bytes]:
    rows = connection.execute(
        sa.select(revocations.c.subject).where(
            (revocations.c.kind == _PARTICIPANT) & revocations.c.subject.in_(participants)
        )
    )
    return frozenset(rows.scalars())


def _parties(connection: sa.Connection, participants: Sequence[bytes]) -> dict[bytes, str]:
    """Return the party of each participant; unknown participants are absent."""
    found: dict[bytes, str] = {}
    for first in range(0, len(participants), 1000):
        rows = connection.execute(
            sa.select(bundles.c.participant, bundles.c.party).where(
                bundles.c.participant.in_(participants[first : first + 1000])
            )
        )
        found.update((row.participant, row.party) for row in rows)
    return found


def _check_speaks(connection: sa.Connection, party: str, participant: bytes, field: str) -> None:
    if _parties(connection, [participant]).get(participant) != party:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
            f"{party} does not speak for this participant",
            field=field,
            expected=f"a participant of {party}",
        )


def _other_users(number: int) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_CONFLICT,
        f"before wave {number} this run has other users than the population says",
        field="population",
        expected="the users for whom beacons were drawn, and a wave of others after them",
    )


def _another_wave(number: int) -> Refusal:
    return Refusal(
        ErrorReason.ERROR_REASON_CONFLICT,
        f"this run has another wave {number}",
        field="population",
        expected="the wave for which the beacon was drawn, or a further one",
    )


def _add_wave(
    connection: sa.Connection,
    run_id: str,
    number: int,
    from_pass: int,
    people: tuple[Sequence[bytes], Sequence[str]],
    sha256: bytes,
    draw: Callable[[bytes], Beacon],
) -> Beacon:
    """Draw a beacon for a wave of users and their devices, once they are known to be enrolled, and keep both."""
    participants, devices = people
    _check_enrolled(connection, participants, devices)
    fresh = draw(sha256)
    kept = {"beacon": fresh.value, "signature": fresh.signature, "from_pass": from_pass}
    row = {"run_id": run_id, "number": number, "population_sha256": sha256, **kept}
    connection.execute(waves.insert(), {**row, "participants": Ids.of(participants).packed})
    _add_members(connection, run_id, participants)
    log.append(connection, transparency.BEACON, beacon_statement(run_id, sha256, fresh.value))
    return fresh


def _add_members(connection: sa.Connection, run_id: str, participants: Sequence[bytes]) -> None:
    for first in range(0, len(participants), _ROWS):
        rows = [{"run_id": run_id, "participant": one} for one in participants[first : first + _ROWS]]
        connection.execute(members.insert(), rows)


def _check_no_members(connection: sa.Connection, run_id: str, participants: Sequence[bytes]) -> None:
    """Require that nobody of a wave is in the population before it."""
    for first in range(0, len(participants), 1000):
        some = members.c.participant.in_(participants[first : first + 1000])
        if connection.execute(sa.select(members).where(members.c.run_id == run_id, some).limit(1)).first():
            raise Refusal(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "a user is in the population twice",
                field="population",
                expected="users who are not in the population yet",
            )


def _check_enrolled(connection: sa.Connection, participants: Sequence[bytes], devices: Sequence[str]) -> None:
    """Require that users are enrolled, by the parties that are said to speak for them, and not revoked."""
    enrolled = _parties(connection, participants)
    strange = sum(
        enrolled.get(participant) != device for participant, device in zip(participants, devices, strict=True)
    )
    if strange:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
            f"{strange} users are not enrolled, or by another party than the population says",
            field="population",
            expected="participants of the parties that are named",
        )
    _check_not_revoked(connection, participants, "population")


def _check_not_revoked(connection: sa.Connection, participants: Sequence[bytes], field: str) -> None:
    for first in range(0, len(participants), 1000):
        if _revoked_among(connection, participants[first : first + 1000]):
            raise Refusal(
                ErrorReason.ERROR_REASON_REVOKED, "a participant was revoked", field=field, expected="others"
            )


def _publish(connection: sa.Connection, token: Redemption, published: Sequence[Published]) -> None:
    if len({bundle.participant for bundle in published}) != len(published):
        raise Refusal(
            ErrorReason.ERROR_REASON_INVALID_FIELD,
            "a participant comes twice",
            field="bundles",
            expected="one bundle for each participant",
        )
    changed: list[Published] = []
    added = 0
    for first in range(0, len(published), 1000):
        batch = published[first : first + 1000]
        ids = [bundle.participant for bundle in batch]
        _check_not_revoked(connection, ids, "bundles")
        held = {
            row.participant: row
            for row in connection.execute(sa.select(bundles).where(bundles.c.participant.in_(ids)))
        }
        for bundle in batch:
            row = held.get(bundle.participant)
            if row is None or _replaces(bundle, token.party, row):
                changed.append(bundle)
                added += row is None or row.token_hash != token.token_hash
    if not changed:
        return
    _check_allowance(connection, token, added)
    connection.execute(
        sa.delete(bundles).where(bundles.c.participant == sa.bindparam("key")),
        [{"key": bundle.participant} for bundle in changed],
    )
    connection.execute(
        bundles.insert(),
        [
            {
                "participant": bundle.participant,
                "party": token.party,
                "token_hash": token.token_hash,
                "version": bundle.version,
                "message": bundle.message,
            }
            for bundle in changed
        ],
    )
    log.append_all(connection, [(transparency.BUNDLE, bundle.statement) for bundle in changed])
    _next_revision(connection)


def _replaces(bundle: Published, party: str, held: sa.Row[tuple[bytes, str, bytes, int, bytes]]) -> bool:
    """Return whether a bundle replaces the held one; False when both are the same.

    The same bundle replaces one that an earlier release countersigned without its party.
    """
    if held.party != party:
        raise Refusal(
            ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT,
            "a participant belongs to another party",
            field="bundles",
            expected=f"participants of {party}",
        )
    if bundle.message == held.message:
        return False
    if bundle.version == held.version and _names_no_party(held.message, bundle.message):
        return True
    if bundle.version <= held.version:
        raise Refusal(
            ErrorReason.ERROR_REASON_OLD_VERSION,
            f"version {bundle.version} of a bundle, and the directory holds {held.version}",
            field="bundles.version",
            expected=f"above {held.version}",
        )
    return True


def _names_no_party(held: bytes, offered: bytes) -> bool:
    """Return whether a held bundle is the offered one as earlier releases countersigned it, without its party."""
    try:
        old, new = (bundle_from_wire(KeyBundle.FromString(message)) for message in (held, offered))
    except DecodeError:
        return False
    return not old.party and (old.signed_fields(), old.signature) == (new.signed_fields(), new.signature)


def _check_allowance(connection: sa.Connection, token: Redemption, added: int) -> None:
    held = connection.execute(
        sa.select(sa.func.count()).select_from(bundles).where(bundles.c.token_hash == token.token_hash)
    ).scalar_one()
    if added and held + added > token.participants:
        raise Refusal(
            ErrorReason.ERROR_REASON_TOO_LARGE,
            f"{token.party} would speak for {held + added} participants",
            field="bundles",
            expected=f"at most {token.participants}, as its token says",
        )
