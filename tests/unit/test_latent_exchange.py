"""Users of a host in a set of meta-latents: what is published and read when, failures, a key that is replaced."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from coterie_client.agent import PROTECTIONS

from coterie.crypto.latent_terms import LatentTerms
from coterie.errors import PeerError
from coterie.parties.latent_exchange import VECTOR, LatentExchange
from coterie.parties.latents import LatentUpload
from coterie.wire.refusal import ErrorReason, Refusal

TERMS = LatentTerms(dimension=2, combinations=20, least=20, most=4, bound=1000)
USERS = (0, 1, 2, 3)
MODEL = {}
READY = np.full((20, 2), 0.5)


def plan(pass_number, purpose="train"):
    return SimpleNamespace(run_id="a-run", round=1 + pass_number, pass_number=pass_number, purpose=purpose)


class Side:
    """A side whose users publish from pass 1 on and need combinations from pass 2 on; the last is a query user."""

    def __init__(self):
        self.latents = None

    def latent_terms(self, model):
        return TERMS if model is not None else None

    def key_users(self, plan, users):
        return [user for user in users if user < 3] if plan.pass_number >= 1 else []

    def latent(self, model, user):
        return np.full(2, float(user))

    def lacks_latents(self, plan):
        return self.latents is None and plan.pass_number >= 2

    def take_latents(self, latents):
        self.latents = latents


class ThirdParty:
    """A key and its sets in memory, in place of custody and calls; ``least`` vectors make a set ready."""

    def __init__(self, folder, least=3):
        self.folder, self.least = folder, least
        self.epoch, self.sets, self.down, self.refused = 1, {}, False, None
        self.made, self.receipts, self.uploads, self.ready = [], [], {}, READY
        self.exchange = self.begin()

    def begin(self):
        """Begin as after a start of the host's process."""
        self.uploads = {}
        return LatentExchange(self, lambda terms: self, self.upload, self.obfuscators, self.note)

    def before(self, side, pass_number, users=USERS, purpose="train", model=MODEL):
        asyncio.run(self.exchange.before(side, plan(pass_number, purpose), model, users))

    def upload(self, user):
        return self.uploads.setdefault(user, LatentUpload(self.folder / f"user-{user}", user))

    def obfuscators(self, holding):
        self.made.append(holding.record.epoch)
        return object()

    async def note(self, kind, user, size):
        self.receipts.append((kind, user, size))

    # --- custody

    async def ensure(self):
        if self.down:
            raise PeerError("nobody answers")
        return SimpleNamespace(record=SimpleNamespace(epoch=self.epoch, key_id=bytes([self.epoch])))

    async def rotate(self):
        self.epoch += 1
        return await self.ensure()

    # --- calls

    def state(self, epoch):
        vectors = self.sets.get(epoch)
        if vectors is None:
            return None
        void = vectors == "void"
        ready = not void and len(vectors) >= self.least
        record = SimpleNamespace(epoch=epoch, terms=TERMS)
        return SimpleNamespace(record=record, void=void, ready=ready, key_users=0 if void else len(vectors))

    async def look(self, holding, hold_s=0.0, *, ready=False):
        return self.state(holding.record.epoch)

    async def stands(self, run, epoch):
        if self.down:
            raise PeerError("nobody answers")
        newest = max(self.sets)
        return newest == epoch and self.sets[epoch] != "void"

    async def open(self, holding, *, open_s, valid_s):
        self.sets[holding.record.epoch] = {}
        return self.state(holding.record.epoch)

    async def publish(self, user, opened, latent, obfuscators):
        if self.refused is not None and user.slot == 1:
            raise Refusal(self.refused, "the set is closed")
        user.begin(opened.record.epoch, latent.tobytes())
        self.sets[opened.record.epoch][user.slot] = latent
        user.acknowledged()

    async def read(self, opened, holding):
        return self.ready


@pytest.fixture
def third(tmp_path):
    return ThirdParty(tmp_path)


def test_key_users_publish_once_and_combinations_are_read_when_they_are_needed(third):
    side = Side()
    third.before(side, 0)
    assert third.sets == {}
    third.before(side, 1)
    assert sorted(third.sets[1]) == [0, 1, 2]
    assert third.sets[1][2].tolist() == [2.0, 2.0]
    assert side.latents is None
    third.before(side, 1)
    assert third.receipts == [(VECTOR, user, 10) for user in (0, 1, 2)]
    assert third.made == [1]
    third.before(side, 2)
    assert side.latents is READY
    assert third.exchange.failure == ""


