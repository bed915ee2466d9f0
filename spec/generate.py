"""The vectors of the protocol book (``docs/spec``), made by the product: ``python spec/generate.py``.

Everything is drawn from seeds, so the files are the same each time.  Secrets of a round are the only thing that the
product draws itself: while it does, ``os.urandom`` is replaced *here*; the product has no way to be given them.

``--check`` writes nothing; the status is 1 if a file would change.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gmpy2
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coterie.crypto import masking, sealed, shamir, transparency
from coterie.crypto.beacon import beacon_statement
from coterie.crypto.custody import HeldKey, countersign_record, open_sealed, seal_for, sign_record
from coterie.crypto.explicit import encode
from coterie.crypto.graph_key import (
    GraphSecrets,
    GraphTerms,
    open_graph_secrets,
    seal_graph_secrets,
    sign_graph_record,
)
from coterie.crypto.graph_requests import (
    Kind,
    SealingSecret,
    UploadPlace,
    open_request,
    seal_request,
    upload_id_of,
)
from coterie.crypto.graph_tags import bucket_counts, bucket_of, item_tag
from coterie.crypto.identity import Bundle, Delegation, Identity, Prekey, PublicPrekey, countersign
from coterie.crypto.key_record import KeyTerms
from coterie.crypto.latent_codes import encode_latent, latents_of_sums
from coterie.crypto.latent_terms import LatentTerms, sign_latent_record
from coterie.crypto.latent_weights import weight_range
from coterie.crypto.merkle import Tree
from coterie.crypto.operator_key import sign_run
from coterie.crypto.paillier import (
    EncryptedVector,
    HolderObfuscators,
    Mode,
    Packing,
    PublicKey,
    PublicObfuscators,
    RunningSum,
    SecretKey,
    decrypt_vector,
    encrypt,
    to_bytes,
)
from coterie.crypto.paillier.keys import Factor
from coterie.crypto.paillier.pads import contributor_key, pad_sums, pads, sums_hash
from coterie.crypto.paillier.proof import prove
from coterie.crypto.roll import RollDelegation, roll_of
from coterie.crypto.roster import Roster
from coterie.crypto.sealed_model import agreement, open_model, seal_model
from coterie.crypto.sealed_noise import seal_noise
from coterie.rounds import policy
from coterie.rounds.conductor import model_to_bytes
from coterie.rounds.plan_hash import holding_of, keys_hash, plan_hash
from coterie.rounds.population import Population, Wave
from coterie.secure_sum.chains import Chains
from coterie.secure_sum.contribution import Contribution, Layout, Segment, quantise
from coterie.secure_sum.denoised import pack_noise
from coterie.secure_sum.encrypted import part_of
from coterie.secure_sum.graph import graph_fields, neighbourhoods
from coterie.secure_sum.masked import MaskedServer
from coterie.secure_sum.masked_member import MaskedMember
from coterie.secure_sum.plan import Member, SumInput, SumPlan, layout_hash
from coterie.secure_sum.protocol import ClosedSteps, Step
from coterie.secure_sum.sparse import above_floor, nothing, pack_places
from coterie.secure_sum.statements import list_hash
from coterie.wire.tensor import to_wire
from coterie.wire.v1 import rounds_pb2
from coterie.wire.v1.orchestrator_pb2 import Aggregation, OptimiserPlan, PrivacyPlan, RoundsPlan, RunPlan
from coterie.wire.visit import Reply, Visit

VECTORS = Path(__file__).parent / "vectors"

NOW = 1_800_000_000
NOT_BEFORE, NOT_AFTER = NOW - 86_400, NOW + 86_400
RUN = "run-of-the-book"

Json = dict[str, Any]


def secret(name: str, size: int = 32) -> bytes:
    """Return bytes that a name stands for."""
    return hashlib.shake_256(f"coterie vectors: {name}".encode()).digest(size)


def number(name: str, below: int) -> int:
    """Return a number that a name stands for; no need for it to be uniform."""
    return int.from_bytes(secret(name, 40)) % below


def identity(name: str) -> Identity:
    """Return the participant of a name."""
    return Identity(
        Ed25519PrivateKey.from_private_bytes(secret(f"{name}, signing")),
        X25519PrivateKey.from_private_bytes(secret(f"{name}, agreement")),
    )


DIRECTORY = Ed25519PrivateKey.from_private_bytes(secret("directory"))
DIRECTORY_KEY = DIRECTORY.public_key().public_bytes_raw()
OPERATOR = Ed25519PrivateKey.from_private_bytes(secret("operator"))


def enrolled(one: Identity, version: int = 1, party: str = "client/host-0") -> Bundle:
    """Return the countersigned bundle of an identity that a party enrolled."""
    return countersign(one.bundle(version, (NOT_BEFORE, NOT_AFTER)), DIRECTORY, party)


# --- one file each -----------------------------------------------------------------------------------------------


def explicit_bytes() -> Json:
    """Labels and fields."""
    cases: list[tuple[str, list[bytes | str | int]]] = [
        ("plan", []),
        ("advert", [b"", b"\x00", bytes(range(32))]),
        ("sealed-context", ["run", "Zoë", 0, 1, 2**64 - 1]),
        ("graph", [bytes(32), 7]),
    ]
    return {
        "cases": [
            {
                "purpose": purpose,
                "fields": [_field(field) for field in fields],
                "encoded": encode(purpose, *fields).hex(),
            }
            for purpose, fields in cases
        ]
    }


def transparency_log() -> Json:
    """Entries of the log, its roots, proofs, and two heads."""
    statements = [
        (transparency.CERTIFICATE, secret("certificate in DER", 300)),
        (transparency.BUNDLE, transparency.bundle_statement(enrolled(identity("user"), version=3))),
        (transparency.BEACON, beacon_statement(RUN, secret("population"), secret("beacon"))),
        (transparency.REVOCATION, transparency.revocation_statement("participant", secret("revoked"), 9)),
        *((transparency.CERTIFICATE, secret(f"certificate {n}", 40)) for n in range(3)),
    ]
    tree = Tree()
    leaves = [transparency.entry_leaf(*entry) for entry in statements]
    for leaf in leaves:
        tree.append(leaf)
    size = len(leaves)
    seed = secret("log key")
    key = transparency.LogKey(Ed25519PrivateKey.from_private_bytes(seed), DIRECTORY)
    heads = [key.sign(count, tree.root(count), NOW * 1000 + count) for count in (3, size)]
    return {
        "directory_seed": secret("directory").hex(),
        "log_seed": seed.hex(),
        "entries": [
            {"kind": kind, "statement": statement.hex(), "leaf": leaf.hex()}
            for (kind, statement), leaf in zip(statements, leaves, strict=True)
        ],
        "roots": [tree.root(count).hex() for count in range(size + 1)],
        "joint": [
            {
                "indices": indices,
                "size": count,
                "path": [one.hex() for one in tree.inclusions(indices, count)],
            }
            for indices, count in (
                ([0], 1),
                ([1, 2], 3),
                ([0, 3, 4], 5),
                (list(range(len(leaves))), len(leaves)),
            )
        ],
        "inclusion": [
            {"index": index, "size": count, "path": [one.hex() for one in tree.inclusion(index, count)]}
            for index, count in ((0, 1), (0, size), (4, size), (6, size), (2, 3), (3, 5))
        ],
        "consistency": [
            {"first": first, "second": second, "path": [one.hex() for one in tree.consistency(first, second)]}
            for first, second in ((0, size), (1, size), (3, size), (4, size), (6, size), (size, size), (2, 5))
        ],
        "heads": [head.to_json() for head in heads],
    }


def _field(field: bytes | str | int) -> Json:
    if isinstance(field, bytes):
        return {"bytes": field.hex()}
    return {"text": field} if isinstance(field, str) else {"integer": str(field)}


def identities() -> Json:
    """Ids, bundles, delegations, prekeys."""
    one, owner = identity("user"), identity("owner")
    bundle = enrolled(one, version=3)
    fingerprint, expiry = secret("certificate"), NOW + 3600
    delegation = Delegation.sign(one, fingerprint, RUN, expiry)
    private = X25519PrivateKey.from_private_bytes(secret("prekey"))
    prekey_id, public = secret("prekey id", 8), private.public_key().public_bytes_raw()
    prekey = PublicPrekey(
        RUN, prekey_id, public, expiry, owner.sign("prekey", RUN, prekey_id, public, expiry)
    )
    delegation.verify(one.signing_public, fingerprint, RUN, NOW)
    users = [one.participant_id, owner.participant_id, secret("third user")]
    together = RollDelegation.sign(one, fingerprint, RUN, expiry, roll_of(users))
    together.verify(one.signing_public, fingerprint, RUN, NOW, roll_of(users))
    prekey.verify(owner.signing_public, NOW)
    return {
        "directory": {"signing_seed": secret("directory").hex(), "signing_public": DIRECTORY_KEY.hex()},
        "signing_seed": secret("user, signing").hex(),
        "agreement_secret": secret("user, agreement").hex(),
        "participant": one.participant_id.hex(),
        "bundle": _bundle(bundle),
        "delegation": {
            "certificate_fingerprint": fingerprint.hex(),
            "run_id": RUN,
            "expiry": expiry,
            "signature": delegation.signature.hex(),
        },
        "roll": {
            "users": [user.hex() for user in users],
            "certificate_fingerprint": fingerprint.hex(),
            "run_id": RUN,
            "expiry": expiry,
            "root": together.root.hex(),
            "size": together.size,
            "signature": together.signature.hex(),
        },
        "prekey": {
            "owner_signing_seed": secret("owner, signing").hex(),
            "run_id": RUN,
            "prekey_id": prekey_id.hex(),
            "secret": secret("prekey").hex(),
            "public": public.hex(),
            "expiry": expiry,
            "signature": prekey.signature.hex(),
        },
    }


def _bundle(bundle: Bundle) -> Json:
    return {
        "signing_public": bundle.signing_public.hex(),
        "agreement_public": bundle.agreement_public.hex(),
        "version": bundle.version,
        "not_before": bundle.not_before,
        "not_after": bundle.not_after,
        "signature": bundle.signature.hex(),
        "countersignature": bundle.countersignature.hex(),
        "party": bundle.party,
    }


def run_plans() -> Json:
    """Hashes of plans of runs."""
    rounds = RoundsPlan(
        cohorts=1,
        cohort=100,
        group=100,
        party_per_user=True,
        min_cohort=20,
        min_sum=20,
        experiment=False,
        passes=60,
        evaluate_every=5,
        patience=4,
        choose_by="validation_hit_ratio@10",
        step_timeout_ms=60_000,
        redraw=50,
    )
    drift: Json = {"run_id": RUN, "system": "drift", "form": "published", "secure_sum": "clear", "dim": 16}
    drift |= {"rate": 0.05, "ridge": 0.005, "theta": 8, "item_bias": True, "seed": 7, "max_staleness": 64}
    drift |= {"epochs": 8, "min_users": 20}
    fedncf: Json = {"run_id": RUN, "system": "fedncf", "form": "users", "secure_sum": "masked", "seed": 2**40}
    fedncf |= {"settings": '{"min_touch":3}'}
    optimised = RoundsPlan()
    optimised.CopyFrom(rounds)
    optimiser: Json = {"name": "fedyogi", "rate": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.001}
    optimised.server_optimiser.CopyFrom(OptimiserPlan(**optimiser))
    fedmf: Json = {**fedncf, "system": "fedmf"}
    # The messages of the optimiser, of aggregation and of privacy are left out where they are absent.
    fields = [field.name for field in RoundsPlan.DESCRIPTOR.fields if field.message_type is None]
    # Left out where the population is closed.
    fields.remove("most_users")
    plain = {name: getattr(rounds, name) for name in fields}
    plain["beacon"] = plain["beacon_signature"] = ""
    named = RoundsPlan()
    named.CopyFrom(rounds)
    named.beacon, named.experiment = secret("beacon"), True
    bounded = RoundsPlan()
    bounded.CopyFrom(rounds)
    terms: Json = {"rule": "sum", "byzantine": 0.25, "norm_bound": 1.5}
    bounded.aggregation.CopyFrom(Aggregation(**terms))
    noisy = RoundsPlan()
    noisy.CopyFrom(rounds)
    noise: Json = {
        "place": "distributed",
        "mechanism": "gaussian",
        "noise": 4.0,
        "clip": 0.5,
        "most_items": 100,
    }
    noise |= {"most_metrics": 10.0, "delta": 1e-05, "colluders": 2, "per_value": False, "epsilon": 25.5}
    noisy.privacy.CopyFrom(PrivacyPlan(**noise))
    opened = RoundsPlan()
    opened.CopyFrom(rounds)
    opened.most_users = 1000
    films, books = ["film-2", "film-10", "film-\u00e9"], ["book-1"]
    held = [holding_of("films", films, "films"), holding_of("books", books, "owners-1")]
    stated = [
        {"owner": one.owner, "items": one.items, "items_sha256": one.items_sha256.hex(), "party": one.party}
        for one in held
    ]

    def case(given: Json, plan: RunPlan) -> Json:
        return {
            "plan": given,
            "hash": plan_hash(plan).hex(),
            "signature": sign_run(OPERATOR, plan.run_id, plan_hash(plan)).hex(),
        }

    return {
        "operator": OPERATOR.public_key().public_bytes_raw().hex(),
        "cases": [
            case({**drift, "holdings": stated}, RunPlan(**drift, holdings=held)),
            case({**fedncf, "rounds": plain}, RunPlan(**fedncf, rounds=rounds)),
            case(
                {**fedncf, "rounds": {**plain, "beacon": named.beacon.hex(), "experiment": True}},
                RunPlan(**fedncf, rounds=named),
            ),
            case(
                {**fedmf, "rounds": {**plain, "server_optimiser": optimiser}},
                RunPlan(**fedmf, rounds=optimised),
            ),
            case({**fedncf, "rounds": {**plain, "aggregation": terms}}, RunPlan(**fedncf, rounds=bounded)),
            case({**fedmf, "rounds": {**plain, "privacy": noise}}, RunPlan(**fedmf, rounds=noisy)),
            # A field of version 2 of the protocol.
            case(
                {**drift, "oldest_protocol": 2, "holdings": stated},
                RunPlan(**drift, oldest_protocol=2, holdings=held),
            ),
            case({**fedncf, "rounds": {**plain, "most_users": 1000}}, RunPlan(**fedncf, rounds=opened)),
        ],
        "keys": [{"keys": keys, "hash": keys_hash(keys).hex()} for keys in (films, sorted(films), [])],
    }


LAYOUT = Layout(
    (
        Segment("items", (3, 2), 0.5, 16, "touched"),
        Segment.whole("touched", (3,), 1),
        Segment("network", (4,), 2.0, 20, "instances"),
        Segment.whole("instances", (), 1000),
    )
)


def _segments(layout: Layout) -> list[Json]:
    return [
        {
            "name": one.name,
            "shape": list(one.shape),
            "bound": one.bound,
            "bits": one.bits,
            "over": one.over,
            "clip": one.clip,
        }
        for one in layout.segments
    ]


def layouts() -> Json:
    """Layouts and their hashes."""
    others = [Layout((Segment("one", (), 1.0, 2),)), Layout((Segment("λ", (2, 0, 5), 1e-3, 31, clip=False),))]
    return {
        "cases": [
            {"segments": _segments(layout), "size": layout.size, "hash": layout_hash(layout).hex()}
            for layout in [LAYOUT, *others]
        ]
    }


class _Given:
    """Stands where a generator does, with given draws."""

    def __init__(self, draws: Sequence[float]) -> None:
        self._draws = list(draws)

    def random(self, shape: tuple[int, ...], dtype: Any) -> Any:
        count = int(np.prod(shape, dtype=np.int64))
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return np.array(drawn, dtype).reshape(shape)


def _draws(name: str, count: int, bits: int) -> list[float]:
    """Return draws as the generators of both precisions make them: multiples of 2^-24, or of 2^-53."""
    digits = 24 if bits <= 16 else 53
    return [number(f"{name}, draw {at}", 2**digits) / 2**digits for at in range(count)]


def _values(name: str, count: int, bound: float) -> list[float]:
    return [(number(f"{name}, value {at}", 2**53) / 2**52 - 1) * 1.1 * bound for at in range(count)]


def quantised() -> Json:
    """Values, draws, and the codes that come of them."""
    cases = []
    for bits, bound in ((2, 1.0), (8, 0.3), (16, 0.1), (16, 5.0), (17, 0.1), (24, 64.0), (31, 1e-3)):
        name = f"quantiser {bits} {bound}"
        values = [0.0, -0.0, bound, -bound, bound / 3, 2 * bound, -2 * bound, *_values(name, 9, bound)]
        draws = _draws(name, len(values), bits)
        draws[2] = 1 - 2.0**-24 if bits <= 16 else 1 - 2.0**-53
        cases.append(_quantised(bits, bound, values, draws))
    # One more bit, and what rounds up in single precision does not in double.
    cases.append(_quantised(16, 32767.0, [20000.5], [0.5 - 2.0**-24]))
    cases.append(_quantised(17, 65535.0, [20000.5], [0.5 - 2.0**-30]))
    return {"cases": cases, "sum": _quantised_sum()}


def _quantised(bits: int, bound: float, values: list[float], draws: list[float]) -> Json:
    segment = Segment("values", (len(values),), bound, bits)
    steps, clipped = quantise(np.array(values), segment, _Given(draws))  # type: ignore[arg-type]
    case = {"segment": _segments(Layout((segment,)))[0], "values": values, "draws": draws}
    return {**case, "steps": steps.tolist(), "clipped": clipped}


def _quantised_sum() -> Json:
    """Two users of one host: their values, the codes of the host, what the server makes of them."""
    contribution, users = Contribution(LAYOUT), []
    for user in range(2):
        given: Json = {}
        for segment in LAYOUT.segments:
            name = f"user {user}, {segment.name}"
            if segment.clip:
                values = _values(name, segment.size, segment.bound)
            else:
                most = 1 if segment.bits == 2 else 20
                values = [float(number(f"{name} {at}", most + 1)) for at in range(segment.size)]
            # Whole numbers stay what they are under any draw; half of a step leaves no doubt.
            draws = _draws(name, segment.size, segment.bits) if segment.clip else [0.5] * segment.size
            shaped = np.array(values).reshape(segment.shape)
            contribution.add(segment.name, shaped, _Given(draws))  # type: ignore[arg-type]
            given[segment.name] = {"values": values, "draws": draws}
        contribution.count()
        users.append(given)
    codes = contribution.codes()
    decoded = LAYOUT.decode(codes, 2)
    return {
        "segments": _segments(LAYOUT),
        "users": users,
        "codes": codes.tolist(),
        "decoded": {name: value.ravel().tolist() for name, value in decoded.items()},
    }


def cohort_rules() -> Json:
    """Permutations, groups, cohorts, and a population."""
    beacon = secret("beacon")
    people = sorted(identity(f"member {member}").participant_id for member in range(4))
    everybody = Population(people, [f"client/host-{n}" for n in (1, 0, 1, 2)], beacon)
    signed = DIRECTORY.sign(beacon_statement(RUN, everybody.hash(RUN), beacon))
    cases = []
    settings: list[tuple[policy.Cohorts, int, int, int, int, int]] = [
        ("groups", 5, 5, 23, 3, 0),
        ("groups", 8, 5, 37, 0, 0),
        ("groups", 8, 5, 37, 149, 50),
        ("groups", 8, 5, 37, 150, 50),
        ("groups", 100, 5, 23, 1, 0),
        ("random", 4, 5, 10, 2, 0),
        ("random", 4, 5, 9, 2, 0),
        ("independent", 4, 5, 10, 2, 0),
        ("independent", 4, 5, 9, 3, 0),
        ("all", 4, 5, 6, 0, 0),
    ]
    for kind, size, least, users, pass_number, redraw in settings:
        rule = policy.CohortRule(kind, size, least, beacon, redraw)
        cases.append(
            {
                "kind": kind,
                "cohort": size,
                "group": least,
                "users": users,
                "pass_number": pass_number,
                "redraw": redraw,
                "groups": [one.tolist() for one in policy.groups(rule, users, rule.drawing(pass_number))],
                "cohorts": [one.tolist() for one in policy.cohorts(rule, users, pass_number)],
                "min_sum": [policy.min_sum(count, 6) for count in range(users + 1)],
            }
        )
    order = policy._permutation(beacon, "cohorts", 3, 12).tolist()
    grown, grown_cases = _grown(), []
    later = ((0, beacon), (23, secret("beacon of wave 1")), (34, secret("beacon of wave 2")))
    for kind, size, users, pass_number in (("groups", 5, 40, 3), ("groups", 8, 40, 0), ("all", 8, 40, 2)):
        waves = policy.CohortRule(kind, size, 5, later[-1][1], waves=later)  # type: ignore[arg-type]
        grown_cases.append(
            {
                "kind": kind,
                "cohort": size,
                "group": 5,
                "users": users,
                "pass_number": pass_number,
                "waves": [{"first": first, "beacon": one.hex()} for first, one in later],
                "first_asked": policy.first_asked(waves),
                "groups": [one.tolist() for one in policy.groups(waves, users)],
                "cohorts": [one.tolist() for one in policy.cohorts(waves, users, pass_number)],
            }
        )
    return {
        "population": {
            "run_id": RUN,
            "message": replace(everybody, signature=signed)
            .to_wire()
            .SerializeToString(deterministic=True)
            .hex(),
            "hash": everybody.hash(RUN).hex(),
            "directory": DIRECTORY_KEY.hex(),
        },
        "grown": {
            "run_id": RUN,
            "message": grown.to_wire().SerializeToString(deterministic=True).hex(),
            "hashes": [one.hex() for one in grown.hashes(RUN)],
            "later": [
                grown.later_waves(count).SerializeToString(deterministic=True).hex() for count in (0, 1, 2)
            ],
            "directory": DIRECTORY_KEY.hex(),
        },
        "grown_cases": grown_cases,
        "beacon": beacon.hex(),
        "permutation": {"purpose": "cohorts", "number": 3, "count": 12, "order": order},
        "floor": 6,
        "cases": cases,
    }


def _grown() -> Population:
    """Return a population of four users and of two waves of two, with signed beacons."""
    people = [identity(f"member {member}").participant_id for member in range(8)]
    found = Population([], [])
    for number, (users, from_pass) in enumerate(((people[:4], 0), (people[4:6], 2), (people[6:], 5))):
        beacon, first = secret(f"beacon of wave {number}" if number else "beacon"), len(found)
        devices = [f"client/host-{number}-{n}" for n in range(len(users))]
        found = replace(
            found,
            participants=[*found.participants, *sorted(users)],
            devices=[*found.devices, *devices],
            waves=(*found.waves, Wave(first, from_pass)) if number else (),
        )
        signature = DIRECTORY.sign(beacon_statement(RUN, found.hash(RUN), beacon))
        if number:
            drawn = Wave(first, from_pass, beacon, signature)
            found = replace(found, waves=(*found.waves[:-1], drawn))
        else:
            found = replace(found, beacon=beacon, signature=signature)
    return found


def graphs() -> Json:
    """Degrees, thresholds, neighbours."""
    beacon = secret("beacon")
    cohort: Json = {"run_id": RUN, "purpose": "train", "pass_number": 3, "part": 2}
    plan = SumPlan(**cohort, round=1, secure_sum="masked", model_sha256=b"", layout_sha256=b"", members=())
    seed = replace(plan, beacon=beacon).graph_seed
    fields = [(members, *graph_fields(members)) for members in (2, 3, 4, 10, 20, 100, 101, 150, 300, 1000)]
    return {
        "fields": [{"members": n, "degree": degree, "threshold": t} for n, degree, t in fields],
        "cohort": {**cohort, "beacon": beacon.hex()},
        "seed": seed.hex(),
        "neighbours": [
            {
                "members": members,
                "degree": degree,
                "of_each": [list(one) for one in neighbourhoods(seed, members, degree)],
            }
            for members, degree in ((4, 3), (12, 6))
        ],
    }


def denoised_sum() -> Json:
    """Who denoises for whom, packed and sealed noise."""
    run_plan, beacon = secret("run plan"), secret("beacon")
    hosts = ("client/a", "client/b", "client/c", "client/d", "client/e")
    members = tuple(Member(secret(f"member {n}"), hosts[n * n % len(hosts)]) for n in range(16))
    cases = []
    for count, floor in ((16, 2), (16, 5), (9, 1)):
        plan = SumPlan(
            RUN,
            1,
            "train",
            "denoised",
            b"",
            b"",
            members[:count],
            run_plan_sha256=run_plan,
            beacon=beacon,
            noise_floor=floor,
        )
        found = plan.denoisers
        cases.append(
            {"members": count, "floor": floor, "ring": list(found.ring), "groups": list(found.groups)}
        )
    noise = np.zeros(21, np.int32)
    noise[[2, 9, 20]] = 5, -7, 2047
    packed = pack_noise(noise, 5)
    sender, denoiser = identity("member"), identity("denoiser")
    plan_hash, salt = secret("plan hash"), secret("salt")
    bundle = denoiser.bundle(1, (0, 1))
    return {
        "run_plan_sha256": run_plan.hex(),
        "beacon": beacon.hex(),
        "members": [[one.participant.hex(), one.device] for one in members],
        "cases": cases,
        "noise": noise.tolist(),
        "room": 5,
        "packed": packed.hex(),
        "secret": secret("member, agreement").hex(),
        "public": bundle.agreement_public.hex(),
        "participants": [sender.participant_id.hex(), bundle.participant_id.hex()],
        "plan_hash": plan_hash.hex(),
        "salt": salt.hex(),
        "sealed": seal_noise(sender, bundle, plan_hash, packed, salt).hex(),
    }


def keys() -> Json:
    """Agreements and the keys that are derived from them."""
    hash_, one, other = secret("plan hash"), secret("participant u"), secret("participant v")
    first, second = masking.RoundKey(secret("round key u")), masking.RoundKey(secret("round key v"))
    agreed = first.agree(second.public)
    chain = masking.chain_key(agreed, hash_, one, other)
    return {
        "plan_hash": hash_.hex(),
        "participants": [one.hex(), other.hex()],
        "secrets": [first.secret.hex(), second.secret.hex()],
        "publics": [first.public.hex(), second.public.hex()],
        "agreed": agreed.hex(),
        "share_key": masking.share_key(agreed, hash_, one, other).hex(),
        "share_key_back": masking.share_key(agreed, hash_, other, one).hex(),
        "pair_mask_key": masking.pair_mask_key(agreed, hash_, one, other).hex(),
        "chain": chain.hex(),
        "chained": [each.hex() for each in masking.chained_keys(chain, hash_, one, other)],
        "seed": secret("seed").hex(),
        "own_mask_key": masking.own_mask_key(secret("seed"), hash_, one).hex(),
        "seed_hash": masking.seed_hash(hash_, secret("seed")).hex(),
    }


def shares() -> Json:
    """Shares of secrets by given polynomials, sealed pairs of shares, reconstruction."""
    threshold, points = 3, [1, 2, 4, 5, 300]
    secrets_ = [secret("first secret"), bytes([255]) * 32]
    coefficients = [[_coefficient(f"{which} {at}") for at in range(threshold - 1)] for which in range(2)]
    with _drawing([], coefficients):
        held = shamir.split(secrets_, threshold, points)
    some = {points[at]: held[at][0] for at in (0, 2, 4)}
    large = (shamir.PRIME - 1, shamir.PRIME - 2)
    pairs = [held[0], (0, 0), large, (large[0], 5), (5, large[0])]
    key = secret("share key")
    return {
        "prime": f"{shamir.PRIME:x}",
        "threshold": threshold,
        "points": points,
        "secrets": [one.hex() for one in secrets_],
        "coefficients": [[_share(one) for one in row] for row in coefficients],
        "shares": [[_share(one) for one in pair] for pair in held],
        "reconstructed": {
            "points": list(some),
            "secret": shamir.reconstruct(some).to_bytes(32).hex(),
        },
        "key": key.hex(),
        "sealed": [
            {"pair": [_share(one) for one in pair], "sealed": masking.seal_share(key, *pair).hex()}
            for pair in pairs
        ],
    }


def _share(value: int) -> str:
    return masking.share_to_bytes(value).hex()


def _coefficient(name: str) -> int:
    return number(f"coefficient {name}", shamir.PRIME)


def masks() -> Json:
    """Masks: the expansion of one key, and a vector that is masked with three."""
    key = secret("mask key")
    words = np.zeros(100_000, np.uint32)
    masking.add_masks(words, [key])
    codes = np.array([number(f"code {at}", 2**32) for at in range(5)], np.uint32)
    plus, minus = [secret("plus 0"), secret("plus 1")], [secret("minus")]
    masked = codes.copy()
    masking.add_masks(masked, plus, minus)
    return {
        "key": key.hex(),
        "count": len(words),
        "first": words[:4].tolist(),
        "last": words[-4:].tolist(),
        "sha256": hashlib.sha256(words.astype("<u4").tobytes()).hexdigest(),
        "codes": codes.tolist(),
        "plus": [one.hex() for one in plus],
        "minus": [one.hex() for one in minus],
        "masked": masked.tolist(),
    }


def payloads() -> Json:
    """Payloads that parties hash or read bit by bit: a model, a list of open items, places."""
    model = {
        "network": np.array([0.5, -1.25, 3.0], np.float32),
        "items": np.array([[1, 2], [-0.0, 1e-3]], np.float32),
    }
    opened = np.array([[1, 0, 0, 0, 0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0, 0, 1]], np.bool_)
    packed = np.packbits(opened, axis=1, bitorder="little")
    payload = model_to_bytes(model)
    return {
        "model": {
            "tensors": [
                {
                    "name": name,
                    "shape": list(value.shape),
                    "data": np.ascontiguousarray(value, "<f4").tobytes().hex(),
                }
                for name, value in model.items()
            ],
            "payload": payload.hex(),
            "sha256": hashlib.sha256(payload).hexdigest(),
        },
        "open_items": {
            "open": [np.flatnonzero(row).tolist() for row in opened],
            "items": opened.shape[1],
            "payload": to_wire(packed).SerializeToString().hex(),
        },
    }


def sealed_batch() -> Json:
    """Sealed records: those of a user in two messages, a visit, and the owner's reply."""
    user, owner = identity("user"), identity("owner")
    private = X25519PrivateKey.from_private_bytes(secret("prekey"))
    prekey_id, public = secret("prekey id", 8), private.public_key().public_bytes_raw()
    prekey = Prekey(private, PublicPrekey(RUN, prekey_id, public, NOW + 3600, bytes(64)))
    ours = sealed.Agreement.of_user(user, owner.participant_id, prekey.public)
    theirs = sealed.Agreement.of_owner(prekey, owner.participant_id, enrolled(user))
    if ours.secret != theirs.secret:
        raise AssertionError("both sides agree on the same secret")
    with mock.patch("os.urandom", lambda size: secret("session id", size)):
        process = sealed.SenderProcess()
    items, positive = np.array([0, 7, 2**32 - 1], np.uint32), np.array([True, False, True])
    records = np.frombuffer(sealed.encode_records(items, positive), sealed.RECORD_DTYPE)
    sending = sealed.SealingSession(ours, sealed.Direction.TO_OWNER, process)
    batches = sending.seal_many(41, records, 2)
    answering = sealed.SealingSession(theirs, sealed.Direction.TO_USER, process)
    visit = Visit(5, 2, True, np.array([0.5, -2.0, 1.0], np.float32))
    reply = Reply(5, 3, 4, 1.25, np.array([0.25, 1e-3, 0.0], np.float32))
    visiting = sending.seal(44, sealed.encode_records(items[:1], positive[:1]) + visit.to_bytes(), 1)
    answer = answering.seal(visit.number, reply.to_bytes(), 0)
    return {
        "run_id": RUN,
        "user": {
            "participant": user.participant_id.hex(),
            "agreement_secret": secret("user, agreement").hex(),
        },
        "owner": {"participant": owner.participant_id.hex(), "prekey_secret": secret("prekey").hex()},
        "prekey_id": prekey_id.hex(),
        "session_id": process.session_id.hex(),
        "agreed": ours.secret.hex(),
        "records": [[int(item), bool(flag)] for item, flag in zip(items, positive, strict=True)],
        "first": 41,
        "batches": [
            {"header": header.hex(), "ciphertext": ciphertext.hex(), "records": count}
            for header, ciphertext, count in zip(batches.headers, batches.ciphertexts, (2, 1), strict=True)
        ],
        "visit": {
            "number": visit.number,
            "epoch": visit.epoch,
            "complete": visit.complete,
            "row": visit.row.tolist(),
            "first": 44,
            "records": 1,
            "counter": len(batches.headers),
            "header": visiting.header.hex(),
            "ciphertext": visiting.ciphertext.hex(),
        },
        "reply": {
            "number": reply.number,
            "blocks": reply.blocks,
            "held": reply.held,
            "loss": reply.loss,
            "step": reply.step.tolist(),
            "header": answer.header.hex(),
            "ciphertext": answer.ciphertext.hex(),
        },
    }


