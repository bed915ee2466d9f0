"""Tables of the messages that the book explains, from ``proto/coterie/v1`` (see ``protobuf`` for the kinds)."""

TENSOR = {"dtype": (1, "uint"), "shape": (2, "[int]"), "data": (3, "bytes")}

CHUNK = {"offset": (1, "uint"), "data": (2, "bytes"), "last": (3, "bool")}

KEY_BUNDLE = {
    "signing_public": (1, "bytes"),
    "agreement_public": (2, "bytes"),
    "version": (3, "uint"),
    "not_before": (4, "int"),
    "not_after": (5, "int"),
    "signature": (6, "bytes"),
    "countersignature": (7, "bytes"),
    "party": (8, "text"),
}

DELEGATION = {
    "certificate_fingerprint": (1, "bytes"),
    "run_id": (2, "text"),
    "expiry": (3, "int"),
    "signature": (4, "bytes"),
}

PREKEY = {"prekey_id": (1, "bytes"), "public": (2, "bytes"), "expiry": (3, "int"), "signature": (4, "bytes")}

SEALED_BATCH = {"user": (1, "bytes"), "header": (2, "bytes"), "ciphertext": (3, "bytes")}

OPTIMISER_PLAN = {
    "name": (1, "text"),
    "rate": (2, "double"),
    "beta1": (3, "double"),
    "beta2": (4, "double"),
    "tau": (5, "double"),
}
AGGREGATION = {"rule": (1, "text"), "byzantine": (2, "float"), "norm_bound": (3, "float")}
PRIVACY_PLAN = {
    "place": (1, "text"),
    "mechanism": (2, "text"),
    "noise": (3, "double"),
    "clip": (4, "double"),
    "most_items": (5, "uint"),
    "most_metrics": (6, "double"),
    "delta": (7, "double"),
    "colluders": (8, "uint"),
    "per_value": (9, "bool"),
    "epsilon": (10, "double"),
}

ROUNDS_PLAN = {
    "cohorts": (1, "uint"),
    "cohort": (2, "uint"),
    "group": (3, "uint"),
    "beacon": (4, "bytes"),
    "party_per_user": (5, "bool"),
    "min_cohort": (6, "uint"),
    "min_sum": (7, "uint"),
    "experiment": (8, "bool"),
    "passes": (9, "uint"),
    "evaluate_every": (10, "uint"),
    "patience": (11, "uint"),
    "choose_by": (12, "text"),
    "step_timeout_ms": (13, "uint"),
    "redraw": (14, "uint"),
    "beacon_signature": (15, "bytes"),
    "sparse": (16, "bool"),
    "server_optimiser": (17, OPTIMISER_PLAN),
    "aggregation": (18, AGGREGATION),
    "privacy": (19, PRIVACY_PLAN),
    "most_users": (20, "uint"),
    "channel_rounds": (21, "uint"),
}

HOLDING = {"owner": (1, "text"), "items": (2, "uint"), "items_sha256": (3, "bytes"), "party": (4, "text")}

RUN_PLAN = {
    "run_id": (1, "text"),
    "system": (2, "text"),
    "form": (3, "text"),
    "secure_sum": (4, "text"),
    "dim": (5, "uint"),
    "rate": (6, "float"),
    "ridge": (7, "float"),
    "theta": (8, "uint"),
    "item_bias": (9, "bool"),
    "seed": (10, "uint"),
    "max_staleness": (11, "uint"),
    "epochs": (12, "uint"),
    "min_users": (13, "uint"),
    "settings": (14, "text"),
    "rounds": (15, ROUNDS_PLAN),
    "holdings": (16, [HOLDING]),
    "oldest_protocol": (17, "uint"),
}

ROUND_MEMBER = {"participant": (1, "bytes"), "device": (2, "uint"), "users": (3, "uint")}

KEY_HOLDER = {"participant": (1, "bytes"), "device": (2, "text")}

SUM_INPUT = {"name": (1, "text"), "sha256": (2, "bytes")}

SUM_PLAN = {
    "version": (1, "uint"),
    "run_id": (2, "text"),
    "round": (3, "uint"),
    "purpose": (4, "text"),
    "secure_sum": (5, "text"),
    "model_sha256": (6, "bytes"),
    "layout_sha256": (7, "bytes"),
    "devices": (8, "[text]"),
    "members": (9, [ROUND_MEMBER]),
    "degree": (10, "uint"),
    "threshold": (11, "uint"),
    "min_sum": (12, "uint"),
    "pass_number": (13, "uint"),
    "part": (14, "uint"),
    "key_id": (15, "bytes"),
    "code_bits": (16, "uint"),
    "holders": (17, [KEY_HOLDER]),
    "sparse_floor": (18, "uint"),
    "run_plan_sha256": (19, "bytes"),
    "model_version": (20, "uint"),
    "inputs": (21, [SUM_INPUT]),
    "population_sha256": (22, "bytes"),
    "beacon": (23, "bytes"),
    "noise_floor": (24, "uint"),
}

