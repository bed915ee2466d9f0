"""Evidence from the files that a run over services leaves: which party saw what, and what attacks find."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from coterie.config.run import RunSettings
from coterie.evaluation.holdout import TRAIN
from coterie.evaluation.threads import one_thread
from coterie.net.enrolment import saved_bundles
from coterie.privacy import visibility
from coterie.privacy.attacks.scoring import Truth
from coterie.store import cos as cos_store
from coterie.store.client import load_users
from coterie.store.reading import read_store
from coterie.studies.run_data import Feed
from coterie.studies.run_graph import graph_of_run
from coterie.studies.services_run import COS, FinishedRun
from coterie.studies.study import Recorded, study_of
from coterie.studies.tag_matching import attack_run
from coterie.systems.visibility import matrix

__all__ = ["attack", "numbering", "seen_by_parties", "transcripts"]


def transcripts(states: Mapping[str, Path]) -> dict[str, list[Path]]:
    """Return the transcripts of each party, by its state folder; a party that recorded nothing has none."""
    return {party: list(state.glob("transcript*.bin")) for party, state in states.items()}


def seen_by_parties(settings: RunSettings, states: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Return which party saw which kind of datum by the transcripts; without transcripts, which it may see.

    Parameters
    ----------
    settings : RunSettings
    states : mapping of str to Path
        State folder of each process, by party.
    """
    recorded = transcripts(states)
    if any(recorded.values()):
        seen = visibility.observed(recorded)
        return {
            party: {kind: "seen" if yes else "not seen" for kind, yes in kinds.items()}
            for party, kinds in seen.items()
        }
    declared = matrix(settings.system, settings.form, settings.secure_sum)
    return {
        party: {
            kind: "may see" if access.allowed else "may not see"
            for kind, access in declared[party.partition("/")[0]].items()
        }
        for party in recorded
    }


def attack(settings: RunSettings, run: FinishedRun, feed: Feed) -> dict[str, Any]:
    """Run the system's attacks on the COS's transcript and score them by the true interactions in the feed.

    The third party's store is attacked, too, if users have published tags there.

    Parameters
    ----------
    settings : RunSettings
    run : FinishedRun
        A run with transcripts.
    feed : Feed
        Data that the run was trained on.

    Returns
    -------
    dict
        Figures by attack.
    """
    slots, items = numbering(run.states)
    data = feed.dataset
    train = feed.split.part == TRAIN
    user_slot = np.array([slots.get(name, -1) for name in data.users])
    item_index = np.array([items.get(key, -1) for key in data.items])
    user, item = user_slot[data.user[train]], item_index[data.item[train]]
    known = (user >= 0) & (item >= 0)
    truth = Truth(
        n_users=max(slots.values()) + 1,
        n_items=len(items),
        users=user[known],
        items=item[known],
        positive=feed.positive[train][known],
    )
    told = np.full((truth.n_users, len(feed.attribute_names)), np.nan)
    if feed.attributes is not None:
        told[user_slot[user_slot >= 0]] = feed.attributes.values[user_slot >= 0]
    recorded = Recorded(transcripts(run.states)[COS], run.plan, truth, data.rating[train][known], told)
    with one_thread():
        found = dict(study_of(settings.system).attack(recorded))
    graph = graph_of_run(run.states, run.plan.run_id, data, train)
    if graph is not None:
        found["tag_matching"] = attack_run(*graph)
    return found


def numbering(states: Mapping[str, Path]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the COS's slot of each user name and catalogue index of each item key, from the stores."""
    by_participant, items = read_store(states[COS] / "cos.db", _participants_and_items)
    slots: dict[str, int] = {}
    for party, state in states.items():
        if party.startswith("client/"):
            names = read_store(state / "client.db", load_users)
            # A host that holds the key of sums has one more participant, listed after its users.
            for name, bundle in zip(names, saved_bundles(state)[: len(names)], strict=True):
                slots[name] = by_participant[bundle.participant_id]
    return slots, items


def _participants_and_items(connection: sa.Connection) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the slot of each participant, and the item of each key."""
    by_participant = {
        row.participant: row.slot for row in connection.execute(sa.select(cos_store.participants))
    }
    return by_participant, {row.key: row.item for row in connection.execute(sa.select(cos_store.items))}
