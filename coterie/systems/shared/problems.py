"""Checks that systems in rounds share: conflicting settings, and settings that disclose single users."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.errors import ConfigError
from coterie.secure_sum.aggregation import check_aggregation
from coterie.secure_sum.denoisers import FEWEST_DENOISERS
from coterie.secure_sum.privacy import check_privacy
from coterie.systems.description import Driver
from coterie.systems.run_settings import BaseRunSettings

__all__ = [
    "FEWEST_BEHIND",
    "NO_GROUPS",
    "aggregation_problems",
    "few_behind",
    "one_held_out_problems",
    "privacy_problems",
    "random_cohorts",
    "rounds_problems",
    "sparse_problems",
    "split_problems",
    "uncounted",
]

FEWEST_BEHIND = 3
"""Fewest users behind a row such that none of them can compute another one's part."""

NO_GROUPS = (
    "Groups are asked for the items that they have rated, but cohorts are no groups: an item that enough users of a "
    "group have rated may have a single one in a cohort, whose row the sum then shows."
)
"""Warning of systems that close items by group, where cohorts are drawn at random."""

_BY_DATA = ("published", "file")
"""Kinds of splits that others made: what they hold out only the data tell (`coterie.studies.run_data`)."""

_AGREEING = 2
"""Hosts that apply each sum where participants share the key (``coterie.secure_sum.shared_key``, which needs gmpy2)."""


def rounds_problems(run: BaseRunSettings, *, chosen_by: Sequence[str], wide: str) -> list[str]:
    """Return the conflicts between a run and a system in rounds, a sentence each.

    Parameters
    ----------
    run : BaseRunSettings
    chosen_by : sequence of str
        Metrics by which the version that counts can be chosen.
    wide : str
        The settings that decide how many bits a contribution's codes have, in words.
    """
    found = []
    federation, rounds = run.federation, run.rounds
    if run.split.validation == 0:
        found.append(
            f"split.validation 0 leaves no item for rounds.choose_by {rounds.choose_by!r}; expected above 0"
        )
    if rounds.choose_by not in chosen_by:
        found.append(
            f"rounds.choose_by {rounds.choose_by!r} is not measured; expected one of {', '.join(chosen_by)}"
        )
    if run.secure_sum != "clear" and federation.hosts == 1 and not rounds.party_per_user:
        found.append(
            f"secure_sum {run.secure_sum!r} with federation.hosts 1: the host is the only party, and a sum over "
            "one member protects nothing; expected more hosts, or rounds.party_per_user true"
        )
    if run.secure_sum == "shared-key" and federation.hosts < _AGREEING:
        found.append(
            f"secure_sum 'shared-key' with federation.hosts {federation.hosts}: {_AGREEING} hosts have to come to the "
            "same model; expected more hosts"
        )
    found += _denoising_problems(run)
    if run.sparse:
        found += run.own.sparse_problems(run)
    if not rounds.experiment and federation.hosts < rounds.min_cohort:
        found.append(
            f"rounds.experiment false counts devices, and federation.hosts {federation.hosts} are fewer than "
            f"rounds.min_cohort {rounds.min_cohort}; expected true on one machine"
        )
    if rounds.channel_rounds and run.secure_sum != "masked":
        found.append(
            f"rounds.channel_rounds {rounds.channel_rounds} with secure_sum {run.secure_sum!r}: only members of a "
            "masked sum agree on keys with one another; expected 0"
        )
    if rounds.cohorts != "all" and rounds.cohort > run.own.room:
        found.append(
            f"{wide} leave room for sums over {run.own.room} users, and rounds.cohort is {rounds.cohort}; expected "
            "fewer bits or users"
        )
    if federation.churn.owners > 0:
        found.append(f"federation.churn.owners is for systems without rounds, and {run.system} has rounds")
    return found


def aggregation_problems(run: BaseRunSettings) -> list[str]:
    """Return why a run's contributions cannot become one sum on its terms, a sentence each."""
    rounds = run.rounds
    terms = rounds.aggregation.terms
    if terms.adds and not terms.norm_bound:
        return []
    if run.driver is not Driver.ROUNDS:
        return [f"rounds.aggregation is for systems in rounds, and {run.system} has none"]
    try:
        check_aggregation(terms, run.secure_sum)
    except ConfigError as error:
        return [error.message]
    if rounds.party_per_user and rounds.cohorts == "all":
        # The number of users is known with the data only.
        return []
    members = rounds.cohort if rounds.party_per_user else run.federation.hosts
    if few := terms.shortfall(members):
        what = "rounds.cohort users" if rounds.party_per_user else "hosts, each of which is one member"
        return [
            f"rounds.aggregation with {members} {what}: {few.replace('submitted', 'are there')}; expected more, or "
            "rounds.party_per_user true"
        ]
    return []


