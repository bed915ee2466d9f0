"""Lengths of what a user's member sends in a sum, for users who have few items and users who have many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coterie.config.run import RunSettings
from coterie.secure_sum.plan import SumPlan
from coterie.secure_sum.protocol import MemberHalf, Step
from coterie.secure_sum.registry import Signer, member_half
from coterie.studies import in_process
from coterie.studies.run_data import Feed, load, make_feed
from coterie.systems.registry import combination, systems

USERS = 20
SYSTEMS = [
    (name, secure_sum)
    for name, system in systems().items()
    for secure_sum in system.sums
    if system.in_rounds and combination(name, secure_sum, "users").allowed and secure_sum != "denoised"
]
SPLITS = {"ease": "leave-last-out", "fedncf": "leave-last-out", "ials": "leave-last-out"}

Lengths = dict[tuple[str, Step], list[tuple[int, int]]]
"""Position of the member and length of each message, by the purpose of its sum and the step."""

PASSES = {"fedidcf": 5}
"""Passes where one is no run: FedIDCF has stages, whose contributions are of one length, too."""


def settings_of(system: str, secure_sum: str, *, sparse: bool = False) -> RunSettings:
    return RunSettings.model_validate(
        {
            "system": system,
            "secure_sum": secure_sum,
            "reference": False,
            "data": {"synthetic": {"users": USERS, "items": 60, "interactions": 400}},
            "split": {"kind": SPLITS.get(system, "random")},
            "rounds": {
                "cohort": USERS,
                "group": USERS,
                "passes": PASSES.get(system, 1),
                "evaluate_every": 1,
                "party_per_user": True,
                "min_cohort": 4,
                "min_sum": 4,
            },
            "federation": {"hosts": 3},
            "encryption": {"bits": 1024, "comparison": True, "sparse": sparse},
            **({"fedmf": {"min_touch": 4, "factors": 20}} if sparse else {}),
        }
    )


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunSettings], tuple[Lengths, Feed]]:
    """Return a function that trains a run with users as members, and returns how long their messages were."""

    def measure(settings: RunSettings) -> tuple[Lengths, Feed]:
        found: Lengths = defaultdict(list)

        def noting(plan: SumPlan, member: int, signer: Signer) -> MemberHalf:
            half = member_half(plan, member, signer)
            answer = half.answer

            def answered(step: Step, briefing: bytes, codes: Any = None) -> bytes:
                message = answer(step, briefing, codes)
                found[plan.purpose, step].append((member, len(message)))
                return message

            monkeypatch.setattr(half, "answer", answered)
            return half

        monkeypatch.setattr(in_process, "member_half", noting)
        feed = make_feed(settings, load(settings), 0)
        in_process.train_in_process(settings, feed, run_id="test", seed=0, see=lambda event: None)
        return found, feed

    return measure


@pytest.mark.parametrize(("system", "secure_sum"), SYSTEMS)
def test_the_messages_of_a_member_are_as_long_whatever_its_user_has(
    lengths: Callable[[RunSettings], tuple[Lengths, Feed]], system: str, secure_sum: str
) -> None:
    found, feed = lengths(settings_of(system, secure_sum))
    counts = np.bincount(feed.dataset.user)
    assert counts.max() > 2 * counts.min()
    assert {step for _, step in found} >= {Step.SUBMIT}
    for key, sent in found.items():
        assert {member for member, _ in sent} == set(range(USERS)), key
        # Position 0 takes no bytes in protobuf: the first member's messages under masks are shorter.
        assert len({length for member, length in sent if member}) == 1, key


def test_messages_under_a_denoised_sum_tell_how_many_rows_moved_and_nothing_more(
    lengths: Callable[[RunSettings], tuple[Lengths, Feed]],
) -> None:
    # The server sees the rows themselves.
    given = settings_of("fedmf", "clear").model_dump(mode="json")
    noisy = {**given, "secure_sum": "denoised", "fedmf": {"samples": 1, "min_touch": 1}}
    found, feed = lengths(RunSettings.model_validate(noisy))
    counts = np.bincount(feed.dataset.user[feed.split.train])
    # Rated and sampled items together are a power of two, and at most all of them.
    touched = np.minimum(2 ** np.ceil(np.log2(2 * counts)), 60)
    sent = dict(found["supports", Step.SUBMIT])
    users = sorted(sent)
    by_rows = {(count, length) for count, length in zip(sorted(touched), sorted(sent.values()), strict=True)}
    assert len(users) == USERS
    assert len({count for count, _ in by_rows}) == len(by_rows) > 1
    assert len({length for _, length in by_rows}) == len(by_rows)


def test_sparse_contributions_of_users_differ_in_length(
    lengths: Callable[[RunSettings], tuple[Lengths, Feed]],
) -> None:
    # Which is why such sums are off unless they are asked for, and why the threat model says so.
    found, _ = lengths(settings_of("fedmf", "encrypted", sparse=True))
    assert len({length for _, length in found["train", Step.SUBMIT]}) > 1
