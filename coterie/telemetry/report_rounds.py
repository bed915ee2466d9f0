"""What a report says of a run in rounds: who was in them, what became of them, where their time went.

Worked out once for the page and for the terminal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coterie.telemetry import plots
from coterie.telemetry.quantities import count, duration, finite, percent, volume
from coterie.telemetry.report_facts import Report, entries, section
from coterie.telemetry.report_parts import Fact, Section, Table

__all__ = ["Rounds", "protection_lines", "rounds_lines", "rounds_of", "rounds_section"]

_PURPOSES = {
    "supports": "groups asked for their items",
    "train": "training",
    "evaluate": "evaluation",
    "window": "owners hand over their sums",
}
_SHOWN = 200
"""Rounds of which the page lists each; of more, the last."""
_SPARSE = 0.25
"""Share held back above which groups are small for the data (docs/threat-model.md, The attacks on rounds)."""
_SMALL_GROUPS = (
    "; a group's list of items tells much of its users then, larger groups (rounds.group) tell less"
)


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run, added up.

    Attributes
    ----------
    by_purpose : mapping of str to int
        Rounds.
    seconds : mapping of str to float
        By phase, the longest first.
    abandoned : mapping of str to int
        Rounds by the reason why they were abandoned.
    silent : mapping of str to int
        Rounds that were applied without what some data owners know of their items, by the names of these.
    members, dropped, refused, liars : int
        Members of all rounds, those of them that sent nothing at some step, messages refused, wrong shares.
    dropped_places : int
        Places of sparse sums that too few users sent, over all rounds.
    per_member : float or None
        Bytes that a member sent in a round of training, on average; None where nothing crossed a network.
    per_user : float or None
        Bytes that the contributions of the whole run took for each user.
    """

    by_purpose: Mapping[str, int]
    seconds: Mapping[str, float]
    abandoned: Mapping[str, int]
    silent: Mapping[str, int]
    members: int
    dropped: int
    refused: int
    liars: int
    dropped_places: int
    per_member: float | None
    per_user: float | None


def rounds_of(report: Report) -> Rounds | None:
    """Return the rounds of a report, added up; None where it has none."""
    rounds = entries(report, "rounds")
    if not rounds:
        return None
    seconds: dict[str, float] = defaultdict(float)
    for one in rounds:
        for name, spent in section(one, "seconds").items():
            seconds[name] += finite(spent) or 0.0
    training = [one for one in rounds if one.get("purpose") == "train" and not one.get("reason")]
    users = finite(section(report, "dataset").get("users"))
    sent = _total(rounds, "bytes_in")
    return Rounds(
        by_purpose=Counter(str(one.get("purpose")) for one in rounds),
        seconds=dict(sorted(seconds.items(), key=lambda one: -one[1])),
        abandoned=Counter(str(one["reason"]) for one in rounds if one.get("reason")),
        silent=Counter(", ".join(_texts(one["silent_owners"])) for one in rounds if one.get("silent_owners")),
        members=_count(rounds, "members"),
        dropped=_count(rounds, "dropped"),
        refused=_count(rounds, "refused"),
        liars=_count(rounds, "liars"),
        dropped_places=_count(rounds, "dropped_places"),
        per_member=_share(_total(training, "bytes_in"), _count(training, "members")),
        per_user=_share(sent, users),
    )


def _total(rounds: Sequence[Report], key: str) -> float | None:
    values = [value for value in (finite(one.get(key)) for one in rounds) if value is not None]
    return sum(values) if values else None


def _count(rounds: Sequence[Report], key: str) -> int:
    return round(_total(rounds, key) or 0)


def _share(total: float | None, among: float | None) -> float | None:
    return total / among if total is not None and among else None


# --- in a terminal -----------------------------------------------------------------------------------------------


def protection_lines(report: Report) -> list[tuple[str, str]]:
    """Return what the sums protected, name and text a line."""
    known = section(report, "protection")
    if not known:
        return []
    found = [("Secure sum", f"{known.get('sum')}. {known.get('says')}")]
    if devices := _devices(known):
        found.append(("  devices", devices))
    return found + [("  note", str(text)) for text in _texts(known.get("warnings"))]


def rounds_lines(report: Report) -> list[tuple[str, str]]:
    """Return what became of the rounds, name and text a line."""
    rounds = rounds_of(report)
    if rounds is None:
        return []
    found = []
    chosen = section(report, "chosen")
    if chosen:
        found.append(
            (
                "Version that counts",
                f"{count(chosen.get('version'))}, after {count(chosen.get('epoch'))} passes, by validation items",
            )
        )
    made = ", ".join(f"{count(n)} {name}" for name, n in rounds.by_purpose.items())
    found.append(("Rounds", f"{made}; {_became(rounds)}"))
    for reason, n in rounds.abandoned.items():
        found.append(("  abandoned", f"{count(n)}: {reason}"))
    for names, n in rounds.silent.items():
        found.append(("  without item features", f"{count(n)}: {names} said nothing in time"))
    if (closed := finite(report.get("closed_share"))) is not None:
        text = f"{percent(closed)} of what users have: items that too few of their group have"
        found.append(("Held back", text + (_SMALL_GROUPS if closed > _SPARSE else "")))
    if "visits" in report:
        found.append(
            (
                "Visits",
                f"{count(report['visits'])} of users to owners; {count(report.get('held_rows'))} rows never left their "
                "owner: too few users behind them",
            )
        )
    if rounds.per_member is not None:
        found.append(("Sent", f"{volume(rounds.per_member)} by a member in a round of training"))
    if (spent := sum(rounds.seconds.values())) and len(rounds.seconds) > 1:
        shares = ", ".join(f"{name} {percent(one / spent)}" for name, one in rounds.seconds.items())
        found.append(("Time of the rounds", f"{duration(spent)}: {shares}"))
    return found


