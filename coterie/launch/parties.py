"""Parties of a federation and their configurations, on one machine or across many.

The launcher of ``coterie run`` and ``coterie bootstrap`` both lay out a federation with `lay_out`.  They differ only in
the folder and address of each party, which a `PlaceOfParty` gives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coterie.config.run import RunSettings
from coterie.crypto.clocks import CLOCK_SKEW_S
from coterie.crypto.graph_key import GRAPH
from coterie.crypto.operator_key import sign_run
from coterie.crypto.roster import PAILLIER, Roster, save_roster_key
from coterie.net.enrolment import HOLDER, identities
from coterie.rounds.plan_hash import plan_hash
from coterie.studies.run_data import Feed
from coterie.systems.description import Driver
from coterie.wire.v1 import operator_pb2 as wire
from coterie.wire.v1.orchestrator_pb2 import RunPlan

__all__ = [
    "DIRECTORY",
    "JOIN_S",
    "OPERATOR_SIGNS",
    "ROSTER_KEY",
    "Laid",
    "PartyPlace",
    "PartyPlan",
    "PlaceOfParty",
    "lay_out",
    "seed_of_combinations",
    "start_request",
]

DIRECTORY = "directory"
"""Name of the third party."""

ROSTER_KEY = "roster.pub"
"""Name of the file with the operator's public key for rosters."""

OPERATOR_SIGNS = "run.key"
"""Name of the file in the operator's folder with the key that signs plans of runs."""

_ROSTER_FILE = "roster.txt"
_GRAPH_ROSTER_FILE = "graph-roster.txt"
_ROSTER_S = 365 * 24 * 3600

JOIN_S = 60.0
"""How long a process tries to enrol while the third party may still be starting, seconds."""


@dataclass(frozen=True)
class PartyPlace:
    """Folder and addresses of one party.

    Parameters
    ----------
    folder : Path
        Folder into which the party's files are written.
    listen : str
        Address on which the party listens, ``host:port``.
    reached_at : str or None
        Address that other parties use; None when it is the same.
    """

    folder: Path
    listen: str
    reached_at: str | None = None

    @property
    def address(self) -> str:
        """Address that other parties use, ``host:port``."""
        return self.reached_at or self.listen


PlaceOfParty = Callable[[str, str, int], PartyPlace]
"""Function that gives a party's place by role, name and position within the role."""


@dataclass(frozen=True)
class PartyPlan:
    """One party of a federation, with its configuration.

    Parameters
    ----------
    role, name : str
        Role and name of the party.
    place : PartyPlace
        Folder and addresses of the party.
    participants : int
        For how many participants the party speaks.
    values : dict
        The party's own configuration, without the keys that all parties share; relative paths start from its folder.
    late : bool
        Whether the party joins only after some epochs (churn).
    """

    role: str
    name: str
    place: PartyPlace
    participants: int
    values: dict[str, Any] = field(default_factory=dict)
    late: bool = False


@dataclass(frozen=True)
class Laid:
    """A federation that is laid out: all parties but the third party, with their files written."""

    parties: tuple[PartyPlan, ...]
    users: int
    roster_key: bytes | None = None
    """The operator's public key for rosters, for the third party; None in runs without one."""
    signs_rosters: Ed25519PrivateKey | None = field(default=None, repr=False)
    """The operator's private key for rosters; None unless a roster is still to be signed."""

    @property
    def owners(self) -> int:
        """Number of data owners that take part from the beginning."""
        return sum(
            party.participants for party in self.parties if party.role == "data-owner" and not party.late
        )


