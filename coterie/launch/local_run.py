"""Requests to a user's host in a folder of ``coterie run``, as the user's own application would make them.

While the run's services are running, the request goes to them.  Afterwards third party, COS and the user's host are
started again from their stores, on new ports, and stopped after the answer.  Nothing is trained: a run that has ended
stays as it is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import sqlalchemy as sa
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.config.run import RunSettings
from coterie.crypto.authority import logical_name
from coterie.errors import CertificateError, DataError, PeerError, RunError, nearest
from coterie.launch.children import Child, free_port
from coterie.launch.laid_out import configured_address
from coterie.launch.parties import DIRECTORY
from coterie.net.channel import Channel, connect
from coterie.net.credentials import TlsFiles
from coterie.net.meter import Meter
from coterie.net.retry import Retry
from coterie.net.status import from_rpc_error
from coterie.net.uncancelled import to_the_end
from coterie.process.runtime import in_use
from coterie.store import cos as cos_store
from coterie.store.client import load_users
from coterie.store.reading import read_store
from coterie.studies.run_data import load
from coterie.studies.saved_settings import SAVED_SETTINGS
from coterie.wire.v1 import client_pb2 as wire
from coterie.wire.v1.client_pb2_grpc import UserAgentStub

__all__ = [
    "LocalRun",
    "Recommendation",
    "Suggestion",
    "newest",
    "preferences",
    "receipt",
    "recommend",
    "recommend_to_all",
]

_HOST = "127.0.0.1"
_PROBE_S = 10.0
_READY_S = 60.0
_ANSWER_S = 30.0

_GATHER, _DONE = "gather", "done"
"""First and last phase of a run of any kind, as in the COS's store."""
_PAUSE_S = 0.1

_AT_ONCE = 4
"""Users of one host that are asked for at the same time."""

T = TypeVar("T")


@dataclass(frozen=True)
class Suggestion:
    """One recommended item; ``title`` is None where the data set has none."""

    rank: int
    item: str
    title: str | None
    score: float


@dataclass(frozen=True)
class Recommendation:
    """The answer of a user's host: suggestions, best first, by one version of the model."""

    run: str
    user: str
    host: str
    version: int
    suggestions: tuple[Suggestion, ...]


def newest(root: Path) -> LocalRun:
    """Return the run below a folder that was started last.

    Raises
    ------
    RunError
        There is no run below the folder.
    """
    return _newest_first(root)[0]


def newest_answering(root: Path) -> tuple[LocalRun, list[str]]:
    """Return the newest run below a folder that is running or finished, and the ids of those after it, which stopped.

    Where there is none, the newest run.

    Raises
    ------
    RunError
        There is no run below the folder.
    """
    found = _newest_first(root)
    for place, run in enumerate(found):
        if run.answers():
            return run, [other.run_id for other in found[:place]]
    return found[0], []


def _newest_first(root: Path) -> list[LocalRun]:
    """Return the runs below a folder, of those with several seeds the first one's federation."""
    found = [file.parent.parent for file in root.glob("*/thirdparty/config.toml")]
    found += [file.parent.parent for file in root.glob("*/seed-*/thirdparty/config.toml")]
    if not found:
        raise RunError(
            f"there is no run in {root}",
            hint="`coterie run examples/drift.toml` makes one; --run names a folder elsewhere",
        )

    def started(folder: Path) -> tuple[float, str]:
        return (folder / "thirdparty" / "config.toml").stat().st_mtime, folder.name

    ordered = sorted(found, key=started, reverse=True)
    runs = dict.fromkeys(last.parent if last.name.startswith("seed-") else last for last in ordered)
    made = []
    for folder in runs:
        try:
            made.append(LocalRun.at(folder))
        except RunError:
            # It is just beginning, or did not get far.
            continue
    return made or [LocalRun.at(next(iter(runs)))]


