"""Time SecAgg+ of flwr on request: one JSON request a line on standard input, one answer a line.

Run by the interpreter of ``.venv-peers`` as a child of `bench.masked`; imports nothing of Coterie.  Each answer is the
CPU time of one piece of work, in seconds, measured here; preparations are not counted.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen, share_keys_plaintext_concat
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

# Import by name: the package's attribute of this name is a function.
mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")

MOD_RANGE = 1 << 32
WEIGHT = 100.0


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    before = time.process_time()
    work()
    return time.process_time() - before


def settings(members: int, threshold: int) -> ConfigRecord:
    """Return the configuration that the workflow sends for its first stage."""
    return ConfigRecord(
        {
            Key.SAMPLE_NUMBER: members,
            Key.SHARE_NUMBER: members,
            Key.THRESHOLD: threshold,
            Key.CLIPPING_RANGE: 1.0,
            Key.TARGET_RANGE: 1 << 16,
            Key.MOD_RANGE: MOD_RANGE,
            Key.MAX_WEIGHT: WEIGHT,
        }
    )


def members_of(count: int, threshold: int) -> tuple[list[Any], ConfigRecord]:
    """Return members after the first stage, and the public keys of all."""
    states = []
    for number in range(count):
        state = mod.SecAggPlusState()
        state.nid = number
        mod._setup(state, settings(count, threshold))
        states.append(state)
    return states, ConfigRecord({str(state.nid): [state.pk1, state.pk2] for state in states})


def mask(size: int) -> float:
    """Return the CPU seconds of one mask."""
    seed = os.urandom(32)
    return cpu(lambda: pseudo_rand_gen(seed, MOD_RANGE, [(size,)]))


def client(members: int, threshold: int, size: int) -> float:
    """Return the CPU seconds of all stages of one member; others' ciphertexts hold random bytes of the right length."""
    states, keys = members_of(members, threshold)
    values = ndarrays_to_parameters([np.zeros(size, np.float32)])
    fresh = mod.SecAggPlusState()
    fresh.nid = 0
    spent = cpu(lambda: mod._setup(fresh, settings(members, threshold)))
    states[0] = fresh
    keys = ConfigRecord({str(state.nid): [state.pk1, state.pk2] for state in states})
    spent += cpu(lambda: mod._share_keys(fresh, keys))

    lengths = len(fresh.rd_seed_share_dict[0]), len(fresh.sk1_share_dict[0])
    boxes = []
    for state in states[1:]:
        agreed = generate_shared_key(bytes_to_private_key(state.sk2), bytes_to_public_key(fresh.pk2))
        plain = share_keys_plaintext_concat(state.nid, 0, *(os.urandom(length) for length in lengths))
        boxes.append(encrypt(agreed, plain))
    inbox = ConfigRecord({Key.CIPHERTEXT_LIST: boxes, Key.SOURCE_LIST: list(range(1, members))})
    spent += cpu(lambda: mod._collect_masked_vectors(fresh, inbox, 10, values))

    asked = ConfigRecord({Key.ACTIVE_NODE_ID_LIST: list(range(members)), Key.DEAD_NODE_ID_LIST: []})
    return spent + cpu(lambda: mod._unmask(fresh, asked))


def unmask(members: int, threshold: int, size: int, dropped: int, *, whole: bool) -> float:
    """Return the CPU seconds of the server's last stage: the calls of ``SecAggPlusWorkflow.unmask_stage`` in turn.

    Unless ``whole``, one secret of each kind is reconstructed and one mask of each kind removed, and the times are
    multiplied by their numbers.
    """
    states, _ = members_of(members, threshold)
    active, dead = states[dropped:], states[:dropped]
    vector = [np.zeros(size, np.int64)]
    shape = [(size,)]

    def shares(secret: bytes) -> list[bytes]:
        made: list[bytes] = create_shares(secret, threshold, members)
        return made[dropped:]

    def own(seed_shares: list[bytes]) -> None:
        nonlocal vector
        seed = combine_shares(seed_shares)
        vector = parameters_subtraction(vector, pseudo_rand_gen(seed, MOD_RANGE, shape))

    def pair(secret: bytes, state: Any, peer: Any) -> None:
        nonlocal vector
        agreed = generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(peer.pk1))
        change = parameters_addition if state.nid > peer.nid else parameters_subtraction
        vector = change(vector, pseudo_rand_gen(agreed, MOD_RANGE, shape))

    if whole:
        seeds = [shares(os.urandom(32)) for _ in active]
        keys = [shares(state.sk1) for state in dead]

        def work() -> None:
            nonlocal vector
            for each in seeds:
                own(each)
            for state, each in zip(dead, keys, strict=True):
                secret = combine_shares(each)
                for peer in states:
                    if peer is not state:
                        pair(secret, state, peer)
            vector = parameters_mod(vector, MOD_RANGE)

        return cpu(work)
    seed, key = shares(os.urandom(32)), shares(dead[0].sk1)
    spent = len(active) * cpu(lambda: own(seed)) + dropped * cpu(lambda: combine_shares(key))
    return spent + dropped * (members - 1) * cpu(lambda: pair(dead[0].sk1, dead[0], active[0]))


def main() -> None:
    """Answer requests until standard input ends."""
    logging.disable(logging.CRITICAL)
    print(json.dumps({"flwr": version("flwr")}), flush=True)
    work: dict[str, Callable[..., float]] = {"mask": mask, "client": client, "unmask": unmask}
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"seconds": work[asked.pop("work")](**asked)}), flush=True)


if __name__ == "__main__":
    main()