# --- whole rounds ------------------------------------------------------------------------------------------------

Relay = Callable[[Step, int, bytes], bytes]
"""Change that the server makes to a briefing on its way: ``(step, member, briefing) -> briefing``."""


def masked_round(
    name: str,
    members: int,
    lost: Sequence[int] = (),
    relay: Relay | None = None,
    round_: int = 17,
    chains: Sequence[Chains | None] = (),
) -> Json:
    """Return a masked round with every message.

    Parameters
    ----------
    name : str
        Stands for its secrets.
    members : int
    lost : sequence of int
        Members that vanish after having shared.
    relay : callable, optional
        Damages briefings.
    round_ : int
        Number of the round.
    chains : sequence of Chains, optional
        Of each member, of a run that has them.
    """
    people = [identity(f"member {member}") for member in range(members)]
    bundles = [enrolled(person, party=f"client/host-{at // 2}") for at, person in enumerate(people)]
    server = MaskedServer(directory_key=DIRECTORY_KEY, clock=lambda: NOW)
    degree, threshold = graph_fields(members)
    plan = SumPlan(
        run_id=RUN,
        round=round_,
        purpose="train",
        secure_sum="masked",
        run_plan_sha256=secret("plan of the run"),
        model_version=16,
        model_sha256=secret("model"),
        layout_sha256=layout_hash(LAYOUT),
        inputs=(SumInput("catalogue", secret("catalogue")), SumInput("open-items", secret("open items"))),
        # Two users at every second member, so that what counts users is seen to do so.
        members=tuple(
            Member(person.participant_id, f"client/host-{at // 2}", 1 + at % 2)
            for at, person in enumerate(people)
        ),
        degree=degree,
        threshold=threshold,
        min_sum=members,
        pass_number=2,
        part=1,
        population_sha256=secret("population"),
        beacon=secret("beacon"),
    )
    halves = [
        MaskedMember(plan, at, person, bundle, DIRECTORY_KEY, NOW, chains=chains[at] if chains else None)
        for at, (person, bundle) in enumerate(zip(people, bundles, strict=True))
    ]
    given = [_round_secrets(name, at, threshold) for at in range(members)]
    codes = [_codes(name, at, one.users) for at, one in enumerate(plan.members)]
    closed = ClosedSteps()
    running, steps = np.zeros(LAYOUT.size, np.uint32), []
    for step in MaskedServer.steps:
        arrived: dict[int, bytes] = {}
        messages = []
        for member in server.expected(plan, closed, step):
            if member in lost and step not in (Step.ADVERTISE, Step.SHARE):
                continue
            briefing = server.pieces(plan, closed, step, member).whole
            if relay is not None:
                briefing = relay(step, member, briefing)
            one, coefficients = given[member], given[member]["coefficients"]
            drawn = {
                Step.ADVERTISE: ([one["channel_secret"], one["mask_secret"]], []),
                Step.SHARE: ([one["seed"]], coefficients),
            }
            with _drawing(*drawn.get(step, ([], []))):
                message = halves[member].answer(
                    step, briefing, codes[member] if step is Step.SUBMIT else None
                )
            if step is Step.SUBMIT:
                vector = server.vector(plan, closed, arrived, member, message, LAYOUT)
                running, arrived[member] = running + vector.addend, vector.note
            else:
                server.check(plan, closed, step, member, message)
                arrived[member] = message
            messages.append({"member": member, "briefing": briefing.hex(), "message": message.hex()})
        if short := server.shortfall(plan, closed, step, arrived):
            raise AssertionError(short)
        closed = closed.with_step(step, arrived)
        steps.append({"step": step.value, "messages": messages})
    total = server.unmask(plan, closed, running)
    expected = sum((codes[at] for at in closed[Step.SUBMIT]), np.zeros(LAYOUT.size, np.uint32))
    if not np.array_equal(total.codes, expected):
        raise AssertionError("the sum of a round is that of its codes")
    return {
        "plan": plan.to_wire().SerializeToString(deterministic=True).hex(),
        "plan_hash": plan.hash.hex(),
        "directory_public": DIRECTORY_KEY.hex(),
        "now": NOW,
        "segments": _segments(LAYOUT),
        "members": [
            {
                "signing_seed": secret(f"member {at}, signing").hex(),
                "bundle": _bundle(bundle),
                "channel_secret": one["channel_secret"].hex(),
                "mask_secret": one["mask_secret"].hex(),
                "seed": one["seed"].hex(),
                "coefficients": [[_share(each) for each in row] for row in one["coefficients"]],
                "codes": codes[at].tolist(),
            }
            for at, (one, bundle) in enumerate(zip(given, bundles, strict=True))
        ],
        "steps": steps,
        "submitters": sorted(closed[Step.SUBMIT]),
        "users": sum(plan.members[at].users for at in closed[Step.SUBMIT]),
        "masked_sum": running.tolist(),
        "sum": total.codes.tolist(),
    }