def lay_out(
    settings: RunSettings,
    feed: Feed,
    layout: PlaceOfParty,
    operator: str,
    *,
    run_id: str,
    seed: int,
    invited: bool = False,
    cos: tuple[Mapping[str, Any], Sequence[PartyPlan]] | None = None,
) -> Laid:
    """Write each party's data into its folder, and return the parties with their configurations.

    Parameters
    ----------
    settings : RunSettings
        The run.
    feed : Feed
        The data, divided.
    layout : callable
        Gives the folder and addresses of each party.
    operator : str
        Public key of the operator who signs the run's plan, 64 hexadecimal digits.
    run_id : str
        Id of the run.
    seed : int
        Seed of users' own randomness and order of delivery, where the system or an experiment has these seeded.
    invited : bool
        Whether parties make their keys themselves; the roster of key holders is then signed later.
    cos : tuple, optional
        Where parties find the COS, and its processes, where there are several; one of its own is laid out otherwise.
    """
    if cos is None:
        place = layout("cos", "cos", 0)
        cos = {"address": place.address, "name": "cos"}, [PartyPlan("cos", "cos", place, 0)]
    peer, processes = cos
    common = {
        "run": run_id,
        "cos": dict(peer),
        "operator_keys": [operator],
    }
    parties = [*processes, *_owners(settings, feed, layout, common)]
    hosts = []
    for host in range(settings.federation.hosts):
        place = layout("client", f"host-{host}", host)
        if users := feed.write_histories(host, place.folder / "histories.csv"):
            hosts.append((host, place, users))
    run = None if invited else run_id
    signs = Ed25519PrivateKey.generate()
    encryption = _encryption(settings, layout, common, run, [place for _, place, _ in hosts], signs)
    graph = (
        _Graph(signs, [place.folder / "state" for _, place, _ in hosts], run)
        if settings.own.expands
        else None
    )
    # Where hosts share the key of sums it is the same one; otherwise the first user of each holds it.
    latents = None
    if settings.own.combines:
        holders = [place.folder / "state" for _, place, _ in hosts]
        latents = encryption or _Encryption(settings, holders, run, signs)
    if encryption is not None:
        parties += encryption.parties
    for host, place, users in hosts:
        values = {
            **common,
            "histories": "histories.csv",
            **_told(feed.write_attributes(host, place.folder / "attributes.csv"), "attributes"),
            **_told(feed.write_preferences(host, place.folder / "preferences.csv"), "preferences"),
            **_own_seed(settings, seed),
            **_consent(settings),
            **({"per_user_metrics": True} if settings.federation.per_user_metrics else {}),
            **({"check_in": True} if settings.federation.check_in_s else {}),
            **({} if encryption is None else encryption.of_a_host(place.folder)),
            **({} if graph is None else graph.of_a_host(place.folder)),
            **({} if latents is None else {"latents": latents.trust(place.folder)}),
        }
        participants = users + (encryption is not None and encryption.shared)
        parties.append(PartyPlan("client", f"host-{host}", place, participants, values))
    listed = encryption is not None or graph is not None or latents is not None
    return Laid(
        tuple(parties),
        sum(users for _, _, users in hosts),
        _public(signs) if listed else None,
        signs if listed and invited else None,
    )


def _encryption(
    settings: RunSettings,
    layout: PlaceOfParty,
    common: dict[str, Any],
    run_id: str | None,
    hosts: Sequence[PartyPlace],
    signs: Ed25519PrivateKey,
) -> _Encryption | None:
    """Return the encryption of a run's sums, None when they are not encrypted; without a run id, sign no roster."""
    if settings.secure_sum == "shared-key":
        return _Encryption(settings, [place.folder / "state" / HOLDER for place in hosts], run_id, signs)
    if settings.secure_sum != "encrypted":
        return None
    count = settings.encryption.holders
    places = {f"key-{n}": layout("decrypting-client", f"key-{n}", n) for n in range(count)}
    found = _Encryption(settings, [place.folder / "state" for place in places.values()], run_id, signs)
    for name, place in places.items():
        values = {
            **common,
            "encryption": found.trust(place.folder),
            "rotate_every": settings.encryption.rotate_every,
            **_consent(settings),
        }
        found.parties.append(PartyPlan("decrypting-client", name, place, 1, values))
    return found