def _denoising_problems(run: BaseRunSettings) -> list[str]:
    """Return why denoisers cannot serve the members of a run, a sentence each."""
    rounds, hosts = run.rounds, run.federation.hosts
    if run.secure_sum != "denoised":
        return []
    if not rounds.party_per_user:
        return [
            "secure_sum 'denoised' with rounds.party_per_user false: noise is taken out of contributions of single "
            "users, and hosts would add up their users' before; expected rounds.party_per_user true"
        ]
    if hosts < FEWEST_DENOISERS:
        return [
            f"secure_sum 'denoised' with federation.hosts {hosts}: each user has two denoisers on hosts of others; "
            f"expected {FEWEST_DENOISERS} hosts or more"
        ]
    least = FEWEST_DENOISERS * rounds.min_sum
    if rounds.cohorts == "all" or rounds.cohort >= least:
        return []
    return [
        f"secure_sum 'denoised' with rounds.cohort {rounds.cohort}: users are divided among at least "
        f"{FEWEST_DENOISERS} groups of denoisers, with rounds.min_sum {rounds.min_sum} users each; expected "
        f"rounds.cohort {least} or more"
    ]


def privacy_problems(run: BaseRunSettings) -> list[str]:
    """Return why a run's contributions cannot have its clip and noise, a sentence each."""
    rounds = run.rounds
    terms = rounds.privacy.terms
    if not terms.on:
        try:
            check_privacy(terms, run.secure_sum)
        except ConfigError as error:
            return [error.message]
        return []
    if run.driver is not Driver.ROUNDS:
        return [
            f"rounds.privacy is for systems in rounds, and {run.system} has none: a window sums rows of records, not "
            f"of "
            "users"
        ]
    try:
        check_privacy(terms, run.secure_sum)
    except ConfigError as error:
        return [error.message]
    found = []
    if terms.place == "distributed" and rounds.min_sum <= terms.colluders:
        found.append(
            f"rounds.privacy.colluders {terms.colluders} with rounds.min_sum {rounds.min_sum}: nobody's noise would be "
            f"left; expected fewer than {rounds.min_sum}"
        )
    if rounds.cohorts == "independent":
        found.append(
            "rounds.privacy with rounds.cohorts 'independent': a user may be in any number of cohorts; expected "
            "'groups', "
            "'random' or 'all'"
        )
    if run.sparse:
        found.append(
            "rounds.privacy with encryption.sparse: who sends which places has no noise; expected false"
        )
    aggregation = rounds.aggregation.terms
    if not aggregation.adds or aggregation.norm_bound:
        found.append(
            f"rounds.privacy with rounds.aggregation.rule {aggregation.rule!r} and norm_bound "
            f"{aggregation.norm_bound:g}: "
            "the clip bounds norms, and noise is in every place; expected 'sum' and 0"
        )
    return found


def split_problems(run: BaseRunSettings, kinds: Sequence[str]) -> list[str]:
    """Return why a system of factors cannot be measured by a run's split, a sentence each.

    Parameters
    ----------
    run : BaseRunSettings
    kinds : sequence of str
        Splits by which the system can be measured, besides those that others made.
    """
    if run.split.kind in (*kinds, *_BY_DATA):
        return []
    return [
        f"split.kind {run.split.kind!r}: {run.system} is measured by held-out items of users that it has learned from; "
        f"expected {' or '.join(map(repr, kinds))}"
    ]


def one_held_out_problems(run: BaseRunSettings) -> list[str]:
    """Return why a system that ranks one held-out item of each user cannot be measured by a run's split."""
    kinds = ("leave-last-out", "leave-random-out", *_BY_DATA)
    if run.split.kind in kinds:
        return []
    return [
        f"split.kind {run.split.kind!r}: {run.system} is measured by one held-out item of each user; expected one of "
        f"{', '.join(map(repr, kinds))}"
    ]


def sparse_problems(run: BaseRunSettings, min_touch: int) -> list[str]:
    """Return why contributions of a system whose users have few items cannot be sparse, a sentence each.

    Parameters
    ----------
    run : BaseRunSettings
    min_touch : int
        Fewest users of a group that must have an item for the group to train it.
    """
    if min_touch >= run.rounds.min_sum:
        return []
    return [
        f"encryption.sparse with {run.description.table}.min_touch {min_touch}: what fewer than rounds.min_sum "
        f"{run.rounds.min_sum} users sent is not added, and such items would never be learned; expected "
        f"{run.rounds.min_sum} or more"
    ]


def few_behind(run: BaseRunSettings, min_touch: int) -> list[str]:
    """Return a warning where items with fewer than three raters in a group are trained."""
    if min_touch >= FEWEST_BEHIND:
        return []
    return [
        f"{run.description.table}.min_touch {min_touch}: rows of items that so few users have rated are trained; of "
        "two users each would know the other's part."
    ]


def uncounted(weight: float, table: str, *, counted: bool, otherwise: str) -> list[str]:
    """Return why popularity cannot count in scores, where nobody counts users of items, a sentence.

    Parameters
    ----------
    weight : float
        Weight of popularity; 0 for none.
    table : str
        Name of the system's table.
    counted : bool
        Whether groups are asked for their items.
    otherwise : str
        Settings with which they are, in words.
    """
    if counted or not weight:
        return []
    return [
        f"{table}.popularity {weight:g}: no sum counts who has an item, so that nothing is known of its popularity; "
        f"expected 0, or {otherwise}"
    ]


def random_cohorts(run: BaseRunSettings) -> bool:
    """Return whether cohorts are drawn at random instead of being fixed groups."""
    return run.rounds.cohorts in ("random", "independent")
