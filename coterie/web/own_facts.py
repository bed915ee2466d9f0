"""What a person's own page says of the run and of the consent to it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.rounds.consent import Consent
from coterie.rounds.privacy import epsilon, most_sums, privacy_of
from coterie.rounds.stance import Stance
from coterie.systems.description import Driver
from coterie.systems.registry import driver_of, preferences_of, publishes, system_named, systems
from coterie.wire.v1.orchestrator_pb2 import RoundsPlan, RunPlan

__all__ = ["choices", "consent_rows", "cost", "import_words", "other_preferences", "run_facts"]

_SUMS = {
    "clear": "in clear: the server sees each contribution",
    "denoised": "in clear, with noise that other hosts take out of the sum",
    "masked": "masked: the server sees only the sum over a cohort",
    "encrypted": "encrypted: key holders open only the sum over a cohort",
    "shared-key": "encrypted under a key that participants share",
}


def run_facts(plan: RunPlan) -> dict[str, Any]:
    """Return name, system and way of summing of a run, for the page."""
    driver = driver_of(plan.system, plan.form)
    return {
        "run": plan.run_id,
        "system": system_named(plan.system).title,
        "summed": _SUMS.get(plan.secure_sum, plan.secure_sum) if plan.HasField("rounds") else "",
        "rounds": driver is Driver.ROUNDS,
    }


def consent_rows(consent: Consent, plan: RunPlan | None, metrics: Sequence[str] | None) -> list[list[str]]:
    """Return each condition of the consent: what it is about, what the person accepts, and what the run has.

    Parameters
    ----------
    consent : Consent
    plan : RunPlan or None
        None before the server has told it.
    metrics : sequence of str or None
        Metrics that leave the device; None before it has joined.
    """
    leaving = "any" if consent.metrics is None else ", ".join(consent.metrics) or "none"
    accepted = [
        ["Learning system", _any(consent.systems)],
        ["How contributions are summed", _any(consent.secure_sums)],
        ["Smallest cohort", f"{consent.min_cohort} or more"],
        ["Smallest sum", f"{consent.min_sum} or more"],
        ["What these count", "devices or users" if consent.experiment else "devices only"],
        ["Users who may come after the run has begun", "any number"],
        ["Metrics that leave, inside sums", leaving],
        ["Contributions that show near which items you have something", "yes" if consent.sparse else "no"],
        [
            "Rounds in a day",
            f"{consent.rounds_per_day} or fewer" if consent.rounds_per_day else "any number",
        ],
        [
            "Epsilon that the whole run may cost you",
            f"{consent.max_epsilon:g} or less" if consent.max_epsilon else "any, or none",
        ],
    ]
    if plan is None:
        return [[*row, "not told yet"] for row in accepted]
    if not plan.HasField("rounds"):
        return [[*accepted[0], plan.system]]
    rounds = plan.rounds
    has = [
        plan.system,
        plan.secure_sum,
        str(rounds.min_cohort),
        str(rounds.min_sum),
        "users, as in an experiment" if rounds.experiment else "devices",
        f"up to {rounds.most_users} users in all" if rounds.most_users else "none",
        "known once this device has joined" if metrics is None else ", ".join(metrics) or "none",
        "yes" if rounds.sparse else "no",
        "no limit of its own",
        cost(rounds),
    ]
    return [[*row, one] for row, one in zip(accepted, has, strict=True)]


def cost(rounds: RoundsPlan) -> str:
    """Return what a run may cost a user in epsilon, in words; computed here, whatever the plan says."""
    terms = privacy_of(rounds)
    if not terms.on:
        return "none: sums are exact, and no epsilon bounds what they say of you"
    if terms.per_value:
        return "noise for each value, which protects no user as a whole"
    try:
        return f"{epsilon(terms, most_sums(rounds)):.4g} at delta {terms.delta:g}, {terms.place} noise"
    except ConfigError as error:
        return f"unknown on this device: {error.message}"


def import_words(plan: RunPlan | None) -> str:
    """Return what becomes of items that a person adds to the own history."""
    if plan is None:
        return "This device has not joined the run yet; items can be added once it has."
    if driver_of(plan.system, plan.form) is Driver.ROUNDS:
        return (
            "Adding sends nothing: the items are kept on this device. In rounds that are still to come it also trains "
            "on them, and what leaves then is still only a contribution to sums."
        )
    return (
        "The preview sends nothing. Of what you then keep, this run's system sends each record, sealed, to the owners "
        "of its item, as it does with everything that you record."
    )


def choices(plan: RunPlan | None, stance: Stance, state: str, *, ended: bool = False) -> dict[str, Any]:
    """Return what the person has chosen and may choose, and what leaving undoes and does not, in words.

    Parameters
    ----------
    plan : RunPlan or None
        None before the server has told it.
    stance : Stance
    state : str
        The folder with everything that the device keeps.
    ended : bool, optional
        Whether the run is over.
    """
    rounds = plan is not None and driver_of(plan.system, plan.form) is Driver.ROUNDS
    published = plan is not None and rounds and publishes(plan.system, plan.settings)
    kept = [
        "What this device has given to sums stays in them, and in every version of the model that came of them: nobody "
        "can take one device's part out of a sum, the server neither.",
        "Receipts of other parties, and the registration of this device for the run, stay.",
    ]
    undone = ["From the next round on this device takes part in no sum, for good."]
    if plan is not None and not rounds:
        undone = [
            "From now on this device sends no record, nor anything else that is learned from, for good."
        ]
        kept.insert(0, "Records that the owners of the items have already stay with them, and in the model.")
    if ended:
        undone = []
    if published:
        undone.append(
            "What this device has published at the third party (tags of items, an embedding or a vector) is deleted "
            "there."
        )
        kept.append("What other devices have already received of it stays with them.")
    may = ["pause", "limit", "leave"] if rounds else ["pause", "leave"]
    if ended:
        # What stands at the third party can still be deleted.
        may = ["leave"] if published else []
    if stance.left or plan is None:
        may = []
    return {
        "words": _participation(plan, stance, rounds=rounds, ended=ended),
        "may": may,
        "paused": stance.paused,
        "left": stance.left,
        "rounds_per_day": stance.rounds_per_day,
        "publishes": published,
        "undone": undone,
        "kept": kept,
        "local": f"Your history, the receipt and your part of the model are in {state}: stop the agent and delete that "
        "folder, and they are gone.",
    }


def _participation(plan: RunPlan | None, stance: Stance, *, rounds: bool, ended: bool) -> str:
    """Return how a device takes part now, in words."""
    if plan is None:
        return "The run's server has not told yet what this run is."
    if stance.left:
        return "You have left this run: this device takes part in " + (
            "no round any more." if rounds else "nothing of it any more."
        )
    if ended:
        return "The run has ended: there is nothing left to take part in."
    if stance.paused:
        what = "takes part in no round" if rounds else "sends none of your records"
        return f"You have paused: this device {what} until you go on."
    if not rounds:
        return "This device sends what you record, sealed, to the owners of the items."
    if stance.rounds_per_day:
        return f"This device takes part in {stance.rounds_per_day} rounds a day at most."
    return "This device takes part in every round that your consent bears."


def other_preferences(system: str) -> list[dict[str, Any]]:
    """Return preferences that other systems have and this run does not use: name, meaning and those systems."""
    used = {one.name for one in preferences_of(system)}
    found: dict[str, dict[str, Any]] = {}
    for name, about in systems().items():
        for one in about.preferences:
            if one.name not in used and name != system:
                entry = found.setdefault(one.name, {"name": one.name, "meaning": one.meaning, "systems": []})
                entry["systems"].append(about.title)
    return list(found.values())


def _any(accepted: Sequence[str]) -> str:
    return ", ".join(accepted) or "any"
