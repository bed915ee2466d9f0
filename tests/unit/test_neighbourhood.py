"""Users of a host in graph expansion: neighbours of a run in one process, failures, a key that is replaced."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from coterie_client.agent import PROTECTIONS

from coterie.crypto.graph_key import GraphSecrets, GraphTerms, sign_graph_record
from coterie.crypto.graph_tags import TAG_BYTES
from coterie.crypto.identity import Identity
from coterie.errors import PeerError
from coterie.parties.expansion import Expansion, UserUpload
from coterie.parties.graph_keys import GraphHolding
from coterie.parties.graph_records import graph_record_to_wire
from coterie.parties.neighbourhood import ASKED, PUBLISHED, Neighbourhood, seed_of_user
from coterie.studies.local_graph import LocalThirdParty
from coterie.systems.fedgnn.neighbours import KnownNeighbours, published_items
from coterie.systems.fedgnn.settings import FedGnnSettings
from coterie.wire.refusal import ErrorReason, Refusal

USERS, ITEMS = 8, 12
SETTINGS = FedGnnSettings(factors=2, neighbours=4, neighbours_after=1, refresh=2, tags=3)
CATALOGUE = [f"item-{n}" for n in range(ITEMS)]
LONER = USERS - 1


class Side:
    """A host's side whose users all share the first item, but for one who shares nothing with anybody."""

    def __init__(self, settings=SETTINGS):
        self.around = KnownNeighbours(settings, KnownNeighbours.initial(settings, USERS))

    def epoch(self, plan):
        return self.around.epoch(plan.pass_number)

    def sharers(self, model):
        return np.full(ITEMS, 5, np.int64)

    def due(self, plan, users):
        return self.around.due(plan.pass_number, users)

    def shared(self, user):
        items = np.array([11] if user == LONER else [0, 1 + user % 3])
        return SimpleNamespace(items=items, embedding=np.full(2, user, np.float32))

    def published(self, plan, user):
        self.around.published(plan.pass_number, user)

    def curious(self, plan, users):
        return self.around.curious(plan.pass_number, users)

    def met(self, plan, user, neighbours):
        self.around.take(plan.pass_number, user, neighbours)

    def known(self, user):
        embeddings, counts = self.around.of(np.array([user]))
        return {float(one[0]) for one in embeddings[0, : counts[0]]}


class Graph:
    """A third party in this process, the keys of two epochs, and what a host's users keep."""

    def __init__(self, run="a-run", seeds=True):
        self.party, self.run, self.receipts, self.epoch = LocalThirdParty(), run, [], 0
        self.uploads = [UserUpload(None, n, seed_of_user(n) if seeds else b"") for n in range(USERS)]
        self.rotate()
        self.side = Side()
        calls = Expansion(self.party, self.party, self.party.directory_key)
        self.neighbourhood = Neighbourhood(calls, self.held, self.upload, self.note)

    async def held(self, least):
        while self.epoch < least:
            await self.newer()
        return self.holding

    def upload(self, user):
        return self.uploads[user]

    async def note(self, kind, user, size):
        self.receipts.append((kind, user, size))

    def rotate(self):
        self.party.run(self.newer())

    async def newer(self):
        self.epoch += 1
        identity, secrets = Identity.generate(), GraphSecrets.generate(self.run, self.epoch)
        record = sign_graph_record(
            identity, secrets, SETTINGS.graph_terms, 1 << 40, [identity.participant_id]
        )
        kept = graph_record_to_wire(record).SerializeToString(deterministic=True)
        await self.party.store.publish_graph(
            self.run, self.epoch, identity.participant_id, record.expiry, kept, {}
        )
        self.holding = GraphHolding(record, secrets)

    def before(self, pass_number, users=range(USERS)):
        plan = SimpleNamespace(pass_number=pass_number, round=pass_number + 1, run_id=self.run)
        self.party.run(self.neighbourhood.before(self.side, plan, {}, CATALOGUE, list(users)))
        return self.neighbourhood.failure


@pytest.fixture
def graph():
    made = Graph()
    yield made
    made.party.close()


def test_users_publish_in_one_pass_and_have_neighbours_in_the_next(graph):
    assert graph.before(0) == ""
    assert all(graph.side.known(user) == set() for user in range(USERS))
    assert graph.before(1) == ""
    for user in range(LONER):
        known = graph.side.known(user)
        assert len(known) == SETTINGS.neighbours
        assert known <= set(map(float, range(LONER))) - {float(user)}
    kinds = [kind for kind, _, _ in graph.receipts]
    # The second publication is due in pass 2, before the second question.
    assert (kinds.count(PUBLISHED), kinds.count(ASKED)) == (USERS, USERS)
    # A user has at most so many tags, of which a later publication has only those that are new: here none.
    published = [
        [size for kind, at, size in graph.receipts if (kind, at) == (PUBLISHED, user)]
        for user in range(LONER)
    ]
    assert all(size > SETTINGS.graph_terms.sealed_bytes for sizes in published for size in sizes)
    assert graph.before(2) == ""
    for user, (first,) in enumerate(published):
        sizes = [size for kind, at, size in graph.receipts if (kind, at) == (PUBLISHED, user)]
        assert sizes[0] == first
        assert all(size <= first - TAG_BYTES for size in sizes[1:])
        assert len(sizes) == 2