def test_before_the_terms_are_known_nobody_is_asked(third):
    third.down = True
    third.before(Side(), 2, model=None)
    assert third.exchange.failure == ""


def test_nothing_is_published_for_an_evaluation(third):
    third.before(Side(), 1, purpose="evaluate")
    assert third.sets == {}


def test_after_a_restart_nothing_is_published_again_and_combinations_are_read_again(third):
    third.before(Side(), 1)
    third.exchange = third.begin()
    side = Side()
    third.before(side, 2, purpose="evaluate")
    assert side.latents is READY
    assert len(third.receipts) == 3


def test_a_side_that_is_built_anew_is_given_what_was_read_before(third):
    third.before(Side(), 1)
    third.before(Side(), 2)
    third.down = True
    side = Side()
    third.before(side, 3)
    assert side.latents is READY


def test_without_the_third_party_training_goes_on_and_it_is_tried_again(third):
    side, third.down = Side(), True
    third.before(side, 1)
    assert third.exchange.failure == "nobody answers"
    third.before(side, 2)
    assert side.latents is None
    third.down = False
    third.before(side, 3)
    assert side.latents is READY
    assert third.exchange.failure == ""


def test_a_set_that_is_not_combined_yet_is_said_with_how_far_it_is(third):
    third.least = 5
    side = Side()
    third.before(side, 2)
    assert side.latents is None
    assert "has 3 of 4 key users and is not combined yet" in third.exchange.failure


@pytest.mark.parametrize("reason", ["STALE", "CONFLICT", "UNKNOWN_PARTICIPANT"])
def test_a_refusal_for_one_user_stops_nobody_else(third, reason):
    third.refused = getattr(ErrorReason, f"ERROR_REASON_{reason}")
    third.before(Side(), 1)
    assert sorted(third.sets[1]) == [0, 2]
    assert third.exchange.failure == "the set is closed"


def test_a_refusal_of_everybody_ends_the_attempt(third):
    third.refused = ErrorReason.ERROR_REASON_OVERLOADED
    third.before(Side(), 1)
    assert third.exchange.failure == "the set is closed"


def test_after_a_key_user_was_forgotten_the_others_publish_under_the_key_of_a_new_epoch(third):
    third.before(Side(), 1)
    third.upload(1).end()
    third.sets[1], third.least = "void", 2
    side = Side()
    third.before(side, 2)
    assert third.epoch == 2
    assert sorted(third.sets[2]) == [0, 2]
    assert third.made == [1, 2]
    assert side.latents is READY
    third.exchange = third.begin()
    assert third.upload(1).forgotten
    assert not third.upload(3).forgotten


def test_who_has_read_combinations_publishes_again_and_takes_those_of_a_new_set_once_they_are_there(third):
    side = Side()
    third.before(side, 2)
    assert third.exchange.failure == ""
    third.upload(1).end()
    third.sets[1], third.least = "void", 3
    before, after = side.latents, np.zeros((20, 2))
    third.ready = after
    third.before(side, 3, purpose="evaluate")
    assert sorted(third.sets) == [1]
    third.before(side, 3)
    # Two of three have published: what was read before is used, and nobody waits.
    assert sorted(third.sets[2]) == [0, 2]
    assert side.latents is before
    assert third.exchange.failure == ""
    third.least = 2
    third.before(side, 4)
    assert side.latents is after
    assert third.made == [1, 2]


def test_a_host_that_holds_the_next_key_already_opens_the_set_that_nobody_has_opened(third):
    side = Side()
    third.before(side, 2)
    # Another host made the key, and gave up before all held it.
    third.sets[1], third.epoch, third.ready = "void", 2, np.zeros((20, 2))
    third.before(side, 3)
    assert sorted(third.sets[2]) == [0, 1, 2]
    assert side.latents is third.ready


def test_while_the_third_party_is_down_sums_do_not_wait_each_time_for_whether_a_set_still_stands(third):
    side = Side()
    third.before(side, 2)
    third.down = True
    third.before(side, 3)
    assert third.exchange.failure == ""
    third.down, third.sets[1] = False, "void"
    third.before(side, 4)
    assert third.epoch == 1
    third.exchange._look_at = 0.0
    third.before(side, 5)
    assert third.epoch == 2


def test_receipts_say_how_a_vector_is_protected():
    assert "encrypted" in PROTECTIONS[VECTOR]
