"""The vectors of the protocol book: what the product computes, and what a second implementation computes from them."""

import hashlib
import json
import re
import runpy
from pathlib import Path

import pytest

from ..reference import (
    cohorts,
    custody,
    denoised,
    encrypted,
    expansion,
    explicit,
    graph,
    identities,
    latents,
    masked,
    messages,
    paillier,
    plans,
    primitives,
    protobuf,
    quantiser,
    sealed,
    shamir,
    shared_key,
    transparency,
)

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "spec" / "vectors"
GENERATED = runpy.run_path(str(ROOT / "spec" / "generate.py"))
NAMES = sorted(GENERATED["FILES"])


def vectors(name):
    return json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))


def unhexed(message, *but):
    """Return a dict with its hexadecimal values as bytes, but for some that are text."""
    return {
        name: bytes.fromhex(value) if isinstance(value, str) and name not in but else value
        for name, value in message.items()
    }


def shares_of(row):
    return [int(share, 16) for share in row]


# --- the product -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_vectors_are_what_the_product_computes(name):
    assert (VECTORS / f"{name}.json").read_text(encoding="utf-8") == GENERATED["text"](name)


def test_every_file_of_vectors_is_generated_and_explained_in_the_book():
    assert sorted(path.stem for path in VECTORS.iterdir()) == NAMES
    book = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "spec").glob("*.md"))
    assert set(re.findall(r"`spec/vectors/([a-z-]+)\.json`", book)) == set(NAMES)


# --- the second implementation -----------------------------------------------------------------------------------


def test_the_second_implementation_shares_no_code_with_the_product():
    own = ROOT / "tests" / "reference"
    imported = set()
    for path in own.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = re.match(r"\s*(?:from\s+([\w.]+)\s+import\b|import\s+([\w.]+))", line)
            if found:
                imported.add((found[1] or found[2]).split(".")[0])
    assert imported <= {
        "",
        "cryptography",
        "fractions",
        "hashlib",
        "hmac",
        "itertools",
        "math",
        "os",
        "secrets",
        "struct",
    }


def test_explicit_bytes_are_computed_alike():
    for case in vectors("explicit-bytes")["cases"]:
        fields = [
            bytes.fromhex(field["bytes"])
            if "bytes" in field
            else int(field["integer"])
            if "integer" in field
            else field["text"]
            for field in case["fields"]
        ]
        assert explicit.encode(case["purpose"], *fields).hex() == case["encoded"]


def test_identities_are_computed_alike():
    given = vectors("identities")
    seeds = {name: bytes.fromhex(given[name]) for name in ("signing_seed", "agreement_secret")}
    directory = bytes.fromhex(given["directory"]["signing_seed"])
    assert primitives.ed25519_public(directory).hex() == given["directory"]["signing_public"]
    expected = unhexed(given["bundle"], "party")
    numbers = (expected[name] for name in ("version", "not_before", "not_after"))
    bundle = identities.bundle(seeds["signing_seed"], seeds["agreement_secret"], *numbers)
    assert identities.countersigned(bundle, directory, expected["party"]) == expected
    assert identities.participant_id(expected["signing_public"]).hex() == given["participant"]
    delegation = unhexed(given["delegation"], "run_id")
    made = identities.delegation(
        seeds["signing_seed"],
        delegation["certificate_fingerprint"],
        delegation["run_id"],
        delegation["expiry"],
    )
    assert made == delegation
    users = [bytes.fromhex(user) for user in given["roll"].pop("users")]
    roll = unhexed(given["roll"], "run_id")
    made = identities.roll(
        seeds["signing_seed"], users, roll["certificate_fingerprint"], roll["run_id"], roll["expiry"]
    )
    assert made == roll
    prekey = unhexed(given["prekey"], "run_id")
    made = identities.prekey(
        prekey["owner_signing_seed"],
        prekey["run_id"],
        prekey["prekey_id"],
        prekey["secret"],
        prekey["expiry"],
    )
    assert made == {name: prekey[name] for name in made}


