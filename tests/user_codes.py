"""Codes of single users under every system and model, for tests of what a user's part of a round may depend on.

``python -m tests.user_codes FILE`` writes the codes that this process comes to, and what its users' parts add up to in
one batch: so a test can ask another kernel of BLAS.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from coterie.data import SyntheticSpec, generate, generate_user_attributes, leave_last_out, random
from coterie.data.keyed_order import key_hash
from coterie.evaluation.holdout import TEST
from coterie.rounds.sides import HostSide, User
from coterie.rounds.training import Purpose
from coterie.systems.fcf.settings import FcfSettings
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.systems.fedidcf.settings import FedIdcfSettings
from coterie.systems.fedmf.settings import FedMfSettings
from coterie.systems.fedmvmf.settings import PRESETS, FedMvmfPlan
from coterie.systems.fedncf.networks import MODELS
from coterie.systems.fedncf.settings import FedNcfSettings, published, tuned
from coterie.systems.fpl.settings import FplSettings
from coterie.systems.ials.settings import IalsSettings
from coterie.systems.registry import host_side, server_side
from coterie.systems.shared.host_data import HostData

USERS, ITEMS = 24, 400
NEW = 3
"""Users without training data."""
SPEC = SyntheticSpec(users=USERS, items=ITEMS, interactions=1_800, genres=4)
ASKED = ((Purpose.TRAIN, 1), (Purpose.EVALUATE, 2), (Purpose.TRAIN, 3))
"""Purpose and number of the rounds: what users keep of the first one matters in the others."""


def _ncf(learning: FedNcfSettings, **changes: object) -> tuple[str, str]:
    return "fedncf", learning.model_copy(update={**changes, "min_touch": 1}).to_json()


def _mvmf(preset: str, attributes: Sequence[str] = (), **changes: object) -> tuple[str, str]:
    plan = FedMvmfPlan(preset=preset, attribute_names=tuple(attributes), min_touch=1, **changes)
    return "fedmvmf", plan.to_json()


def _cases() -> dict[str, tuple[str, str]]:
    """Return system and settings by the name of a case."""
    found = {}
    for model in MODELS:
        one = tuned(model)
        found[f"fedncf {model}"] = _ncf(one)
        found[f"fedncf {model} batches"] = _ncf(one, batch_size=64, local_rate=0.01, local_epochs=2)
        found[f"fedncf {model} published"] = _ncf(published(model))
    more = {"scaffold": True, "proximal": 0.1, "aggregation": "fedavg", "batch_size": 40, "local_rate": 0.01}
    found["fedncf neumf scaffold"] = _ncf(tuned("neumf"), **more)
    for name, learning in {
        "fedmf": FedMfSettings(min_touch=1),
        "fedmf epochs": FedMfSettings(factors=17, local_epochs=5, min_touch=1),
        "fedmf printed": FedMfSettings(steps="sum", min_touch=1),
    }.items():
        found[name] = "fedmf", learning.to_json()
    found["fedgnn"] = "fedgnn", FedGnnSettings(min_touch=1).to_json()
    found["fedgnn sampled"] = "fedgnn", FedGnnSettings(factors=5, samples=1, min_touch=1).to_json()
    found["fedidcf"] = "fedidcf", FedIdcfSettings(min_touch=1, query=0.3).to_json()
    told = _told().names
    for name in PRESETS:
        found[f"fedmvmf {name}"] = _mvmf(name, told)
    found["fedmvmf rated only"] = _mvmf("paper", weights="obs-only", factors=11)
    found["fedmvmf sgd"] = _mvmf("paper", told, update="sgd")
    found["fcf"] = "fcf", FcfSettings(min_touch=1).to_json()
    found["ials"] = "ials", IalsSettings(min_touch=1, products="item", min_products=1).to_json()
    odd = IalsSettings(
        factors=7, nu=0.7, user_bound=0.5, bits=24, min_touch=1, products="item", min_products=3
    )
    found["ials odd"] = "ials", odd.to_json()
    found["ials average"] = "ials", IalsSettings(min_touch=1).to_json()
    for name, pairs in {
        "fpl": FplSettings(min_touch=1),
        "fpl shares": FplSettings(min_touch=1, pi=0.4, pi_spread=0.3, factors=17, triples_per_item=3),
        "fpl one triple": FplSettings(min_touch=1, triples_per_item=0, disclose="items"),
    }.items():
        found[name] = "fpl", pairs.to_json()
    return found


@cache
def _told():
    return generate_user_attributes(SPEC)


CASES = _cases()


@cache
def _data(name: str) -> HostData:
    system = CASES[name][0]
    made = generate(SPEC)
    one_held_out = system in ("fedncf", "ials")
    part = (leave_last_out(made) if one_held_out else random(made, seed=3)).part
    told = _told() if system == "fedmvmf" and "rated only" not in name else None
    # Some have nothing to learn from: no interactions at all, or held-out ones only.
    kept = made.user >= NEW
    if not one_held_out:
        part, kept = np.where(kept, part, TEST), np.ones(len(made), np.bool_)
    return HostData(
        made.users, made.items, made.user[kept], made.item[kept], part[kept], made.rating[kept], told
    )


def host(name: str) -> HostSide:
    """Return the side of a host that has all users, before their first round."""
    data = _data(name)

    def keep(made):
        return {key: value.copy() for key, value in made.items()}

    return host_side(*CASES[name], data, key_hash(data.users, 0), 0, keep)


@cache
def model(name: str):
    """Return a model that is not a first one, so that every factor and weight has a say."""
    server = server_side(*CASES[name], ITEMS, 0, 1)
    arrays = server.initial()
    rng = np.random.default_rng(5)
    for key, value in arrays.items():
        if key.startswith("model."):
            arrays[key] = value + 0.1 * rng.standard_normal(value.shape, np.float32)
        if key == "supports":
            arrays[key] = np.ones_like(value)
    data = _data(name)
    arrays["popularity"] = np.bincount(data.item, minlength=ITEMS).astype(np.float32)
    return server.model(arrays)


def apart(name: str, batches: Iterable[Sequence[int]]) -> list[dict[int, np.ndarray]]:
    """Return for each round the codes of each user, whose users go through a host's program batch by batch."""
    side, batches = host(name), [list(batch) for batch in batches]
    found = []
    for purpose, number in ASKED:
        asked = SimpleNamespace(purpose=purpose.value, round=number, pass_number=0, noise_floor=0)
        codes: dict[int, np.ndarray] = {}
        for batch in batches:
            codes |= side.contributions(asked, model(name), None, {user: [User(user, 0)] for user in batch})
        found.append(codes)
    return found


def together(name: str, batches: Iterable[Sequence[int]]) -> list[np.ndarray]:
    """Return for each round what hosts' codes add up to, where each batch of users has a host of its own."""
    sides = [(host(name), [User(user, 0) for user in batch]) for batch in batches]
    found = []
    for purpose, number in ASKED:
        asked = SimpleNamespace(purpose=purpose.value, round=number, pass_number=0, noise_floor=0)
        total = np.uint32(0)
        for side, users in sides:
            ((_, codes),) = side.contributions(asked, model(name), None, {0: users})
            total = total + codes
        found.append(total)
    return found


def alone(name: str) -> list[np.ndarray]:
    """Return for each round the codes of all users, (users, codes), who were alone each time."""
    found = apart(name, [[user] for user in range(USERS)])
    return [np.stack([codes[user] for user in range(USERS)]) for codes in found]


if __name__ == "__main__":
    arrays = {}
    for case in CASES:
        for at, (codes, summed) in enumerate(zip(alone(case), together(case, [range(USERS)]), strict=True)):
            arrays[f"{case}/{at}"], arrays[f"{case}/{at}/sum"] = codes, summed
    np.savez(Path(sys.argv[1]), **arrays)
