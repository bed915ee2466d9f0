"""The masked sum: a member and the server (docs/spec/masked-sum.md).  Bytes in, bytes out; steps are named by words."""

import os
import secrets
from itertools import combinations, pairwise

from . import graph, shamir
from .explicit import digest, encode
from .identities import check_bundle, participant_id, role_of
from .messages import (
    ADVERT,
    ADVERTS,
    CONFIRMATION,
    CONFIRMATIONS,
    SHARE_INBOX,
    SHARES,
    SUBMITTERS,
    SUMMED_VECTOR,
    UNMASKING,
)
from .plans import device_of, sum_plan_hash
from .primitives import (
    Refused,
    ed25519_check,
    ed25519_sign,
    gcm_open,
    gcm_seal,
    hkdf,
    keystream,
    sha256,
    x25519,
    x25519_public,
)
from .protobuf import read, write

STEPS = ("advertise", "share", "submit", "confirm", "unmask")
MODULUS = 1 << 32


# --- derivations -------------------------------------------------------------------------------------------------


def share_key(agreed, plan_hash, sender, receiver):
    """Return the key under which one member seals for another."""
    return hkdf(agreed, encode("share", plan_hash, sender, receiver))


def chain_key(agreed, plan_hash, one, other):
    """Return the first key of the chain of two members."""
    low, high = sorted((one, other))
    return hkdf(agreed, encode("chain", plan_hash, low, high))


def chained_share_key(chain, plan_hash, sender, receiver):
    """Return the key under which one member seals for another in a sum of their chain."""
    return hkdf(chain, encode("chained-share", plan_hash, sender, receiver))


def next_chain(chain):
    """Return the key of a chain for the sum after."""
    return hkdf(chain, encode("chain-step"))