ADVERT = {
    "member": (1, "uint"),
    "bundle": (2, KEY_BUNDLE),
    "channel_public": (3, "bytes"),
    "mask_public": (4, "bytes"),
    "signature": (5, "bytes"),
    "chained": (6, "bytes"),
}

ADVERTS = {"adverts": (1, [ADVERT])}

SEALED_SHARE = {"member": (1, "uint"), "sealed": (2, "bytes")}

SHARES = {"shares": (1, [SEALED_SHARE]), "seed_hash": (2, "bytes")}

SHARE_INBOX = {"shares": (1, [SEALED_SHARE])}

SUMMED_VECTOR = {
    "codes": (1, "bytes"),
    "left_out": (2, "[uint]"),
    "signature": (3, "bytes"),
    "ciphertexts": (4, "bytes"),
    "places": (5, "bytes"),
    "noise": (6, ["bytes"]),
}

SUBMITTERS = {"members": (1, "[uint]"), "places": (7, "bytes"), "ciphertexts": (8, "uint")}

CONFIRMATION = {
    "member": (1, "uint"),
    "signature": (2, "bytes"),
    "signing_public": (3, "bytes"),
    "pads": (6, "bytes"),
}

CONFIRMATIONS = {"confirmations": (1, [CONFIRMATION])}

REVEALED_SHARE = {"member": (1, "uint"), "seed": (2, "one of"), "mask": (3, "one of")}

UNMASKING = {"shares": (1, [REVEALED_SHARE])}

BRIEFING = {"member": (1, "uint"), "payload": (2, "bytes"), "of": (3, "[uint]")}

BRIEFINGS = {
    "briefings": (1, [BRIEFING]),
    "common": (2, "bytes"),
    "parts": (3, "[bytes]"),
    "next": (4, "uint"),
}

WAVE = {
    "first": (1, "uint"),
    "from_pass": (2, "uint"),
    "beacon": (3, "bytes"),
    "beacon_signature": (4, "bytes"),
}

POPULATION = {
    "devices": (1, "[text]"),
    "participants": (2, "bytes"),
    "device": (3, "[uint]"),
    "beacon": (4, "bytes"),
    "beacon_signature": (5, "bytes"),
    "waves": (6, [WAVE]),
}

WAVES = {
    "devices": (1, "[text]"),
    "participants": (2, "bytes"),
    "device": (3, "[uint]"),
    "waves": (4, [WAVE]),
}

NAMED_TENSOR = {"name": (1, "text"), "tensor": (2, TENSOR)}

MODEL = {"tensors": (1, [NAMED_TENSOR])}

NAMES = {
    "Tensor": TENSOR,
    "Chunk": CHUNK,
    "KeyBundle": KEY_BUNDLE,
    "Delegation": DELEGATION,
    "Prekey": PREKEY,
    "SealedBatch": SEALED_BATCH,
    "Aggregation": AGGREGATION,
    "RoundsPlan": ROUNDS_PLAN,
    "Holding": HOLDING,
    "RunPlan": RUN_PLAN,
    "RoundMember": ROUND_MEMBER,
    "KeyHolder": KEY_HOLDER,
    "SumInput": SUM_INPUT,
    "SumPlan": SUM_PLAN,
    "Advert": ADVERT,
    "Adverts": ADVERTS,
    "SealedShare": SEALED_SHARE,
    "Shares": SHARES,
    "ShareInbox": SHARE_INBOX,
    "SummedVector": SUMMED_VECTOR,
    "Submitters": SUBMITTERS,
    "Confirmation": CONFIRMATION,
    "Confirmations": CONFIRMATIONS,
    "RevealedShare": REVEALED_SHARE,
    "Unmasking": UNMASKING,
    "Briefing": BRIEFING,
    "Briefings": BRIEFINGS,
    "Wave": WAVE,
    "Population": POPULATION,
    "Waves": WAVES,
    "NamedTensor": NAMED_TENSOR,
    "Model": MODEL,
}
"""By the name of the message in the contract."""
