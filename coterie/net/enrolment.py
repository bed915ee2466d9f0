"""Enrolment: a process exchanges a one-time token for its certificate and countersigned key bundles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog
from cryptography import x509
from google.protobuf.message import DecodeError

from coterie.crypto import clocks
from coterie.crypto.authority import (
    PeerIdentity,
    issuer_of,
    load_tls_key,
    logical_name,
    make_csr,
    new_tls_key,
    save_tls_key,
    validity_of,
)
from coterie.crypto.clocks import CLOCK_SKEW_S, apart, moment
from coterie.crypto.id_tokens import is_id_token
from coterie.crypto.identity import Bundle, Identities, Identity, KeptBundles, load_many, save_many
from coterie.crypto.keyfile import write_private_file
from coterie.crypto.made_when_asked import MadeWhenAsked
from coterie.errors import CertificateError, CoterieError, CryptoError, PeerError
from coterie.net.bundle_file import BundleFile
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.late_renewal import renew_expired
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error, untimely, waits_for_store
from coterie.secure_sum.bundles import bundle_from_wire, bundle_to_wire
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1.thirdparty_pb2 import EnrolRequest, EnrolResponse, PublishBundlesRequest
from coterie.wire.v1.thirdparty_pb2_grpc import EnrolmentStub
from coterie.wire.versions import agree, own

if TYPE_CHECKING:
    from coterie.wire.v1.thirdparty_pb2_grpc import EnrolmentAsyncStub

__all__ = [
    "BUNDLE_DAYS",
    "DIRECTORY_KEY",
    "HOLDER",
    "IDENTITIES",
    "Enrolling",
    "EnrolmentPoint",
    "NewToken",
    "check_begun",
    "check_chain",
    "enrol",
    "identities",
    "renew_late",
    "saved_bundles",
]

_log = structlog.get_logger("coterie.enrolment")

BUNDLE_DAYS = 365
"""Validity of a key bundle; a process that starts with an expired one publishes its next version."""

IDENTITIES = "identities.key"
"""File of the state folder with a process's identities."""
_BUNDLES = "bundles.pb"
DIRECTORY_KEY = "directory.key"
_IN_MEMORY = 4096
"""Most bundles that a process keeps in memory; more of them stay in their file."""
_PER_MESSAGE = 1_000
_PER_CALL = 2_000
"""Bundles in one call: the third party verifies and signs them within `_CALL_S`, while other hosts enrol, too."""
_CALL_S = 60.0
_LATE = "client"
"""Role whose expired certificates are renewed."""
_THIRD_PARTYS = "the third party's"


class EnrolmentPoint(Protocol):
    """The settings of enrolment that this module reads; `coterie.config.base.EnrolSettings` has them."""

    @property
    def address(self) -> str:
        """``host:port`` of the third party's enrolment service."""

    @property
    def name(self) -> str:
        """Name of the third party, which its certificate must carry."""

    @property
    def ca_file(self) -> Path:
        """File of the authority's certificate, PEM."""

    @property
    def token_file(self) -> Path:
        """File that holds the one-time token, or an ID token."""

    @property
    def timeout_s(self) -> float:
        """Time for which to keep trying, seconds."""


class Enrolling(Protocol):
    """The part of a service's settings that enrolment reads."""

    @property
    def name(self) -> str:
        """Name of the process."""

    @property
    def state(self) -> Path:
        """State folder of the process."""

    @property
    def enrol(self) -> EnrolmentPoint | None:
        """Settings of enrolment; None when the configuration has none."""


HOLDER = "holder"
"""Folder, within a client host's state, of its identity and secrets as a key holder."""


def identities(state: Path, count: int) -> Identities:
    """Return the identities of a process's participants; draw and save those that do not exist yet.

    Parameters
    ----------
    state : Path
        State folder of the process.
    count : int
        How many participants the process speaks for; their order never changes.

    Raises
    ------
    CertificateError
        When the folder holds more, or its file cannot be used.
    """
    path = state / IDENTITIES
    held = load_many(path) if path.exists() else Identities()
    if len(held) > count:
        raise CertificateError(
            f"{path} holds {len(held)} identities, and the configuration names {count} participants",
            hint="identities belong to participants in order: use a new state folder when participants leave",
        )
    if len(held) < count:
        held = held.more(count - len(held))
        save_many(path, held)
    return held