def chained_rounds() -> Json:
    """Return three masked rounds of a run with chains: an agreement, a step of the chain, and an agreement again."""
    sums = 2
    chains = [Chains(sums) for _ in range(4)]
    return {
        "channel_rounds": sums,
        "rounds": [
            masked_round(f"chained {round_}", 4, round_=round_, chains=chains) for round_ in (17, 18, 19)
        ],
    }


def _round_secrets(name: str, member: int, threshold: int) -> Json:
    what = f"{name}, member {member}"
    return {
        **{one: secret(f"{what}, {one}") for one in ("channel_secret", "mask_secret", "seed")},
        "coefficients": [
            [_coefficient(f"{what}, {which} {at}") for at in range(threshold - 1)] for which in range(2)
        ],
    }


def _codes(name: str, member: int, users: int) -> Any:
    """Return codes within the layout's bounds."""
    drawn = [
        users + number(f"{name}, member {member}, code {at}", users * int(span) + 1)
        for at, span in enumerate(LAYOUT._span)
    ]
    return np.array(drawn, np.uint32)


def damaged_share(step: Step, member: int, briefing: bytes) -> bytes:
    """Change a bit of the share that member 5 sealed for member 2, and of the one that 2 sealed for 5."""
    if step is not Step.SUBMIT or member not in (2, 5):
        return briefing
    inbox = rounds_pb2.ShareInbox.FromString(briefing)
    for share in inbox.shares:
        if {member, share.member} == {2, 5}:
            share.sealed = share.sealed[:-1] + bytes([share.sealed[-1] ^ 1])
    return inbox.SerializeToString()