def bits(around, chosen):
    """Return a bit for each neighbour, lowest bit of the first byte first."""
    number = sum(1 << at for at, member in enumerate(around) if member in chosen)
    return number.to_bytes((len(around) + 7) // 8, "little")


def pair_mask_key(agreed, plan_hash, one, other):
    """Return the key of the mask of two members."""
    low, high = sorted((one, other))
    return hkdf(agreed, encode("pair-mask", plan_hash, low, high))


def own_mask_key(seed, plan_hash, participant):
    """Return the key of a member's own mask."""
    return hkdf(seed, encode("own-mask", plan_hash, participant))


def mask(key, count):
    """Return the words of a mask."""
    stream = keystream(key, 4 * count)
    return [int.from_bytes(stream[at : at + 4], "little") for at in range(0, 4 * count, 4)]


def seal_pair(key, seed_share, mask_share):
    """Seal the two shares of one holder."""
    low = (1 << 256) - 1
    top = (seed_share >> 256) * 2 + (mask_share >> 256)
    plain = bytes([top]) + (seed_share & low).to_bytes(32, "big") + (mask_share & low).to_bytes(32, "big")
    return gcm_seal(key, bytes(12), plain)


def open_pair(key, sealed):
    """Return the two shares, or refuse."""
    plain = gcm_open(key, bytes(12), sealed)
    if len(plain) != 65 or plain[0] > 3:
        raise Refused("no pair of shares")
    seed_share = (plain[0] >> 1 << 256) + int.from_bytes(plain[1:33], "big")
    mask_share = ((plain[0] & 1) << 256) + int.from_bytes(plain[33:], "big")
    if max(seed_share, mask_share) >= shamir.PRIME:
        raise Refused("a share that is not below the prime")
    return seed_share, mask_share


def list_hash(positions, *places):
    """Return the hash of a list of submitters; of a sparse sum with what each of them sent."""
    return digest("submitters", b"".join(position.to_bytes(4, "big") for position in positions), *places)


def code_bytes(codes):
    """Return codes as they travel."""
    return b"".join(code.to_bytes(4, "little") for code in codes)


def codes_from(data):
    """Return the codes that bytes are."""
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


def drawn(degree, threshold):
    """Return fresh secrets of one member for one round."""
    return {
        "channel_secret": os.urandom(32),
        "mask_secret": os.urandom(32),
        "seed": os.urandom(32),
        "coefficients": [[secrets.randbelow(shamir.PRIME) for _ in range(threshold - 1)] for _ in range(2)],
    }


def _advert_statement(plan_hash, channel_public, mask_public, chained):
    return encode("advert", plan_hash, channel_public, mask_public, *([chained] if chained else []))


def _ascending(positions, below):
    return all(a < b for a, b in pairwise(positions)) and all(0 <= position < below for position in positions)


# --- the member --------------------------------------------------------------------------------------------------


class Member:
    """One member in one round; raises ``Refused`` and is done when something is wrong."""

    def __init__(
        self,
        plan,
        index,
        signing_seed,
        bundle,
        directory_public,
        now,
        given=None,
        rule=graph.rule,
        chains=None,
        most=0,
    ):
        self.plan, self.index, self.signing_seed, self.bundle = plan, index, signing_seed, bundle
        self.directory_public, self.now = directory_public, now
        self.hash = sum_plan_hash(plan)
        self.ids = [one["participant"] for one in plan["members"]]
        self.own = participant_id(bundle["signing_public"])
        self.rule = rule
        self.given = given or drawn(plan["degree"], plan["threshold"])
        self.met, self.held, self.left_out, self.listed = {}, {}, [], []
        # Chains of this member by the other one's id, each a key and the sums it had; None in runs without them.
        self.chains, self.most, self.following = chains, most, {}

    def answer(self, step, briefing, codes=None):
        """Return the message for a step."""
        if step == "submit":
            return self.submit(briefing, codes)
        return getattr(self, step)(briefing)

    def advertise(self, _briefing=b""):
        """Check the plan; return an ``Advert``."""
        plan, members = self.plan, len(self.ids)
        users = sum(one["users"] for one in plan["members"])
        degree, least = self.rule(members)
        if plan["version"] != 2 or plan["secure_sum"] != "masked":
            raise Refused("another protocol")
        if self.ids[self.index] != self.own or len(set(self.ids)) != members:
            raise Refused("a cohort that this member is not in, or somebody twice")
        if self.bundle["party"] != device_of(plan, self.index):
            raise Refused("a plan in which this member is of another party")
        if not 1 <= plan["min_sum"] <= users:
            raise Refused("a floor that cannot be")
        if plan["degree"] != degree or not least <= plan["threshold"] <= degree:
            raise Refused("another graph")
        self.near = graph.neighbourhoods(graph.seed(plan, self.hash), members, degree)
        self.around = self.near[self.index]
        self.own_chains, chained = {}, b""
        if self.chains is not None:
            for member in self.around:
                if self.ids[member] in self.chains:
                    self.own_chains[member] = self.chains.pop(self.ids[member])
            chained = bits(self.around, self.own_chains)
        keys = [x25519_public(self.given[name]) for name in ("channel_secret", "mask_secret")]
        return write(
            ADVERT,
            {
                "member": self.index,
                "bundle": self.bundle,
                "channel_public": keys[0],
                "mask_public": keys[1],
                "signature": ed25519_sign(self.signing_seed, _advert_statement(self.hash, *keys, chained)),
                "chained": chained,
            },
        )

    def share(self, briefing):
        """Check the neighbours' advertisements; return ``Shares``."""
        adverts = read(ADVERTS, briefing)["adverts"]
        positions = [one["member"] for one in adverts]
        self._require(positions, self.around)
        keys = {x25519_public(self.given[name]) for name in ("channel_secret", "mask_secret")}
        keys.update(one[name] for one in adverts for name in ("channel_public", "mask_public"))
        if len(keys) != 2 * len(adverts) + 2:
            raise Refused("a key that was advertised twice")
        points = [position + 1 for position in positions]
        split = [
            shamir.split(int.from_bytes(self.given[name], "big"), coefficients, points)
            for name, coefficients in zip(("seed", "mask_secret"), self.given["coefficients"], strict=True)
        ]
        shares = []
        for one, seed_share, mask_share in zip(adverts, *split, strict=True):
            peer = self.ids[one["member"]]
            self._check_advert(one, peer, device_of(self.plan, one["member"]))
            key, opening = self._share_keys(one, peer)
            self.met[one["member"]] = (one["bundle"]["signing_public"], one["mask_public"], opening)
            shares.append({"member": one["member"], "sealed": seal_pair(key, seed_share, mask_share)})
        seed_hash = digest("seed", self.hash, self.given["seed"])
        return write(SHARES, {"shares": shares, "seed_hash": seed_hash})

    def _share_keys(self, one, peer):
        """Return the keys to seal and to open with, of the chain where both hold it; step or begin the chain."""
        member, near = one["member"], self.near[one["member"]]
        said = int.from_bytes(one["chained"], "little") >> near.index(self.index) & 1
        if said and member in self.own_chains:
            chain, sums = self.own_chains[member]
            self.following[member] = next_chain(chain), sums + 1
            return [
                chained_share_key(chain, self.hash, *pair) for pair in ((self.own, peer), (peer, self.own))
            ]
        agreed = x25519(self.given["channel_secret"], one["channel_public"])
        if self.chains is not None:
            self.following[member] = chain_key(agreed, self.hash, self.own, peer), 1
        return [share_key(agreed, self.hash, *pair) for pair in ((self.own, peer), (peer, self.own))]

    def _check_advert(self, one, peer, device):
        bundle = one["bundle"]
        if bundle is None or participant_id(bundle["signing_public"]) != peer:
            raise Refused("an advertisement with another participant's keys")
        check_bundle(bundle, self.directory_public, self.now)
        if bundle["party"] != device or role_of(bundle) != role_of(self.bundle):
            raise Refused("a bundle of another party or role than the plan says")
        if len(one["chained"]) not in (0, (len(self.near[one["member"]]) + 7) // 8):
            raise Refused("bits for others than the neighbours")
        message = _advert_statement(self.hash, one["channel_public"], one["mask_public"], one["chained"])
        ed25519_check(bundle["signing_public"], one["signature"], message, "an advertisement")

    def submit(self, briefing, codes):
        """Open the shares; return the masked codes as a ``SummedVector``."""
        inbox = read(SHARE_INBOX, briefing)["shares"]
        self._require([one["member"] for one in inbox], self.met)
        for one in inbox:
            try:
                self.held[one["member"]] = open_pair(self.met[one["member"]][2], one["sealed"])
            except Refused:
                self.left_out.append(one["member"])
        self._require(sorted(self.held), self.met)
        for member, (chain, sums) in self.following.items():
            if member in self.held and sums < self.most:
                self.chains[self.ids[member]] = chain, sums
        found = list(codes)
        self._add(found, own_mask_key(self.given["seed"], self.hash, self.own), 1)
        for member in self.held:
            peer = self.ids[member]
            agreed = x25519(self.given["mask_secret"], self.met[member][1])
            self._add(found, pair_mask_key(agreed, self.hash, self.own, peer), 1 if self.own < peer else -1)
        sent = code_bytes(found)
        signature = ed25519_sign(self.signing_seed, encode("submit", self.hash, sha256(sent)))
        return write(SUMMED_VECTOR, {"codes": sent, "left_out": self.left_out, "signature": signature})

    @staticmethod
    def _add(codes, key, sign):
        for at, word in enumerate(mask(key, len(codes))):
            codes[at] = (codes[at] + sign * word) % MODULUS

    def confirm(self, briefing):
        """Check the list of submitters; return a ``Confirmation``."""
        listed = read(SUBMITTERS, briefing)["members"]
        if not _ascending(listed, len(self.ids)) or self.index not in listed:
            raise Refused("a list of submitters that is none, or without this member")
        known = {*self.held, *self.left_out}
        if any(member in self.around and member not in known for member in listed):
            raise Refused("a neighbour that did not share is said to have submitted")
        if sum(self.plan["members"][member]["users"] for member in listed) < self.plan["min_sum"]:
            raise Refused("a sum over too few users")
        if sum(member in self.held for member in listed) < self.plan["threshold"]:
            raise Refused("too few neighbours submitted")
        self.listed = listed
        message = encode("confirm", self.hash, list_hash(listed))
        return write(
            CONFIRMATION, {"member": self.index, "signature": ed25519_sign(self.signing_seed, message)}
        )

    def unmask(self, briefing):
        """Check the neighbours' confirmations; return an ``Unmasking``."""
        confirmations = read(CONFIRMATIONS, briefing)["confirmations"]
        positions = [one["member"] for one in confirmations]
        self._require(positions, [member for member in self.held if member in self.listed])
        message = encode("confirm", self.hash, list_hash(self.listed))
        for one in confirmations:
            ed25519_check(self.met[one["member"]][0], one["signature"], message, "a confirmation")
        shares = []
        for member in sorted(self.held):
            name, which = ("seed", 0) if member in self.listed else ("mask", 1)
            shares.append({"member": member, name: shamir.to_bytes(self.held[member][which])})
        return write(UNMASKING, {"shares": shares})

    def _require(self, positions, among):
        if not _ascending(positions, len(self.ids)) or not set(positions) <= set(among):
            raise Refused("no ascending list of neighbours")
        if len(positions) < self.plan["threshold"]:
            raise Refused("too few neighbours")


# --- the server --------------------------------------------------------------------------------------------------


class Server:
    """The server in one round, without deadlines: whoever calls it says when a step is closed."""

    def __init__(self, plan, size):
        self.plan, self.size = plan, size
        self.hash = sum_plan_hash(plan)
        self.ids = [one["participant"] for one in plan["members"]]
        self.near = graph.neighbourhoods(graph.seed(plan, self.hash), len(self.ids), plan["degree"])
        self.closed, self.arrived, self.step = {}, {}, STEPS[0]
        self.running = [0] * size

    def expected(self):
        """Return the members that the open step asks."""
        if self.step == "advertise":
            return list(range(len(self.ids)))
        before = self.closed[STEPS[STEPS.index(self.step) - 1]]
        return [
            member
            for member in sorted(before)
            if sum(each in before for each in self.near[member]) >= self.plan["threshold"]
        ]

    def _sharing(self, member):
        return [each for each in self.near[member] if each in self.closed["share"]]

    def _masked_with(self, member):
        """Return the neighbours with whom a submitter has masks."""
        left_out = self.closed["submit"][member]["left_out"]
        return [each for each in self._sharing(member) if each not in left_out]

    def briefing(self, member):
        """Return what a member needs for the open step."""
        if self.step == "advertise":
            return b""
        if self.step == "share":
            adverts = self.closed["advertise"]
            return write(
                ADVERTS, {"adverts": [adverts[each] for each in self.near[member] if each in adverts]}
            )
        if self.step == "submit":
            shares = [
                {"member": each, "sealed": sealed["sealed"]}
                for each in self._sharing(member)
                for sealed in self.closed["share"][each]["shares"]
                if sealed["member"] == member
            ]
            return write(SHARE_INBOX, {"shares": shares})
        if self.step == "confirm":
            return write(SUBMITTERS, {"members": sorted(self.closed["submit"])})
        there = self.closed["confirm"]
        return write(
            CONFIRMATIONS,
            {"confirmations": [there[each] for each in self._masked_with(member) if each in there]},
        )

    def take(self, member, message):
        """Check a member's message for the open step, and keep it."""
        if member not in self.expected():
            raise Refused("a member that is not asked")
        self.arrived[member] = getattr(self, "_take_" + self.step)(member, message)

    def _signing(self, member):
        return self.closed["advertise"][member]["bundle"]["signing_public"]

    def _take_advertise(self, member, message):
        advert = read(ADVERT, message)
        public = advert["bundle"]["signing_public"]
        if advert["member"] != member or participant_id(public) != self.ids[member]:
            raise Refused("an advertisement of another member")
        message = _advert_statement(
            self.hash, advert["channel_public"], advert["mask_public"], advert["chained"]
        )
        ed25519_check(public, advert["signature"], message, "an advertisement")
        return advert

    def _take_share(self, member, message):
        shares = read(SHARES, message)
        met = [each for each in self.near[member] if each in self.closed["advertise"]]
        if [one["member"] for one in shares["shares"]] != met or len(shares["seed_hash"]) != 32:
            raise Refused("shares for others than the neighbours")
        return shares

    def _take_submit(self, member, message):
        vector = read(SUMMED_VECTOR, message)
        near, left_out = self._sharing(member), vector["left_out"]
        if len(vector["codes"]) != 4 * self.size:
            raise Refused("a vector of another length")
        if not _ascending(left_out, len(self.ids)) or not set(left_out) <= set(near):
            raise Refused("left_out names others than neighbours")
        if len(near) - len(left_out) < self.plan["threshold"]:
            raise Refused("too few masks")
        for other in near:
            if other in self.arrived and (member in self.arrived[other]["left_out"]) != (other in left_out):
                raise Refused("two members do not agree on the mask between them")
        signed = encode("submit", self.hash, sha256(vector["codes"]))
        ed25519_check(self._signing(member), vector["signature"], signed, "a contribution")
        for at, code in enumerate(codes_from(vector["codes"])):
            self.running[at] = (self.running[at] + code) % MODULUS
        return vector

    def _take_confirm(self, member, message):
        confirmation = read(CONFIRMATION, message)
        signed = encode("confirm", self.hash, list_hash(sorted(self.closed["submit"])))
        ed25519_check(self._signing(member), confirmation["signature"], signed, "a confirmation")
        return confirmation

    def _take_unmask(self, member, message):
        unmasking = read(UNMASKING, message)
        if [one["member"] for one in unmasking["shares"]] != self._masked_with(member):
            raise Refused("shares of others than the neighbours")
        for one in unmasking["shares"]:
            due, other = ("seed", "mask") if one["member"] in self.closed["submit"] else ("mask", "seed")
            if one[due] is None or one[other] is not None or len(one[due]) != 33:
                raise Refused("a share of the wrong secret")
        return unmasking

    def close(self):
        """Close the open step and open the next; refuses below a floor."""
        there = self.arrived
        if (
            self.step != "unmask"
            and sum(self.plan["members"][each]["users"] for each in there) < (self.plan["min_sum"])
        ):
            raise Refused("too few users")
        self.closed[self.step], self.arrived = there, {}
        at = STEPS.index(self.step) + 1
        self.step = STEPS[at] if at < len(STEPS) else "over"

    def total(self):
        """Return the sum of the codes of those who submitted."""
        submitted, found = self.closed["submit"], list(self.running)
        adverts = self.closed["advertise"]
        for member in sorted(self.closed["share"]):
            holders = [
                each
                for each in self._sharing(member)
                if each in submitted and member in self._masked_with(each)
            ]
            if member not in submitted and not holders:
                continue
            which = "seed" if member in submitted else "mask"
            shares = {
                holder + 1: int.from_bytes(one[which], "big")
                for holder, unmasking in self.closed["unmask"].items()
                for one in unmasking["shares"]
                if one["member"] == member
            }
            secret = self._reconstructed(member, which, shares)
            own = self.ids[member]
            if which == "seed":
                self._subtract(found, own_mask_key(secret, self.hash, own), 1)
                continue
            for peer in holders:
                agreed = x25519(secret, adverts[peer]["mask_public"])
                key = pair_mask_key(agreed, self.hash, own, self.ids[peer])
                self._subtract(found, key, 1 if self.ids[peer] < own else -1)
        return found

    def _reconstructed(self, member, which, shares):
        for chosen in combinations(sorted(shares), self.plan["threshold"]):
            value = shamir.at_zero({point: shares[point] for point in chosen})
            if value < 1 << 256 and self._fits(member, which, value.to_bytes(32, "big")):
                return value.to_bytes(32, "big")
        raise Refused("a secret that cannot be reconstructed")

    def _fits(self, member, which, secret):
        if which == "seed":
            return digest("seed", self.hash, secret) == self.closed["share"][member]["seed_hash"]
        return x25519_public(secret) == self.closed["advertise"][member]["mask_public"]

    @staticmethod
    def _subtract(codes, key, sign):
        """Take away a mask that was added (sign 1) or subtracted (sign -1)."""
        for at, word in enumerate(mask(key, len(codes))):
            codes[at] = (codes[at] - sign * word) % MODULUS