def saved_bundles(state: Path) -> Sequence[Bundle]:
    """Return the countersigned bundles of an enrolled process, in the order of its identities.

    Very many of them stay in their file.

    Raises
    ------
    CertificateError
        When there are none, or they are damaged.
    """
    bundles: Sequence[Bundle] = BundleFile(state / _BUNDLES)
    if len(bundles) <= _IN_MEMORY:
        bundles = _load_bundles(state / _BUNDLES)
    if not all(bundle.countersignature for bundle in bundles):
        raise CertificateError(f"the bundles in {state} are not countersigned yet", hint="enrol first")
    return bundles


async def enrol(
    role: str, settings: Enrolling, tls: TlsFiles, participants: Sequence[Identity]
) -> Sequence[Bundle]:
    """Return a process's countersigned bundles; enrol first when it has no valid certificate or bundles.

    A valid certificate and valid bundles are used without a call.  Otherwise the process exchanges its token at
    the third party.  It saves its key and bundles before the call, so that after a lost answer or a crash it
    repeats the same request.

    Parameters
    ----------
    role : str
        Role of the process.
    settings : ServiceSettings, or the like
        Name, state folder, and how to enrol.
    tls : TlsFiles
        Where key, chain and the authority's certificate go.
    participants : sequence of Identity
        Participants for which the process speaks.

    Returns
    -------
    sequence of Bundle
        Countersigned, in the order given; also in the state folder, see `saved_bundles`.

    Raises
    ------
    CertificateError
        When the folder belongs to another party, nothing says how to enrol, the token is missing, used,
        expired or made for another party, or what the third party answers does not verify.
    UnsupportedVersionError
        When the third party and this process have no version of the protocol in common.
    PeerError
        When the third party cannot be reached in time, or refuses for another reason.
    """
    now = clocks.now()
    problem = _certificate_problem(role, settings, tls, now)
    if problem is not None and expired(tls, now):
        return await _enrol_again(role, settings, tls, participants, problem)
    if problem is not None and problem == (tls.damage() if tls.complete() else None):
        # Its token may still give the same certificate again, as after a lost answer.
        return await _enrol_for_damaged(role, settings, tls, participants, problem)
    return await _enrol(role, settings, tls, participants, problem)


async def _enrol_for_damaged(
    role: str, settings: Enrolling, tls: TlsFiles, participants: Sequence[Identity], damage: str
) -> Sequence[Bundle]:
    _log.error("a certificate file is damaged", party=f"{role}/{settings.name}", because=damage)
    try:
        return await _enrol(role, settings, tls, participants, damage)
    except CoterieError as error:
        raise CertificateError(
            f"{damage}; and there is no other certificate: {error.message}",
            hint="put the file back from a backup, or " + _token_hint(role, settings),
        ) from error


def expired(tls: TlsFiles, now: float) -> bool:
    """Return whether a folder has a certificate that has ended, with all that belongs to it."""
    return tls.complete() and tls.damage() is None and validity_of(tls.chain.read_bytes())[1] <= now


async def renew_late(role: str, settings: Enrolling, tls: TlsFiles) -> bool:
    """Renew the expired certificate of a client host by its key, where its configuration says at whom to enrol.

    Returns
    -------
    bool
        Whether there is a certificate now that holds.

    Raises
    ------
    CertificateError
        What the third party answers does not verify.
    PeerError
        The third party cannot be reached, or refuses.
    """
    point = settings.enrol
    if role != _LATE or point is None or not expired(tls, clocks.now_s()):
        return False
    chain = await renew_expired(point.address, point.name, tls, point.timeout_s)
    check_chain(role, settings.name, tls, chain, tls.authority.read_bytes())
    check_begun(chain, f"thirdparty/{point.name}", clocks.now_s())
    write_private_file(tls.chain, chain)
    _log.info("renewed an expired certificate", party=f"{role}/{settings.name}")
    return True


