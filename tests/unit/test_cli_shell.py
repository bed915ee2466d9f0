"""The shell of the command line: envelopes, errors, exit statuses, and what needs no federation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coterie import data
from coterie.cli import main, output, serve
from coterie.cli.main import app, invoke
from coterie.errors import ConfigError, CoterieError, PreflightError, RunError

SERVICE = """
name = "cos"
state = "state"
listen = "127.0.0.1:7001"
thirdparty = {address = "127.0.0.1:7002", name = "directory"}
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COTERIE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def fail_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make ``coterie version`` end with an exception."""

    def arrange(error: BaseException) -> None:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("coterie.cli.version.Output", raise_it)

    return arrange


def envelope(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the only thing on standard output: one line, one object."""
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


# Results


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("serve", "config", "data", "version"):
        assert command in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        "serve",
        "version",
        "config show",
        "config reference",
        "data describe",
        "data split",
        "data generate",
        "data fetch",
    ],
)
def test_every_command_has_help(words: str) -> None:
    result = CliRunner().invoke(app, [*words.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_a_result_is_one_envelope_and_the_prose_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["version", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["ok"], found["command"]) == (True, "version")
    assert found["result"].keys() == {
        "version",
        "protocol",
        "python",
        "grpc",
        "protobuf",
        "numpy",
        "kernels",
        "left_out",
        "platform",
    }
    assert found["result"]["version"] in printed.err


def test_without_json_the_prose_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["version"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("coterie ")
    assert printed.err == ""


def test_brackets_in_prose_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    output.Output("any").say("a [bold]file[/bold].csv")
    assert capsys.readouterr().out == "a [bold]file[/bold].csv\n"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=_JSON)
def test_what_is_json_already_is_left_as_it_is(value: Any) -> None:
    assert output.plain(value) == value


def test_numpy_paths_dataclasses_and_sets_become_json() -> None:
    @dataclasses.dataclass
    class Row:
        path: Path
        values: tuple[int, ...]

    found = output.plain({1: Row(Path("a/b"), (1, 2)), "n": np.float32(0.5), "a": np.arange(2), "s": {2, 1}})
    assert found == {"1": {"path": "a/b", "values": [1, 2]}, "n": 0.5, "a": [0, 1], "s": [1, 2]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan"), np.array([-np.inf])])
def test_a_number_that_json_lacks_becomes_null(value: Any) -> None:
    assert output.plain([value]) in ([None], [[None]])


def test_a_value_without_a_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        output.plain({"a": object()})


def commands(group: Any = None, words: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every command, and every group of them, with the words that call it."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        called = f"{words} {name}".strip()
        yield called, command
        if hasattr(command, "commands"):
            yield from commands(command, called)


LEAVES = [words for words, command in commands() if not hasattr(command, "commands")]


@pytest.mark.parametrize("words", ["", *(words for words, _ in commands())])
def test_help_fits_in_80_columns_and_cuts_no_summary(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = CliRunner().invoke(app, [*words.split(), "--help"]).stdout
    assert max(map(len, printed.splitlines())) <= 80
    assert "..." not in printed.replace("COTERIE_...", "").replace("[ARGS]...", "")


@pytest.mark.parametrize("words", LEAVES)
def test_help_of_a_command_says_with_which_documented_statuses_it_ends(words: str) -> None:
    printed = " ".join(CliRunner().invoke(app, [*words.split(), "--help"]).stdout.split())
    _, found, said = printed.partition("Exit status: 0 when done, 2 for a wrong command line")
    assert found, printed
    numbers = {int(number) for number in re.findall(r"(?<![\w.-])\d+(?= (?:for|when) )", said)}
    documented = {error.exit_code for error in CoterieError.__subclasses__()} | set(output.Status)
    assert numbers <= documented
    if " {FILE}" in printed or "--config" in printed:
        assert ConfigError.exit_code in numbers


@pytest.mark.parametrize(("columns", "width"), [("", 120), ("72", 72)])
def test_what_is_piped_is_as_wide_as_asked_for(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert output.Output("any").console.width == width


# Errors


@pytest.mark.parametrize("kind", CoterieError.__subclasses__())
def test_an_error_ends_the_command_with_its_status(
    kind: type[CoterieError],
    fail_with: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail_with(kind("it broke", hint="mend it"))
    assert invoke(["version"]) == kind.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "error: it broke\n  hint: mend it\n"


def test_an_error_is_one_envelope_with_json(
    fail_with: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(RunError("it broke"))
    assert invoke(["version", "--json"]) == 60
    assert envelope(capsys) == {
        "ok": False,
        "command": "version",
        "error": {"code": "run", "message": "it broke", "hint": None, "exit_code": 60},
    }


@pytest.mark.parametrize("arguments", [["version"], ["version", "--json"]])
def test_an_interrupt_ends_the_command_with_130(
    arguments: list[str], fail_with: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(KeyboardInterrupt())
    assert invoke(arguments) == 130
    if "--json" in arguments:
        assert envelope(capsys)["error"]["code"] == "interrupted"


def test_an_unforeseen_error_is_70_and_keeps_its_traceback_to_itself(
    fail_with: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(ZeroDivisionError("division by zero"))
    assert invoke(["version"]) == 70
    printed = capsys.readouterr().err
    assert printed.startswith("error: unexpected ZeroDivisionError: division by zero\n")
    assert "COTERIE_DEBUG=1" in printed
    assert "Traceback" not in printed


def test_the_traceback_is_shown_when_debugging_and_leaves_the_envelope_alone(
    fail_with: Callable[[BaseException], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COTERIE_DEBUG", "1")
    fail_with(ZeroDivisionError("division by zero"))
    assert invoke(["version", "--json"]) == 70
    printed = capsys.readouterr()
    assert "Traceback" in printed.err
    assert json.loads(printed.out)["error"]["code"] == "internal"


def test_an_error_from_a_task_group_keeps_its_status() -> None:
    async def fail() -> None:
        raise PreflightError("no port")

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(work())
    assert output.failure_of(caught.value) == output.Failure("preflight", "no port", None, 11)


@pytest.mark.parametrize(
    "arguments",
    [["bogus"], ["version", "--bogus"], ["data", "describe"], ["data", "generate", "x", "--users", "0"]],
)
def test_a_wrong_command_line_is_2_in_prose_and_in_json(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Error" in printed.err

    assert invoke([*arguments, "--json"]) == 2
    assert envelope(capsys)["error"]["code"] == "usage"


def test_the_envelope_of_a_failure_names_the_command_as_far_as_there_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    invoke(["data", "describe", "nowhere", "--json"])
    assert envelope(capsys)["command"] == "data describe"
    invoke(["data", "bogus", "--json"])
    assert envelope(capsys)["command"] == "data"


def test_json_after_a_double_dash_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["data", "describe", "--", "--json"]) == 20
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--json does not exist" in printed.err


# config


def test_config_show_prints_values_with_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[federation]\nhosts = 4\n")
    monkeypatch.setenv("COTERIE_DRIFT__DIM", "8")
    assert invoke(["config", "show", str(file), "--run", "--set", "name=night", "--json"]) == 0
    result = envelope(capsys)["result"]
    assert (result["file"], result["configures"]) == (str(file), "run")
    assert result["values"]["federation.hosts"] == {"value": 4, "origin": "file"}
    assert result["values"]["drift.dim"] == {"value": 8, "origin": "environment"}
    assert result["values"]["name"] == {"value": "night", "origin": "--set"}
    assert result["values"]["drift.theta"]["origin"] == "default"

    assert invoke(["config", "show", str(file)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["federation.hosts", "4", "file"] in rows
    assert ["data.path", "-", "default"] in rows


def test_config_show_of_a_role_takes_paths_from_the_folder_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cos.toml"
    file.write_text(SERVICE)
    assert invoke(["config", "show", str(file), "--role", "cos", "--json"]) == 0
    result = envelope(capsys)["result"]
    assert result["configures"] == "cos"
    assert result["values"]["state"]["value"] == str(tmp_path / "state")


def test_config_show_of_an_operator_shows_what_bootstrap_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "operator.toml"
    cos = '[cos]\naddress = "10.0.0.5:7443"\nname = "cos"\n'
    file.write_text(f'state = "state"\norder = "order.json"\nsigns = "run.key"\noutput = "report"\n{cos}')
    assert invoke(["config", "show", str(file), "--role", "operator", "--json"]) == 0
    values = envelope(capsys)["result"]["values"]
    assert values["order"] == {"value": str(tmp_path / "order.json"), "origin": "file"}
    assert values["name"]["origin"] == "default"


def test_config_show_refuses_a_role_together_with_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["config", "show", "--role", "cos", "--run", "--json"]) == 2
    assert "exclude each other" in envelope(capsys)["error"]["message"]


def test_config_show_of_a_wrong_file_ends_with_10(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["config", "show", str(tmp_path / "none.toml"), "--json"]) == 10
    assert "none.toml" in envelope(capsys)["error"]["message"]


def test_config_reference_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["config", "reference"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Configuration\n")
    assert invoke(["config", "reference", "--json"]) == 0
    assert envelope(capsys)["result"]["markdown"] == page


# data


def generate(folder: Path, *options: str) -> list[str]:
    sizes = ["--users", "20", "--items", "30", "--interactions", "200", "--genres", "3"]
    return ["data", "generate", str(folder), *sizes, *options]


def test_a_generated_data_set_is_read_back_the_same(tmp_path: Path) -> None:
    assert invoke(generate(tmp_path / "set", "--seed", "4")) == 0
    found = data.read(tmp_path / "set")
    made = data.generate(data.SyntheticSpec(users=20, items=30, interactions=200, genres=3, seed=4))

    def rows(dataset: data.Dataset) -> set[tuple[str, str, float, int]]:
        assert dataset.time is not None
        users = [dataset.users[user] for user in dataset.user]
        items = [dataset.items[item] for item in dataset.item]
        return set(zip(users, items, dataset.rating.tolist(), dataset.time.tolist(), strict=True))

    def genres(dataset: data.Dataset) -> dict[str, set[str]]:
        assert dataset.item_genres is not None
        members = zip(dataset.items, dataset.item_genres, strict=True)
        return {item: {dataset.genres[g] for g in np.flatnonzero(row)} for item, row in members}

    assert rows(found) == rows(made)
    of_made = genres(made)
    assert genres(found) == {item: of_made[item] for item in found.items}
    assert found.item_titles is not None


def test_the_same_seed_gives_the_same_files_and_another_gives_others(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert invoke(generate(tmp_path / name, "--seed", seed)) == 0
    first, same, other = ((tmp_path / name / "ratings.csv").read_bytes() for name in "abc")
    assert first == same
    assert first != other


def test_generating_over_files_that_are_there_has_to_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "movies.csv").write_text("mine")
    assert invoke(generate(tmp_path)) == 20
    assert (tmp_path / "movies.csv").read_text() == "mine"
    assert not (tmp_path / "ratings.csv").exists()
    assert "--overwrite" in capsys.readouterr().err
    assert invoke(generate(tmp_path, "--overwrite")) == 0
    assert (tmp_path / "movies.csv").read_text() != "mine"


def test_a_folder_that_cannot_be_written_is_an_error_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert invoke(generate(tmp_path / "file", "--json")) == 20
    assert "cannot write" in envelope(capsys)["error"]["message"]


def test_data_describe_prints_sizes_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.csv"
    file.write_text("who,what\na,x\na,y\nb,x\n")
    arguments = ["data", "describe", str(file), "--column", "user=who", "--column", "item=what"]
    assert invoke([*arguments, "--format", "csv", "--json"]) == 0
    result = envelope(capsys)["result"]
    assert (result["users"], result["items"], result["interactions"]) == (2, 2, 3)
    assert any("no timestamps" in remark for remark in result["missing"])

    assert invoke(arguments) == 0
    prose = capsys.readouterr().out
    assert "sparsity" in prose
    assert "missing: no timestamps" in prose


def test_a_column_without_a_name_on_each_side_is_a_wrong_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert invoke(["data", "describe", "x.csv", "--column", "user", "--json"]) == 2
    assert "OURS=THEIRS" in envelope(capsys)["error"]["message"]


def test_data_fetch_says_where_the_set_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("coterie.data.fetch.fetch", lambda name, target: target / name)
    assert invoke(["data", "fetch", "ml-100k", str(tmp_path), "--json"]) == 0
    assert envelope(capsys)["result"] == {"name": "ml-100k", "path": str(tmp_path / "ml-100k")}


def test_data_fetch_of_an_unknown_set_ends_with_20(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["data", "fetch", "ml-100", "--json"]) == 20
    assert envelope(capsys)["error"]["code"] == "data"


# serve


class _Registered:
    """Stands for the entry points of installed packages."""

    def __init__(self, **loaders: Callable[[], object]) -> None:
        self.loaders = loaders
        self.names = set(loaders)
        self.value = "package.service:SERVICE"

    def __call__(self, *, group: str) -> _Registered:
        assert group == "coterie.services"
        return self

    def select(self, *, name: str) -> list[_Registered]:
        return [_Registered(**{name: self.loaders[name]})] if name in self.loaders else []

    def load(self) -> object:
        (loader,) = self.loaders.values()
        return loader()


def test_serve_gives_the_registered_service_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = pytest.importorskip("coterie.process.runtime")
    (tmp_path / "cos.toml").write_text(SERVICE)
    service = object()
    served: list[tuple[object, Any]] = []
    monkeypatch.setattr("importlib.metadata.entry_points", _Registered(cos=lambda: service))
    monkeypatch.setattr(process, "serve", lambda *given: served.append(given))
    arguments = ["serve", "cos", "--config", str(tmp_path / "cos.toml"), "--set", "max_uploads=3"]
    assert invoke(arguments) == 0
    ((found, settings),) = served
    assert found is service
    assert (settings.max_uploads, settings.state) == (3, tmp_path / "state")


def test_a_service_computes_with_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    invoke(["serve", "cso"])
    assert os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    invoke(["serve", "cso"])
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_serve_refuses_an_unknown_role_and_a_wrong_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["serve", "cso"]) == 10
    assert "did you mean cos?" in capsys.readouterr().err
    assert invoke(["serve", "cos", "--set", "nmae=x"]) == 10
    assert "did you mean name?" in capsys.readouterr().err


def test_a_service_that_no_package_provides_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", _Registered(client=object))
    with pytest.raises(PreflightError, match=r"'cos'; there are: client"):
        serve.find_service("cos")


def test_a_service_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> object:
        raise ImportError("No module named 'missing'")

    monkeypatch.setattr("importlib.metadata.entry_points", _Registered(cos=broken))
    with pytest.raises(PreflightError, match=r"package\.service:SERVICE.*No module named 'missing'"):
        serve.find_service("cos")


# As a process


def command(*arguments: str, folder: Path, module: str = "coterie") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("module", ["coterie", "coterie.cli.main"])
def test_the_process_ends_with_the_status_of_the_error(module: str, tmp_path: Path) -> None:
    ended = command("config", "show", "none.toml", "--json", folder=tmp_path, module=module)
    assert ended.returncode == 10
    assert json.loads(ended.stdout)["error"]["exit_code"] == 10
    assert ended.stderr == ""


def test_the_process_ends_with_0_and_prints_in_any_folder(tmp_path: Path) -> None:
    ended = command("version", folder=tmp_path)
    assert ended.returncode == 0
    assert ended.stdout.startswith("coterie ")


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from coterie.cli.main import invoke\n"
        "assert invoke(['--help']) == 0\n"
        "heavy = {'numpy', 'grpc', 'pydantic', 'polars', 'sqlalchemy', 'cryptography', 'matplotlib'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert ended.stderr.strip() == "[]"


def test_main_ends_the_process_with_what_the_command_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["coterie", "serve", "cso"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 10