def test_the_log_is_hashed_proven_and_signed_alike():
    given = vectors("transparency")
    leaves = []
    for entry in given["entries"]:
        leaves.append(transparency.leaf(entry["kind"], bytes.fromhex(entry["statement"])))
        assert leaves[-1].hex() == entry["leaf"]
    assert [transparency.root(leaves[:count]).hex() for count in range(len(leaves) + 1)] == given["roots"]
    for case in given["joint"]:
        joint = transparency.joint(case["indices"], leaves[: case["size"]])
        assert [one.hex() for one in joint] == case["path"]
    for case in given["inclusion"]:
        index, size = case["index"], case["size"]
        path = transparency.inclusion(index, leaves[:size])
        assert [one.hex() for one in path] == case["path"]
        assert transparency.root_by(leaves[index], index, size, path).hex() == given["roots"][size]
    for case in given["consistency"]:
        path = transparency.consistency(case["first"], leaves[: case["second"]])
        assert [one.hex() for one in path] == case["path"]
    directory, log = (bytes.fromhex(given[name]) for name in ("directory_seed", "log_seed"))
    heads = [unhexed(head) for head in given["heads"]]
    for head in heads:
        assert transparency.head(log, directory, head["size"], head["root"], head["time_ms"]) == head
        transparency.check_head(head, primitives.ed25519_public(directory))
        with pytest.raises(primitives.Refused):
            transparency.check_head({**head, "size": head["size"] + 1}, primitives.ed25519_public(directory))
    assert not transparency.contradict(*heads)
    assert transparency.contradict(heads[0], {**heads[1], "time_ms": heads[0]["time_ms"]})
    assert transparency.contradict(heads[0], {**heads[0], "root": heads[1]["root"]})


def test_plans_of_runs_are_hashed_alike():
    given = vectors("run-plan")
    operator = bytes.fromhex(given["operator"])
    for case in given["cases"]:
        plan = dict(case["plan"])
        if "rounds" in plan:
            plan["rounds"] = unhexed(plan["rounds"], "choose_by")
        plan["holdings"] = [unhexed(one, "owner", "party") for one in plan.get("holdings", [])]
        assert plans.run_plan_hash(plan).hex() == case["hash"]
        plans.check_signed(plan, bytes.fromhex(case["signature"]), operator)
        with pytest.raises(primitives.Refused):
            plans.check_signed({**plan, "seed": 9}, bytes.fromhex(case["signature"]), operator)
        # What the hash covers is all that is carried.
        assert plans.run_plan_hash(
            protobuf.read(messages.RUN_PLAN, protobuf.write(messages.RUN_PLAN, plan))
        ) == (bytes.fromhex(case["hash"]))


def test_keys_of_items_are_hashed_alike():
    for case in vectors("run-plan")["keys"]:
        assert plans.keys_hash(case["keys"]).hex() == case["hash"]


def test_layouts_are_hashed_alike():
    for case in vectors("layout")["cases"]:
        assert plans.layout_hash(case["segments"]).hex() == case["hash"]
        assert quantiser.size(case["segments"]) == case["size"]


def test_values_are_quantised_alike():
    for case in vectors("quantiser")["cases"]:
        steps, clipped = quantiser.quantise(case["values"], case["segment"], case["draws"])
        assert (steps, clipped) == (case["steps"], case["clipped"])


def test_codes_are_made_and_decoded_alike():
    given = vectors("quantiser")["sum"]
    steps = [0] * quantiser.size(given["segments"])
    for user in given["users"]:
        found = [
            step
            for segment in given["segments"]
            for step in quantiser.quantise(
                user[segment["name"]]["values"], segment, user[segment["name"]]["draws"]
            )[0]
        ]
        steps = [one + other for one, other in zip(steps, found, strict=True)]
    assert quantiser.codes(steps, given["segments"], len(given["users"])) == given["codes"]
    assert quantiser.decode(given["codes"], given["segments"], len(given["users"])) == given["decoded"]


def test_cohorts_are_drawn_alike():
    given = vectors("cohorts")
    beacon, order = bytes.fromhex(given["beacon"]), given["permutation"]
    population = given["population"]
    message = protobuf.read(messages.POPULATION, bytes.fromhex(population["message"]))
    about = population["run_id"], message, bytes.fromhex(population["directory"])
    assert cohorts.check_population(*about).hex() == population["hash"]
    assert message["beacon"] == beacon
    for changed in (
        {"beacon": bytes(32)},
        {"devices": message["devices"][::-1]},
        {"participants": message["participants"][:32] * 4},
    ):
        with pytest.raises(primitives.Refused):
            cohorts.check_population(about[0], {**message, **changed}, about[2])
    drawn = cohorts.permutation(beacon, order["purpose"], order["number"], order["count"])
    assert drawn == order["order"]
    for case in given["cases"]:
        users = case["users"]
        redraw, pass_number = case["redraw"], case["pass_number"]
        drawn = cohorts.drawing(redraw, pass_number)
        assert cohorts.groups(beacon, case["group"], users, drawn) == case["groups"]
        rule = case["kind"], beacon, case["cohort"], case["group"]
        assert cohorts.cohorts(*rule, users, pass_number, redraw) == case["cohorts"]
        floors = [cohorts.min_sum(count, given["floor"]) for count in range(users + 1)]
        assert floors == case["min_sum"]