class _Encryption:
    """Key holders of a run with encrypted sums (decrypting clients, or the hosts themselves) and their signed roster.

    Parameters
    ----------
    settings : RunSettings
    holders : sequence of Path
        Folders of the holders' identities.
    run_id : str, optional
        Id of the run that the roster is for; None when the roster is signed later.
    signs : Ed25519PrivateKey
        The operator's key for rosters: drawn for the run, and not kept unless the roster is signed later, because key
        holders make their identities themselves.
    """

    def __init__(
        self,
        settings: RunSettings,
        holders: Sequence[Path],
        run_id: str | None,
        signs: Ed25519PrivateKey,
    ) -> None:
        encryption = settings.encryption
        self._key = {"bits": encryption.bits, "comparison": encryption.comparison}
        self._obfuscators = encryption.obfuscators
        self._rotate_every = encryption.rotate_every
        self.shared = settings.secure_sum == "shared-key"
        """Whether the hosts themselves hold the key."""
        self._roster_key = _public(signs)
        self._roster = _signed_roster(signs, holders, run_id, PAILLIER)
        self.parties: list[PartyPlan] = []
        """Decrypting clients, to be added to the federation's parties."""

    def of_a_host(self, folder: Path) -> dict[str, Any]:
        """Write a host's roster files, and return its configuration of encryption."""
        own = (
            {"holds_key": True, "rotate_every": self._rotate_every}
            if self.shared
            else {"obfuscators": self._obfuscators}
        )
        return {"encryption": self.trust(folder) | own}

    def trust(self, folder: Path) -> dict[str, Any]:
        """Write roster and roster key into a party's folder, and return the configuration that names them."""
        if self._roster is not None:
            self._roster.save(folder / _ROSTER_FILE)
        save_roster_key(folder / ROSTER_KEY, self._roster_key)
        return {"roster": _ROSTER_FILE, "roster_key": ROSTER_KEY} | self._key


class _Graph:
    """Signed roster of the hosts that hold the graph key of a run with graph expansion.

    Parameters
    ----------
    signs : Ed25519PrivateKey
        The operator's key for rosters.
    hosts : sequence of Path
        State folders of the hosts; the first user of each holds the key for all of them.
    run_id : str, optional
        Id of the run that the roster is for; None when the roster is signed later.
    """

    def __init__(self, signs: Ed25519PrivateKey, hosts: Sequence[Path], run_id: str | None) -> None:
        self._roster_key = _public(signs)
        self._roster = _signed_roster(signs, hosts, run_id, GRAPH)

    def of_a_host(self, folder: Path) -> dict[str, Any]:
        """Write a host's roster files, and return its configuration of graph expansion."""
        if self._roster is not None:
            self._roster.save(folder / _GRAPH_ROSTER_FILE)
        save_roster_key(folder / ROSTER_KEY, self._roster_key)
        return {"expansion": {"roster": _GRAPH_ROSTER_FILE, "roster_key": ROSTER_KEY}}


def _public(signs: Ed25519PrivateKey) -> bytes:
    return signs.public_key().public_bytes_raw()


def _signed_roster(
    signs: Ed25519PrivateKey, holders: Sequence[Path], run_id: str | None, secrets: str
) -> Roster | None:
    """Return a roster for some secrets, of the first participants of state folders; None when it is signed later."""
    if run_id is None:
        return None
    now, members = int(time.time()), [_own_id(folder) for folder in holders]
    return Roster.sign(signs, members, now - CLOCK_SKEW_S, now + _ROSTER_S, purpose=secrets, run=run_id)


def _own_id(state: Path) -> bytes:
    """Draw a key holder's identity before it starts, for the roster to name it, and return its participant id."""
    for folder in (state.parent, state):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (identity,) = identities(state, 1)
    return identity.participant_id