async def _enrol_again(
    role: str, settings: Enrolling, tls: TlsFiles, participants: Sequence[Identity], problem: str
) -> Sequence[Bundle]:
    """Enrol with an expired certificate: by its key where the third party renews it, and else by a new token."""
    why = ""
    try:
        if await renew_late(role, settings, tls):
            return await _enrol(role, settings, tls, participants, None)
    except CoterieError as error:
        why = f"; without a token: {error.message}"
    try:
        return await _enrol(role, settings, tls, participants, problem)
    except CertificateError as error:
        if not why:
            raise
        raise CertificateError(f"{error.message}{why}", hint=error.hint) from error


async def _enrol(
    role: str, settings: Enrolling, tls: TlsFiles, participants: Sequence[Identity], problem: str | None
) -> Sequence[Bundle]:
    now = clocks.now()
    bundles = _bundles_to_publish(settings.state, participants, now)
    if problem is None and _all_countersigned(settings.state, bundles, now):
        _save_bundles(settings.state, bundles)
        return bundles
    wanted = problem or "new participants have to be published"
    if settings.enrol is None:
        raise CertificateError(
            f"{role}/{settings.name}: {wanted}, and the configuration does not say how to enrol",
            hint="add the section [enrol] with address, ca_file and token_file",
        )
    token = _read_text(settings.enrol.token_file, "token", _token_hint(role, settings))
    authority = _read_text(
        settings.enrol.ca_file, "authority's certificate", "copy ca.pem of the third party"
    )
    _check_authority(f"{role}/{settings.name}", settings.enrol.ca_file, authority.encode(), now)
    _log.info("enrolling", party=f"{role}/{settings.name}", at=settings.enrol.address, because=wanted)
    tls.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not tls.key.exists():
        save_tls_key(tls.key, new_tls_key())
    _save_bundles(settings.state, bundles)
    head = EnrolRequest(
        token=token.strip(),
        role=role,
        name=settings.name,
        certificate_request=make_csr(load_tls_key(tls.key)),
        protocol=own(),
    )
    try:
        response, signatures = await _exchange(settings.enrol, authority.encode(), head, bundles)
    except Refusal as refusal:
        if refusal.reason != ErrorReason.ERROR_REASON_BAD_TOKEN:
            raise
        raise CertificateError(
            f"the token in {settings.enrol.token_file} was refused: {refusal.message}",
            hint=_id_token_hint(settings) if is_id_token(token) else _token_hint(role, settings),
        ) from refusal
    agree(f"thirdparty/{settings.enrol.name}", response.protocol)
    countersigned = _Countersigned(bundles, signatures, f"{role}/{settings.name}")
    await asyncio.to_thread(_verify, settings, response, countersigned)
    _check_certificate(role, settings, tls, response.certificate_chain, authority.encode())
    # The chain is written last: where it exists, all the other files do.
    write_private_file(settings.state / DIRECTORY_KEY, response.directory_key)
    _save_bundles(settings.state, countersigned)
    write_private_file(tls.authority, authority.encode())
    write_private_file(tls.chain, response.certificate_chain)
    _log.info("enrolled", party=f"{role}/{settings.name}", participants=len(countersigned))
    return countersigned


class _Countersigned(MadeWhenAsked[Bundle]):
    """Bundles with their countersignatures, each put together when it is asked for."""

    def __init__(self, bundles: Sequence[Bundle], signatures: Sequence[bytes], party: str) -> None:
        self._bundles, self._signatures, self._party = bundles, signatures, party

    def __len__(self) -> int:
        return len(self._bundles)

    def _make(self, first: int, last: int) -> Iterator[Bundle]:
        signed = zip(self._bundles[first:last], self._signatures[first:last], strict=True)
        return (replace(bundle, countersignature=one, party=self._party) for bundle, one in signed)