@dataclass(frozen=True)
class LocalRun:
    """The folder of one run on this machine, with what can be read from it.

    Parameters
    ----------
    folder : Path
        Folder with ``thirdparty``, ``cos``, ``host-N`` and ``operator``.
    """

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> LocalRun:
        """Return the run in a folder; the first seed's where the run has several.

        Raises
        ------
        RunError
            The folder holds no run.
        """
        folder = folder.absolute()
        seeds = sorted(folder.glob("seed-*"), key=lambda path: (len(path.name), path.name))
        for candidate in (folder, *seeds):
            if all((candidate / name / "config.toml").is_file() for name in ("thirdparty", "cos")):
                return cls(candidate)
        raise RunError(
            f"{folder} holds no run of this machine" if folder.is_dir() else f"there is no folder {folder}",
            hint="expected a folder such as runs/ID, as `coterie run` leaves it",
        )

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.folder.parent.name if self.folder.name.startswith("seed-") else self.folder.name

    def phase(self) -> str | None:
        """Return the run's phase from the COS's store, such as "done"; None before the run was started.

        Raises
        ------
        RunError
            The store cannot be read.
        """
        path = self.folder / "cos" / "state" / "cos.db"
        rows = read_store(
            path, lambda connection: list(connection.execute(sa.select(cos_store.runs.c.state)))
        )
        # Every kind of run keeps its phase under this key.
        return str(json.loads(rows[0].state)["phase"]) if rows else None

    def answers(self) -> bool:
        """Return whether hosts of the run answer: it is running, or finished so that they can be started again."""
        if in_use(self.folder / "cos" / "state"):
            return True
        try:
            return self.phase() == _DONE
        except RunError:
            return False

    def users(self) -> dict[str, str]:
        """Return the name of each user's host, by user name.

        Raises
        ------
        RunError
            A host's store cannot be read.
        """
        found = {}
        for config in sorted(self.folder.glob("host-*/config.toml")):
            path = config.parent / "state" / "client.db"
            found.update(dict.fromkeys(read_store(path, load_users), config.parent.name))
        return found

    def host_of(self, user: str) -> str:
        """Return the host that keeps a user's history.

        Raises
        ------
        DataError
            No host of the run has the user.
        """
        users = self.users()
        host = users.get(user)
        if host is None:
            near = nearest(user, users)
            raise DataError(
                f"no host of run {self.run_id} has a user {user!r}; {len(users)} users take part",
                hint=f"did you mean {near!r}?"
                if near
                else f"users are named as in the data set, {_some(users)}",
            )
        return host

    def titles(self) -> dict[str, str]:
        """Return item titles by item key; empty when the data set has no titles or cannot be read any more."""
        path = next(
            (f / SAVED_SETTINGS for f in (self.folder, self.folder.parent) if (f / SAVED_SETTINGS).is_file()),
            None,
        )
        if path is None:
            return {}
        try:
            dataset = load(RunSettings.model_validate_json(path.read_text()))
        except (DataError, OSError, ValueError):
            return {}
        if dataset.item_titles is None:
            return {}
        return {key: title for key, title in zip(dataset.items, dataset.item_titles, strict=True) if title}

    def operator(self) -> TlsFiles:
        """Return the files of the operator's key and certificate.

        Raises
        ------
        CertificateError
            There is no certificate, or it is damaged or has expired.
        """
        tls = TlsFiles(self.folder / "operator" / "tls")
        if not tls.complete():
            raise CertificateError(
                f"{tls.folder} holds no operator's certificate", hint="the run did not get as far as starting"
            )
        if (damage := tls.damage()) is not None:
            raise CertificateError(damage, hint="put it back from a backup, or run it again")
        end = x509.load_pem_x509_certificate(tls.chain.read_bytes()).not_valid_after_utc
        if time.time() >= end.timestamp():
            raise CertificateError(
                f"the certificates of run {self.run_id} expired at {end:%Y-%m-%d %H:%M} UTC",
                hint="its stores stay readable, but its services trust each other no more: run it again",
            )
        return tls


async def recommend(run: LocalRun, user: str, k: int) -> Recommendation:
    """Ask a user's host for the ``k`` best items that the user has not seen.

    Raises
    ------
    DataError
        No host has the user.
    RunError
        The run has not ended and is not running, or a service ends.
    PeerError
        The host refuses, or cannot be reached in time.
    """
    host = run.host_of(user)
    titles = await asyncio.to_thread(run.titles)
    async with _asked(run, host) as channel:
        stub: Any = channel.stub(UserAgentStub)
        response: wire.UserRecommendResponse = await _answer(
            channel, lambda: stub.Recommend(wire.UserRecommendRequest(user=user, k=k))
        )
    suggestions = tuple(
        Suggestion(rank, item, titles.get(item), score)
        for rank, (item, score) in enumerate(zip(response.items, response.scores, strict=True), start=1)
    )
    return Recommendation(run.run_id, user, host, response.version, suggestions)


