"""Totals over a report's rounds (members, outcomes, time), for the HTML page and for the terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coterie.telemetry import plots
from coterie.telemetry.quantities import count, duration, percent, volume
from coterie.telemetry.report import Report, RoundRecord
from coterie.telemetry.report_parts import Fact, ReportTable, Section

__all__ = ["RoundTotals", "protection_lines", "rounds_lines", "rounds_of", "rounds_section"]

_PURPOSES = {
    "supports": "groups asked for their items",
    "train": "training",
    "evaluate": "evaluation",
    "window": "owners hand over their sums",
}
_SHOWN = 200
"""Number of rounds that the page lists; of more rounds it lists the last."""
_SPARSE = 0.25
"""Share held back above which groups are small for the data (docs/threat-model.md, The attacks on rounds)."""
_SMALL_GROUPS = (
    "; a group's list of items tells much of its users then, larger groups (rounds.group) tell less"
)


@dataclass(frozen=True)
class RoundTotals:
    """Totals over all rounds of a run.

    Attributes
    ----------
    by_purpose : mapping of str to int
        Number of rounds by purpose.
    seconds : mapping of str to float
        Seconds by phase, the longest first.
    abandoned : mapping of str to int
        Number of abandoned rounds by reason.
    silent : mapping of str to int
        Number of rounds that lacked item features of silent data owners, by the owners' names.
    members, dropped, refused, liars : int
        Numbers of members, of members that sent nothing at some step, of refused messages, and of wrong shares.
    dropped_places : int
        Number of places of sparse sums that too few users sent.
    left_out : int
        Number of contributions that a robust rule left out, or that were withdrawn.
    withdrawn : mapping of str to int
        Number of rounds by reason for which contributions were withdrawn.
    per_member : float or None
        Mean bytes that a member sent in a round of training; None when nothing crossed a network.
    per_user : float or None
        Bytes that all members sent in the whole run, per user; None when nothing crossed a network.
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
    left_out: int
    withdrawn: Mapping[str, int]
    per_member: float | None
    per_user: float | None


