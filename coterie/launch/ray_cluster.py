"""Client hosts of a run as actors on the nodes of a Ray cluster.

All other services run on the launcher's machine; hosts reach them there, with mutual TLS, as they do on one machine.
Ray places the hosts, carries their files there and back, and tells when a node is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from coterie.config.run import RunSettings
from coterie.errors import PeerError, PreflightError
from coterie.launch.children import Child
from coterie.launch.node_host import AUTHORITY, ENDING_S, Files, NodeHost, packed, unpack
from coterie.systems.run_settings import RaySettings
from coterie.wire.versions import release

__all__ = ["Cluster", "NodeChild", "NodeProcess", "objection_to_nodes", "require_answer"]

_PROBE_S = 5.0
_PLACING_S = 180.0
_CALL_S = 60.0
_LOOK_S = 0.3
_MB = 1 << 20

_OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Nothing is reported to Ray's makers, and no warning is printed about accelerators that hosts do not use."""


def _library() -> Any:
    """Return the package ``ray``.

    Raises
    ------
    PreflightError
        It is not installed.
    """
    for name, value in _OURS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise PreflightError(
            f"client hosts on a Ray cluster need {error.name}",
            hint="pip install 'coterie[ray]', or leave `--hosts` out",
        ) from error
    return ray


def require_answer(options: RaySettings) -> None:
    """Check that Ray is installed, and that a gRPC server answers at the address of the cluster's head.

    Raises
    ------
    PreflightError
        Ray is not installed.
    PeerError
        No gRPC server answers.
    """
    _library()
    if (head := options.head) is None:
        return
    why = ""
    try:
        socket.create_connection(head, timeout=_PROBE_S).close()
        # Ray itself would wait half a minute for a server of another kind.  Where it uses TLS, it has the certificates.
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
            with grpc.insecure_channel(f"{head[0]}:{head[1]}") as channel:
                grpc.channel_ready_future(channel).result(timeout=_PROBE_S)
    except grpc.FutureTimeoutError:
        why = "what listens there is no Ray Client"
    except OSError as error:
        why = str(error.strerror or error)
    if why:
        raise PeerError(
            f"no Ray cluster answers at {options.address}: {why}",
            hint="expected the port of Ray Client at its head, 10001 unless `ray start` was told another one",
        )


def objection_to_nodes(nodes: Iterable[Mapping[str, Any]], hosts: int, options: RaySettings) -> str:
    """Return why a cluster can never hold all hosts, however idle it is; empty where it can.

    Parameters
    ----------
    nodes : iterable of mapping
        As ``ray.nodes`` returns them.
    hosts : int
        Number of client hosts; one host does not extend over several nodes.
    options : RaySettings
    """
    needs = {"CPU": options.cpus, "memory": float(options.memory_mb * _MB)}
    alive = [one["Resources"] for one in nodes if one["Alive"]]
    there = sum(one.get("CPU", 0.0) for one in alive)
    if hosts * options.cpus > there:
        return f"the Ray cluster has {there:g} processors, and {hosts} hosts need {hosts * options.cpus:g}"
    # Ray counts in parts of 1/10,000.
    room = sum(
        min((int(one.get(name, 0.0) / need + 1e-4) for name, need in needs.items() if need), default=hosts)
        for one in alive
    )
    if room >= hosts:
        return ""
    each = f"{options.cpus:g} processors" + (f" and {options.memory_mb} MiB" if options.memory_mb else "")
    return f"the nodes of the Ray cluster have room for {room} of {hosts} hosts, each of which needs {each} of one node"