async def recommend_to_all(
    run: LocalRun, k: int, answered: Callable[[Recommendation], None], users: Sequence[str] | None = None
) -> None:
    """Ask the hosts of all users, each user at its own, for the ``k`` best items that the user has not seen.

    Services are started once for all users.  Titles are left out.

    Parameters
    ----------
    run : LocalRun
    k : int
    answered : callable
        Receives each user's answer, in no particular order.
    users : sequence of str, optional
        Only these users; all if left out.

    Raises
    ------
    DataError
        No host has a user.
    RunError, PeerError
        As in `recommend`; the answers before a failure have been handed on.
    """
    hosts = run.users()
    by_host: dict[str, list[str]] = {}
    for user in hosts if users is None else dict.fromkeys(users):
        by_host.setdefault(hosts.get(user) or run.host_of(user), []).append(user)

    async with _all_asked(run, sorted(by_host)) as channels:

        async def ask(host: str, waiting: Iterator[str]) -> None:
            channel = channels[host]
            stub: Any = channel.stub(UserAgentStub)
            for user in waiting:
                request = wire.UserRecommendRequest(user=user, k=k)
                response = await _answer(channel, partial(stub.Recommend, request))
                found = enumerate(zip(response.items, response.scores, strict=True), start=1)
                suggestions = tuple(Suggestion(rank, item, None, score) for rank, (item, score) in found)
                answered(Recommendation(run.run_id, user, host, response.version, suggestions))

        try:
            async with asyncio.TaskGroup() as asking:
                for host, own in by_host.items():
                    # Whoever is free takes the next user.
                    waiting = iter(own)
                    for _ in range(_AT_ONCE):
                        asking.create_task(ask(host, waiting))
        except BaseExceptionGroup as failed:
            # Several may fail for one cause, such as a host that has ended.
            raise failed.exceptions[0] from None


async def receipt(run: LocalRun, user: str) -> wire.DisclosureReceiptResponse:
    """Ask a user's host for the user's disclosure receipt: what has left the host about the user, and what it refused.

    Raises
    ------
    DataError, RunError, PeerError
        As in `recommend`.
    """
    async with _asked(run, run.host_of(user)) as channel:
        stub: Any = channel.stub(UserAgentStub)
        response: wire.DisclosureReceiptResponse = await _answer(
            channel, lambda: stub.DisclosureReceipt(wire.DisclosureReceiptRequest(user=user))
        )
    return response


async def preferences(
    run: LocalRun, user: str, changes: Mapping[str, float | None] | None = None
) -> list[wire.Preference]:
    """Change what a user has set for itself at its host, None taking one out, and return all preferences.

    Raises
    ------
    DataError, RunError, PeerError
        As in `recommend`; the host refuses a preference that the system does not have, or a value out of range.
    """
    listed = [wire.PreferenceChange(name=name, value=value) for name, value in (changes or {}).items()]
    async with _asked(run, run.host_of(user)) as channel:
        stub: Any = channel.stub(UserAgentStub)
        response: wire.SetPreferencesResponse | wire.ShowPreferencesResponse = await _answer(
            channel,
            lambda: (
                stub.SetPreferences(wire.SetPreferencesRequest(user=user, changes=listed))
                if listed
                else stub.ShowPreferences(wire.ShowPreferencesRequest(user=user))
            ),
        )
    return list(response.preferences)


# --- reaching the services -------------------------------------------------------------------------------------


@asynccontextmanager
async def _asked(run: LocalRun, host: str) -> AsyncIterator[Channel]:
    """Yield a channel to a host that serves, started again when the run has ended."""
    async with _all_asked(run, [host]) as channels:
        yield channels[host]


