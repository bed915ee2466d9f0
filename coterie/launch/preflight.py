"""Preflight checks of ``coterie run``: each returns a finding, with the problem and its fix.

The checks change nothing: no store is migrated and no token redeemed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from coterie.config.load import ROLES
from coterie.config.run import RunSettings
from coterie.errors import CoterieError, PreflightError
from coterie.launch.children import free_port
from coterie.launch.finding import Finding, FindingStatus, failed, passed
from coterie.launch.preflight_service import check_service, check_systems, existing, unwritable
from coterie.rounds.training import Purpose
from coterie.secure_sum.registry import KEYED
from coterie.secure_sum.robust import kept_bytes
from coterie.studies.beside import beside
from coterie.studies.floors import Floors, fitted, floors, require_open, sufficient
from coterie.studies.protection import fragile, protection, require_cohorts, require_pads
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.description import Driver
from coterie.systems.registry import server_side

__all__ = ["Finding", "check_run", "check_service"]

_MB = 1 << 20
_RECORDED = 300
"""Bytes of transcripts by interaction and pass, where owners take blocks of interactions."""
_PROCESS_MB = 120
"""Memory of one service process with little data, MiB: the peak that small runs report."""


def check_run(settings: RunSettings) -> list[Finding]:
    """Check that ``coterie run`` can carry out a run on this machine; reads and divides the data set."""
    findings = [*_services(), *check_systems(), *_packages(settings)]
    try:
        dataset = load(settings)
    except CoterieError as error:
        findings.append(failed("data", error, "`coterie data describe PATH` says how a data set is read"))
    except ImportError as error:
        findings.append(
            Finding("data", "fail", f"the data set needs {error.name}", "pip install 'coterie[data]'")
        )
    else:
        findings.append(
            passed(
                "data",
                f"{dataset.name}: {len(dataset):,} interactions of {len(dataset.users):,} users "
                f"with {len(dataset.items):,} items",
            )
        )
        try:
            feed = make_feed(settings, dataset, settings.seeds[0])
        except CoterieError as error:
            findings.append(failed("split", error, "`[split]` and `[federation]` say how data is divided"))
        else:
            findings += [_split(settings, feed), _memory(settings, feed), _disk(settings, feed)]
            if settings.description.in_rounds:
                findings += _rounds(settings, feed)
            elif settings.driver is Driver.WINDOWS:
                findings += [
                    Finding("rounds", "warn", warning, settings.description.page)
                    for warning in fragile(settings, feed.users_of_hosts())
                ]
    return [*findings, _output(settings.output), _loopback(settings)]


def _services() -> Iterator[Finding]:
    registered = metadata.entry_points(group="coterie.services").names
    missing = [role for role in ROLES if role not in registered]
    if missing:
        yield Finding(
            "services",
            "fail",
            f"no installed package provides {', '.join(missing)}",
            "install coterie again: services register as entry points when it is installed",
        )
    else:
        yield passed("services", ", ".join(ROLES))


def _packages(settings: RunSettings) -> Iterator[Finding]:
    keyed = settings.secure_sum in KEYED
    for extra, modules, use in (
        ("report", ("matplotlib", "jinja2"), "report.html"),
        ("data", ("polars", "h5py", "scipy"), "data sets from files"),
        ("fast", ("uvloop",), "a faster event loop"),
        *([("paillier", ("gmpy2",), f"secure_sum '{settings.secure_sum}'")] if keyed else []),
    ):
        missing = [name for name in modules if util.find_spec(name) is None]
        check = f"package {extra}"
        if not missing:
            yield passed(check, ", ".join(modules))
        else:
            # This run needs a Paillier key; the other extras cost a page or a column.
            status: FindingStatus = "fail" if extra == "paillier" else "warn"
            yield Finding(
                check,
                status,
                f"{', '.join(missing)} not installed: no {use}",
                f"pip install 'coterie[{extra}]'",
            )


def _split(settings: RunSettings, feed: Feed) -> Finding:
    owners, hosts = feed.partition.names, settings.federation.hosts
    users = [int((feed.host == host).sum()) for host in range(hosts)]
    floor = settings.federation.min_users
    below = sum(count < floor for count in users)
    few, many = min(users), max(users)
    each = f"{few}" if few == many else f"{few} to {many}"
    sizes = f"{len(owners)} data owners, {each} users on each of {hosts} hosts"
    if below and not settings.description.in_rounds:  # in rounds metrics are part of a sum over the cohort
        return Finding(
            "split",
            "warn",
            f"{sizes}: {below} hosts have fewer than min_users = {floor} and will withhold their metric sums"
            + (", so that nothing is measured" if below == hosts else ""),
            f"federation.hosts at most {max(1, len(feed.dataset.users) // floor)} for so many users",
        )
    return passed("split", sizes)


def _rounds(settings: RunSettings, feed: Feed) -> Iterator[Finding]:
    hosts = feed.users_of_hosts()
    settings = fitted(settings, feed)
    try:
        require_cohorts(settings, sum(hosts))
        require_pads(settings, sum(hosts), len(feed.dataset.items))
    except CoterieError as error:
        yield failed("rounds", error, "`[rounds]` says how cohorts are drawn and under which floors")
        return
    known = protection(settings, hosts)
    yield passed("rounds", f"secure sum {known['sum']}, {known['parties']} as parties")
    for warning in known["warnings"]:
        yield Finding("rounds", "warn", warning, settings.description.page)
    if (expected := floors(settings, feed)) is not None:
        yield _floors(settings, feed, expected)


def _floors(settings: RunSettings, feed: Feed, expected: Floors) -> Finding:
    """Report what groups will close to learning, and what their counts will tell of users."""
    try:
        require_open(settings, feed)
    except CoterieError as error:
        return failed("floors", error, "")
    if settings.rounds.fit_groups:
        chosen = f"rounds.group={expected.group}, fitted to the data; {expected}"
    else:
        chosen = str(expected)
    if not expected.costly:
        return passed("floors", chosen)
    better = sufficient(settings, feed)
    if better is None or better.groups == expected.groups:
        fix = f"no group is larger; a smaller {settings.description.table}.min_touch closes less, and tells more"
    else:
        fix = (
            f"rounds.group={better.group} and rounds.cohort={better.group} close {better.closed:.0%}, and their "
            "counts tell less"
        )
    return Finding("floors", "warn", chosen, fix)


def _contributions(settings: RunSettings, feed: Feed) -> int:
    """Return the most bytes of single contributions that the server keeps for a robust rule."""
    if settings.rounds.aggregation.terms.adds:
        return 0
    _, members, size = _round(settings, feed)
    return members * size


def _round(settings: RunSettings, feed: Feed) -> tuple[int, int, int]:
    """Return rounds of training a pass, members of each, and bytes of a member's contribution in eight-byte values."""
    rounds, users = settings.rounds, len(feed.dataset.users)
    cohort = users if rounds.cohorts == "all" else min(rounds.cohort, users)
    members = cohort if rounds.party_per_user else settings.federation.hosts
    plan = settings.own.for_plan(settings, feed.attribute_names)
    side = server_side(settings.system, plan, len(feed.dataset.items), 0, 1)
    return -(-users // cohort), members, kept_bytes(side.layout(Purpose.TRAIN))


def _recorded(settings: RunSettings, feed: Feed) -> int:
    """Return about how many bytes the transcripts of a run take, each message at its sender and its receiver."""
    federation, passes = settings.federation, settings.own.passes(settings)
    if not (federation.transcripts or federation.attacks):
        return 0
    if settings.driver is not Driver.ROUNDS:
        return passes * len(feed.dataset) * _RECORDED
    rounds, members, size = _round(settings, feed)
    # Contributions and models go in values of four bytes; every host fetches the model.
    return 2 * passes * rounds * (members + federation.hosts) * size // 2


def _versions(settings: RunSettings) -> int:
    """Return the largest number of model versions that a run keeps."""
    return 10 if settings.description.in_rounds else settings.own.passes(settings)


def _processes(settings: RunSettings) -> int:
    federation = settings.federation
    if not settings.description.needs.owners_by_genre:
        return 2 + settings.own.catalogue_owners + federation.hosts
    # By default there is one process for each owner, and a data set has about 20 genres.
    owners = federation.owner_processes or federation.owners or 20
    return 2 + owners + federation.hosts


def _memory(settings: RunSettings, feed: Feed) -> Finding:
    users, items, d = len(feed.dataset.users), len(feed.dataset.items), settings.own.width
    hosts = settings.federation.hosts
    model = (users + items) * d * 4
    # A host scores 256 users at a time and holds about ten arrays of shape (256, items).
    evaluating = 256 * items * 8 * 10
    expected = (
        _processes(settings) * _PROCESS_MB * _MB
        + 4 * model
        + hosts * (evaluating + model)
        + 400 * len(feed.dataset)
        + _contributions(settings, feed)
    )
    free = _free_memory()
    if free is None:
        return passed("memory", f"about {expected // _MB:,} MiB expected; what is free is not known here")
    text = f"about {expected // _MB:,} MiB expected, {free // _MB:,} MiB free"
    if expected > free:
        return Finding("memory", "warn", text, "fewer hosts, or federation.owner_processes = 1")
    return passed("memory", text)


def _free_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _disk(settings: RunSettings, feed: Feed) -> Finding:
    d, seeds = settings.own.width, len(settings.seeds)
    model = (len(feed.dataset.users) + len(feed.dataset.items)) * d * 4
    # Histories and stores take some hundred bytes an interaction; one model is kept for each evaluation.
    expected = seeds * (500 * len(feed.dataset) + (_versions(settings) + 3) * model + 20 * _MB)
    expected += seeds * _recorded(settings, feed)
    if (second := beside(settings)) is not None:
        expected += 20 * _MB + _recorded(second, feed)
    free = shutil.disk_usage(existing(settings.output)).free
    text = f"about {max(1, expected // _MB):,} MiB expected, {free // _MB:,} MiB free"
    if expected > free:
        return Finding("disk", "fail", text, "free space, or let `output` name a folder on another volume")
    return passed("disk", text)


def require_room(settings: RunSettings, feed: Feed) -> None:
    """Check that the disk has room for a run.

    Raises
    ------
    PreflightError
        It has not.
    """
    found = _disk(settings, feed)
    if found.status == "fail":
        raise PreflightError(f"the disk of {existing(settings.output)}: {found.problem}", hint=found.fix)


def _output(folder: Path) -> Finding:
    holder = existing(folder)
    if not holder.is_dir():
        return Finding("output", "fail", f"{holder} is no folder", "let `output` name a folder")
    problem = unwritable(holder)
    if problem is not None:
        return Finding(
            "output", "fail", f"{holder} cannot be written: {problem}", "let `output` name another folder"
        )
    return passed("output", str(folder))


def _loopback(settings: RunSettings) -> Finding:
    wanted = _processes(settings) + 1  # the third party listens twice
    try:
        ports = {free_port() for _ in range(wanted)}
    except OSError as error:
        return Finding(
            "ports", "fail", f"127.0.0.1 has no free port: {error.strerror}", "stop what uses the ports there"
        )
    return passed("ports", f"{len(ports)} free ports at 127.0.0.1, chosen when the run starts")
