"""The report's part on services of the third party that answer users: graph expansion and meta-latents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from coterie.telemetry.quantities import ABSENT, count
from coterie.telemetry.report import HostRequests, Report
from coterie.telemetry.report_parts import Fact, ReportTable, Section

__all__ = ["services_lines", "services_section"]

_TITLES = {"expansion": "graph expansion", "latents": "meta-latents"}
_REQUESTS = {"publish": "publications", "ask": "questions", "forget": "orders to forget"}
_COUNTERS = {
    "epoch": "epoch of the key",
    "uploads": "uploads",
    "tags": "tags",
    "served_tags": "tags that enough users have",
    "questions": "questions answered",
    "neighbours": "neighbours handed out",
    "key_users": "key users",
    "combinations": "combinations",
}
_SHOWN = ("uploads", "questions", "neighbours", "key_users", "combinations")
"""Counters that a line in the terminal shows."""
_LIMITS = frozenset({"OVERLOADED", "TOO_LARGE"})
"""Reasons of refusals that say that somebody asked for more than anybody may have."""


def services_lines(report: Report) -> list[tuple[str, str]]:
    """Return lines about the third party's services, as pairs of name and text, for the terminal."""
    found = []
    for service, known in report.third_party.items():
        told = ", ".join(
            f"{count(known.counters[name])} {_COUNTERS[name]}" for name in _SHOWN if name in known.counters
        )
        title = _title(service)
        found.append((title[:1].upper() + title[1:], told or "the third party did not answer in the end"))
        for host, one in known.hosts.items():
            found += [("  refused over a limit", f"{host}, {text}") for text in _limited(one)]
    return found


def services_section(report: Report) -> Section:
    """Return the HTML page's section on the third party's services; empty for a run that asked none."""
    found = Section("services", "Third party", "Services of the third party")
    for service, known in report.third_party.items():
        title = _title(service)
        found.facts += [
            Fact(_COUNTERS.get(name, name).capitalize(), count(number), title)
            for name, number in known.counters.items()
        ]
        rows = []
        for host, one in known.hosts.items():
            refused = "; ".join(f"{reason} ({text})" for reason, text in _refusals(one)) or ABSENT
            over = "; ".join(_limited(one)) or ABSENT
            rows.append([host, *(count(one.answered.get(name, 0)) for name in _REQUESTS), refused, over])
        found.tables.append(
            ReportTable(
                f"Requests of hosts to {title}",
                ["Host", *(name.capitalize() for name in _REQUESTS.values()), "Refused", "Over a limit"],
                rows,
            )
        )
        if known.refused:
            found.tables.append(
                ReportTable(
                    f"Refusals by {title}",
                    ["Reason", "Requests"],
                    [[reason, count(number)] for reason, number in known.refused.items()],
                )
            )
    if found:
        found.lead = (
            "Requests go through the orchestration server, which sees from which host they are and not what is in "
            "them; the third party sees what is in them and not whose they are. A user who asks for more than anybody "
            "may have is refused."
        )
    return found


def _title(service: str) -> str:
    return _TITLES.get(service, service)


def _refusals(host: HostRequests) -> Iterator[tuple[str, str]]:
    for reason, kinds in host.refused.items():
        kinds_of = ", ".join(
            f"{_REQUESTS.get(kind, kind)}: {count(number)}" for kind, number in kinds.items()
        )
        yield reason, kinds_of


def _limited(host: HostRequests) -> list[str]:
    """Return what a host's users asked for beyond limits, in words."""
    over: Counter[str] = Counter()
    for reason in _LIMITS & host.refused.keys():
        for kind, number in host.refused[reason].items():
            over[kind] += int(number or 0)
    return [f"{_REQUESTS.get(kind, kind)}: {count(number)}" for kind, number in sorted(over.items())]