@contextmanager
def _drawing(secrets_: Sequence[bytes], coefficients: Sequence[Sequence[int]]) -> Iterator[None]:
    """Let the operating system's randomness be these secrets, and behind them the coefficients of polynomials.

    Given are those of x, x^2 and so on, as the vectors have them; what is drawn are those of x, x(x - 1) and so on.
    One is drawn as 33 bytes of which the lower 257 bits count, until it is below the prime; a block holds more than
    are needed, so what is behind them is filled up with zeros.
    """
    left, rows = list(secrets_), [_drawn_for(row) for row in coefficients]

    def urandom(size: int) -> bytes:
        if left:
            found = left.pop(0)
            if len(found) != size:
                raise AssertionError(f"{size} random bytes were asked for, {len(found)} were expected")
            return found
        return b"".join(one.to_bytes(33) for one in rows.pop(0)).ljust(size, b"\0")[:size]

    with mock.patch("os.urandom", urandom):
        yield
    if left or rows:
        raise AssertionError("not all of the secrets were drawn")


def _drawn_for(coefficients: Sequence[int]) -> list[int]:
    """Return what is drawn for a polynomial: its coefficients from x on, divided by x - 1, x - 2 and so on in turn."""
    rest, found = list(coefficients), []
    for point in range(1, len(rest) + 1):
        quotient: list[int] = []
        remainder = 0
        for one in reversed(rest):
            quotient.insert(0, remainder)
            remainder = (remainder * point + one) % shamir.PRIME
        found.append(remainder)
        rest = quotient[:-1]
    return found


