"""Wakes of a device that has no process in between: when it wakes, how long it stays, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from coterie_client.choice import Choice, Forgetting

from coterie.cli.main import invoke
from coterie.config.services import ClientSettings
from coterie.errors import PeerError
from coterie.process import runtime
from coterie.process.next_wake import NEXT_WAKE, NextWake, content_hash, read_next_wake, write_next_wake
from coterie.process.wake import InVainError, Wake
from coterie.rounds.stance import STANCE, changed_stance

NOW = 1_800_000_000.0

# --- when it wakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("next_wake", "waits"),
    [
        (NextWake("run", NOW + 1, NOW - 1), True),
        (NextWake("run", NOW, NOW - 1), False),
        (NextWake("another", NOW + 1, NOW - 1), False),
        # The clock was set back.
        (NextWake("run", NOW + 3600, NOW + 3000), False),
        (NextWake("run", NOW - 1, NOW - 2, "the run has ended"), True),
    ],
    ids=["before", "due", "another run", "clock set back", "over"],
)
def test_a_device_waits_until_it_is_due_in_its_run(next_wake: NextWake, waits: bool) -> None:
    assert next_wake.waits("run", NOW) is waits


def test_what_is_kept_is_read_again_by_nobody_else(tmp_path: Path) -> None:
    decided = NextWake("run", NOW, NOW - 60)
    write_next_wake(tmp_path, decided)
    assert read_next_wake(tmp_path) == decided
    assert (tmp_path / NEXT_WAKE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"run": "run", "at": "noon", "written": 1}'])
def test_a_device_wakes_where_its_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NEXT_WAKE).write_bytes(content)
    assert read_next_wake(tmp_path) is None


# --- how it ends ---------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only when a wake is woken to look at them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_wake_ends_when_the_server_says_when_to_come_back_and_what_is_last_is_done() -> None:
    wake, done = Wake(60.0), list[str]()

    async def last() -> None:
        done.append("stored")

    wake.before_end(last)
    resting = asyncio.create_task(wake.rest(30.0))
    await wake.until_over()
    assert (wake.come_back_s, wake.ended, wake.failure, done) == (30.0, "", None, ["stored"])
    # The process ends here: it goes on with nothing.
    assert not resting.done()
    resting.cancel()


async def test_a_wake_of_a_run_that_is_over_ends_for_good() -> None:
    wake = Wake(60.0)
    wake.run_over("done")
    await wake.until_over()
    assert (wake.come_back_s, wake.ended) == (None, "done")


@pytest.mark.parametrize(("answers", "error"), [(0, PeerError), (1, InVainError)])
async def test_a_device_that_is_asked_for_nothing_ends_with_a_status_of_its_own(
    answers: int, error: type[Exception]
) -> None:
    clock = Clock()
    wake = Wake(60.0, clock=clock)
    clock.now = 59.0
    for _ in range(answers):
        wake.heard(asked=False)
    clock.now = 60.0
    with pytest.raises(error) as raised:
        await wake.until_over()
    assert raised.type is error
    assert InVainError.exit_code == 61


async def test_a_device_stays_for_a_sum_that_it_joined_for_as_long_as_the_server_answers() -> None:
    clock = Clock()
    wake = Wake(60.0, clock=clock)
    wake.heard(asked=True)
    for clock.now in (59.0, 118.0, 177.0):
        wake.heard(asked=False)
    waiting = asyncio.create_task(wake.until_over())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    clock.now = 237.0
    with pytest.raises(PeerError, match="was away for 60 s"):
        await wake.until_over()


async def test_a_wake_that_does_not_finish_what_comes_last_is_no_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coterie.process.wake._SETTLE_S", 0.01)
    wake = Wake(60.0)

    async def never_done() -> None:
        await asyncio.Event().wait()

    wake.before_end(never_done)
    wake.run_over("done")
    with pytest.raises(PeerError, match="not finished within"):
        await wake.until_over()


async def test_a_wish_that_could_not_be_fulfilled_keeps_the_last_wake_from_being_the_last(
    tmp_path: Path,
) -> None:
    changed_stance(tmp_path, left=True, forget=True)

    async def forget() -> int:
        raise PeerError("the third party is away")

    forgetting = Forgetting(Choice(tmp_path), forget)
    looking = asyncio.create_task(forgetting.run())
    wake = Wake(60.0)
    wake.before_end(forgetting.looked)
    wake.run_over("done")
    with pytest.raises(PeerError, match="the third party is away"):
        await wake.until_over()
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking


async def test_a_device_outside_its_consent_looks_again_in_a_day() -> None:
    wake = Wake(60.0)
    wake.stay_out(["the sum is in clear"])
    await wake.until_over()
    assert wake.come_back_s == 86_400
    assert isinstance(wake.failure, InVainError)
    assert "the sum is in clear" in wake.failure.message


# --- the command ---------------------------------------------------------------------------------------------------


def _configured(folder: Path, run: str = "run") -> Path:
    config = folder / "client.toml"
    config.write_text(
        f'name = "device"\nlisten = "127.0.0.1:1"\nrun = "{run}"\nstate = "{folder}/state"\n'
        f'thirdparty = {{ address = "127.0.0.1:1", name = "directory" }}\n'
        f'cos = {{ address = "127.0.0.1:1", name = "cos" }}\n'
        f'operator_keys = ["{"0" * 64}"]\n'
        f'[enrol]\naddress = "127.0.0.1:1"\nca_file = "{folder}/ca.pem"\ntoken_file = "{folder}/token"\n'
    )
    (folder / "state").mkdir()
    return config


def _seen(folder: Path) -> str:
    return f"{content_hash(folder / 'client.toml')} {content_hash(folder / 'state' / STANCE)}"


def test_a_device_that_is_not_due_ends_at_once_without_what_a_wake_needs(tmp_path: Path) -> None:
    config = _configured(tmp_path)
    write_next_wake(tmp_path / "state", NextWake("run", 4e9, 1.0, seen=_seen(tmp_path)))
    script = (
        "import sys; from coterie.cli.main import invoke; status = invoke(sys.argv[1:]);"
        "print([name for name in ('grpc', 'sqlalchemy', 'numpy') if name in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "client", "--once", "-c", config],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("COTERIE_")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "next wake: 2096-10-02T07:06:40+00:00\n[]\n"


def test_a_device_of_a_run_that_is_over_wakes_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _configured(tmp_path)
    write_next_wake(tmp_path / "state", NextWake("run", 1.0, 1.0, "done", _seen(tmp_path)))
    assert invoke(["serve", "client", "--once", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "no wake is needed any more: done\n"


@pytest.mark.parametrize("changed", ["configuration", "stance"])
@pytest.mark.parametrize("over", ["", "done"], ids=["goes on", "over"])
def test_what_the_person_changed_while_the_device_was_awake_is_seen_by_the_next_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, over: str
) -> None:
    config = _configured(tmp_path)
    awake: list[str] = []

    def serve(service: object, settings: ClientSettings, wake: Wake) -> None:
        awake.append(wake.seen)
        if len(awake) == 1:
            # The process has read both by now, and does not again.
            file = config if changed == "configuration" else settings.state / STANCE
            file.write_text(f"{config.read_text()}# changed\n" if file == config else "{}")
        write_next_wake(settings.state, NextWake(settings.run, 4e9, 1.0, over, wake.seen))
        # However the clock of the file system stands.
        os.utime(settings.state / NEXT_WAKE, (5e9, 5e9))

    monkeypatch.setattr(runtime, "serve", serve)
    for _ in range(3):
        assert invoke(["serve", "client", "--once", "--config", str(config)]) == 0
    assert len(awake) == 2


def test_only_a_device_of_a_person_wakes_on_a_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["serve", "cos", "--once"]) == 10
    assert "expected client" in capsys.readouterr().err


def test_the_file_names_nothing_but_the_run_times_and_hashes(tmp_path: Path) -> None:
    write_next_wake(tmp_path, NextWake("run", NOW, NOW - 60))
    assert set(json.loads((tmp_path / NEXT_WAKE).read_bytes())) == {"run", "at", "written", "over", "seen"}