def test_populations_that_grow_are_hashed_checked_and_cut_alike():
    given = vectors("cohorts")
    grown = given["grown"]
    message = protobuf.read(messages.POPULATION, bytes.fromhex(grown["message"]))
    about = grown["run_id"], message, bytes.fromhex(grown["directory"])
    assert cohorts.check_population(*about).hex() == grown["hashes"][-1]
    for number in range(len(message["waves"])):
        first = message["waves"][number]["first"]
        earlier = {
            **message,
            "participants": message["participants"][: 32 * first],
            "device": message["device"][:first],
            "waves": message["waves"][:number],
        }
        assert cohorts.check_population(about[0], earlier, about[2]).hex() == grown["hashes"][number]
        later = protobuf.read(messages.WAVES, bytes.fromhex(grown["later"][number]))
        found = cohorts.with_waves(about[0], earlier, later, about[2])
        assert cohorts.population_hash_of(about[0], found).hex() == grown["hashes"][-1]
        assert cohorts.check_population(about[0], found, about[2]).hex() == grown["hashes"][-1]
        assert [one["first"] for one in found["waves"]] == [one["first"] for one in message["waves"]]
        for changed in (
            {"participants": later["participants"][:32] * len(later["device"])},
            {"waves": [{**one, "from_pass": 1} for one in later["waves"]]},
            {"waves": [{**one, "beacon": bytes(32)} for one in later["waves"]]},
            {"waves": [{**one, "first": one["first"] + 1} for one in later["waves"]]},
        ):
            with pytest.raises(primitives.Refused):
                cohorts.with_waves(about[0], earlier, {**later, **changed}, about[2])
    assert grown["later"][-1] == ""
    one, other = message["waves"]
    for changed in (
        [one],
        [one, {**other, "from_pass": other["from_pass"] + 1}],
        [{**one, "beacon": other["beacon"]}, other],
        [{**one, "first": one["first"] - 1}, other],
    ):
        with pytest.raises(primitives.Refused):
            cohorts.check_population(about[0], {**message, "waves": changed}, about[2])
    for case in given["grown_cases"]:
        waves = [(one["first"], bytes.fromhex(one["beacon"])) for one in case["waves"]]
        assert cohorts.grown_groups(waves, case["group"], case["users"]) == case["groups"]
        before = cohorts.grown_groups(waves[:-1], case["group"], waves[-1][0])
        assert before == case["groups"][: case["first_asked"]]
        rule = case["kind"], waves[-1][1], case["cohort"], case["group"], case["users"]
        assert cohorts.cohorts(*rule, case["pass_number"], waves=waves) == case["cohorts"]


def test_graphs_are_drawn_alike():
    given = vectors("graph")
    for case in given["fields"]:
        assert graph.rule(case["members"]) == (case["degree"], case["threshold"])
    cohort = {**given["cohort"], "beacon": bytes.fromhex(given["cohort"]["beacon"])}
    seed = graph.seed(cohort, bytes(32))
    assert seed.hex() == given["seed"]
    assert graph.seed({**cohort, "beacon": b""}, bytes(32)) == bytes(32)
    for case in given["neighbours"]:
        found = graph.neighbourhoods(seed, case["members"], case["degree"])
        assert found == case["of_each"]


def test_denoisers_are_drawn_and_noise_is_sealed_alike():
    given = vectors("denoised")
    members = [(bytes.fromhex(participant), device) for participant, device in given["members"]]
    about = bytes.fromhex(given["run_plan_sha256"]), bytes.fromhex(given["beacon"])
    for case in given["cases"]:
        found = denoised.ring_and_groups(*about, members[: case["members"]], case["floor"])
        assert found == (case["ring"], case["groups"])
    packed = denoised.pack(given["noise"], given["room"])
    assert packed.hex() == given["packed"]
    secret, public, plan_hash, salt = (
        bytes.fromhex(given[name]) for name in ("secret", "public", "plan_hash", "salt")
    )
    participants = [bytes.fromhex(one) for one in given["participants"]]
    assert denoised.seal(secret, public, participants, plan_hash, salt, packed).hex() == given["sealed"]


def test_keys_are_derived_alike():
    given = unhexed(vectors("keys"))
    secrets, publics, ids = (
        [bytes.fromhex(one) for one in given[name]] for name in ("secrets", "publics", "participants")
    )
    assert [primitives.x25519_public(secret) for secret in secrets] == publics
    assert primitives.x25519(secrets[0], publics[1]) == given["agreed"]
    assert primitives.x25519(secrets[1], publics[0]) == given["agreed"]
    plan = given["plan_hash"]
    assert masked.share_key(given["agreed"], plan, *ids) == given["share_key"]
    assert masked.share_key(given["agreed"], plan, *reversed(ids)) == given["share_key_back"]
    assert masked.pair_mask_key(given["agreed"], plan, *ids) == given["pair_mask_key"]
    assert masked.pair_mask_key(given["agreed"], plan, *reversed(ids)) == given["pair_mask_key"]
    chain = masked.chain_key(given["agreed"], plan, *ids)
    assert chain == masked.chain_key(given["agreed"], plan, *reversed(ids)) == given["chain"]
    up, down, following = (bytes.fromhex(one) for one in given["chained"])
    assert masked.chained_share_key(chain, plan, *ids) == up
    assert masked.chained_share_key(chain, plan, *reversed(ids)) == down
    assert masked.next_chain(chain) == following
    assert masked.own_mask_key(given["seed"], plan, ids[0]) == given["own_mask_key"]
    assert explicit.digest("seed", plan, given["seed"]) == given["seed_hash"]