class NewToken:
    """Gives a running process whose certificate has ended another one: by its key, or by a new token in its file.

    Parameters
    ----------
    point : EnrolmentPoint or None
        How to enrol.
    enrol : callable
        Carries out the enrolment.
    late : callable, optional
        Renews the certificate by its key; returns whether it did.
    """

    def __init__(
        self,
        point: EnrolmentPoint | None,
        enrol: Callable[[], Awaitable[None]],
        late: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._point = point
        self._enrol = enrol
        self._late = late
        self._tried = self._token()

    async def __call__(self) -> None:
        """Renew the certificate, or enrol with the new token.

        Raises
        ------
        CertificateError
            There is no new token, or it is refused.
        PeerError
            The third party cannot be reached.
        """
        why = ""
        try:
            if self._late is not None and await self._late():
                return
        except CoterieError as error:
            why = f"; without a token: {error.message}"
        token = self._token()
        if token is None or token == self._tried:
            where = "no [enrol] in the configuration" if self._point is None else str(self._point.token_file)
            raise CertificateError(f"there is no new token ({where}){why}")
        await self._enrol()
        self._tried = token

    def _token(self) -> bytes | None:
        try:
            return None if self._point is None else self._point.token_file.read_bytes()
        except OSError:
            return None


def _token_hint(role: str, settings: Enrolling) -> str:
    path = settings.enrol.token_file if settings.enrol else "the token file"
    return (
        f"ask the operator for a new one (`coterie certs token --role {role} --name {settings.name}`) "
        f"and put it into {path}"
    )


def _id_token_hint(settings: Enrolling) -> str:
    return (
        "ask the issuer for an ID token with the nonce that "
        f"`coterie certs oidc-nonce --state {settings.state}` prints"
    )


def _read_text(path: Path, what: str, hint: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CertificateError(f"cannot read the {what} in {path}: {error}", hint=hint) from error


def _certificate_problem(role: str, settings: Enrolling, tls: TlsFiles, now: int) -> str | None:
    """Return why the process needs a certificate; None when it has a valid certificate of its own.

    Raises
    ------
    CertificateError
        When the certificate is another party's, or begins later than this machine's clock says.
    """
    if not tls.complete():
        return "there is no certificate yet"
    if (damage := tls.damage()) is not None:
        return damage
    held = tls.identity()
    if (held.role, held.name) != (role, settings.name):
        raise CertificateError(
            f"the certificate in {tls.folder} is {held}'s, and this is {role}/{settings.name}",
            hint="give every process a state folder of its own",
        )
    certificate = x509.load_pem_x509_certificate(tls.chain.read_bytes())
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin.timestamp():
        raise CertificateError(
            f"this machine's clock says {moment(now)}, and the certificate in {tls.folder} is valid from "
            f"{moment(begin.timestamp())}",
            hint=f"the clock of {role}/{settings.name} is {apart(now - begin.timestamp(), _THIRD_PARTYS)}, or more: "
            "set it and start the process again; it need not enrol anew",
        )
    if now >= end.timestamp():
        return f"the certificate expired at {end:%Y-%m-%d %H:%M} UTC"
    if not (settings.state / DIRECTORY_KEY).is_file():
        return "the directory's key is missing"
    return None


def _bundles_to_publish(state: Path, participants: Sequence[Identity], now: int) -> KeptBundles:
    """Return each participant's bundle: the saved one, a first one, or the next version of one that is not valid now.

    A bundle that begins later was made while this machine's clock was ahead, and nobody takes it yet.
    """
    path = state / _BUNDLES
    kept = _load_bundles(path) if path.exists() else KeptBundles()
    position = {participant: n for n, participant in enumerate(kept.ids())}
    validity = (now - CLOCK_SKEW_S, now + BUNDLE_DAYS * 24 * 3600)

    def published() -> Iterator[Bundle]:
        for participant in participants:
            at = position.get(participant.participant_id)
            if at is None:
                yield participant.bundle(1, validity)
                continue
            bundle = kept[at]
            if not bundle.not_before - CLOCK_SKEW_S <= now < bundle.not_after:
                bundle = participant.bundle(bundle.version + 1, validity)
            yield bundle

    return KeptBundles(published())


def _all_countersigned(state: Path, bundles: Sequence[Bundle], now: int) -> bool:
    if not bundles:
        return True
    key = (state / DIRECTORY_KEY).read_bytes()
    try:
        # Only the last is verified here: all are written together, and every receiver verifies each again.
        bundles[-1].verify(key, now)
    except CryptoError:
        return False
    return all(bundle.countersignature for bundle in bundles)


def _load_bundles(path: Path) -> KeptBundles:
    try:
        message = PublishBundlesRequest.FromString(path.read_bytes())
        return KeptBundles(bundle_from_wire(bundle) for bundle in message.bundles)
    except OSError as error:
        raise CertificateError(
            f"cannot read the key bundles {path}: {error.strerror}", hint="enrol first"
        ) from error
    except (DecodeError, Refusal, CryptoError) as error:
        raise CertificateError(
            f"the key bundles {path} are damaged", hint="restore them from a backup"
        ) from error


def _save_bundles(state: Path, bundles: Sequence[Bundle]) -> None:
    # Serialised in parts, which in a row are the message as a whole: a host may have very many.
    def parts() -> Iterator[bytes]:
        for first in range(0, len(bundles), _PER_MESSAGE):
            part = [bundle_to_wire(bundle) for bundle in bundles[first : first + _PER_MESSAGE]]
            yield PublishBundlesRequest(bundles=part).SerializeToString()

    path = state / _BUNDLES
    if not _holds(path, parts()):
        write_private_file(path, parts())


def _holds(path: Path, parts: Iterable[bytes]) -> bool:
    """Return whether a file has this content."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        return all(file.read(len(part)) == part for part in parts) and not file.read(1)


async def _exchange(
    enrolment: EnrolmentPoint, authority: bytes, head: EnrolRequest, bundles: Sequence[Bundle]
) -> tuple[EnrolResponse, list[bytes]]:
    """Exchange the token at the third party; many bundles take several calls with the same token and key."""
    peer = f"thirdparty/{enrolment.name}"
    channel = connect(
        enrolment.address,
        grpc.ssl_channel_credentials(root_certificates=authority),
        tls_name=logical_name("thirdparty", enrolment.name),
        peer=peer,
        meter=Meter(),
    )
    try:
        signatures: list[bytes] = []
        for first in range(0, max(len(bundles), 1), _PER_CALL):
            part = bundles[first : first + _PER_CALL]
            response = await _call(channel, enrolment, head, part)
            if len(response.countersignatures) != len(part):
                raise CertificateError(
                    f"{peer} answered with {len(response.countersignatures)} countersignatures "
                    f"for {len(part)} bundles"
                )
            signatures += response.countersignatures
        return response, signatures
    finally:
        await channel.close()


async def _call(
    channel: Channel, enrolment: EnrolmentPoint, head: EnrolRequest, bundles: Sequence[Bundle]
) -> EnrolResponse:
    stub: EnrolmentAsyncStub = channel.stub(lambda inner: EnrolmentStub(inner))

    async def requests() -> AsyncIterator[EnrolRequest]:
        yield head
        for first in range(0, len(bundles), _PER_MESSAGE):
            part = [
                bundle_to_wire(replace(bundle, countersignature=b"", party=""))
                for bundle in bundles[first : first + _PER_MESSAGE]
            ]
            yield EnrolRequest(bundles=part)

    async def attempt() -> EnrolResponse:
        try:
            response: EnrolResponse = await stub.Enrol(requests(), timeout=min(_CALL_S, enrolment.timeout_s))
        except grpc.aio.AioRpcError as error:
            if untimely(error):
                failure = from_rpc_error(error, channel.peer)
                raise CertificateError(
                    f"the certificate of {channel.peer} at {enrolment.address} does not hold now: {failure.message}",
                    hint=failure.hint,
                ) from error
            raise
        return response

    try:
        # A third party whose disk is full still answers, and may have space before the time is up.
        return await Retry(limit_s=enrolment.timeout_s, also=waits_for_store)(attempt)
    except grpc.aio.AioRpcError as error:
        failure = from_rpc_error(error, channel.peer)
        if isinstance(failure, Refusal):
            raise failure from error
        raise PeerError(
            f"no enrolment at {enrolment.address} within {enrolment.timeout_s:g} s: {failure.message}",
            hint=f"is the third party {enrolment.name!r} running there, and {enrolment.ca_file} its ca.pem?",
        ) from error


def _verify(settings: Enrolling, response: EnrolResponse, bundles: Sequence[Bundle]) -> None:
    key_file = settings.state / DIRECTORY_KEY
    if key_file.exists() and key_file.read_bytes() != response.directory_key:
        raise CertificateError(
            f"the directory has another key than the one in {key_file}",
            hint="a new federation needs new state folders",
        )
    now = clocks.now()
    try:
        for bundle in bundles:
            bundle.verify_countersignature(response.directory_key, now)
    except CryptoError as error:
        raise CertificateError(f"the directory's answer does not verify: {error.message}") from error


def check_chain(role: str, name: str, tls: TlsFiles, chain: bytes, authority: bytes) -> None:
    """Check that a certificate names a party, is for its key, and was issued by the authority.

    Parameters
    ----------
    role, name : str
        The party.
    tls : TlsFiles
        Where its key is.
    chain, authority : bytes
        PEM; of authorities there may be several.

    Raises
    ------
    CertificateError
        The certificate does not.
    """
    peer = PeerIdentity.from_certificate(chain)
    if (peer.role, peer.name) != (role, name):
        raise CertificateError(f"the third party made a certificate for {peer}, expected {role}/{name}")
    certificate = x509.load_pem_x509_certificate(chain)
    if certificate.public_key() != load_tls_key(tls.key).public_key():
        raise CertificateError(f"the third party made a certificate for another key than {tls.key}")
    try:
        issuer_of(certificate, authority)
    except ValueError as error:
        raise CertificateError("the authority's certificate is not in PEM, or not whole") from error


def _check_authority(party: str, path: Path, pem: bytes, now: int) -> None:
    """Check that the authority's certificate does not begin later than now: TLS would refuse whatever it signed."""
    try:
        begin = x509.load_pem_x509_certificate(pem).not_valid_before_utc.timestamp()
    except ValueError as error:
        raise CertificateError(
            f"{path} is no certificate in PEM, or not a whole one",
            hint="copy ca.pem of the third party again",
        ) from error
    if now < begin:
        raise CertificateError(
            f"this machine's clock says {moment(now)}, and the authority's certificate in {path} is valid from "
            f"{moment(begin)}",
            hint=f"the clock of {party} is {apart(now - begin, _THIRD_PARTYS)}, or more: set it and start the process "
            "again",
        )


def check_begun(chain: bytes, third_party: str, now: float, then: str = "") -> None:
    """Check that a certificate which the third party has just made does not begin later than now.

    Parameters
    ----------
    chain : bytes
        PEM.
    third_party : str
        Role and name, for the error.
    now : float
        This machine's time, Unix seconds.
    then : str
        What to do once the clocks are right, for the hint.

    Raises
    ------
    CertificateError
        It begins later: nobody would take it.
    """
    begin = x509.load_pem_x509_certificate(chain).not_valid_before_utc.timestamp()
    if now < begin:
        raise CertificateError(
            f"the certificate that {third_party} made is valid from {moment(begin)}, and this machine's clock says "
            f"{moment(now)}",
            hint=f"the clock of {third_party} is {apart(begin - now)}, or more: set one of the two"
            + (f"; {then}" if then else ""),
        )


def _check_certificate(role: str, settings: Enrolling, tls: TlsFiles, chain: bytes, authority: bytes) -> None:
    check_chain(role, settings.name, tls, chain, authority)
    third_party = "" if settings.enrol is None else f"thirdparty/{settings.enrol.name}"
    check_begun(chain, third_party, clocks.now_s(), f"if its clock was wrong, {_token_hint(role, settings)}")
    end = x509.load_pem_x509_certificate(chain).not_valid_after_utc
    if clocks.now_s() >= end.timestamp():
        # The same token and key give the same certificate again, however old it is.
        raise CertificateError(
            f"the certificate of {role}/{settings.name} expired at {end:%Y-%m-%d %H:%M} UTC, and its token was used "
            "up by it",
            hint=_token_hint(role, settings),
        )
