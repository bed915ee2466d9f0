"""A page's server: who may open it, which sites and names are refused, what a browser that was away receives."""

import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie.config.page import PageSettings
from coterie.errors import ConfigError, PreflightError, RunError
from coterie.web.board import Board
from coterie.web.passwords import PasswordFile, password_line
from coterie.web.run_actions import RunActions
from coterie.web.server import PageServer
from coterie.web.sessions import EntryError, PageSessions


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def server(board: Board, clock: Clock) -> Iterator[PageServer]:
    sessions = PageSessions(link_s=60, session_s=600, clock=clock)
    with PageServer(board, page="live", sessions=sessions) as started:
        yield started


def asked(
    server: PageServer,
    path: str,
    method: str = "GET",
    body: Any = None,
    tls: ssl.SSLContext | None = None,
    **headers: str | None,
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and text of an answer; header names with _ for -, None leaves a usual one out."""
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    connection = kind("127.0.0.1", server.port, timeout=10, **({"context": tls} if tls else {}))
    given: dict[str, str | None] = {"host": f"127.0.0.1:{server.port}"}
    if method != "GET":
        given |= {"origin": f"{server.scheme}://127.0.0.1:{server.port}", "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value)
    text = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.putheader("content-length", str(len(text)))
    connection.endheaders(text)
    answer = connection.getresponse()
    found = (
        answer.status,
        {name.lower(): value for name, value in answer.getheaders()},
        answer.read().decode(),
    )
    connection.close()
    return found


def entered(server: PageServer) -> str:
    """Open a session by a link and return the cookie."""
    secret = server.link().partition("#")[2]
    status, headers, _ = asked(server, "/session", "POST", {"link": secret})
    assert status == 200
    return headers["set-cookie"].partition(";")[0]


class Stream:
    """One browser's stream of events."""

    def __init__(self, server: PageServer, cookie: str, mark: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        headers = {"cookie": cookie, **({"last-event-id": mark} if mark else {})}
        self._connection.request("GET", "/events", headers=headers)
        self.answer = self._connection.getresponse()

    def event(self) -> dict[str, str]:
        """Return the fields of the next event that has data."""
        found: dict[str, str] = {}
        while line := self.answer.readline().decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if name:
                found[name] = value
            elif "data" in found:
                return found
            else:
                found = {}
        raise EOFError

    def close(self) -> None:
        self._connection.close()


def test_a_link_opens_a_session_once_and_no_other_word_does(server: PageServer, clock: Clock) -> None:
    secret = server.link().partition("#")[2]
    assert len(secret) >= 43
    assert asked(server, "/session", "POST", {"link": "x" * 43})[0] == 403
    status, headers, _ = asked(server, "/session", "POST", {"link": secret})
    assert status == 200
    flags = {part.strip().lower() for part in headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags
    again = asked(server, "/session", "POST", {"link": secret})
    assert again[0] == 403
    assert "used already" in again[2]
    late = server.link().partition("#")[2]
    clock.now += 61
    expired = asked(server, "/session", "POST", {"link": late})
    assert expired[0] == 403
    assert "expired" in expired[2]


def test_an_attempt_whose_answer_was_lost_uses_its_link_again_and_no_other_does(
    server: PageServer, clock: Clock
) -> None:
    def tried(secret: str, **more: object) -> str:
        status, headers, _ = asked(server, "/session", "POST", {"link": secret, **more})
        assert status in (200, 403)
        return str(headers.get("set-cookie", "")).partition(";")[0]

    def inside(cookie: str) -> bool:
        return bool(json.loads(asked(server, "/session", cookie=cookie)[2])["inside"])

    secret = server.link().partition("#")[2]
    first = tried(secret, attempt="of this page")
    assert inside(first)
    assert not tried(secret, attempt="of another")
    assert not tried(secret)
    second = tried(secret, attempt="of this page")
    assert inside(second)
    assert not inside(first), "the session of the lost answer ends"
    clock.now += 31
    assert not tried(secret, attempt="of this page")
    assert inside(second)

    plain = server.link().partition("#")[2]
    assert inside(tried(plain))
    assert not tried(plain), "without an attempt there is none to repeat"


def test_a_session_ends_when_it_is_silent_for_long_or_left(server: PageServer, clock: Clock) -> None:
    cookie = entered(server)
    assert asked(server, "/links", "POST", {}, cookie=cookie)[0] == 200
    clock.now += 599
    assert asked(server, "/links", "POST", {}, cookie=cookie)[0] == 200
    clock.now += 601
    assert asked(server, "/links", "POST", {}, cookie=cookie)[0] == 401
    second = entered(server)
    assert asked(server, "/session", "DELETE", cookie=second)[0] == 200
    assert asked(server, "/events", cookie=second)[0] == 401


@pytest.mark.parametrize("cookie", [None, "", "coterie=", "coterie-1=x", "a;b=,\x7f"])
def test_without_a_session_there_is_the_empty_page_only(server: PageServer, cookie: str | None) -> None:
    assert asked(server, "/", cookie=cookie)[0] == 200
    for path, method in (
        ("/events", "GET"),
        ("/links", "POST"),
        ("/nothing", "GET"),
        ("/assets/../server.py", "GET"),
    ):
        assert asked(server, path, method, cookie=cookie)[0] in (401, 404), path


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", None]
)
def test_a_request_by_another_name_is_refused(server: PageServer, name: str | None) -> None:
    # DNS rebinding: the browser takes another site's name for this machine, and sends that name as Host.
    cookie = entered(server)
    for path in ("/", "/session", "/events", "/assets/live/index.html"):
        host = name and name.format(port=server.port)
        status, headers, _ = asked(server, path, cookie=cookie, host=host)
        assert status in (400, 421), path
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": None},
        {"origin": None, "sec_fetch_site": "cross-site"},
        {"origin": None, "sec_fetch_site": "same-site"},
        {"origin": None, "sec_fetch_site": "none"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_a_change_that_another_site_asks_for_is_refused(
    server: PageServer, headers: dict[str, str | None]
) -> None:
    cookie = entered(server)
    for path, method in (("/links", "POST"), ("/session", "POST"), ("/session", "DELETE")):
        assert asked(server, path, method, {}, cookie=cookie, **headers)[0] == 403
    # The same without the other site's mark is served.
    assert asked(server, "/links", "POST", {}, cookie=cookie)[0] == 200


def test_another_site_reads_no_events_and_loads_no_files_but_may_link_to_the_page(server: PageServer) -> None:
    cookie = entered(server)
    for site in ("cross-site", "same-site"):
        for path in ("/events", "/session", "/assets/live/index.html"):
            assert asked(server, path, cookie=cookie, sec_fetch_site=site, sec_fetch_mode="no-cors")[0] == 403
        assert asked(server, "/", sec_fetch_site=site, sec_fetch_mode="navigate")[0] == 200
        assert asked(server, "/", sec_fetch_site=site, sec_fetch_mode="no-cors")[0] == 403


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{}", "text/plain"),
        (b"{}", "application/x-www-form-urlencoded"),
        (b"[]", "application/json"),
        (b"{", "application/json"),
        (b"[" * 4000, "application/json"),
        (b'{"link":"' + b"x" * 5000 + b'"}', "application/json"),
        (b'{"link":3}', "application/json"),
        (b'{"name":"x"}', "application/json"),
    ],
)
def test_a_malformed_request_is_refused_with_a_reason(server: PageServer, body: bytes, kind: str) -> None:
    status, _, text = asked(server, "/session", "POST", body, content_type=kind)
    assert status == 400
    assert "expected" in json.loads(text)["error"]


def test_no_answer_may_be_kept_framed_or_extended_by_scripts_of_others(server: PageServer) -> None:
    cookie = entered(server)
    (script,) = re.findall("<script>(.*?)</script>", asked(server, "/")[2], re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for path, method in (("/", "GET"), ("/session", "GET"), ("/links", "POST"), ("/nothing", "GET")):
        _, headers, _ = asked(server, path, method, {} if method == "POST" else None, cookie=cookie)
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert f"script-src 'self' 'sha256-{digest}';" in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == ("no-cache" if path == "/" else "no-store")


def test_a_stream_begins_with_everything_and_goes_on_with_what_changes(
    server: PageServer, board: Board
) -> None:
    board.put("round", {"number": 1})
    board.put("name", "<b>bold</b>\nline")
    stream = Stream(server, entered(server))
    assert stream.answer.headers["content-type"].startswith("text/event-stream")
    first = stream.event()
    assert json.loads(first["data"]) == {"round": {"number": 1}, "name": "<b>bold</b>\\nline"}
    board.put("name", "<b>bold</b>\nline")  # no change
    board.put("round", {"number": 2})
    assert json.loads(stream.event()["data"]) == {"round": {"number": 2}}
    stream.close()


def test_a_browser_that_was_away_receives_only_what_changed_meanwhile(
    server: PageServer, board: Board
) -> None:
    cookie = entered(server)
    board.put("a", 0)
    board.put("b", 0)
    stream = Stream(server, cookie)
    mark = stream.event()["id"]
    stream.close()
    for number in range(1, 5001):
        board.put("a", number)
    stream = Stream(server, cookie, mark)
    assert json.loads(stream.event()["data"]) == {"a": 5000}
    stream.close()
    for other in ("0", "other-3", f"{mark.partition('-')[0]}-99999999999999999999999", "x" * 3000):
        stream = Stream(server, cookie, other)
        assert json.loads(stream.event()["data"]) == {"a": 5000, "b": 0}
        stream.close()


def test_two_browsers_see_the_same_and_the_end(board: Board) -> None:
    with PageServer(board, page="live") as server:
        board.put("a", 1)
        streams = [Stream(server, entered(server)) for _ in range(2)]
        assert [json.loads(stream.event()["data"]) for stream in streams] == [{"a": 1}] * 2
        board.put("a", 2)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    for stream in streams:
        assert json.loads(stream.event()["data"]) == {"a": 2}
        assert stream.event()["event"] == "end"


def test_a_session_that_ends_ends_its_streams(server: PageServer, board: Board) -> None:
    cookie = entered(server)
    board.put("a", 1)
    stream = Stream(server, cookie)
    stream.event()
    asked(server, "/session", "DELETE", cookie=cookie)
    with pytest.raises(EOFError):
        stream.event()


def test_a_further_link_opens_the_page_in_another_browser(server: PageServer) -> None:
    _, _, text = asked(server, "/links", "POST", {}, cookie=entered(server))
    link = json.loads(text)["link"]
    assert link.startswith(server.address)
    assert asked(server, "/session", "POST", {"link": link.partition("#")[2]})[0] == 200


def test_a_page_starts_and_stops_a_run_on_the_commands_own_loop_and_tells_what_is_refused() -> None:
    board = Board()
    actions = RunActions(board)
    done: list[str] = []

    async def start() -> None:
        done.append(f"start on {threading.current_thread().name}")

    async def stop(reason: str) -> None:
        if reason == "too early":
            raise RunError("the run has not begun")
        done.append(f"stop: {reason}")

    async def command(server: PageServer) -> None:
        cookie = await asyncio.to_thread(entered, server)

        async def post(path: str, body: Any) -> tuple[int, str]:
            status, _, text = await asyncio.to_thread(asked, server, path, "POST", body, cookie=cookie)
            return status, text

        assert (await post("/run/start", {}))[0] == 409  # nothing is offered yet
        actions.offer(start=start, stop=stop)
        assert board.part("actions") == {"start": "start", "stop": True, "measure": False}
        assert (await post("/run/start", {}))[0] == 200
        assert (await post("/run/stop", {"reason": "x" * 500}))[0] == 200
        status, text = await post("/run/stop", {"reason": "too early"})
        assert (status, json.loads(text)) == (409, {"error": "the run has not begun"})
        assert (await post("/run/measure", {}))[0] == 409
        for path in ("/run/start", "/run/stop", "/run/measure"):
            assert (await asyncio.to_thread(asked, server, path, "POST", {}))[0] == 401
            other = {"cookie": cookie, "origin": "http://evil.example"}
            assert (await asyncio.to_thread(asked, server, path, "POST", {}, **other))[0] == 403
            assert (await asyncio.to_thread(asked, server, path, cookie=cookie))[0] == 405
        actions.offer()
        assert (await post("/run/stop", {}))[0] == 409

    with PageServer(board, page="live", routes=actions.routes()) as server:
        asyncio.run(command(server))
    assert done == [f"start on {threading.current_thread().name}", f"stop: {'x' * 200}"]


# --- opened to other machines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=page.example"
    )
    subprocess.run(
        [*command.split(), "-keyout", folder / "key.pem", "-out", folder / "chain.pem"],
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text("# people\n\n" + password_line("ada", "correct horse battery") + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("given", [(), ("tls",), ("passwords_file",)])
def test_a_page_is_not_opened_to_others_without_tls_and_passwords(
    given: tuple[str, ...], certificate: Path, passwords: Path
) -> None:
    both = {"certificate_file": certificate / "chain.pem", "key_file": certificate / "key.pem"}
    keys = (both if "tls" in given else {}) | (
        {"passwords_file": passwords} if "passwords_file" in given else {}
    )
    with pytest.raises(ConfigError, match=r"opens the page to other machines.*TLS and passwords"):
        PageServer(Board(), page="live", settings=PageSettings(listen="0.0.0.0:0", **keys))


def test_with_tls_and_passwords_a_password_opens_the_page_and_a_link_does_not(
    certificate: Path, passwords: Path
) -> None:
    settings = PageSettings(
        listen="0.0.0.0:0",
        names=("page.example",),
        certificate_file=certificate / "chain.pem",
        key_file=certificate / "key.pem",
        passwords_file=passwords,
    )
    tls = ssl.create_default_context(cafile=certificate / "chain.pem")
    tls.check_hostname = False
    with PageServer(Board(), page="live", settings=settings) as server:
        host = f"page.example:{server.port}"
        assert server.link() == f"https://{host}/"
        own = {"host": host, "origin": f"https://{host}", "tls": tls}

        def attempt(body: dict[str, str]) -> tuple[int, dict[str, str], str]:
            return asked(server, "/session", "POST", body, **own)

        assert attempt({"link": server.sessions.new_link()})[0] == 403
        wrong = attempt({"name": "ada", "password": "wrong"})
        assert wrong[0] == 403
        soon = attempt({"name": "ada", "password": "correct horse battery"})
        assert soon[0] == 403
        assert "too many" in soon[2].lower()
        time.sleep(1.1)
        status, headers, _ = attempt({"name": "ada", "password": "correct horse battery"})
        assert status == 200
        assert "secure" in headers["set-cookie"].lower()
        assert headers["set-cookie"].startswith("__Host-")
        assert asked(server, "/session", "GET", tls=tls, host=f"127.0.0.1:{server.port}")[0] == 421


def test_a_password_is_checked_against_its_own_name_only(passwords: Path) -> None:
    known = PasswordFile(passwords)
    assert known.matches("ada", "correct horse battery")
    assert not known.matches("ada", "correct horse batterz")
    assert not known.matches("bob", "correct horse battery")
    assert not known.matches("nobody", "")
    assert "correct" not in passwords.read_text()
    with pytest.raises(EntryError):
        PageSessions(None).open_with_password("ada", "correct horse battery")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ada",
        "ada:correct horse battery",
        "ada:scrypt:2:8:1:AAAAAAAAAAAAAAAAAAAAAA==:AAAA",
        "ada:md5:32768:8:1:a:b",
    ],
)
def test_a_password_file_that_protects_nothing_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "passwords"
    path.write_text(line + "\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"expected name:scrypt|has no line|too weak"):
        PasswordFile(path)


def test_a_password_file_that_others_read_and_one_that_is_not_there_are_refused(passwords: Path) -> None:
    passwords.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        PasswordFile(passwords)
    with pytest.raises(ConfigError, match="cannot read"):
        PasswordFile(passwords.with_name("nothing"))


@pytest.mark.parametrize(
    ("name", "password"), [("", "x" * 12), ("a:b", "x" * 12), ("a b", "x" * 12), ("a", "short")]
)
def test_names_and_passwords_that_a_file_cannot_hold_are_refused(name: str, password: str) -> None:
    with pytest.raises(ConfigError):
        password_line(name, password)


def test_an_address_in_use_is_refused_with_a_hint(server: PageServer) -> None:
    with pytest.raises(PreflightError, match="cannot listen"):
        PageServer(Board(), page="live", settings=PageSettings(listen=f"127.0.0.1:{server.port}"))


def test_keys_of_a_page_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="go together"):
        PageSettings(key_file=Path("key.pem"))
    with pytest.raises(ValueError, match="listen"):
        PageSettings(listen="8080")


def test_the_page_asks_nobody_else_and_every_file_of_it_is_ours() -> None:
    from coterie.web.application import STATIC

    for path in STATIC.rglob("*"):
        if path.is_file():
            text = path.read_text()
            addresses = [word for word in text.split() if "://" in word and "www.w3.org" not in word]
            assert addresses == [], path
            for danger in (
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
                "eval(",
                "style=",
            ):
                assert danger not in text, (path, danger)
    assert os.access(STATIC / "live" / "index.html", os.R_OK)
