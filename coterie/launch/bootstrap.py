"""Layout of a federation across machines, by ``coterie bootstrap``: one folder per party, to be mounted or copied.

A folder holds the party's configuration, the authority's certificate, a one-time token and the party's own data, and
nothing of any other party.  All paths in a folder are relative, so it works wherever it is copied.  In place of
configuration, certificate and token a folder may hold an invitation, by which the party makes its keys and its
configuration on its own machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.json_format import MessageToDict

from coterie.config.run import RunSettings
from coterie.crypto.identity import save_signing_key
from coterie.crypto.keyfile import write_private_file
from coterie.crypto.operator_key import public_text
from coterie.crypto.roster import save_roster_key
from coterie.errors import ConfigError, PreflightError
from coterie.launch.authority import TOKENS, keep_operator_keys, make_authority, make_token
from coterie.launch.children import toml
from coterie.launch.invitation import INVITATION, invite
from coterie.launch.order import Order
from coterie.launch.parties import (
    DIRECTORY,
    JOIN_S,
    OPERATOR_SIGNS,
    ROSTER_KEY,
    PartyPlace,
    lay_out,
    seed_of_combinations,
)
from coterie.launch.replicas import has_replicas, lay_out_replicas
from coterie.studies.floors import require_open
from coterie.studies.outcome import about
from coterie.studies.protection import protection, require_cohorts, require_pads
from coterie.studies.run_data import load, make_feed
from coterie.studies.study import study_of
from coterie.systems.description import Driver

__all__ = ["ENROL_PORT", "METRICS", "PORT", "ROSTER_SIGNS", "bootstrap", "held_order"]

PORT = 7443
"""Port on which every service listens."""

ENROL_PORT = 7444
"""Port on which the third party takes enrolments."""

METRICS = "127.0.0.1:9464"
"""Address of every service's metrics and health probe, reachable from its own machine only."""

ROSTER_SIGNS = "roster.key"
"""Name of the file in the operator's folder with the key that signs the roster of invited key holders."""

_CONFIG = "config.toml"
_ORDER = "order.json"
_OPERATOR = "operator"
_TOKEN_HOURS = 24.0


def held_order(root: Path) -> Order | None:
    """Return the order of a federation that is laid out already, None when there is none."""
    path = root / _OPERATOR / _ORDER
    return Order.load(path) if path.exists() else None


def bootstrap(
    settings: RunSettings,
    root: Path,
    run_id: str,
    *,
    addresses: Mapping[str, str] | None = None,
    invitations: bool = False,
) -> Order:
    """Write every party's folder below a root: ``thirdparty``, ``cos``, ``owner-N``, ``host-N`` and ``operator``.

    A COS of several processes has ``coordinator-N`` and ``intake-N``, or ``cos-N`` where it has no intakes.

    The order is written last, so a root with an order is complete.  An interrupted bootstrap can be run again.

    Parameters
    ----------
    settings : RunSettings
        The run; one seed, without churn and attacks, which need a launcher on one machine.
    root : Path
        Folder below which the parties' folders are made; they may exist already.
    run_id : str
        Id of the run, a DNS label.
    addresses : mapping, optional
        ``host:port`` by folder, for parties not at ``FOLDER:7443`` with the folder as host name.  The key
        ``enrol`` stands for the third party's enrolment port, and ``cos`` for the balancer before intakes.
    invitations : bool
        Whether parties get invitations for `coterie.launch.joining` in place of a configuration.  Holders of the
        key of sums then make their identities themselves, so their roster is signed later, with `ROSTER_SIGNS`.

    Returns
    -------
    Order
        The order written into the operator's folder.

    Raises
    ------
    ConfigError
        The settings ask for what needs a launcher on one machine, or an address names no party.
    PreflightError
        A folder cannot be written.
    DataError
        The data set cannot be read or divided.
    """
    _require_one_federation(settings)
    layout = _Layout(root, dict(addresses or {}), invitations)
    try:
        return _lay_out(settings, layout, run_id)
    except OSError as error:
        raise PreflightError(
            f"cannot write {error.filename}: {error.strerror}",
            hint="every party needs a folder that this process may write: in a compose file, a volume",
        ) from error


def _require_one_federation(settings: RunSettings) -> None:
    refused = {
        f"seeds = {list(settings.seeds)}": len(settings.seeds) > 1,
        f"federation.churn.owners = {settings.federation.churn.owners}": settings.federation.churn.owners > 0,
        "federation.attacks = true": settings.federation.attacks,
    }
    if settings.rounds.fit_groups:
        raise ConfigError(
            "rounds.fit_groups = true: across machines the data is at the hosts, and groups cannot be fitted to it",
            hint="rounds.group with a number; `coterie preflight` on data of the same kind says which would do",
        )
    for setting, asked in refused.items():
        if asked:
            raise ConfigError(
                f"{setting}: a federation across machines is one run of one seed",
                hint="`coterie run` does this on one machine",
            )