def test_a_user_who_shares_nothing_has_no_neighbours_and_is_not_asked_for_again(graph):
    graph.before(0)
    graph.before(1)
    assert graph.side.known(LONER) == set()
    everybody = np.arange(USERS)
    assert graph.side.around.has_any(everybody).tolist() == [1.0] * LONER + [0.0]
    assert graph.side.around.current(2, everybody).all()
    assert graph.side.curious(SimpleNamespace(pass_number=2), [LONER]) == []


def test_neighbours_are_the_same_in_every_run_of_an_experiment_and_others_otherwise():
    found = []
    for run, seeds in (("one", True), ("another", True), ("third", False), ("fourth", False)):
        graph = Graph(run, seeds)
        graph.before(0)
        graph.before(1)
        found.append([graph.side.around.of(np.arange(LONER))[0].tobytes()])
        graph.party.close()
    assert found[0] == found[1]
    assert found[2] != found[3]


def test_without_the_third_party_users_go_on_and_are_due_again(graph):
    graph.before(0)

    async def nobody(least):
        raise PeerError("the third party does not answer")

    there, graph.neighbourhood._holding = graph.neighbourhood._holding, nobody
    assert graph.before(1) == "the third party does not answer"
    everybody = np.arange(USERS)
    assert not graph.side.around.current(2, everybody).any()
    graph.neighbourhood._holding = there
    # Pass 2 has a publication of its own, and the question of pass 1 is made up for.
    assert graph.before(2) == ""
    assert graph.side.around.current(3, everybody).all()
    assert len(graph.side.known(0)) == SETTINGS.neighbours


def test_what_is_refused_to_one_user_stops_nobody_else(graph):
    graph.before(0)
    ask = graph.neighbourhood._calls.neighbours

    async def picky(upload, holding):
        if upload is graph.uploads[3]:
            raise Refusal(ErrorReason.ERROR_REASON_TOO_LARGE, "65 questions of an upload", field="request")
        return await ask(upload, holding)

    graph.neighbourhood._calls.neighbours = picky
    assert "65 questions" in graph.before(1)
    assert graph.side.known(3) == set()
    assert all(graph.side.known(user) for user in range(LONER) if user != 3)


def test_after_a_rotation_users_publish_under_the_new_key_before_they_ask_again(graph):
    graph.before(0)
    graph.rotate()
    assert graph.before(1) == ""
    assert all(upload.epoch == 2 and upload.sequence == 1 for upload in graph.uploads)
    # Others may publish later in the same pass: nobody asks before the next one, and what was known stays.
    assert all(graph.side.known(user) == set() for user in range(USERS))
    assert graph.before(2) == ""
    assert len(graph.side.known(0)) == SETTINGS.neighbours


def test_the_key_is_replaced_before_the_first_publication_after_so_many_passes(graph):
    graph.side = Side(SETTINGS.model_copy(update={"rotate_every": 4}))
    epochs, known, before = [], [], None
    for pass_number in range(10):
        assert graph.before(pass_number) == ""
        epochs.append(graph.epoch)
        known.append(len(graph.side.known(0)))
        tags = set(graph.uploads[0].tags.values())
        assert before is None or (tags == before) == (epochs[-1] == epochs[-2])
        before = tags
    # Publications are in passes 0, 2, 4 and so on; each finds the newest key, and questions follow a pass later.
    assert epochs == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert known == [0] + [SETTINGS.neighbours] * 9
    assert graph.party.run(graph.party.store.counts(graph.run)).epoch == 3


def test_items_that_a_user_publishes_are_its_own_and_stay_when_it_rates_another():
    own = np.array([9, 2, 5, 7, 1])
    before = published_items(own, 77, ITEMS, 3, seed=1)
    assert set(before.tolist()) <= set(own.tolist())
    assert before.tolist() == sorted(before.tolist())
    after = published_items(np.append(own, 11), 77, ITEMS, 3, seed=1)
    assert len(set(after.tolist()) - set(before.tolist())) <= 1
    assert published_items(own[:2], 77, ITEMS, 3, seed=1).tolist() == [2, 9]
    drawn = {tuple(published_items(own, key, ITEMS, 3, seed=1).tolist()) for key in range(40)}
    assert len(drawn) > 5


def test_terms_that_make_answers_too_long_are_refused():
    with pytest.raises(ValueError, match="fewer neighbours"):
        FedGnnSettings(neighbours=512, factors=256, tags=1024)
    assert FedGnnSettings(neighbours=3).graph_terms == GraphTerms(16, 32, 20, 3)


def test_calls_work_beside_an_event_loop_of_the_caller(graph):
    async def inside():
        await asyncio.sleep(0)
        return graph.before(0)

    assert asyncio.run(inside()) == ""


def test_receipts_say_how_both_requests_are_protected():
    assert "embedding also to hosts of neighbours" in PROTECTIONS[PUBLISHED]
    assert "sealed to the third party" in PROTECTIONS[ASKED]