@dataclass
class NodeProcess:
    """A host's process on a node, as last seen from here; implements `ChildProcess`."""

    actor: Any
    pid: int = 0
    """0: the process is none of this machine's."""
    returncode: int | None = None
    lost: str = ""
    """Why nothing is known of the process any more; empty while its node answers."""
    starts: int = 1
    """How often it was started on this node: an answer from before the last start is out of date."""

    def poll(self) -> int | None:
        """Return the exit status as last seen; None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has been seen to end, and return its exit status; raises as `subprocess.Popen`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None and not self.lost:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("client host", timeout or 0.0)
            time.sleep(_LOOK_S)
        return self.returncode or 0

    def send_signal(self, sig: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self.returncode is None and not self.lost:
            self.actor.signal.remote(int(sig))

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self.send_signal(signal.SIGKILL)


@dataclass
class NodeChild(Child):
    """A client host of a launcher that runs on a node of a Ray cluster.

    Its folder here has its files before the start, and its log and state after the end.
    """

    cluster: Cluster = field(kw_only=True, repr=False)
    process: NodeProcess | None = field(default=None, repr=False)

    def start(self, *sets: str) -> None:
        """Start the process on a node, or again where it ended; on another node where its node is gone."""
        if sets:
            raise ValueError("a host on a node takes its configuration from its file")
        if self.process is not None and not self.process.lost:
            self.process.starts += 1
            self.process.returncode = None
            self.process.actor.start.remote()
        else:
            self.process = self.cluster.place(self)

    @property
    def lost(self) -> str:
        """Why nothing is known of the process any more, as when its node is gone; empty otherwise."""
        return "" if self.process is None else self.process.lost

    async def stop(self) -> None:
        """End the process, and take its log and state from its node."""
        if self.process is not None:
            await asyncio.to_thread(self.cluster.end, self)


class Cluster:
    """Connection to a Ray cluster for the hosts of one federation.

    Parameters
    ----------
    settings : RunSettings
        The run; ``settings.ray`` names the cluster.
    run_id : str
        Id of the run.
    authority : Path
        File with the authority's certificate, which is made before the first host starts.
    """

    def __init__(self, settings: RunSettings, run_id: str, authority: Path) -> None:
        self._options = settings.ray
        self._hosts = settings.federation.hosts
        self._authority = authority
        self._kept = ""
        if self._options.state is not None:
            self._kept = str(self._options.state / f"{run_id}-{secrets.token_hex(4)}")
        self._ray: Any = None
        self._own = False
        self._watching: threading.Thread | None = None
        self._ending = threading.Event()
        self._seen = threading.Lock()
        self._placed: dict[str, NodeChild] = {}
        self.address = "127.0.0.1"
        """Address of this machine at which nodes reach the services here."""

    @property
    def keeps_state(self) -> bool:
        """Whether a host whose node is gone goes on from its state on another node."""
        return bool(self._kept)

    # --- connection --------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect to the cluster, and find the address at which its nodes reach this machine.

        Raises
        ------
        PreflightError
            Ray is not installed, or the cluster can never hold all hosts.
        PeerError
            No cluster answers.
        """
        require_answer(self._options)
        ray = _library()
        quiet = {"log_to_driver": False, "logging_level": "error"}
        address = "auto" if self._options.head is None else self._options.address
        if not ray.is_initialized():
            try:
                ray.init(address, **quiet)
            except (ConnectionError, RuntimeError, OSError, ValueError) as error:
                first = str(error).strip().partition("\n")[0]
                raise PeerError(
                    f"no Ray cluster can be used at {self._options.address}: {first}",
                    hint="all nodes need the same Python and Ray as this machine (docs/ray.md)",
                ) from error
            self._own = True
        self._ray = ray
        if problem := objection_to_nodes(ray.nodes(), self._hosts, self._options):
            self.close()
            raise PreflightError(
                problem,
                hint="add nodes, or lower federation.hosts, ray.cpus (a fraction is allowed) or ray.memory_mb",
            )
        self.address = self._options.reached_at or self._own_address(ray)
        self._ending.clear()
        self._watching = threading.Thread(target=self._watch, name="ray-hosts", daemon=True)
        self._watching.start()

    def _own_address(self, ray: Any) -> str:
        if (head := self._options.head) is None:
            return str(ray.util.get_node_ip_address())
        # No packet is sent: the system chooses the address that it would send from.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(head)
            return str(probe.getsockname()[0])

    def close(self) -> None:
        """Disconnect; whatever hosts are left end with it."""
        self._ending.set()
        if self._watching is not None:
            self._watching.join()
            self._watching = None
        if self._own and self._ray is not None:
            self._ray.shutdown()
        self._ray = None

    # --- hosts -------------------------------------------------------------------------------------------------

    def place(self, child: NodeChild) -> NodeProcess:
        """Have Ray place a host, and start its process there.

        Its files go to the node with it.  Hosts are spread over the nodes.
        """
        files: Files = packed(child.folder)
        files.pop(child.log.name, None)
        files[AUTHORITY] = (0o600, self._authority.read_bytes())
        needs: dict[str, Any] = {"num_cpus": self._options.cpus, "scheduling_strategy": "SPREAD"}
        if self._options.memory_mb:
            needs["memory"] = self._options.memory_mb * _MB
        kept = f"{self._kept}/{child.name}" if self._kept else ""
        actor = self._ray.remote(NodeHost).options(**needs).remote(child.name, self._ray.put(files), kept)
        process = NodeProcess(actor)
        actor.start.remote()
        with self._seen:
            self._placed[child.party] = child
        return process

    def placed(self, children: Iterable[Child]) -> None:
        """Wait until hosts have been placed, and check their nodes' release of Coterie.

        Raises
        ------
        PreflightError
            No node has room for a host in time, or its node has another release of Coterie, or none.
        """
        own_release = release()
        hosts = [one for one in children if isinstance(one, NodeChild) and one.process is not None]
        asked = {one.process.actor.release.remote(): one for one in hosts if one.process is not None}
        done, waiting = self._ray.wait(list(asked), num_returns=len(asked), timeout=_PLACING_S)
        for reference in done:
            name = asked[reference].party
            try:
                found = self._ray.get(reference)
            except Exception as error:
                words = [line for line in str(error).splitlines() if line.strip()]
                raise PreflightError(
                    f"{name} cannot be started on its node: {words[-1] if words else type(error).__name__}",
                    hint="every node needs Coterie as it is installed here (docs/ray.md)",
                ) from error
            if found != own_release:
                raise PreflightError(
                    f"the node of {name} has Coterie {found}, and this machine {own_release}",
                    hint="install the same release on every node",
                )
        for reference in waiting:
            # Its end would be waited for in vain.
            if (process := asked[reference].process) is not None:
                process.lost = "no node had room for it"
                self._ray.kill(process.actor)
        if waiting:
            raise PreflightError(
                f"no node has had room for {asked[waiting[0]].party} within {_PLACING_S:g} s",
                hint="end other work on the cluster, add nodes, or lower ray.cpus or ray.memory_mb",
            )

    def end(self, child: NodeChild) -> None:
        """End a host's process, and write its log and state into its folder here; a lost one leaves nothing."""
        process = child.process
        if process is None or process.lost or self._ray is None:
            return
        with self._seen:
            self._placed.pop(child.party, None)
        try:
            status, log, files = self._ray.get(process.actor.end.remote(), timeout=ENDING_S + _CALL_S)
        except Exception as error:  # whatever Ray raises: the others must still end
            process.lost = _reason(error)
        else:
            process.returncode = status
            _append(child.log, log)
            unpack(files, child.state)
        with contextlib.suppress(Exception):
            self._ray.kill(process.actor)

    def _watch(self) -> None:
        """Ask every host how it is, again and again; one that is slow to answer holds up none of the others."""
        asked: dict[Any, tuple[NodeChild, NodeProcess, int]] = {}
        while not self._ending.wait(_LOOK_S):
            with self._seen:
                placed = [(child, child.process) for child in self._placed.values()]
            waited = {id(process) for _, process, _ in asked.values()}
            for child, process in placed:
                if process is None or process.lost or id(process) in waited:
                    continue
                starts = process.starts
                try:
                    asked[process.actor.look.remote()] = child, process, starts
                except Exception as error:
                    self._lose(child, process, error)
            if not asked:
                continue
            try:
                done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S)
            except Exception as error:
                # The cluster's head is gone, and the hosts with it.
                for child, process, _ in asked.values():
                    self._lose(child, process, error)
                asked.clear()
                continue
            for reference in done:
                child, process, starts = asked.pop(reference)
                try:
                    status, log = self._ray.get(reference)
                except Exception as error:
                    if not isinstance(error, self._ray.exceptions.ActorUnavailableError):
                        self._lose(child, process, error)
                    continue
                _append(child.log, log)
                if status is not None and process.starts == starts:
                    process.returncode = status

    def _lose(self, child: NodeChild, process: NodeProcess, error: Exception) -> None:
        with self._seen:
            # A host that is being ended, or runs elsewhere already, is no longer watched for this process.
            if child.process is process and child.party in self._placed:
                process.lost = _reason(error)
                del self._placed[child.party]


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _append(log: Path, content: bytes) -> None:
    if content:
        with log.open("ab") as stream:
            stream.write(content)
