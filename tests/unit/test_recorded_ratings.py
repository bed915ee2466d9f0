"""A rating that a user's application records: within the run's range, and only where the run learns from ratings."""

import math
from pathlib import Path

import pytest
from coterie_client.agent import Agent
from coterie_client.history import Histories
from coterie_client.preferences import Preferences

from coterie.errors import ConfigError
from coterie.store.engine import Writer, open_sqlite
from coterie.systems.fedmvmf.settings import FedMvmfPlan
from coterie.systems.registry import ratings_of
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import client_pb2 as wire


@pytest.fixture
async def histories(tmp_path: Path):
    writer = Writer(engine := open_sqlite(tmp_path / "client.db", "client"))
    one = Histories(engine, writer)
    await one.take(["ann"], [])
    yield one, engine
    writer.close()
    engine.dispose()


async def recorded(histories, allowed, **rating):
    """Record something; return the ratings that are kept then."""
    held, engine = histories

    async def recommend(user, k):
        raise AssertionError("nobody asked")

    agent = Agent(
        held,
        engine,
        recommend,
        lambda item: 0,
        lambda: allowed,
        preferences=Preferences(engine, held._writer),
        system=lambda: "",
    )
    await agent.RecordInteraction(
        wire.RecordInteractionRequest(user="ann", item="a", positive=True, **rating), None
    )
    return [one.rating for one in held._held]


@pytest.mark.parametrize("rating", [1.0, 4.5, 5.0])
async def test_a_rating_within_the_range_of_the_run_is_kept(histories, rating):
    assert await recorded(histories, (1.0, 5.0), rating=rating) == [rating]


@pytest.mark.parametrize("allowed", [None, (1.0, 5.0)])
async def test_an_interaction_without_a_rating_is_kept_whatever_the_run_learns_from(histories, allowed):
    assert await recorded(histories, allowed) == [None]


@pytest.mark.parametrize(
    ("allowed", "rating", "expected"),
    [
        ((1.0, 5.0), 0.5, "1 to 5, or none"),
        ((1.0, 5.0), 5.5, "1 to 5, or none"),
        ((1.0, 5.0), math.nan, "1 to 5, or none"),
        ((1.0, 5.0), math.inf, "1 to 5, or none"),
        (None, 3.0, "none"),
    ],
)
async def test_another_rating_is_refused_and_nothing_is_kept(histories, allowed, rating, expected):
    with pytest.raises(Refusal) as caught:
        await recorded(histories, allowed, rating=rating)
    assert (caught.value.reason, caught.value.field) == (ErrorReason.ERROR_REASON_INVALID_FIELD, "rating")
    assert caught.value.expected == expected
    assert len(histories[0]) == 0


def test_the_range_is_that_of_the_plan_of_systems_that_predict_ratings():
    assert ratings_of("fedmvmf", FedMvmfPlan(lowest=1.0, highest=10.0).to_json()) == (1.0, 10.0)
    assert ratings_of("fedncf", "{}") is None
    assert ratings_of("", "") is None
    with pytest.raises(ConfigError, match="not of FedMvmfPlan"):
        ratings_of("fedmvmf", '{"learning":{}}')