# --- packed Paillier ---------------------------------------------------------------------------------------------

_PAILLIER_BITS = 1024


def packings() -> Json:
    """Slots, plaintexts, and the sum of several."""
    rules = [(bits, *rule) for bits in (1024, 3072) for rule in ((16, 32), (24, 256), (24, 16384), (31, 3))]
    cases = []
    for bits, code_bits, addends in rules[:4]:
        packing = Packing(bits, code_bits, addends)
        count = packing.slots + 3
        each = [_packed(f"packing {code_bits} {addends} {one}", packing, count) for one in range(2)]
        # The largest code is among them.
        each.append([2**code_bits - 1] * count)
        plaintexts = [packing.pack(np.array(codes)) for codes in each]
        total = [sum(column) for column in zip(*plaintexts, strict=True)]
        found = packing.unpack(total, count, len(each))
        cases.append(
            {
                "key_bits": bits,
                "code_bits": code_bits,
                "addends": addends,
                "vectors": [
                    {"codes": codes, "plaintexts": _hexadecimals(row)}
                    for codes, row in zip(each, plaintexts, strict=True)
                ],
                "sum": {"plaintexts": _hexadecimals(total), "codes": found.tolist()},
            }
        )
    shapes = []
    for bits, code_bits, addends in rules:
        packing = Packing(bits, code_bits, addends)
        rule = {"key_bits": bits, "code_bits": code_bits, "addends": addends}
        shapes.append(rule | {"slot_bits": packing.slot_bits, "slots": packing.slots})
    return {"shapes": shapes, "cases": cases}