def test_secrets_are_shared_and_sealed_alike():
    given = vectors("shares")
    assert int(given["prime"], 16) == shamir.PRIME
    for which, (secret, row) in enumerate(zip(given["secrets"], given["coefficients"], strict=True)):
        found = shamir.split(int(secret, 16), shares_of(row), given["points"])
        assert found == [int(pair[which], 16) for pair in given["shares"]]
    again = {
        point: int(given["shares"][given["points"].index(point)][0], 16)
        for point in given["reconstructed"]["points"]
    }
    assert shamir.at_zero(again) == int(given["reconstructed"]["secret"], 16)
    assert given["reconstructed"]["secret"] == given["secrets"][0]
    key = bytes.fromhex(given["key"])
    for case in given["sealed"]:
        assert masked.seal_pair(key, *shares_of(case["pair"])).hex() == case["sealed"]
        assert masked.open_pair(key, bytes.fromhex(case["sealed"])) == tuple(shares_of(case["pair"]))


def test_masks_are_expanded_alike():
    given = vectors("masks")
    words = masked.mask(bytes.fromhex(given["key"]), given["count"])
    assert words[:4] == given["first"]
    assert words[-4:] == given["last"]
    assert hashlib.sha256(masked.code_bytes(words)).hexdigest() == given["sha256"]
    found = given["codes"]
    for sign, keys in ((1, given["plus"]), (-1, given["minus"])):
        for key in keys:
            mask = masked.mask(bytes.fromhex(key), len(found))
            found = [(code + sign * word) % 2**32 for code, word in zip(found, mask, strict=True)]
    assert found == given["masked"]


def integers(row):
    return [int(one, 16) for one in row]


def rule_of(case):
    return tuple(case[name] for name in ("key_bits", "code_bits", "addends"))


def test_codes_are_packed_alike():
    given = vectors("packing")
    for case in given["shapes"]:
        assert paillier.shape(*rule_of(case)) == (case["slot_bits"], case["slots"])
    for case in given["cases"]:
        rule, total = rule_of(case), case["sum"]
        for one in case["vectors"]:
            assert paillier.pack(one["codes"], rule) == integers(one["plaintexts"])
        rows = [integers(one["plaintexts"]) for one in case["vectors"]]
        plaintexts = [sum(column) for column in zip(*rows, strict=True)]
        assert plaintexts == integers(total["plaintexts"])
        assert paillier.unpack(plaintexts, len(total["codes"]), len(rows), rule) == total["codes"]
        assert total["codes"] == [
            sum(column) for column in zip(*(one["codes"] for one in case["vectors"]), strict=True)
        ]


@pytest.fixture(scope="module")
def paillier_keys():
    """Records by kind, and what their secret keys hold."""
    found = {}
    for kind, given in vectors("paillier")["keys"].items():
        record = {name: int(given[name] or "0", 16) for name in ("n", "base")}
        record |= {name: given[name] for name in ("bits", "created", "run_id")}
        record["set_public"] = bytes.fromhex(given["set_public"])
        paillier.check_record(record, least=1024)
        assert paillier.key_id(record).hex() == given["key_id"]
        assert paillier.derived_base(record["n"], record["bits"]) == int(given["derived_base"], 16)
        found[kind] = record, paillier.secret_key(record, bytes.fromhex(given["secret"]))
    return found


def test_records_and_secret_keys_of_paillier_are_read_alike(paillier_keys):
    assert [bool(record["base"]) for record, _ in paillier_keys.values()] == [False, True]
    record, _ = paillier_keys["standard"]
    with pytest.raises(primitives.Refused):
        paillier.check_record(record)
    content = bytes.fromhex(vectors("paillier")["keys"]["standard"]["secret"])
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 2]), content[::-1]):
        with pytest.raises(primitives.Refused):
            paillier.secret_key(record, damaged)