def _became(rounds: Rounds) -> str:
    abandoned = sum(rounds.abandoned.values())
    share = f" ({percent(rounds.dropped / rounds.members)})" if rounds.dropped and rounds.members else ""
    said = [f"{count(abandoned)} abandoned", f"{count(rounds.dropped)} members dropped out{share}"]
    if rounds.refused:
        said.append(f"{count(rounds.refused)} messages refused")
    if rounds.liars:
        said.append(f"{count(rounds.liars)} wrong shares")
    if rounds.dropped_places:
        said.append(f"{count(rounds.dropped_places)} places dropped")
    return ", ".join(said)


def _devices(known: Report) -> str:
    devices = section(known, "devices")
    if not devices:
        return ""
    return (
        f"{count(devices.get('count'))}; curious tolerated: {count(devices.get('curious'))}; "
        f"lost tolerated: {count(devices.get('lost'))}"
    )


def _texts(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


# --- on the page -------------------------------------------------------------------------------------------------


def rounds_section(report: Report) -> Section:
    """Return the section of the page."""
    found = Section("rounds", "Rounds", "What the rounds summed")
    rounds = rounds_of(report)
    if rounds is None:
        return found
    known = section(report, "protection")
    found.lead = str(known.get("says") or "")
    found.facts = [
        Fact("Rounds", count(sum(rounds.by_purpose.values()))),
        Fact("Abandoned", count(sum(rounds.abandoned.values()))),
        Fact("Members dropped out", count(rounds.dropped), f"of {count(rounds.members)}"),
        Fact("Messages refused", count(rounds.refused)),
    ]
    if rounds.liars:
        found.facts.append(Fact("Wrong shares", count(rounds.liars)))
    if rounds.dropped_places:
        found.facts.append(Fact("Places dropped", count(rounds.dropped_places), "that too few users sent"))
    if rounds.per_member is not None:
        found.facts.append(Fact("A member sent", volume(rounds.per_member), "in a round of training"))
    if rounds.per_user is not None:
        found.facts.append(Fact("Contributions", volume(rounds.per_user), "for each user, in the whole run"))
    if devices := section(known, "devices"):
        found.facts += [
            Fact("Devices in a cohort", count(devices.get("count"))),
            Fact("Curious ones tolerated", count(devices.get("curious"))),
            Fact("Lost ones tolerated", count(devices.get("lost"))),
        ]
    if len(rounds.seconds) > 1:
        names = list(rounds.seconds)
        longest = names[0]
        found.figures.append(
            plots.stacked_bars(
                "round-phases",
                "Time of the rounds by phase",
                f"{longest.capitalize()} took longest: {duration(rounds.seconds[longest])}.",
                names,
                [plots.Bars("seconds", [rounds.seconds[name] for name in names], "s1")],
                write=duration,
            )
        )
    if warnings := _texts(known.get("warnings")):
        found.tables.append(
            Table("What to know of this setting", ["Note"], [[text] for text in warnings], numeric=False)
        )
    if rounds.abandoned:
        found.tables.append(
            Table(
                "Abandoned rounds",
                ["Reason", "Rounds"],
                [[reason, count(n)] for reason, n in rounds.abandoned.items()],
            )
        )
    if rounds.silent:
        found.tables.append(
            Table(
                "Rounds without item features",
                ["Data owners that said nothing in time", "Rounds"],
                [[names, count(n)] for names, n in rounds.silent.items()],
            )
        )
    found.folded.append(_every_round(entries(report, "rounds")))
    return found


def _every_round(rounds: Sequence[Report]) -> Table:
    shown = rounds[-_SHOWN:]
    return Table(
        "Every round" if len(shown) == len(rounds) else f"The last {len(shown)} of {len(rounds)} rounds",
        [
            "Round",
            "Purpose",
            "Pass",
            "Users",
            "In the sum",
            "Members",
            "Dropped",
            "Received",
            "Time",
            "Outcome",
        ],
        [
            [
                count(one.get("round")),
                _PURPOSES.get(str(one.get("purpose")), str(one.get("purpose"))),
                count(one.get("pass")),
                count(one.get("users")),
                count(one.get("summed")),
                count(one.get("members")),
                count(one.get("dropped")),
                volume(one.get("bytes_in")),
                duration(sum(finite(spent) or 0.0 for spent in section(one, "seconds").values())),
                f"abandoned: {one['reason']}"
                if one.get("reason")
                else f"version {count(one.get('version'))}",
            ]
            for one in shown
        ],
    )