def _packed(name: str, packing: Packing, count: int) -> list[int]:
    """Return codes that a name stands for."""
    return [1 + number(f"{name} code {at}", 2**packing.code_bits - 1) for at in range(count)]


def _pads(name: str, packing: Packing, count: int, n: int) -> list[int]:
    """Return pads that a name stands for."""
    return [number(f"{name} pad {at}", int(n)) for at in range(packing.ciphertexts(count))]


def _hexadecimal(value: int) -> str:
    return f"{int(value):x}"


def _hexadecimals(values: Sequence[int]) -> list[str]:
    return [_hexadecimal(value) for value in values]


def _factor(name: str, order_bits: int) -> Factor:
    """Return the prime 2 k p' + 1 that a name stands for."""
    rest_bits = _PAILLIER_BITS // 2 - 1 - order_bits
    rest = gmpy2.next_prime((15 << (rest_bits - 4)) + number(f"{name} rest", 1 << (rest_bits - 5)))
    order = gmpy2.next_prime((31 << (order_bits - 5)) + number(f"{name} order", 1 << (order_bits - 6)))
    while not gmpy2.is_prime(2 * order * rest + 1):
        order = gmpy2.next_prime(order)
    return Factor(2 * order * rest + 1, order)


@cache
def paillier_key(kind: str) -> SecretKey:
    """Return the key of a kind, ``standard`` or ``subgroup``."""
    p, q = (_factor(f"paillier {kind} {side}", 320 if kind == "subgroup" else 40) for side in "pq")
    n, base = p.prime * q.prime, gmpy2.mpz(0)
    if kind == "subgroup":
        phi = (p.prime - 1) * (q.prime - 1)
        base = gmpy2.powmod(number("paillier base", int(n)), phi // (p.order * q.order), n)
    public = PublicKey(n, secret("set key"), _PAILLIER_BITS, NOW, RUN, base, comparison=True)
    found = SecretKey(public, p, q)
    found.check()
    return found


def paillier() -> Json:
    """Keys, vectors of every mode as they are sent, and a sum."""
    packing = Packing(_PAILLIER_BITS, 16, 32)
    count = packing.slots + 2
    vectors, found = [], {}
    every_pad: dict[Mode, list[int]] = {}
    for mode in Mode:
        kind = "subgroup" if mode is Mode.SUBGROUP else "standard"
        codes, key = _packed(f"paillier {mode.name}", packing, count), paillier_key(kind)
        own = _pads(f"paillier {mode.name}", packing, count, key.public.n)
        every_pad[mode] = own
        vector, exponents = _encrypted(np.array(codes), own, packing, key, mode)
        found[mode] = vector
        # Mode A has no exponents of anything that others know.
        shown = {} if mode is Mode.KEY_HOLDER else {"exponents": _hexadecimals(exponents)}
        shown |= {"codes": codes, "pads": _hexadecimals(own)}
        vectors.append({"mode": int(mode), "key": kind, **shown, "vector": to_bytes(vector).hex()})
    total = RunningSum(paillier_key("standard").public, packing, count)
    added = Mode.PUBLIC, Mode.SHORT, Mode.KEY_HOLDER
    for mode in added:
        total.add(found[mode])
    n = paillier_key("standard").public.n
    sums = [sum(column) % n for column in zip(*(every_pad[mode] for mode in added), strict=True)]
    summed = decrypt_vector(total.total(), paillier_key("standard"), sums)
    return {
        "keys": {kind: _paillier_key(paillier_key(kind)) for kind in ("standard", "subgroup")},
        "packing": {"key_bits": _PAILLIER_BITS, "code_bits": 16, "addends": 32},
        "vectors": vectors,
        "sum": {
            "of_modes": [2, 3, 1],
            "vector": to_bytes(total.total()).hex(),
            "pads": _hexadecimals(sums),
            "codes": summed.tolist(),
        },
    }


def _paillier_key(key: SecretKey) -> Json:
    public = key.public
    return {
        "n": _hexadecimal(public.n),
        "set_public": public.set_public.hex(),
        "bits": public.bits,
        "created": public.created,
        "run_id": public.run,
        "base": _hexadecimal(public.base) if public.subgroup else "",
        "key_id": public.key_id.hex(),
        "derived_base": _hexadecimal(public.derived_base),
        "secret": key.to_bytes().hex(),
    }


def _encrypted(
    codes: np.ndarray, own: Sequence[int], packing: Packing, key: SecretKey, mode: Mode
) -> tuple[EncryptedVector, list[int]]:
    """Return a vector, and the exponents with which it was obfuscated."""
    holder = mode is Mode.KEY_HOLDER
    source = HolderObfuscators(key) if holder else PublicObfuscators(key.public, mode)
    size = {Mode.SHORT: 64, Mode.SUBGROUP: 96}.get(mode, _PAILLIER_BITS // 16)
    draws = len(own) * (1 + holder)
    # A holder draws below each order: with the highest byte zero it need not draw again.
    drawn = [secret(f"exponent {mode.name} {at}", size - holder).ljust(size, b"\0") for at in range(draws)]
    exponents = [int.from_bytes(one, "little") for one in drawn]
    with _drawing(drawn, ()):
        return encrypt(codes, packing, source, pads=[gmpy2.mpz(pad) for pad in own]), exponents


def pads_of_contributors() -> Json:
    """Return pads of several contributors to one sum, their sums, and what holders say of these."""
    public, plan_hash, count, parts = paillier_key("standard").public, secret("plan of pads"), 5, 2
    set_public = X25519PrivateKey.from_private_bytes(secret("set key of pads")).public_key()
    contributors, keys_of = [], []
    for at in range(3):
        own, person = secret(f"agreement of pads {at}"), secret(f"contributor of pads {at}")
        agreed = X25519PrivateKey.from_private_bytes(own).exchange(set_public)
        key = contributor_key(agreed, RUN, public.key_id, person)
        keys_of.append(key)
        contributors.append(
            {
                "agreement_secret": own.hex(),
                "participant": person.hex(),
                "key": key.hex(),
                "pads": _hexadecimals(pads(key, plan_hash, public, count)),
            }
        )
    sums = pad_sums(keys_of, plan_hash, public, count)
    hashes = []
    for part in range(parts):
        places = part_of(count, part, parts)
        own_sums = sums[places.start : places.stop]
        hashes.append(sums_hash(plan_hash, places.start, own_sums, public.modulus_bytes).hex())
    return {
        "run_id": RUN,
        "key_id": public.key_id.hex(),
        "n": _hexadecimal(public.n),
        "bits": public.bits,
        "plan_hash": plan_hash.hex(),
        "set_secret": secret("set key of pads").hex(),
        "set_public": set_public.public_bytes_raw().hex(),
        "contributors": contributors,
        "sums": _hexadecimals(sums),
        "parts": parts,
        "hashes": hashes,
    }


def sparse_sums() -> Json:
    """Return who sent what in a sparse sum, what of it is added, and what stands where something was left out."""
    count, floor, users = 19, 3, (1, 2, 1, 4)
    sent = np.array([[number(f"sent {at} {place}", 3) > 0 for place in range(count)] for at in range(4)])
    # One place below the floor, one that nobody sent, one that a single member sent for enough users.
    sent[:, 5], sent[:, 6], sent[:, 7] = (True, False, True, False), False, (False, False, False, True)
    members = tuple(
        Member(secret(f"member of a sparse sum {at}"), "h", each) for at, each in enumerate(users)
    )
    plan = SumPlan(RUN, 1, "train", "encrypted", bytes(32), bytes(32), members, sparse_floor=floor)
    positions = [0, 1, 2, 3]
    added = above_floor(plan, positions, sent)
    packing = Packing(_PAILLIER_BITS, 20, 8)
    return {
        "floor": floor,
        "ciphertexts": count,
        "members": [
            {
                "users": each,
                "sent": np.flatnonzero(own).tolist(),
                "places": pack_places(own).hex(),
                "added": np.flatnonzero(theirs).tolist(),
            }
            for each, own, theirs in zip(users, sent, added, strict=True)
        ],
        "dropped": np.flatnonzero(sent.any(axis=0) & ~added.any(axis=0)).tolist(),
        "list": pack_places(added).hex(),
        "list_hash": list_hash(positions, pack_places(added)).hex(),
        "zeros": {
            "packing": {"key_bits": _PAILLIER_BITS, "code_bits": 20, "addends": 8},
            "bits": [segment.bits for segment in LAYOUT.segments for _ in range(segment.size)],
            "users": 3,
            "plaintexts": _hexadecimals([3 * one for one in nothing(LAYOUT, packing)]),
        },
    }


def decryption() -> Json:
    """Return a part of a sum, decrypted and proved."""
    key, plan_hash, first = paillier_key("standard"), secret("plan of a decryption"), 2
    packing = Packing(_PAILLIER_BITS, 16, 32)
    count = packing.slots * 3
    codes, own = _packed("decryption", packing, count), _pads("decryption", packing, count, key.public.n)
    vector, _ = _encrypted(np.array(codes), own, packing, key, Mode.PUBLIC)
    packed = packing.pack(np.array(codes))
    plaintexts = [(one + pad) % key.public.n for one, pad in zip(packed, own, strict=True)]
    context = encode("decryption", plan_hash, first)
    proof = prove(key, context, vector.units, vector.shifts, plaintexts)
    return {
        "key": _paillier_key(key),
        "plan_hash": plan_hash.hex(),
        "first": first,
        "units": _hexadecimals(vector.units),
        "shifts": _hexadecimals(vector.shifts),
        "plaintexts": _hexadecimals(plaintexts),
        "proof": proof.hex(),
        "pads": _hexadecimals(own),
        "packing": {"key_bits": _PAILLIER_BITS, "code_bits": 16, "addends": 32},
        "codes": codes,
    }


def custody() -> Json:
    """Rosters, the record of a key with its signatures, and what is sealed for a holder."""
    holders = sorted((identity(f"holder {at}") for at in range(3)), key=lambda one: one.participant_id)
    ids = tuple(one.participant_id for one in holders)
    operator = Ed25519PrivateKey.from_private_bytes(secret("operator"))
    rosters = [
        Roster.sign(operator, ids, NOT_BEFORE, NOT_AFTER),
        Roster.sign(operator, ids[:1], NOT_BEFORE, NOT_AFTER, purpose="graph-tags", run=RUN),
    ]
    set_secret = X25519PrivateKey.from_private_bytes(secret("set secret"))
    standard = paillier_key("standard")
    fields = standard.public.n, set_secret.public_key().public_bytes_raw(), _PAILLIER_BITS, NOW, RUN
    public = PublicKey(*fields, comparison=True)
    held = HeldKey(2, SecretKey(public, *standard.factors), set_secret)
    generator, opener, other = holders
    record = sign_record(generator, held, ids)
    with _drawing([secret("ephemeral")], []):
        envelope = seal_for(enrolled(opener), held, record)
    terms = KeyTerms(bits=_PAILLIER_BITS, comparison=True)
    if open_sealed(opener, record, envelope, terms).key_id != record.key_id:
        raise AssertionError("a holder opens what was sealed for it")
    for one in (opener, other):
        record = record.with_countersignature(countersign_record(one, held, record))
    operator_public = operator.public_key().public_bytes_raw()
    record.verify(rosters[0], operator_public, run=RUN, now=NOW, terms=terms)
    return {
        "operator": {"signing_seed": secret("operator").hex(), "signing_public": operator_public.hex()},
        "rosters": [
            {
                "purpose": one.purpose,
                "run_id": one.run,
                "members": [member.hex() for member in one.members],
                "issued": one.issued,
                "expiry": one.expiry,
                "signature": one.signature.hex(),
                "text": one.to_text(),
            }
            for one in rosters
        ],
        "holders": [
            {
                name: secret(f"holder {at}, {kind}").hex()
                for name, kind in (("signing_seed", "signing"), ("agreement_secret", "agreement"))
            }
            for at in range(3)
        ],
        "set_secret": secret("set secret").hex(),
        "key": _paillier_key(held.secret),
        "epoch": record.epoch,
        "generator": record.generator.hex(),
        "signature": record.signature.hex(),
        "countersignatures": [
            {"holder": one.participant.hex(), "signature": one.signature.hex()}
            for one in record.countersignatures
        ],
        "envelope": {
            "holder": opener.participant_id.hex(),
            "ephemeral_secret": secret("ephemeral").hex(),
            "sealed": envelope.hex(),
        },
    }


def graph_expansion() -> Json:
    """Return the record of a graph key, an envelope, tags, a sealed embedding, a request and its answer."""
    holders = sorted((identity(f"holder {at}") for at in range(3)), key=lambda one: one.participant_id)
    secrets = GraphSecrets(RUN, 2, secret("tag key"), secret("group key"))
    generator, opener, _ = holders
    terms = GraphTerms(dimension=4)
    record = sign_graph_record(generator, secrets, terms, NOT_AFTER, [one.participant_id for one in holders])
    with _drawing([secret("ephemeral")], []):
        envelope = seal_graph_secrets(enrolled(opener), secrets, record)
    if open_graph_secrets(opener, record, envelope).key_id != record.key_id:
        raise AssertionError("a holder opens what was sealed for it")
    tags = []
    for item, users in (("1193", 19), ("1193", 583), ("Amélie", 41)):
        buckets = int(bucket_counts(np.array([users]), terms.bucket_users)[0])
        bucket = bucket_of(secret("user"), RUN, 2, item, buckets)
        tag = item_tag(secrets.tag_key, RUN, 2, item, bucket)
        tags.append({"item": item, "users": users, "bucket": bucket, "tag": tag.hex()})
    floats = np.array([1.5, -2.25, 0.0, 3e-9], np.float32)
    with _drawing([secret("salt")], []):
        embedding = secrets.seal_embedding(floats)
    directory = Ed25519PrivateKey.from_private_bytes(secret("directory"))
    key = SealingSecret.of(secret("sealing"), secret("sealing id", 8), NOT_AFTER, directory)
    place = UploadPlace(RUN, 2, upload_id_of(secret("upload")))
    with _drawing([secret("ephemeral request")], []):
        sealed, answers = seal_request(Kind.NEIGHBOURS, place, key.public, b"question")
    content, theirs = open_request(Kind.NEIGHBOURS, place, key, sealed)
    with _drawing([secret("salt of the answer")], []):
        answer = theirs.seal(b"answer")
    if (content, answers.open(answer)) != (b"question", b"answer"):
        raise AssertionError("both sides read each other")
    return {
        "record": {
            "run_id": record.run,
            "epoch": record.epoch,
            "key_id": record.key_id.hex(),
            **terms._asdict(),
            "expiry": record.expiry,
            "holders": [one.hex() for one in record.holders],
        },
        "generator_seed": _seed_of(holders, 0, "signing"),
        "signature": record.signature.hex(),
        "tag_key": secret("tag key").hex(),
        "group_key": secret("group key").hex(),
        "envelope": {
            "holder": opener.participant_id.hex(),
            "agreement_secret": _seed_of(holders, 1, "agreement"),
            "ephemeral_secret": secret("ephemeral").hex(),
            "sealed": envelope.hex(),
        },
        "user_secret": secret("user").hex(),
        "tags": tags,
        "embedding": {
            "salt": secret("salt").hex(),
            "floats": floats.astype("<f4").tobytes().hex(),
            "sealed": embedding.hex(),
        },
        "sealing": {
            "directory_seed": secret("directory").hex(),
            "secret": secret("sealing").hex(),
            "key_id": key.public.key_id.hex(),
            "expiry": key.public.expiry,
            "signature": key.public.signature.hex(),
        },
        "request": {
            "kind": Kind.NEIGHBOURS.value,
            "upload_secret": secret("upload").hex(),
            "upload_id": place.upload_id.hex(),
            "ephemeral_secret": secret("ephemeral request").hex(),
            "content": b"question".hex(),
            "sealed": sealed.hex(),
        },
        "answer": {
            "salt": secret("salt of the answer").hex(),
            "content": b"answer".hex(),
            "sealed": answer.hex(),
        },
    }


def meta_latents() -> Json:
    """Return the record of a set, codes of vectors, and their combination with its values."""
    holders = sorted((identity(f"holder {at}") for at in range(3)), key=lambda one: one.participant_id)
    standard = paillier_key("standard")
    set_secret = X25519PrivateKey.from_private_bytes(secret("set secret"))
    fields = standard.public.n, set_secret.public_key().public_bytes_raw(), _PAILLIER_BITS, NOW, RUN
    held = HeldKey(2, SecretKey(PublicKey(*fields, comparison=True), *standard.factors), set_secret)
    keys = sign_record(holders[0], held, tuple(one.participant_id for one in holders))
    terms = LatentTerms(dimension=3, combinations=20, least=20, most=24, bound=4000, members=3)
    record = sign_latent_record(holders[1], keys, terms, NOW, NOT_AFTER)
    latents = np.array([[0.5, -4.0, 1e-6], [4.5, 0.0, -1.25], [-0.125, 3.0, 2.0]])
    weights = [20000, 20000, 25536]
    codes = np.array([encode_latent(row, terms) for row in latents])
    sums = np.array(weights) @ codes.astype(np.int64)
    return {
        "record": {
            "run_id": record.run,
            "epoch": record.epoch,
            "key_id": record.key_id.hex(),
            **terms._asdict(),
            "closes": record.closes,
            "expiry": record.expiry,
        },
        "opener_seed": _seed_of(holders, 1, "signing"),
        "signature": record.signature.hex(),
        "slot_bits": terms.packing(3072).slot_bits,
        "slots": terms.packing(3072).slots,
        "weight_range": list(weight_range(terms.members)),
        "latents": latents.tolist(),
        "codes": codes.tolist(),
        "weights": weights,
        "sums": sums.tolist(),
        "values": latents_of_sums(sums, terms).tolist(),
    }


def _seed_of(holders: Sequence[Identity], which: int, kind: str) -> str:
    """Return a secret of one of the holders, who are in another order than their names."""
    names = {identity(f"holder {at}").participant_id: at for at in range(3)}
    return secret(f"holder {names[holders[which].participant_id]}, {kind}").hex()


def shared_key() -> Json:
    """Seal a version of a model for the holders of a key, and compare what two of them made."""
    standard = paillier_key("standard")
    set_secret = X25519PrivateKey.from_private_bytes(secret("set secret"))
    fields = standard.public.n, set_secret.public_key().public_bytes_raw(), _PAILLIER_BITS, NOW, RUN
    held = HeldKey(2, SecretKey(PublicKey(*fields, comparison=True), *standard.factors), set_secret)
    round_, content = 7, b"arrays of version 4"
    with mock.patch("os.urandom", lambda size: secret("nonce")[:size]):
        sealed = seal_model(held, RUN, round_, content)
    if open_model(held, RUN, round_, sealed) != content:
        raise AssertionError("a holder opens what was sealed for all of them")
    plan_hash, parts = secret("plan of a sum"), [secret(f"part {n}") for n in range(3)]
    return {
        "key": _paillier_key(held.secret),
        "epoch": held.epoch,
        "set_secret": secret("set secret").hex(),
        "round": round_,
        "nonce": secret("nonce")[:12].hex(),
        "arrays": content.hex(),
        "sealed": sealed.hex(),
        "plan_hash": plan_hash.hex(),
        "parts": [one.hex() for one in parts],
        "agreement": agreement(held, plan_hash, *parts).hex(),
    }


FILES: dict[str, Callable[[], Json]] = {
    "explicit-bytes": explicit_bytes,
    "identities": identities,
    "transparency": transparency_log,
    "run-plan": run_plans,
    "layout": layouts,
    "quantiser": quantised,
    "cohorts": cohort_rules,
    "graph": graphs,
    "denoised": denoised_sum,
    "keys": keys,
    "shares": shares,
    "masks": masks,
    "payloads": payloads,
    "packing": packings,
    "paillier": paillier,
    "pads": pads_of_contributors,
    "sparse": sparse_sums,
    "decryption": decryption,
    "custody": custody,
    "expansion": graph_expansion,
    "latents": meta_latents,
    "shared-key": shared_key,
    "sealed-records": sealed_batch,
    "round-of-four": lambda: masked_round("four", 4),
    "chained-rounds": chained_rounds,
    "round-of-ten": lambda: masked_round("ten", 10, lost=(7,), relay=damaged_share),
}
"""By the names of their files."""


def text(name: str) -> str:
    """Return the content of a file."""
    return json.dumps(FILES[name](), indent=1, ensure_ascii=False) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Write the files, or compare them."""
    changed = 0
    for name in FILES:
        path, made = VECTORS / f"{name}.json", text(name)
        if path.exists() and path.read_text(encoding="utf-8") == made:
            continue
        changed += 1
        print(path.name)
        if "--check" not in arguments:
            path.write_text(made, encoding="utf-8")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