def test_vectors_of_every_mode_are_encrypted_and_decrypted_alike(paillier_keys):
    given = vectors("paillier")
    rule = rule_of(given["packing"])
    for case in given["vectors"]:
        record, (p, q, *orders) = paillier_keys[case["key"]]
        n, mode, codes, pads = record["n"], case["mode"], case["codes"], integers(case["pads"])
        content = bytes.fromhex(case["vector"])
        assert paillier.read(content, record, rule, len(codes))[0] == mode
        ciphertexts = paillier.read(content, record, rule, len(codes))[1]
        packed = paillier.pack(codes, rule)
        plaintexts = [(one + pad) % n for one, pad in zip(packed, pads, strict=True)]
        if mode > 1:
            base = record["base"] if mode == 4 else paillier.derived_base(n, record["bits"])
            made = [
                paillier.encrypt(plaintext, n, paillier.obfuscator(base, n, exponent))
                for plaintext, exponent in zip(plaintexts, integers(case["exponents"]), strict=True)
            ]
            assert paillier.write(mode, rule, len(codes), record, made) == content
        for one, plaintext in zip(ciphertexts, plaintexts, strict=True):
            assert paillier.decrypt(one, p, q) == plaintext
            if mode == 4:
                assert paillier.decrypt(one, p, q, orders) == plaintext
        for damaged in (content[:-1], b"\2" + content[1:], content[:44] + bytes(len(content) - 44)):
            with pytest.raises(primitives.Refused):
                paillier.read(damaged, record, rule, len(codes))


def test_vectors_are_summed_under_encryption_alike(paillier_keys):
    given = vectors("paillier")
    rule, total = rule_of(given["packing"]), given["sum"]
    record, (p, q, *_) = paillier_keys["standard"]
    by_mode = {case["mode"]: case for case in given["vectors"]}
    count, running = len(total["codes"]), None
    for mode in total["of_modes"]:
        _, found = paillier.read(bytes.fromhex(by_mode[mode]["vector"]), record, rule, count)
        running = found if running is None else paillier.add(running, found, record["n"])
    largest = max(total["of_modes"])
    assert paillier.write(largest, rule, count, record, running).hex() == total["vector"]
    columns = zip(*(integers(by_mode[mode]["pads"]) for mode in total["of_modes"]), strict=True)
    pads = [sum(column) % record["n"] for column in columns]
    assert pads == integers(total["pads"])
    plaintexts = [
        (paillier.decrypt(one, p, q) - pad) % record["n"] for one, pad in zip(running, pads, strict=True)
    ]
    assert paillier.unpack(plaintexts, count, len(total["of_modes"]), rule) == total["codes"]
    columns = zip(*(by_mode[mode]["codes"] for mode in total["of_modes"]), strict=True)
    assert total["codes"] == [sum(column) for column in columns]


