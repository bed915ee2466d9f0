"""The loader of configuration."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.config.base import ConfigModel, Peer
from coterie.config.key_paths import dotted, toml_text
from coterie.config.load import ROLES, Loaded, load, load_service
from coterie.config.run import RunSettings
from coterie.config.services import ClientSettings, CosSettings, DataOwnerSettings, settings_model
from coterie.errors import ConfigError
from tests.operators import KEYS

COS = """
name = "cos"
state = "state"
listen = "127.0.0.1:7001"
thirdparty = {address = "127.0.0.1:7002", name = "directory"}
"""

OPERATORS = f"operator_keys = {json.dumps(KEYS)}\n"


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(
    path: Path | None = None, *, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Loaded[RunSettings]:
    return load(RunSettings, path, sets=sets, environ=environ or {})


def refusal(
    path: Path | None = None, *, sets: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        run(path, sets=sets, environ=environ)
    return caught.value.message


# Layers


def test_without_file_variables_and_sets_every_value_is_a_default() -> None:
    loaded = run()
    assert loaded.settings == RunSettings()
    assert set(loaded.origin.values()) == {"default"}


def test_the_environment_wins_over_the_file_and_set_wins_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "[federation]\nowners = 1\nhosts = 1\nmin_users = 1\n")
    environ = {"COTERIE_FEDERATION__HOSTS": "2", "COTERIE_FEDERATION__MIN_USERS": "2"}
    loaded = run(path, environ=environ, sets=["federation.min_users=3"])
    federation = loaded.settings.federation
    assert (federation.owners, federation.hosts, federation.min_users) == (1, 2, 3)
    assert loaded.origin["federation.owners"] == "file"
    assert loaded.origin["federation.hosts"] == "environment"
    assert loaded.origin["federation.min_users"] == "--set"
    assert loaded.origin["federation.transcripts"] == "default"


def test_of_two_sets_of_one_key_the_later_wins() -> None:
    assert run(sets=["drift.dim=4", "drift.dim=8"]).settings.drift.dim == 8


def test_an_inline_table_is_merged_into_the_table_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[data.synthetic]\nusers = 50\nitems = 60\n")
    loaded = run(path, sets=["data.synthetic={items=70}"])
    assert (loaded.settings.data.synthetic.users, loaded.settings.data.synthetic.items) == (50, 70)
    assert loaded.origin["data.synthetic.users"] == "file"
    assert loaded.origin["data.synthetic.items"] == "--set"


def test_values_and_origins_have_the_same_keys_down_to_the_entries_of_tables(tmp_path: Path) -> None:
    path = write(tmp_path, '[data.columns]\nuser = "who"\n')
    loaded = run(path)
    assert loaded.values.keys() == loaded.origin.keys()
    assert loaded.values["data.columns.user"] == "who"
    assert loaded.origin["data.columns.user"] == "file"
    assert loaded.values["data.path"] is None


@given(hosts=st.integers(1, 10**6), layer=st.sampled_from(["environment", "--set"]))
def test_a_number_arrives_the_same_by_every_typed_layer(hosts: int, layer: str) -> None:
    if layer == "--set":
        loaded = run(sets=[f"federation.hosts={hosts}"])
    else:
        loaded = run(environ={"COTERIE_FEDERATION__HOSTS": str(hosts)})
    assert loaded.settings.federation.hosts == hosts
    assert [key for key, source in loaded.origin.items() if source == layer] == ["federation.hosts"]


# Typed values


@pytest.mark.parametrize(
    ("text", "value"),
    [("[1, 2]", (1, 2)), ("[ 7 ]", (7,))],
)
def test_a_typed_array_is_read_as_toml(text: str, value: tuple[int, ...]) -> None:
    assert run(sets=[f"seeds={text}"]).settings.seeds == value
    assert run(environ={"COTERIE_SEEDS": text}).settings.seeds == value


def test_what_is_no_toml_is_taken_as_text() -> None:
    assert run(sets=["name=night-1"]).settings.name == "night-1"


@pytest.mark.parametrize("text", ["2024", "007", "1e5", "true"])
def test_where_text_is_wanted_a_typed_number_stays_the_text_that_was_typed(text: str) -> None:
    assert run(sets=[f"name={text}"]).settings.name == text
    assert run(environ={"COTERIE_DATA__PATH": text}).settings.data.path == Path(text)


def test_a_number_in_a_file_is_not_text(tmp_path: Path) -> None:
    assert "name = 2024 (file): expected name" in refusal(write(tmp_path, "name = 2024\n"))


def test_a_line_break_in_a_value_cannot_set_a_second_key() -> None:
    message = refusal(sets=["federation.hosts=3\nother = 4"])
    assert 'federation.hosts = "3\\nother = 4"' in message


def test_a_key_may_be_quoted_as_in_toml() -> None:
    assert run(sets=['data.columns."a.b"=c']).settings.data.columns == {"a.b": "c"}


@pytest.mark.parametrize("text", ["federation.hosts", "=3", "a b=3", "", "a=1\nb=2"])
def test_a_set_that_is_no_assignment_to_a_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        run(sets=[text])


def test_an_entry_of_an_array_of_tables_is_reached_by_its_number(tmp_path: Path) -> None:
    text = COS.replace('"cos"', '"owner"', 1) + (
        f'cos = {{address = "127.0.0.1:7001", name = "cos"}}\n{OPERATORS}'
        '[[owners]]\nname = "a"\nitems = "a.csv"\n[[owners]]\nname = "b"\nitems = "b.csv"\n'
    )
    environ = {"COTERIE_OWNERS__1__NAME": "second"}
    loaded = load(DataOwnerSettings, write(tmp_path, text), environ=environ, sets=["owners.0.items=c.csv"])
    assert [owner.name for owner in loaded.settings.owners] == ["a", "second"]
    assert loaded.settings.owners[0].items == Path("c.csv")
    assert loaded.origin["owners.1.name"] == "environment"
    assert loaded.origin["owners.0.items"] == "--set"
    assert loaded.origin["owners.1.items"] == "file"

    with pytest.raises(ConfigError, match=r"owners\.2.*not a table"):
        load(DataOwnerSettings, tmp_path / "run.toml", environ={}, sets=["owners.2.name=c"])


def test_a_key_below_a_value_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "a"\n')
    assert "name.x (--set): name is not a table" in refusal(path, sets=["name.x=1"])


# The environment


def test_variables_that_are_no_configuration_are_left_alone() -> None:
    environ = {"COTERIE_DEBUG": "1", "COTERIE_DOCKER": "yes", "COTERIE_HOME": "here", "PATH": "/bin"}
    assert run(environ=environ).settings == RunSettings()


def test_a_variable_that_names_a_table_counts_only_with_an_inline_table() -> None:
    assert run(environ={"COTERIE_DATA": "folder/of/sets"}).settings == RunSettings()
    assert run(environ={"COTERIE_DATA": "{layout = 'csv'}"}).settings.data.layout == "csv"


def test_an_empty_variable_counts_as_unset() -> None:
    assert run(environ={"COTERIE_NAME": ""}).settings.name == "run"


def test_a_misspelt_variable_is_refused_with_the_right_name() -> None:
    message = refusal(environ={"COTERIE_FEDERATON__HOSTS": "3"})
    assert "COTERIE_FEDERATON__HOSTS: no such key; did you mean COTERIE_FEDERATION__HOSTS?" in message
    assert "did you mean COTERIE_SEEDS?" in refusal(environ={"COTERIE_SEED": "3"})


def test_a_misspelt_part_inside_a_table_is_refused_and_names_the_variable() -> None:
    message = refusal(environ={"COTERIE_FEDERATION__HOST": "3"})
    assert "federation.host = 3 (COTERIE_FEDERATION__HOST)" in message
    assert "did you mean federation.hosts?" in message


def test_a_service_ignores_variables_that_are_meant_for_a_run_or_for_another_service(tmp_path: Path) -> None:
    text = (
        COS.replace('"cos"', '"host"', 1) + f'cos = {{address = "127.0.0.1:7001", name = "cos"}}\n{OPERATORS}'
    )
    environ = {"COTERIE_SEEDS": "[1]", "COTERIE_ENROL_LISTEN": "0.0.0.0:1", "COTERIE_FEDERATION__HOSTS": "9"}
    assert load(ClientSettings, write(tmp_path, text), environ=environ).settings.seed is None


def test_a_variable_with_an_empty_part_is_refused() -> None:
    assert "a part of the name is empty" in refusal(environ={"COTERIE_FEDERATION__": "3"})


def test_another_prefix_may_be_asked_for() -> None:
    loaded = load(RunSettings, None, environ={"OTHER_NAME": "x", "COTERIE_NAME": "y"}, prefix="OTHER_")
    assert loaded.settings.name == "x"


def test_the_environment_of_the_process_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COTERIE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COTERIE_DRIFT__DIM", "5")
    assert load(RunSettings, None).settings.drift.dim == 5


# What is wrong


def test_malformed_toml_is_shown_with_line_and_column(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "a"\n[drift]\ndim = = 3\n')
    first, line, pointer = refusal(path).splitlines()
    assert first.startswith(f"{path}, line 3, column 7: ")
    assert line.endswith("| dim = = 3")
    assert line[pointer.index("^")] == "="
    assert pointer.index("^") == line.index("= 3")


def test_malformed_toml_at_the_end_of_the_document_has_a_place_too(tmp_path: Path) -> None:
    assert "line 2, column 8" in refusal(write(tmp_path, 'name = "a"\nseeds ='))


@given(text=st.text(max_size=40))
def test_whatever_a_file_holds_it_is_loaded_or_refused_by_name(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text, encoding="utf-8", newline="")
    try:
        message = f"{path} is fine: {run(path).settings}"
    except ConfigError as error:
        message = error.message
    assert str(path) in message


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'# fine\nname = "\xe9"\n')
    assert "line 2: not UTF-8" in refusal(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "there is no configuration file" in refusal(tmp_path / "none.toml")
    assert "cannot read the configuration" in refusal(tmp_path)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path, "theta = 2\nseeds = []\n[federation]\nhosts = 0\nchurn = {owners = 1, join_at = 0.9}\n"
    )
    message = refusal(path, sets=["drift.dmi=3"], environ={"COTERIE_SPLIT__KIND": "alphabetic"})
    assert "6 things to put right" in message
    for expected in (
        "theta = 2 (file): no such key; did you mean drift.theta?",
        "seeds = [] (file): expected array of integers, at least 1 long",
        "federation.hosts = 0 (file): expected integer, at least 1",
        "federation.churn (file): join_at 0.9 must be below leave_at 0.6",
        "drift.dmi = 3 (--set): no such key; did you mean drift.dim?",
        'split.kind = "alphabetic" (COTERIE_SPLIT__KIND): expected one of "temporal", "random"',
    ):
        assert f"  - {expected}" in message


def test_what_does_not_fit_together_names_every_place_that_it_was_given_in(tmp_path: Path) -> None:
    path = write(tmp_path, "[rounds]\ncohort = 30\nmin_sum = 20\n")
    sets = ["rounds.cohort=10", "rounds.min_cohort=20"]
    assert "rounds (file, --set): cohort 10 is below min_cohort 20" in refusal(path, sets=sets)
    variable = {"COTERIE_ROUNDS__COHORT": "10"}
    assert "rounds (COTERIE_ROUNDS__COHORT): cohort 10 is below" in refusal(environ=variable)


def test_keys_of_the_whole_run_that_do_not_go_together_are_named_without_a_place(tmp_path: Path) -> None:
    path = write(tmp_path, "system = 'drift'\n")
    message = refusal(path, sets=["secure_sum=encrypted"])
    assert message.startswith(f"configuration {path}: secure_sum 'encrypted' with system 'drift': ")


def test_a_single_problem_stands_on_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, "seeds = [1, 'x']\n")
    assert refusal(path) == f'configuration {path}: seeds.1 = "x" (file): expected integer'


def test_a_key_that_is_like_no_other_is_answered_with_the_keys_there_are() -> None:
    assert "the keys here are kind, fold, path, sha256, train, validation" in refusal(sets=["split.zzz=1"])


def test_missing_keys_say_what_is_expected() -> None:
    with pytest.raises(ConfigError) as caught:
        load(CosSettings, None, environ={}, sets=["thirdparty.name=directory"])
    assert "  - listen: missing; expected host:port" in caught.value.message
    assert "  - thirdparty.address: missing; expected host:port" in caught.value.message


def test_wrong_entries_do_not_make_an_array_too_short() -> None:
    with pytest.raises(ConfigError) as caught:
        load(DataOwnerSettings, None, environ={"COTERIE_OWNERS": "[{name = 'a', items = 3}]"})
    assert "owners.0.items = 3 (COTERIE_OWNERS): expected path" in caught.value.message
    assert "owners:" not in caught.value.message


def test_a_digest_that_is_none_says_what_one_is() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            RunSettings,
            None,
            sets=["split.kind=file", "split.path=split.csv", "split.sha256=ABC"],
            environ={},
        )
    assert "expected 64 lower-case hexadecimal digits, or empty" in caught.value.message


def test_a_long_value_is_shortened_in_the_complaint() -> None:
    (line,) = refusal(sets=[f"drift.dim={'x' * 500}"]).splitlines()
    assert len(line) < 150
    assert "…" in line


# Paths


def test_relative_paths_of_the_file_start_from_the_given_folder_and_others_stay(tmp_path: Path) -> None:
    text = COS + '[enrol]\naddress = "h:1"\nca_file = "ca.pem"\ntoken_file = "/absolute/token"\n'
    loaded = load_service("cos", write(tmp_path, text), environ={})
    enrol = loaded.settings.enrol
    assert loaded.settings.state == tmp_path / "state"
    assert loaded.values["state"] == tmp_path / "state"
    assert enrol is not None
    assert (enrol.ca_file, enrol.token_file) == (tmp_path / "ca.pem", Path("/absolute/token"))

    typed = load_service("cos", tmp_path / "run.toml", environ={"COTERIE_STATE": "here"})
    assert typed.settings.state == Path("here")


def test_relative_paths_in_arrays_of_tables_start_from_the_given_folder(tmp_path: Path) -> None:
    text = (
        COS + f'cos = {{address = "h:1", name = "cos"}}\n{OPERATORS}[[owners]]\nname = "a"\nitems = "a.csv"\n'
    )
    loaded = load(DataOwnerSettings, write(tmp_path, text), environ={}, relative_to=Path("base"))
    assert loaded.settings.owners[0].items == Path("base/a.csv")


def test_paths_of_a_run_stay_relative_to_the_current_directory(tmp_path: Path) -> None:
    settings = run(write(tmp_path, 'output = "out"\n[data]\npath = "ratings.csv"\n')).settings
    assert (settings.output, settings.data.path) == (Path("out"), Path("ratings.csv"))


def test_a_default_path_does_not_move_to_the_folder_of_the_file(tmp_path: Path) -> None:
    loaded = load(RunSettings, write(tmp_path, ""), environ={}, relative_to=tmp_path)
    assert loaded.settings.output == Path("runs")


# Roles and other models


def test_an_unknown_role_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'data_owner' is no role") as caught:
        load_service("data_owner", None, environ={})
    assert caught.value.hint == "did you mean data-owner?"


@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_be_loaded_without_a_file_only_to_hear_what_is_missing(role: str) -> None:
    with pytest.raises(ConfigError, match="state: missing; expected path"):
        load_service(role, None, environ={})
    assert settings_model(role).model_fields["state"].is_required()


def test_any_model_can_be_loaded() -> None:
    class Inner(ConfigModel):
        rate: float = 0.5

    class Outer(ConfigModel):
        inner: Inner = Inner()

    loaded = load(Outer, None, environ={"COTERIE_INNER__RATE": "1"}, sets=[])
    assert loaded.settings == Outer(inner=Inner(rate=1.0))


# TOML text

_SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(allow_nan=False)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@given(value=_VALUES)
def test_toml_text_is_read_back_as_the_same_value(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_text(value)}") == {"value": value}


@given(path=st.lists(st.text(), min_size=1, max_size=4))
def test_a_dotted_path_is_read_back_as_the_same_path(path: list[str]) -> None:
    place: Any = tomllib.loads(f"{dotted(path)} = 1")
    for part in path:
        place = place[part]
    assert place == 1


# --- Addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:0",
        "[::1]:0",
        "[::]:7443",
        "[2001:db8::1]:7443",
        "[fe80::1%eth0]:1",
        "cos:65535",
        "a.b-c_d:7443",
    ],
)
def test_addresses_of_both_kinds_and_names_are_taken(address: str) -> None:
    assert Peer(address=address, name="cos").address == address


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("2001:db8::1:7443", "an IPv6 host stands in brackets, expected [2001:db8::1]:7443"),
        ("[::1:7443", "an IPv6 host stands in brackets, expected [::1]:7443"),
        ("[::g]:7443", "[::g] is no address"),
        ("10.0.0.256:7443", "10.0.0.256 is no address"),
        ("10.0.0.1:70000", "the port 70000, expected at most 65535"),
        ("https://cos:7443", "https://cos is no host"),
        ("user@cos:7443", "user@cos is no host"),
        ("a cos:7443", "a cos is no host"),
        ("10.0.0.1", "expected host:port"),
        (":7443", "expected host:port"),
        ("cos:", "expected host:port"),
        ("cos:http", "expected host:port"),
    ],
)
def test_a_bad_address_says_what_is_wrong_with_it(address: str, said: str) -> None:
    peer = f'thirdparty={{address="{address}", name="directory"}}'
    with pytest.raises(ConfigError) as caught:
        load_service("cos", None, sets=["name=cos", "state=s", "listen=cos:1", peer], environ={})
    assert said in caught.value.message
    assert "thirdparty.address" in caught.value.message


def test_a_standby_without_a_database_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, f"standby = true\n{COS}", "cos.toml")
    with pytest.raises(ConfigError, match=r"standby needs a \[database\]"):
        load_service("cos", path, environ={})
    url = "postgresql+psycopg://coterie@db.example.org/coterie"
    path = write(tmp_path, f'standby = true\n{COS}\n[database]\nurl = "{url}"\n', "cos.toml")
    settings = load_service("cos", path, environ={}).settings
    assert isinstance(settings, CosSettings)
    assert settings.standby
