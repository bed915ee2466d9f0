"""What users set for themselves: read from files, kept by hosts, changed and shown by calls, refused out of range."""

import json
import math

import numpy as np
import pytest
from coterie_client.agent import Agent
from coterie_client.history import Histories
from coterie_client.preferences import Preferences, read_preferences
from typer.testing import CliRunner

from coterie.cli.main import app, invoke
from coterie.config.run import RunSettings
from coterie.data.attributes import AttributeTable
from coterie.errors import DataError
from coterie.launch import local_run
from coterie.store.engine import Writer, open_sqlite
from coterie.studies.run_data import load, make_feed
from coterie.systems.registry import preferences_of
from coterie.systems.shared.host_data import HostData
from coterie.systems.shared.preferences import Preference, objection
from coterie.wire.refusal import ErrorReason, Refusal
from coterie.wire.v1 import client_pb2 as wire

USERS = ["ann", "bob", "cid"]
SHARE = Preference("share", "a share", 0.0, 1.0)


def file_of(folder, text):
    path = folder / "preferences.csv"
    path.write_text(text)
    return path


# --- Files -----------------------------------------------------------------------------------------------------


def test_a_file_says_what_users_have_set_and_nothing_of_the_others(tmp_path):
    path = file_of(tmp_path, "user,pi\ncid,0.3\nann,\n")
    assert read_preferences(path, USERS) == {1: {}, 3: {"pi": 0.3}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user,pi\ndan,0.3\n", "names a user that this host has no history of"),
        ("user,pi\nann,half\n", "line 2.*pi"),
        ("user,pi\nann,0.1\nann,0.2\n", "named twice"),
        ("name,pi\nann,0.1\n", "expected 'user'"),
        ("", "expected 'user'"),
    ],
)
def test_a_malformed_file_is_refused_without_its_values(tmp_path, text, words):
    with pytest.raises(DataError, match=words) as caught:
        read_preferences(file_of(tmp_path, text), USERS)
    assert "half" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"share": -0.01}, "out of range; expected 0 to 1"),
        ({"share": 1.01}, "out of range; expected 0 to 1"),
        ({"share": math.nan}, "out of range"),
        ({"other": 0.5}, "has no preference 'other'; expected share"),
        ({"other": None}, "has no preference 'other'"),
    ],
)
def test_a_system_objects_to_what_it_does_not_have_or_cannot_be(values, words):
    assert words in objection("any", [SHARE], values)
    assert objection("any", [SHARE], {"share": 1.0}) == objection("any", [SHARE], {"share": 0.0}) == ""


FPL = {
    "system": "fpl",
    "data": {"synthetic": {"users": 40, "items": 60, "interactions": 900}},
    "federation": {"hosts": 2},
}


def fed(**options):
    settings = RunSettings.model_validate({**FPL, "fpl": options})
    return make_feed(settings, load(settings), 0)


def test_a_run_gives_each_host_the_preferences_of_its_own_users(tmp_path):
    name = fed().hosted(1).users[2]
    feed = fed(preferences=file_of(tmp_path, f"user,pi\n{name},0.25\n"))
    for host in range(2):
        data = feed.hosted(host)
        own = data.preference("pi")
        assert np.count_nonzero(~np.isnan(own)) == host
        written = feed.write_preferences(host, tmp_path / f"host-{host}" / "preferences.csv")
        assert {
            data.users[user - 1]: one["pi"]
            for user, one in read_preferences(written, data.users).items()
            if one
        } == ({name: 0.25} if host else {})
        assert written.stat().st_mode & 0o777 == 0o600
    assert fed().write_preferences(0, tmp_path / "none.csv") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user,pi\nu1,1.5\n", "out of range; expected 0 to 1"),
        ("user,pi\nu1,-0.5\n", "out of range; expected 0 to 1"),
        ("user,share\nu1,0.5\n", "no preference 'share'; expected pi"),
        ("user\nu1\n", "no column but 'user'; expected pi"),
        ("user,pi\nnobody,0.5\n", "names 1 users that .* does not have, such as 'nobody'"),
    ],
)
def test_a_run_refuses_a_file_that_its_system_or_data_do_not_fit(tmp_path, text, words):
    with pytest.raises(DataError, match=words):
        fed(preferences=file_of(tmp_path, text))


def test_preferences_of_other_numbers_of_users_are_refused():
    none = np.zeros(0, np.int64)
    with pytest.raises(DataError, match="preferences of 1 users for the 2 of this host"):
        HostData(
            ["a", "b"],
            ["x"],
            none,
            none,
            none,
            none,
            preferences=AttributeTable(("pi",), np.zeros((1, 1), np.float32)),
        )


# --- The host --------------------------------------------------------------------------------------------------


class Stand:
    """A host's store with some users, and the servicer that their applications call."""

    def __init__(self, folder, system="fpl"):
        self.folder, self.system = folder, system
        self.engine = open_sqlite(folder / "client.db", "client")
        self.writer = Writer(self.engine)
        self.histories = Histories(self.engine, self.writer)
        self.preferences = Preferences(self.engine, self.writer)

        async def recommend(user, k):
            raise AssertionError("nobody asked")

        self.agent = Agent(
            self.histories,
            self.engine,
            recommend,
            lambda item: 0,
            lambda: None,
            preferences=self.preferences,
            system=lambda: self.system,
        )

    async def change(self, user="ann", **values):
        changes = [wire.PreferenceChange(name=name, value=value) for name, value in values.items()]
        request = wire.SetPreferencesRequest(user=user, changes=changes)
        return shown((await self.agent.SetPreferences(request, None)).preferences)

    async def show(self, user="ann"):
        answer = await self.agent.ShowPreferences(wire.ShowPreferencesRequest(user=user), None)
        return shown(answer.preferences)

    def close(self):
        self.writer.close()
        self.engine.dispose()