def test_pads_are_derived_and_summed_alike():
    given = unhexed(vectors("pads"), "run_id", "n", "bits", "contributors", "sums", "parts", "hashes")
    n = int(given["n"], 16)
    common = given["run_id"], given["key_id"]
    assert primitives.x25519_public(given["set_secret"]) == given["set_public"]
    total = [0] * len(given["sums"])
    for case in given["contributors"]:
        own, participant = (bytes.fromhex(case[name]) for name in ("agreement_secret", "participant"))
        last = participant, given["plan_hash"], n, len(total)
        found = encrypted.pads(own, given["set_public"], *common, *last)
        assert found == integers(case["pads"])
        # Holders come to the same from the other side.
        assert encrypted.pads(given["set_secret"], primitives.x25519_public(own), *common, *last) == found
        total = [(one + other) % n for one, other in zip(total, found, strict=True)]
    assert total == integers(given["sums"])
    cuts = [part * len(total) // given["parts"] for part in range(given["parts"] + 1)]
    for first, end, told in zip(cuts[:-1], cuts[1:], given["hashes"], strict=True):
        found = encrypted.pads_hash(given["plan_hash"], first, total[first:end], given["bits"])
        assert found.hex() == told


def test_who_sent_what_in_a_sparse_sum_is_told_and_added_alike():
    given = vectors("sparse")
    members, count = given["members"], given["ciphertexts"]
    for one in members:
        assert encrypted.places(one["sent"], count).hex() == one["places"]
    users = [one["users"] for one in members]
    added, dropped = encrypted.above_floor([one["sent"] for one in members], users, given["floor"])
    assert (added, dropped) == ([one["added"] for one in members], given["dropped"])
    assert dropped
    told = b"".join(encrypted.places(one, count) for one in added)
    assert told.hex() == given["list"]
    assert masked.list_hash(range(len(members)), told).hex() == given["list_hash"]
    zeros = given["zeros"]
    assert encrypted.zeros(zeros["bits"], zeros["users"], rule_of(zeros["packing"])) == integers(
        zeros["plaintexts"]
    )


def test_decryptions_are_proved_and_checked_alike(paillier_keys):
    given = vectors("decryption")
    record, (p, q, *_) = paillier_keys["standard"]
    units, shifts, plaintexts = (integers(given[name]) for name in ("units", "shifts", "plaintexts"))
    for a, b, m in zip(units, shifts, plaintexts, strict=True):
        assert paillier.decrypt(a * (1 + b * p * q) % (p * q) ** 2, p, q) == m
    about = encrypted.context(bytes.fromhex(given["plan_hash"]), given["first"])
    e = encrypted.exponents(record["bits"], paillier.key_id(record), about, units, shifts, plaintexts)
    root = int(given["proof"], 16)
    assert encrypted.prove(p, q, e, units) == root
    encrypted.check(p * q, e, units, shifts, plaintexts, root)
    values = [(m - pad) % (p * q) for m, pad in zip(plaintexts, integers(given["pads"]), strict=True)]
    assert paillier.unpack(values, len(given["codes"]), 1, rule_of(given["packing"])) == given["codes"]
    with pytest.raises(primitives.Refused):
        encrypted.check(p * q, e, units, shifts, [plaintexts[0] + 1, *plaintexts[1:]], root)


def test_rosters_are_signed_and_written_alike():
    given = vectors("custody")
    seed, public = (bytes.fromhex(given["operator"][name]) for name in ("signing_seed", "signing_public"))
    assert primitives.ed25519_public(seed) == public
    for case in given["rosters"]:
        roster = unhexed(case, "purpose", "run_id", "text")
        roster["members"] = [bytes.fromhex(one) for one in case["members"]]
        assert custody.roster_signature(seed, roster) == roster["signature"]
        assert custody.roster_text(roster) == case["text"]
        holds = {"purpose": roster["purpose"], "run_id": "run-of-the-book", "now": roster["issued"]}
        custody.check_roster(roster, public, **holds)
        for change in ({"purpose": "other"}, {"now": roster["expiry"] + 600}, {"public": bytes(32)}):
            with pytest.raises(primitives.Refused):
                custody.check_roster(roster, **{"public": public, **holds, **change})
        with pytest.raises(primitives.Refused):
            custody.check_roster({**roster, "members": roster["members"] * 2}, public, **holds)


def test_the_record_of_a_key_is_signed_and_its_secret_sealed_alike():
    given = vectors("custody")
    holders = {
        identities.participant_id(primitives.ed25519_public(one["signing_seed"])): one
        for one in map(unhexed, given["holders"])
    }
    names = ("n", "base")
    key = unhexed(given["key"], "run_id", *names) | {
        name: int(given["key"][name] or "0", 16) for name in names
    }
    assert paillier.key_id(key) == key["key_id"]
    roster = {"members": sorted(holders)}
    generator = bytes.fromhex(given["generator"])
    record = custody.record(key, given["epoch"], sorted(holders), holders[generator]["signing_seed"])
    assert record["signature"].hex() == given["signature"]
    with pytest.raises(primitives.Refused):
        custody.check_record(record, roster, ())
    for one in given["countersignatures"]:
        seed = holders[bytes.fromhex(one["holder"])]["signing_seed"]
        record = custody.countersigned(record, seed)
        assert record["countersignatures"][primitives.ed25519_public(seed)].hex() == one["signature"]
    custody.check_record(record, roster, ())
    with pytest.raises(primitives.Refused):
        custody.check_record(record, roster, (generator,))

    envelope, set_secret = unhexed(given["envelope"]), bytes.fromhex(given["set_secret"])
    opener = holders[envelope["holder"]]
    agreement = primitives.x25519_public(opener["agreement_secret"])
    sealed = custody.seal(
        record, set_secret, key["secret"], envelope["holder"], agreement, envelope["ephemeral_secret"]
    )
    assert sealed == envelope["sealed"]
    found = custody.opened(record, sealed, envelope["holder"], opener["agreement_secret"])
    assert found == (set_secret, *paillier.secret_key(key, key["secret"]))
    for damaged in (sealed[:-1], sealed[:40] + bytes(1) + sealed[41:]):
        with pytest.raises(primitives.Refused):
            custody.opened(record, damaged, envelope["holder"], opener["agreement_secret"])
    with pytest.raises(primitives.Refused):
        custody.opened({**record, "epoch": 3}, sealed, envelope["holder"], opener["agreement_secret"])


def test_a_graph_key_is_signed_and_sealed_alike():
    given = vectors("expansion")
    record = unhexed(given["record"], "run_id")
    record["holders"] = [bytes.fromhex(one) for one in record["holders"]]
    seed = bytes.fromhex(given["generator_seed"])
    generator = identities.participant_id(primitives.ed25519_public(seed))
    secrets = [bytes.fromhex(given[name]) for name in ("tag_key", "group_key")]
    assert expansion.key_id(record["run_id"], record["epoch"], *secrets) == record["key_id"]
    assert expansion.record_signature(seed, record, generator).hex() == given["signature"]
    envelope = unhexed(given["envelope"])
    agreement = primitives.x25519_public(envelope["agreement_secret"])
    sealed = expansion.envelope(
        record, generator, envelope["holder"], agreement, envelope["ephemeral_secret"], b"".join(secrets)
    )
    assert sealed == envelope["sealed"]


def test_tags_and_embeddings_are_made_alike():
    given = vectors("expansion")
    record, tag_key, group_key = given["record"], *(bytes.fromhex(given[n]) for n in ("tag_key", "group_key"))
    about = record["run_id"], record["epoch"]
    for one in given["tags"]:
        terms = one["item"], one["users"], record["bucket_users"]
        found = expansion.tag(tag_key, bytes.fromhex(given["user_secret"]), *about, *terms)
        assert found == (one["bucket"], bytes.fromhex(one["tag"]))
    embedding = unhexed(given["embedding"])
    id_ = bytes.fromhex(record["key_id"])
    sealed = expansion.sealed_embedding(group_key, *about, id_, embedding["salt"], embedding["floats"])
    assert sealed == embedding["sealed"]


def test_requests_to_graph_expansion_and_answers_are_sealed_alike():
    given = vectors("expansion")
    key, asked, answer = (
        unhexed(given["sealing"]),
        unhexed(given["request"], "kind"),
        unhexed(given["answer"]),
    )
    public = primitives.x25519_public(key["secret"])
    signed = explicit.encode("expansion-key", key["key_id"], public, key["expiry"])
    assert primitives.ed25519_sign(key["directory_seed"], signed) == key["signature"]
    upload_id, sealed = expansion.request(
        asked["kind"],
        given["record"]["run_id"],
        given["record"]["epoch"],
        asked["upload_secret"],
        key["key_id"],
        public,
        asked["ephemeral_secret"],
        asked["content"],
    )
    assert (upload_id, sealed) == (asked["upload_id"], asked["sealed"])
    assert expansion.answer(sealed, key["secret"], answer["salt"], answer["content"]) == answer["sealed"]
    opened = expansion.opened(sealed, asked["ephemeral_secret"], public, answer["sealed"])
    assert opened == expansion.padded(answer["content"])
    with pytest.raises(primitives.Refused):
        expansion.opened(sealed[:-1] + b"x", asked["ephemeral_secret"], public, answer["sealed"])


def test_sets_of_meta_latents_are_opened_encoded_and_combined_alike():
    given = vectors("latents")
    record = unhexed(given["record"], "run_id")
    seed = bytes.fromhex(given["opener_seed"])
    opener = identities.participant_id(primitives.ed25519_public(seed))
    assert latents.record_signature(seed, record, opener).hex() == given["signature"]
    assert latents.slots(3072, record["bits"]) == (given["slot_bits"], given["slots"])
    assert list(latents.weight_range(record["members"])) == given["weight_range"]
    terms = record["bound"], record["bits"]
    codes = [[latents.code(value, *terms) for value in row] for row in given["latents"]]
    assert codes == given["codes"]
    assert latents.combined(codes, given["weights"]) == given["sums"]
    assert [latents.value(total, *terms) for total in given["sums"]] == given["values"]


def test_versions_are_sealed_and_compared_alike_by_those_who_share_a_key():
    given = vectors("shared-key")
    key = bytes.fromhex(given["key"]["key_id"])
    secrets = bytes.fromhex(given["set_secret"]) + bytes.fromhex(given["key"]["secret"])
    about = (secrets, given["key"]["run_id"], key, given["epoch"])
    sealed, arrays = bytes.fromhex(given["sealed"]), bytes.fromhex(given["arrays"])
    assert shared_key.seal(*about, given["round"], bytes.fromhex(given["nonce"]), arrays) == sealed
    assert shared_key.opened(*about, given["round"], sealed) == arrays
    for round_, damaged in ((given["round"] + 1, sealed), (given["round"], sealed[:-1])):
        with pytest.raises(primitives.Refused):
            shared_key.opened(*about, round_, damaged)
    parts = [bytes.fromhex(one) for one in given["parts"]]
    assert shared_key.agreement(*about, bytes.fromhex(given["plan_hash"]), *parts).hex() == given["agreement"]


def test_payloads_are_made_alike():
    given = vectors("payloads")
    tensors = [
        {
            "name": one["name"],
            "tensor": {"dtype": 1, "shape": one["shape"], "data": bytes.fromhex(one["data"])},
        }
        for one in sorted(given["model"]["tensors"], key=lambda one: one["name"])
    ]
    payload = protobuf.write(messages.MODEL, {"tensors": tensors})
    assert payload.hex() == given["model"]["payload"]
    assert primitives.sha256(payload).hex() == given["model"]["sha256"]
    items = given["open_items"]
    packed = bytearray()
    for row in items["open"]:
        bits = sum(1 << item for item in row)
        packed += bits.to_bytes(-(-items["items"] // 8), "little")
    shape = [len(items["open"]), -(-items["items"] // 8)]
    tensor = {"dtype": 4, "shape": shape, "data": bytes(packed)}
    assert protobuf.write(messages.TENSOR, tensor).hex() == items["payload"]


def test_records_are_sealed_and_opened_alike():
    given = vectors("sealed-records")
    user, owner = unhexed(given["user"]), unhexed(given["owner"])
    agreed = primitives.x25519(user["agreement_secret"], primitives.x25519_public(owner["prekey_secret"]))
    assert agreed.hex() == given["agreed"]
    channel = sealed.Channel(
        agreed,
        given["run_id"],
        user["participant"],
        owner["participant"],
        bytes.fromhex(given["prekey_id"]),
    )
    session, first, at = bytes.fromhex(given["session_id"]), given["first"], 0
    records = [tuple(record) for record in given["records"]]
    for counter, batch in enumerate(given["batches"]):
        part = records[at : at + batch["records"]]
        made = channel.seal(sealed.TO_OWNER, session, counter, first + at, sealed.records(part), len(part))
        assert [one.hex() for one in made] == [batch["header"], batch["ciphertext"]]
        opened = channel.open(sealed.TO_OWNER, *made)
        assert (opened[0], opened[1], sealed.interactions(opened[2])) == (first + at, len(part), part)
        at += batch["records"]
    visit = given["visit"]
    payload = sealed.records(records[: visit["records"]])
    payload += sealed.visit(visit["number"], visit["epoch"], visit["complete"], visit["row"])
    made = channel.seal(sealed.TO_OWNER, session, visit["counter"], visit["first"], payload, visit["records"])
    assert [one.hex() for one in made] == [visit["header"], visit["ciphertext"]]
    reply = unhexed(given["reply"])
    first, count, payload = channel.open(sealed.TO_USER, reply["header"], reply["ciphertext"])
    assert (first, count) == (visit["number"], 0)
    found = sealed.reply_from(payload, len(visit["row"]))
    assert found == tuple(reply[name] for name in ("number", "blocks", "held", "loss", "step"))
    with pytest.raises(primitives.Refused):
        channel.open(sealed.TO_OWNER, reply["header"], reply["ciphertext"])


@pytest.mark.parametrize("name", ["round-of-four", "round-of-ten"])
def test_whole_rounds_are_played_alike(name):
    # The round of ten has one pair of shares that was damaged on its way, and a member that was lost.
    assert play(vectors(name)) == (2 if name == "round-of-ten" else 0)


def test_rounds_of_a_run_with_chains_are_played_alike():
    given = vectors("chained-rounds")
    chains = [{} for _ in range(4)]
    for one in given["rounds"]:
        assert play(one, chains, given["channel_rounds"]) == 0
    adverts = [
        [
            protobuf.read(messages.ADVERT, bytes.fromhex(sent["message"]))["chained"]
            for sent in one["steps"][0]["messages"]
        ]
        for one in given["rounds"]
    ]
    assert adverts == [[bytes([bits])] * 4 for bits in (0, 7, 0)]


def play(given, chains=(), most=0):
    """Play a round of the vectors with the second implementation; return how many briefings were damaged."""
    plan = protobuf.read(messages.SUM_PLAN, bytes.fromhex(given["plan"]))
    assert plans.sum_plan_hash(plan).hex() == given["plan_hash"]
    assert plan["layout_sha256"] == plans.layout_hash(given["segments"])
    members = []
    for index, one in enumerate(given["members"]):
        secrets = {key: bytes.fromhex(one[key]) for key in ("channel_secret", "mask_secret", "seed")}
        secrets["coefficients"] = [shares_of(row) for row in one["coefficients"]]
        members.append(
            masked.Member(
                plan,
                index,
                bytes.fromhex(one["signing_seed"]),
                unhexed(one["bundle"], "party"),
                bytes.fromhex(given["directory_public"]),
                given["now"],
                secrets,
                chains=chains[index] if chains else None,
                most=most,
            )
        )
    server = masked.Server(plan, quantiser.size(given["segments"]))
    damaged = 0
    for part in given["steps"]:
        step = part["step"]
        assert server.step == step
        assert set(server.expected()) >= {one["member"] for one in part["messages"]}
        for one in part["messages"]:
            briefing, message = bytes.fromhex(one["briefing"]), bytes.fromhex(one["message"])
            damaged += server.briefing(one["member"]) != briefing
            codes = given["members"][one["member"]]["codes"]
            assert members[one["member"]].answer(step, briefing, codes) == message
            server.take(one["member"], message)
        server.close()
    assert server.running == given["masked_sum"]
    assert server.total() == given["sum"]
    assert sorted(server.closed["submit"]) == given["submitters"]
    expected = [
        sum(column) % 2**32
        for column in zip(*(given["members"][at]["codes"] for at in given["submitters"]), strict=True)
    ]
    assert given["sum"] == expected
    quantiser.decode(given["sum"], given["segments"], given["users"])
    return damaged