@asynccontextmanager
async def _all_asked(run: LocalRun, hosts: Sequence[str]) -> AsyncIterator[dict[str, Channel]]:
    """Yield a channel to each of some hosts that serve, by host; started again when the run has ended."""
    tls = run.operator()
    services = [
        Child("thirdparty", DIRECTORY, run.folder / "thirdparty"),
        Child("cos", "cos", run.folder / "cos"),
    ]
    asked = {host: Child("client", host, run.folder / host) for host in hosts}
    children = [*services, *asked.values()]
    away = [child.party for child in children if not in_use(child.state)]
    async with AsyncExitStack() as stack:
        if not away:
            addresses = {host: configured_address(child) for host, child in asked.items()}
        elif len(away) < len(children):
            raise PeerError(
                f"run {run.run_id} is running, but not {', '.join(away)}",
                hint="try again in a moment; its log says more when it has stopped",
            )
        else:
            phase = run.phase()
            if phase != _DONE:
                raise RunError(
                    f"run {run.run_id} is neither running nor finished: it stopped in phase {phase or _GATHER}",
                    hint="--run names another run",
                )
            addresses = await stack.enter_async_context(_started_again(children, asked))
        channels = {
            host: await stack.enter_async_context(_connected(tls, child, addresses[host]))
            for host, child in asked.items()
        }
        for channel in channels.values():
            await _ready(channel, children if away else ())
        yield channels


@asynccontextmanager
async def _started_again(
    children: Sequence[Child], hosts: Mapping[str, Child]
) -> AsyncIterator[dict[str, str]]:
    """Start third party, COS and hosts, in this order, from their stores; yield the hosts' addresses."""
    # New ports: another process may have taken the run's by now.
    address = {name: f"{_HOST}:{free_port()}" for name in ("enrol", *(child.party for child in children))}
    thirdparty, cos = (address[child.party] for child in children[:2])
    sets = {
        "thirdparty": (f"enrol_listen={address['enrol']}",),
        "cos": (f"thirdparty.address={thirdparty}",),
        "client": (f"thirdparty.address={thirdparty}", f"cos.address={cos}"),
    }
    try:
        for child in children:
            child.start(
                f"listen={address[child.party]}",
                f"state={child.state}",  # the folder may have been moved
                "transcript=false",  # this request is no part of the run
                *sets[child.role],
            )
        yield {host: address[child.party] for host, child in hosts.items()}
    finally:
        await to_the_end(_stopped(children))


async def _stopped(children: Sequence[Child]) -> None:
    """Stop services in the reverse of the order in which they were started."""
    for child in reversed(children):
        await child.stop()


@asynccontextmanager
async def _connected(tls: TlsFiles, child: Child, address: str) -> AsyncIterator[Channel]:
    channel = connect(
        address,
        tls.channel_credentials(),
        tls_name=logical_name(child.role, child.name),
        peer=child.party,
        meter=Meter(),
    )
    try:
        yield channel
    finally:
        await channel.close()


async def _ready(channel: Channel, children: Sequence[Child]) -> None:
    """Wait until a service reports itself healthy; fail as soon as one of the children has ended."""
    deadline = time.monotonic() + _READY_S
    while True:
        for child in children:
            child.require_alive()
        try:
            if await _health(channel) == health_pb2.HealthCheckResponse.SERVING:
                return
        except grpc.aio.AioRpcError as error:
            if time.monotonic() > deadline:
                raise from_rpc_error(error, channel.peer) from error
        if time.monotonic() > deadline:
            raise PeerError(f"{channel.peer} was not ready within {_READY_S:g} s", hint="see its log")
        await asyncio.sleep(_PAUSE_S)


async def _health(channel: Channel) -> int:
    stub: Any = channel.stub(health_pb2_grpc.HealthStub)
    response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_S)
    return int(response.status)


async def _answer(channel: Channel, attempt: Callable[[], Awaitable[T]]) -> T:
    try:
        return await Retry(limit_s=_ANSWER_S)(attempt)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, channel.peer) from error


# --- reading stores --------------------------------------------------------------------------------------------


def _some(names: dict[str, str]) -> str:
    shown = list(names)[:3]
    return f"as {', '.join(map(repr, shown))}" if shown else "and there are none"