def _told(path: Path | None, key: str) -> dict[str, str]:
    """Return the setting that names a file; empty when no file was written."""
    return {} if path is None else {key: path.name}


def seed_of_combinations(settings: RunSettings, seed: int) -> dict[str, int]:
    """Return the third party's seed of pseudo meta-latents; empty unless an experiment has them."""
    return {"latent_seed": seed} if settings.own.combines and settings.rounds.experiment else {}


def _own_seed(settings: RunSettings, seed: int) -> dict[str, int]:
    """Return the seed of users' own randomness; empty unless the system or an experiment lets an operator know it."""
    return {"seed": seed} if settings.description.seeded_users or settings.rounds.experiment else {}


def _consent(settings: RunSettings) -> dict[str, Any]:
    """Return the consent that a host or key holder gives to the run: system, sums and floors; empty if asynchronous."""
    if settings.driver is Driver.ASYNCHRONOUS:
        return {}
    rounds = settings.rounds
    return {
        "consent": {
            "systems": [settings.system],
            "secure_sums": [settings.secure_sum],
            "min_cohort": rounds.min_cohort,
            "min_sum": rounds.min_sum,
            # Set explicitly: a host would otherwise go by its number of users, which may be one.
            "experiment": rounds.experiment,
            "sparse": settings.sparse,
        }
    }


def _owners_consent(settings: RunSettings) -> dict[str, Any]:
    """Return the consent that data owners give to the run: system, sums and the floor of users behind their rows."""
    floor = settings.own.owners_floor
    asynchronous = settings.driver is Driver.ASYNCHRONOUS
    return {
        "systems": [settings.system],
        "secure_sums": [settings.secure_sum],
        **({} if floor is None else {"k_min": floor}),
        **({} if asynchronous else {"experiment": settings.rounds.experiment}),
    }


def _owners(
    settings: RunSettings, feed: Feed, layout: PlaceOfParty, common: dict[str, Any]
) -> list[PartyPlan]:
    names = feed.partition.names
    options, epochs = settings.federation, settings.own.passes(settings)
    processes = feed.owner_processes(options.owner_processes)
    plans = []
    for position, (name, group) in enumerate(processes):
        place = layout("data-owner", name, position)
        owners = []
        for owner in group:
            items = f"items-{names[owner]}.csv"
            feed.write_items(owner, place.folder / items)
            features = feed.write_features(owner, place.folder / f"features-{names[owner]}.csv")
            owners.append({"name": names[owner], "items": items, **_told(features, "features")})
        values = {
            **common,
            "advertise": place.reached_at,
            "owners": owners,
            "consent": _owners_consent(settings),
        }
        late = position >= len(processes) - options.churn.owners
        if late:
            values["leave_after_epoch"] = max(1, math.floor(epochs * options.churn.leave_at))
        plans.append(PartyPlan("data-owner", name, place, len(owners), values, late))
    return plans


def start_request(
    settings: RunSettings, plan: RunPlan, key: Ed25519PrivateKey, *, owners: int, users: int
) -> wire.StartRunRequest:
    """Return the operator's request to start a run: the signed plan, how many parties to wait for, and time limits.

    Parameters
    ----------
    settings : RunSettings
    plan : RunPlan
    key : Ed25519PrivateKey
        The operator's, which signs the plan.
    owners, users : int
        Numbers of data owners and users to wait for before interactions are taken.
    """
    federation = settings.federation
    return wire.StartRunRequest(
        plan=plan,
        plan_signature=sign_run(key, plan.run_id, plan_hash(plan)),
        expect_owners=owners,
        expect_users=users,
        phase_timeout_ms=int(federation.phase_timeout_s * 1000),
        party_timeout_ms=int(federation.party_timeout_s * 1000),
        evaluate_every=federation.evaluate_every,
        most_abandoned=federation.most_abandoned,
        give_up_ms=int(federation.give_up_s * 1000),
        check_in_ms=int(federation.check_in_s * 1000),
    )