def rounds_of(report: Report) -> RoundTotals | None:
    """Return totals over a report's rounds; None for a report without rounds."""
    rounds = report.rounds
    if not rounds:
        return None
    seconds: dict[str, float] = defaultdict(float)
    for one in rounds:
        for name, spent in one.seconds.items():
            seconds[name] += spent or 0.0
    training = [one for one in rounds if one.purpose == "train" and not one.reason]
    sent = _total(one.bytes_in for one in rounds)
    return RoundTotals(
        by_purpose=Counter(one.purpose for one in rounds),
        seconds=dict(sorted(seconds.items(), key=lambda one: -one[1])),
        abandoned=Counter(one.reason for one in rounds if one.reason),
        silent=Counter(", ".join(one.silent_owners) for one in rounds if one.silent_owners),
        members=_count(one.members for one in rounds),
        dropped=_count(one.dropped for one in rounds),
        refused=_count(one.refused for one in rounds),
        liars=_count(one.liars for one in rounds),
        dropped_places=_count(one.dropped_places for one in rounds),
        left_out=_count(one.left_out for one in rounds),
        withdrawn=Counter(reason for one in rounds for reason in one.withdrawn),
        per_member=_share(_total(one.bytes_in for one in training), _count(one.members for one in training)),
        per_user=_share(sent, report.dataset.users),
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _count(values: Iterable[float | None]) -> int:
    return round(_total(values) or 0)


def _share(total: float | None, among: float | None) -> float | None:
    return total / among if total is not None and among else None


# --- in a terminal -----------------------------------------------------------------------------------------------


def protection_lines(report: Report) -> list[tuple[str, str]]:
    """Return lines about the protection by secure sums, as pairs of name and text, for the terminal."""
    known = report.protection
    if not known.given():
        return []
    found = [("Secure sum", f"{known.sum}. {known.says}")]
    if devices := known.devices.given():
        text = (
            f"{count(devices.get('count'))}; curious tolerated: {count(devices.get('curious'))}; "
            f"lost tolerated: {count(devices.get('lost'))}"
        )
        found.append(("  devices", text))
    return found + [("  note", text) for text in known.warnings]


def rounds_lines(report: Report) -> list[tuple[str, str]]:
    """Return lines about the rounds' outcomes, as pairs of name and text, for the terminal."""
    rounds = rounds_of(report)
    if rounds is None:
        return []
    found = []
    if chosen := report.chosen:
        found.append(
            (
                "Version that counts",
                f"{count(chosen.version)}, after {count(chosen.epoch)} passes, by validation items",
            )
        )
    made = ", ".join(f"{count(n)} {name}" for name, n in rounds.by_purpose.items())
    found.append(("Rounds", f"{made}; {_became(rounds)}"))
    for reason, n in rounds.abandoned.items():
        found.append(("  abandoned", f"{count(n)}: {reason}"))
    for reason, n in rounds.withdrawn.items():
        found.append(("  withdrawn", f"{count(n)}: {reason}"))
    for names, n in rounds.silent.items():
        found.append(("  without item features", f"{count(n)}: {names} said nothing in time"))
    if report.waves:
        came = ", ".join(f"{count(one.users)} from pass {count(one.from_pass)} on" for one in report.waves)
        found.append(("Came later", f"{count(sum(one.users or 0 for one in report.waves))} users: {came}"))
    if (closed := report.closed_share) is not None:
        text = f"{percent(closed)} of what users have: items that too few of their group have"
        found.append(("Held back", text + (_SMALL_GROUPS if closed > _SPARSE else "")))
    if (floors := report.floors).given():
        found.append(("Groups" + (", fitted to the data" if floors.fitted else ""), floors.text))
    if report.privacy.given():
        found.append(("Differential privacy", report.privacy.text))
    found += report.facts()
    if rounds.per_member is not None:
        found.append(("Sent", f"{volume(rounds.per_member)} by a member in a round of training"))
    if (spent := sum(rounds.seconds.values())) and len(rounds.seconds) > 1:
        shares = ", ".join(f"{name} {percent(one / spent)}" for name, one in rounds.seconds.items())
        found.append(("Time of the rounds", f"{duration(spent)}: {shares}"))
    return found


def _left_out_by(rounds: RoundTotals, otherwise: str) -> str:
    return "withdrawn, because noise was not taken out" if rounds.withdrawn else otherwise


def _became(rounds: RoundTotals) -> str:
    abandoned = sum(rounds.abandoned.values())
    share = f" ({percent(rounds.dropped / rounds.members)})" if rounds.dropped and rounds.members else ""
    said = [f"{count(abandoned)} abandoned", f"{count(rounds.dropped)} members dropped out{share}"]
    if rounds.refused:
        said.append(f"{count(rounds.refused)} messages refused")
    if rounds.liars:
        said.append(f"{count(rounds.liars)} wrong shares")
    if rounds.dropped_places:
        said.append(f"{count(rounds.dropped_places)} places dropped")
    if rounds.left_out:
        said.append(f"{count(rounds.left_out)} contributions {_left_out_by(rounds, 'left out by the rule')}")
    return ", ".join(said)


# --- on the page -------------------------------------------------------------------------------------------------


def rounds_section(report: Report) -> Section:
    """Return the HTML page's section on rounds; empty for a report without rounds."""
    found = Section("rounds", "Rounds", "Sums of the rounds")
    rounds = rounds_of(report)
    if rounds is None:
        return found
    known = report.protection
    found.lead = known.says
    found.facts = [
        Fact("Rounds", count(sum(rounds.by_purpose.values()))),
        Fact("Abandoned", count(sum(rounds.abandoned.values()))),
        Fact("Members dropped out", count(rounds.dropped), f"of {count(rounds.members)}"),
        Fact("Messages refused", count(rounds.refused)),
    ]
    if (floors := report.floors).given():
        how = "fitted to the data" if floors.fitted else "as set"
        found.facts.append(Fact("Fixed groups", count(floors.groups), how))
        found.facts.append(Fact("Closed to learning", percent(floors.closed), "of users' items, as expected"))
    if rounds.liars:
        found.facts.append(Fact("Wrong shares", count(rounds.liars)))
    if rounds.dropped_places:
        found.facts.append(Fact("Places dropped", count(rounds.dropped_places), "that too few users sent"))
    if rounds.left_out:
        found.facts.append(
            Fact("Contributions left out", count(rounds.left_out), _left_out_by(rounds, "by the robust rule"))
        )
    if rounds.per_member is not None:
        found.facts.append(Fact("A member sent", volume(rounds.per_member), "in a round of training"))
    if rounds.per_user is not None:
        found.facts.append(Fact("Contributions", volume(rounds.per_user), "for each user, in the whole run"))
    if known.devices.given():
        found.facts += [
            Fact("Devices in a cohort", count(known.devices.count)),
            Fact("Curious ones tolerated", count(known.devices.curious)),
            Fact("Lost ones tolerated", count(known.devices.lost)),
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
    if known.warnings:
        found.tables.append(
            ReportTable("Notes on this setting", ["Note"], [[text] for text in known.warnings], numeric=False)
        )
    if rounds.abandoned:
        found.tables.append(
            ReportTable(
                "Abandoned rounds",
                ["Reason", "Rounds"],
                [[reason, count(n)] for reason, n in rounds.abandoned.items()],
            )
        )
    if report.waves:
        found.tables.append(
            ReportTable(
                "Users who came later",
                ["From pass", "Users"],
                [[count(one.from_pass), count(one.users)] for one in report.waves],
            )
        )
    if rounds.withdrawn:
        found.tables.append(
            ReportTable(
                "Rounds with contributions withdrawn",
                ["Reason", "Rounds"],
                [[reason, count(n)] for reason, n in rounds.withdrawn.items()],
            )
        )
    if rounds.silent:
        found.tables.append(
            ReportTable(
                "Rounds without item features",
                ["Data owners that said nothing in time", "Rounds"],
                [[names, count(n)] for names, n in rounds.silent.items()],
            )
        )
    found.folded.append(_every_round(report.rounds))
    return found


def _every_round(rounds: Sequence[RoundRecord]) -> ReportTable:
    shown = rounds[-_SHOWN:]
    return ReportTable(
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
                count(one.round),
                _PURPOSES.get(one.purpose, one.purpose),
                count(one.pass_),
                count(one.users),
                count(one.summed),
                count(one.members),
                count(one.dropped),
                volume(one.bytes_in),
                duration(sum(spent or 0.0 for spent in one.seconds.values())),
                f"abandoned: {one.reason}" if one.reason else f"version {count(one.version)}",
            ]
            for one in shown
        ],
    )