def shown(preferences):
    return {one.name: one.value if one.HasField("value") else None for one in preferences}


@pytest.fixture
async def stand(tmp_path):
    one = Stand(tmp_path)
    await one.histories.take(USERS, [])
    yield one
    one.close()


async def test_a_user_sets_its_own_share_and_nobody_elses(stand):
    assert await stand.show() == {"pi": None}
    for share in (0.0, 0.3, 1.0):
        assert await stand.change(pi=share) == {"pi": share}
        assert await stand.show() == {"pi": share}
    assert await stand.show("bob") == {"pi": None}
    table = stand.preferences.table("fpl", 3)
    np.testing.assert_array_equal(table.values[:, 0], [1.0, np.nan, np.nan])


async def test_what_is_taken_out_is_the_plans_again(stand):
    await stand.change(pi=0.3)
    before = stand.preferences.changes
    assert await stand.change(pi=None) == {"pi": None}
    assert stand.preferences.changes > before


async def test_what_a_user_has_set_is_there_after_a_restart(stand, tmp_path):
    await stand.change(pi=0.3)
    await stand.change("cid", pi=0.7)
    await stand.change("cid", pi=None)
    stand.close()
    again = Stand(tmp_path)
    try:
        assert (await again.show(), await again.show("cid")) == ({"pi": 0.3}, {"pi": None})
        assert again.preferences.of(1) == {"pi": 0.3}
    finally:
        again.close()


@pytest.mark.parametrize("share", [-0.001, 1.001, math.nan, math.inf, -math.inf])
async def test_a_share_out_of_range_is_refused_and_nothing_changes(stand, share):
    await stand.change(pi=0.3)
    with pytest.raises(Refusal, match="out of range") as caught:
        await stand.change(pi=share)
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert (caught.value.field, caught.value.expected) == ("changes", "pi from 0 to 1")
    assert await stand.show() == {"pi": 0.3}


async def test_changes_are_taken_all_or_none(stand):
    with pytest.raises(Refusal, match="does not have"):
        await stand.change(pi=0.5, theta=1.0)
    twice = [wire.PreferenceChange(name="pi", value=value) for value in (0.1, 0.2)]
    with pytest.raises(Refusal, match="changed twice"):
        await stand.agent.SetPreferences(wire.SetPreferencesRequest(user="ann", changes=twice), None)
    assert await stand.show() == {"pi": None}


async def test_a_stranger_has_no_preferences(stand):
    for call in (stand.show("dan"), stand.change("dan", pi=0.5)):
        with pytest.raises(Refusal) as caught:
            await call
        assert caught.value.reason == ErrorReason.ERROR_REASON_UNKNOWN_PARTICIPANT


async def test_before_a_host_has_joined_it_takes_out_but_sets_nothing(stand):
    await stand.change(pi=0.3)
    stand.system = ""
    with pytest.raises(Refusal, match="joined no run") as caught:
        await stand.change(pi=0.5)
    assert caught.value.reason == ErrorReason.ERROR_REASON_NOT_READY
    assert await stand.show() == {"pi": 0.3}
    assert await stand.change(pi=None) == {}


async def test_a_system_without_preferences_gets_none(stand):
    stand.system = "fcf"
    assert preferences_of("fcf") == ()
    assert await stand.show() == {}
    with pytest.raises(Refusal) as caught:
        await stand.change(pi=0.5)
    assert caught.value.expected == "none"
    assert stand.preferences.table("fcf", 3) is None


async def test_a_host_objects_to_a_run_that_cannot_do_what_a_user_has_set(stand):
    assert stand.preferences.objection("fcf") == ""
    await stand.change("bob", pi=0.5)
    assert stand.preferences.objection("fpl") == ""
    assert "system 'fcf' has no preference 'pi'" in stand.preferences.objection("fcf")


async def test_a_file_is_taken_into_the_store_with_the_histories(tmp_path):
    stand = Stand(tmp_path)
    try:
        await stand.histories.take(USERS, [], {2: {"pi": 0.25}})
        stand.preferences.load()
        assert await stand.show("bob") == {"pi": 0.25}
    finally:
        stand.close()


# --- The command -----------------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch):
    """The preferences of one user at a host that is not there."""
    held = {}

    async def preferences(run, user, changes):
        assert user == "u1"
        held.update(changes)
        return [wire.Preference(name="pi", value=held.get("pi"), meaning="a share", lowest=0, highest=1)]

    monkeypatch.setattr(local_run, "preferences", preferences)
    monkeypatch.setattr(local_run, "newest_answering", lambda folder: (object(), []))
    monkeypatch.setenv("COLUMNS", "160")


def printed(*more):
    result = CliRunner().invoke(app, ["preferences", "--user", "u1", *more])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("host")
def test_a_person_sets_shows_and_takes_out_a_share():
    assert "none: the plan's" in printed()
    assert "0.3" in printed("--prefer", "pi=0.3")
    (one,) = json.loads(printed("--json"))["result"]["preferences"]
    assert one == {"name": "pi", "value": 0.3, "lowest": 0.0, "highest": 1.0, "meaning": "a share"}
    assert "none: the plan's" in printed("--forget", "pi")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    "words",
    [
        ["--prefer", "pi"],
        ["--prefer", "pi=half"],
        ["--prefer", "pi=nan"],
        ["--prefer", "pi=1", "--forget", "pi"],
    ],
)
def test_a_change_that_is_none_is_refused(words, capsys):
    assert invoke(["preferences", "--user", "u1", *words]) != 0
    assert "no change of a preference" in capsys.readouterr().err