@dataclass(frozen=True)
class _Layout:
    """Folders (mode 0700) and addresses of parties below a root; an address follows the folder unless one is given."""

    root: Path
    addresses: dict[str, str]
    invitations: bool

    def __call__(self, role: str, name: str, position: int) -> PartyPlace:
        folder = {"data-owner": f"owner-{position}", "thirdparty": "thirdparty"}.get(role, name)
        return PartyPlace(self.folder(folder), f"0.0.0.0:{PORT}", self.at(folder))

    def folder(self, name: str) -> Path:
        path = self.root / name
        self.root.mkdir(parents=True, exist_ok=True)
        # An existing folder, such as a volume, keeps the mode that its owner chose.
        path.mkdir(exist_ok=True, mode=0o700)
        return path

    def at(self, folder: str, port: int = PORT, key: str | None = None) -> str:
        return self.addresses.get(key or folder, f"{folder}:{port}")

    def require_known(self, folders: set[str]) -> None:
        unknown = sorted(set(self.addresses) - folders - {"enrol"})
        if unknown:
            raise ConfigError(
                f"an address is given for {unknown[0]!r}; there are {', '.join(sorted(folders))}"
            )


def _lay_out(settings: RunSettings, layout: _Layout, run_id: str) -> Order:
    seed = settings.seeds[0]
    replicas = lay_out_replicas(settings, layout, layout.at("cos")) if has_replicas(settings) else None
    thirdparty = layout("thirdparty", DIRECTORY, 0)
    operator = layout.folder(_OPERATOR)
    state = thirdparty.folder / "state"
    make_authority(state)
    (state / TOKENS).unlink(missing_ok=True)  # tokens of an interrupted bootstrap

    feed = make_feed(settings, load(settings), seed)
    if settings.description.in_rounds:
        require_cohorts(settings, sum(feed.users_of_hosts()))
        require_pads(settings, sum(feed.users_of_hosts()), len(feed.dataset.items))
        require_open(settings, feed)
    key = Ed25519PrivateKey.generate()
    save_signing_key(operator / OPERATOR_SIGNS, key)
    keep_operator_keys(state, [public_text(key)])
    laid = lay_out(
        settings,
        feed,
        layout,
        public_text(key),
        run_id=run_id,
        seed=seed,
        invited=layout.invitations,
        cos=None if replicas is None else (replicas.peer, replicas.parties),
    )
    if laid.signs_rosters is not None:
        save_signing_key(operator / ROSTER_SIGNS, laid.signs_rosters)
    if laid.roster_key is not None:
        save_roster_key(state / ROSTER_KEY, laid.roster_key)
    places = {thirdparty.folder.name, *(party.place.folder.name for party in laid.parties)}
    if settings.federation.intakes:
        places.add("cos")  # the balancer, which has no folder
    layout.require_known(places)

    service = {"state": "state", "metrics": METRICS, "transcript": settings.federation.transcripts}
    _configure(
        thirdparty.folder,
        {
            "name": DIRECTORY,
            "listen": thirdparty.listen,
            "enrol_listen": f"0.0.0.0:{ENROL_PORT}",
            **service,
            **seed_of_combinations(settings, seed),
        },
    )
    enrol = {
        "address": layout.at("thirdparty", ENROL_PORT, "enrol"),
        "name": DIRECTORY,
        "ca_file": "ca.pem",
        "token_file": "token",
        "timeout_s": JOIN_S,
    }
    admit = _Admission(state, layout.invitations, enrol)
    directory = {"address": thirdparty.address, "name": DIRECTORY}
    for party in laid.parties:
        values = {**party.values, "thirdparty": directory}
        if settings.federation.transcripts:
            values["transcript"] = True
        own = {"listen": party.place.listen, **service}
        admit(party.place.folder, party.role, party.name, party.participants, values, own)
    cos = {"address": layout.at("cos"), "name": "cos"} if replicas is None else replicas.peer
    own = {"state": "state", "output": "report"}
    values = {"order": _ORDER, "signs": OPERATOR_SIGNS, "cos": cos, "thirdparty": directory}
    admit(operator, "operator", _OPERATOR, 0, values, own)
    order = Order(
        run_id=run_id,
        seed=seed,
        settings=settings,
        owners=laid.owners,
        users=laid.users,
        dataset=about(feed.dataset),
        split_sha256=feed.split.sha256(feed.dataset),
        reference=study_of(settings.system).references(settings, feed, seed) if settings.reference else {},
        protection={}
        if settings.driver is Driver.ASYNCHRONOUS
        else protection(settings, feed.users_of_hosts()),
        attributes=list(feed.attribute_names),
        holdings=[MessageToDict(one) for one in feed.holdings(settings.federation.owner_processes)],
    )
    order.save(operator / _ORDER)
    return order


@dataclass(frozen=True)
class _Admission:
    """Writes into each party's folder what it needs to enrol: token and configuration, or an invitation."""

    authority: Path
    invites: bool
    enrol: dict[str, Any]

    def __call__(
        self,
        folder: Path,
        role: str,
        name: str,
        participants: int,
        values: dict[str, Any],
        own: dict[str, Any],
    ) -> None:
        """Write one party's enrolment files; an invited party chooses the settings in ``own`` itself."""
        if self.invites:
            told = {key: value for key, value in values.items() if value is not None}
            point = self.enrol["address"], self.enrol["name"]
            made = invite(
                self.authority, role, name, participants, enrol=point, settings=told, hours=_TOKEN_HOURS
            )
            made.save(folder / INVITATION)
            return
        make_token(self.authority, role, name, participants, folder / "token", hours=_TOKEN_HOURS)
        write_private_file(folder / "ca.pem", (self.authority / "ca.pem").read_bytes())
        _configure(folder, {"name": name, **own, **values, "enrol": self.enrol})


def _configure(folder: Path, values: dict[str, Any]) -> None:
    (folder / _CONFIG).write_text(toml(values))
    (folder / _CONFIG).chmod(0o600)
