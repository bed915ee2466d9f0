"""DRIFT's published form with unseen items over real processes, on data in which nobody dislikes anything."""

import signal

from coterie.wire.v1.client_pb2 import UserRecommendRequest
from coterie.wire.v1.client_pb2_grpc import UserAgentStub


async def test_the_published_form_learns_from_likes_alone_and_recommends_what_is_new(federation, small):
    settings = small(
        data={"positive_from": 0.5},
        drift={"unseen": "own", "item_bias": True, "dim": 8, "rate": 0.05, "epochs": 40},
    )
    async with federation(settings) as running:
        assert running.feed.positive.all()
        await running.start()
        # Training does not wait for what hosts measure: an owner is held until a model of the beginning is measured.
        owner, _ = running.parties("data-owner")
        await running.phase("epoch", 2)
        running.signal(owner, signal.SIGSTOP)
        await running.until(lambda event: event.HasField("metrics"), "a model of the beginning is measured")
        running.signal(owner, signal.SIGCONT)
        await running.ended()
        names = running.stores.user_names()
        places = running.stores.users()
        name = next(name for name, who in names.items() if places[who][0] == "client/host-0")
        channel = running.channel("client/host-0")
        best = await channel.stub(UserAgentStub).Recommend(UserRecommendRequest(user=name, k=5))
        await channel.close()
        report = await running.finish()
    assert running.ended_well()
    assert report["phase"] == "done", report["reason"]
    assert len(set(best.items)) == 5
    losses = [one["metrics"]["train_loss"] for one in report["history"]]
    assert losses[-1] < losses[0]
    assert 0 <= report["history"][-1]["metrics"]["ndcg@10"] <= 1
