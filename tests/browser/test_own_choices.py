"""A person pauses, limits and leaves a run that goes on, in a real browser; what it published is deleted."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")

from .looking import CHROMIUM, WAIT_S
from .people import People, coterie

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path"),
    pytest.mark.xdist_group("own choices"),
]
SETTINGS = """
name = "people"
system = "fedgnn"
secure_sum = "masked"
seeds = [0]
reference = false
[rounds]
cohort = 4
group = 4
min_cohort = 3
min_sum = 3
passes = 20000
evaluate_every = 20000
[fedgnn]
factors = 4
local_epochs = 1
neighbours = 4
tags = 8
refresh = 2000
[federation]
hosts = 3
"""


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[People]:
    made = People(tmp_path_factory.mktemp("people"), SETTINGS)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def home(people: People, browser: Any) -> Iterator[Any]:
    """Yield the person's browser on the page while the run goes on; the tests of the module share it."""
    from .looking import Looked

    one = Looked(browser)
    one.page.goto(people.link)
    one.state("open")
    operator = coterie("operate", "--config", str(people.folder / "operator" / "config.toml"), wait=False)
    one.until("receipt", "item tags and embedding")
    yield one
    one.context.close()
    operator.kill()
    operator.wait()


def test_a_person_pauses_goes_on_and_limits_its_rounds(people: People, home: Any) -> None:
    home.until("part-words", "every round that your consent bears")
    home.page.click("#pause")
    home.until("part-words", "You have paused")
    assert people.stance["paused"] is True
    home.until("pause", "Go on")
    home.picture("own-4-paused")
    assert home.violations() == []
    home.page.click("#pause")
    home.until("part-words", "every round that your consent bears")
    assert people.stance["paused"] is False
    home.page.fill("#rounds-per-day", "12")
    home.page.click("#limit")
    home.until("part-words", "12 rounds a day at most")
    assert people.stance["rounds_per_day"] == 12
    home.page.fill("#rounds-per-day", "2.5")
    home.page.click("#limit")
    home.until("part-said", "Expected a whole number")
    home.page.fill("#rounds-per-day", "0")
    home.page.click("#limit")
    home.until("part-said", "No limit of your own")
    for body in ({"paused": 1}, {"rounds_per_day": -1}, {"rounds_per_day": True}, {"left": True}, {"x": 1}):
        status = home.page.evaluate(
            """async (body) => {
                const headers = {'content-type': 'application/json'};
                const answer = await fetch('/own/choose', {method: 'POST', headers, body: JSON.stringify(body)});
                return answer.status;
            }""",
            body,
        )
        assert status == 409
    assert people.stance == {"paused": False, "left": False, "rounds_per_day": 0, "forget": False}


def test_leaving_takes_two_steps_and_says_what_it_does_not_undo(people: People, home: Any) -> None:
    home.page.click("#leave-run")
    home.until("leaving", "Leave for good?")
    assert "takes part in no sum, for good" in home.text("undone")
    assert "nobody can take one device's part out of a sum" in home.text("kept")
    assert str(people.folder / people.host / "state") in home.text("local")
    assert home.violations() == []
    home.picture("own-8-leaving")
    home.page.click("#leave-no")
    home.until("part-said", "Nothing was changed")
    assert people.stance["left"] is False
    # The second step without the first, and with another question's token.
    for token in ("", "x" * 22):
        status = home.page.evaluate(
            """async (token) => {
                const headers = {'content-type': 'application/json'};
                const answer = await fetch('/own/leave', {method: 'POST', headers, body: JSON.stringify({token})});
                return answer.status;
            }""",
            token,
        )
        assert status == 409
    assert people.stance["left"] is False
    home.page.click("#leave-run")
    home.until("leaving", "Leave for good?")
    home.page.click("#leave-yes")
    home.until("part-words", "You have left this run")
    home.until("part-said", "One upload was deleted at the third party")
    assert people.stance["left"] is True
    assert people.stance["forget"] is True
    assert not home.page.is_visible("#part-choices")
    assert home.violations() == []
    home.picture("own-9-left")

    # Of the person's upload the third party keeps the id, so that it stays gone.
    store, ends = people.folder / "thirdparty" / "state" / "expansion.db", time.monotonic() + WAIT_S
    query = "SELECT forgotten, count(*), sum(length(tags)) FROM graph_uploads GROUP BY forgotten ORDER BY forgotten"
    with contextlib.closing(sqlite3.connect(store)) as connection:
        while len(found := connection.execute(query).fetchall()) < 2 and time.monotonic() < ends:
            time.sleep(0.2)
    (kept, others, tags), (gone, own, nothing) = found
    assert (kept, gone, own, nothing) == (0, 1, 1, 0)
    assert others == 3
    assert tags > 0
