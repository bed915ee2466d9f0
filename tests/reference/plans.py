"""Hashes of a run's plan, a sum's plan, a layout (docs/spec/plans.md, docs/spec/contributions.md)."""

import hashlib
import struct

from .explicit import digest, encode
from .messages import ROUNDS_PLAN, RUN_PLAN
from .primitives import ed25519_check

LATER = ("oldest_protocol", "rounds.most_users", "rounds.channel_rounds")
"""Fields of a plan since version 2 of the protocol, in order, by path; all of them numbers."""


def device_of(plan, member):
    """Return the name of the device of a member of a ``SumPlan``."""
    return plan["devices"][plan["members"][member]["device"]]


def run_plan_hash(plan):
    """Return the hash of a ``RunPlan``, a dict; what is missing has its default."""
    defaults = {"uint": 0, "text": "", "bool": False, "float": 0.0, "bytes": b""}
    fields = []
    rounds = plan.get("rounds") or {}
    for path, table, message in (("", RUN_PLAN, plan), ("rounds.", ROUNDS_PLAN, rounds)):
        for name, (_, kind) in table.items():
            if isinstance(kind, dict | list) or path + name in LATER:
                continue
            value = message.get(name, defaults[kind])
            if kind == "float":
                value = struct.pack(">f", value)
            elif kind == "bool":
                value = int(value)
            fields.append(value)
    holdings = plan.get("holdings") or []
    fields.append(len(holdings))
    for one in holdings:
        fields += [one["owner"], one["items"], one["items_sha256"], one["party"]]
    optimiser = (plan.get("rounds") or {}).get("server_optimiser")
    if optimiser is not None:
        fields += ["server_optimiser", optimiser["name"]]
        fields += [struct.pack(">d", optimiser[name]) for name in ("rate", "beta1", "beta2", "tau")]
    terms = (plan.get("rounds") or {}).get("aggregation")
    if terms is not None:
        bounds = [struct.pack(">f", terms.get(name, 0.0)) for name in ("byzantine", "norm_bound")]
        fields += ["aggregation", terms.get("rule", ""), *bounds]
    privacy = (plan.get("rounds") or {}).get("privacy")
    if privacy is not None:
        fields += ["privacy", privacy["place"], privacy["mechanism"]]
        fields += [struct.pack(">d", privacy[name]) for name in ("noise", "clip")]
        fields += [privacy.get("most_items", 0), struct.pack(">d", privacy["most_metrics"])]
        fields += [struct.pack(">d", privacy["delta"]), privacy.get("colluders", 0)]
        fields += [int(privacy.get("per_value", False)), struct.pack(">d", privacy["epsilon"])]
    for path in LATER:
        message, name = (rounds, path[7:]) if path.startswith("rounds.") else (plan, path)
        if message.get(name):
            fields += [path, message[name]]
    return digest("plan", *fields)


def check_signed(plan, signature, operator):
    """Check the operator's signature of a ``RunPlan``."""
    message = encode("run", plan["run_id"], run_plan_hash(plan))
    ed25519_check(operator, signature, message, "the run's plan")


def keys_hash(keys):
    """Return the hash of items' keys, in the order given."""
    content = b"".join(hashlib.sha256(key.encode()).digest() for key in keys)
    return digest("items", hashlib.sha256(content).digest())


def layout_hash(segments):
    """Return the hash of a layout: dicts with name, shape, bound, bits, over, clip."""
    fields = [len(segments)]
    for one in segments:
        fields += [one["name"], len(one["shape"]), *one["shape"], struct.pack(">d", one["bound"])]
        fields += [one["bits"], one["over"], int(one["clip"])]
    return digest("layout", *fields)


def sum_plan_hash(plan):
    """Return the hash of a ``SumPlan``, a dict."""
    members = []
    for one in plan["members"]:
        members += [one["participant"], plan["devices"][one["device"]], one["users"]]
    if plan["holders"]:
        members += [plan["key_id"], plan["code_bits"], len(plan["holders"])]
        for one in plan["holders"]:
            members += [one["participant"], one["device"]]
        members.append(plan["sparse_floor"])
    if plan.get("noise_floor"):
        members += ["noise-floor", plan["noise_floor"]]
    return digest(
        "sum-plan",
        plan["version"],
        plan["run_id"],
        plan["round"],
        plan["purpose"],
        plan["secure_sum"],
        plan["run_plan_sha256"],
        plan["model_version"],
        plan["model_sha256"],
        plan["layout_sha256"],
        len(plan["inputs"]),
        *[field for one in plan["inputs"] for field in (one["name"], one["sha256"])],
        plan["degree"],
        plan["threshold"],
        plan["min_sum"],
        plan["population_sha256"],
        plan["beacon"],
        plan["pass_number"],
        plan["part"],
        len(plan["members"]),
        *members,
    )
