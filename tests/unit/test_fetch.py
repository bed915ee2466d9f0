import hashlib
import http.client
import http.server
import io
import stat
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from coterie.data.fetch import _HttpsRedirects, _open_https, fetch
from coterie.errors import DataError

BASE = "https://files.grouplens.org/datasets/movielens"
RATINGS = b"userId,movieId,rating,timestamp\n1,1,4.0,1\n"


class Publisher:
    """A publisher on loopback, and the opener that leads its https addresses there."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        publisher = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                publisher.asked.append(self.path)
                body = publisher.files.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def put(self, name: str, archive: bytes, *, md5: str | None = None) -> None:
        path = f"/datasets/movielens/{name}.zip"
        digest = md5 or hashlib.md5(archive).hexdigest()
        self.files[path] = archive
        self.files[f"{path}.md5"] = f"MD5 ({name}.zip) = {digest}\n".encode()

    def open(self, url: str, timeout: float) -> AbstractContextManager[http.client.HTTPResponse]:
        assert url.startswith("https://files.grouplens.org/")
        path = url.removeprefix("https://files.grouplens.org")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        response: http.client.HTTPResponse = direct.open(
            f"http://127.0.0.1:{self.server.server_port}{path}", timeout=timeout
        )
        return response


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    thread = threading.Thread(target=publisher.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield publisher
    publisher.server.shutdown()
    thread.join()
    publisher.server.server_close()


def archive(**files: bytes) -> bytes:
    return packed([(zipfile.ZipInfo(f"ml-latest-small/{name}"), body) for name, body in files.items()])


def packed(members: list[tuple[zipfile.ZipInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for info, body in members:
            file.writestr(info, body)
    return buffer.getvalue()


SOUND = archive(**{"ratings.csv": RATINGS, "README.txt": b"terms"})


def test_an_archive_is_verified_and_unpacked(publisher: Publisher, tmp_path: Path) -> None:
    publisher.put("ml-latest-small", SOUND)
    folder = fetch("ml-latest-small", tmp_path / "new", opener=publisher.open)
    assert folder == tmp_path / "new" / "ml-latest-small"
    assert (folder / "ratings.csv").read_bytes() == RATINGS
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ml-latest-small"]


def test_what_is_there_is_not_fetched_again(publisher: Publisher, tmp_path: Path) -> None:
    publisher.put("ml-latest-small", SOUND)
    fetch("ml-latest-small", tmp_path, opener=publisher.open)
    asked = len(publisher.asked)
    fetch("ml-latest-small", tmp_path, opener=publisher.open)
    assert len(publisher.asked) == asked == 2


def test_an_archive_that_differs_from_the_published_digest_is_refused(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.put("ml-latest-small", SOUND, md5="0" * 32)
    with pytest.raises(DataError, match="expected 00000000000000000000000000000000"):
        fetch("ml-latest-small", tmp_path, opener=publisher.open)
    assert not list(tmp_path.iterdir())


def test_sets_that_never_change_have_their_digest_pinned(publisher: Publisher, tmp_path: Path) -> None:
    publisher.put("ml-100k", SOUND)  # with a checksum file that vouches for it
    with pytest.raises(DataError, match="expected 0e33842e24a9c977be4e0107933c0723"):
        fetch("ml-100k", tmp_path, opener=publisher.open)


def test_a_digest_can_be_given_where_none_is_published(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files["/mirror.zip"] = SOUND
    url = "https://files.grouplens.org/mirror.zip"
    with pytest.raises(DataError, match=r"cannot read the checksum .*mirror\.zip\.md5.*give the MD5"):
        fetch("ml-latest-small", tmp_path, url=url, opener=publisher.open)
    md5 = hashlib.md5(SOUND).hexdigest().upper()
    assert fetch("ml-latest-small", tmp_path, url=url, md5=md5, opener=publisher.open).is_dir()
    with pytest.raises(DataError, match="expected 32 hexadecimal digits"):
        fetch("ml-1m", tmp_path, md5="abc", opener=publisher.open)


def test_a_checksum_file_without_a_digest_is_refused(publisher: Publisher, tmp_path: Path) -> None:
    publisher.put("ml-latest-small", SOUND, md5="moved")
    with pytest.raises(DataError, match="holds no MD5"):
        fetch("ml-latest-small", tmp_path, opener=publisher.open)


def test_without_a_network_the_error_says_how_to_place_the_files(tmp_path: Path) -> None:
    def no_network(url: str, timeout: float) -> AbstractContextManager[http.client.HTTPResponse]:
        raise urllib.error.URLError("Network is unreachable")

    with pytest.raises(DataError) as caught:
        fetch("ml-100k", tmp_path, opener=no_network)
    assert f"{BASE}/ml-100k.zip" in str(caught.value)
    assert str(tmp_path / "ml-100k" / "u.data") in str(caught.value)


def test_an_archive_that_is_gone_is_an_error_with_its_status(publisher: Publisher, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="HTTP Error 404"):
        fetch("ml-1m", tmp_path, opener=publisher.open)


def member(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


@pytest.mark.parametrize(
    "info",
    [
        member("../escaped.txt"),
        member("/escaped.txt"),
        member("ml-latest-small/../../escaped.txt"),
        member("ml-latest-small\\..\\escaped.txt"),
        member("C:escaped.txt"),
        member("ml-latest-small/link", stat.S_IFLNK | 0o777),
    ],
    ids=lambda info: info.filename,
)
def test_an_archive_that_reaches_outside_its_folder_is_refused(
    publisher: Publisher, tmp_path: Path, info: zipfile.ZipInfo
) -> None:
    target = tmp_path / "deep" / "target"
    publisher.put("ml-latest-small", packed([(member("ml-latest-small/ratings.csv"), RATINGS), (info, b"x")]))
    with pytest.raises(DataError, match="expected plain files inside one folder"):
        fetch("ml-latest-small", target, opener=publisher.open)
    assert not list(target.iterdir())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_archive_that_unpacks_to_too_much_is_refused(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.data.fetch._LARGEST_UNPACKED", 1 << 20)
    publisher.put("ml-latest-small", archive(**{"ratings.csv": bytes(1 << 20), "b": b"x"}))
    with pytest.raises(DataError, match="unpacks to more than 1 MiB"):
        fetch("ml-latest-small", tmp_path, opener=publisher.open)


def test_a_download_without_end_is_cut_off(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.data.fetch._LARGEST_ARCHIVE", len(SOUND) - 1)
    publisher.put("ml-latest-small", SOUND)
    with pytest.raises(DataError, match="is larger than"):
        fetch("ml-latest-small", tmp_path, opener=publisher.open)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>not found</html>", "no readable zip archive"),
        (archive(**{"other.csv": b""}), r"does not hold ml-latest-small/ratings\.csv"),
    ],
)
def test_a_file_that_is_not_the_archive_is_refused(
    publisher: Publisher, tmp_path: Path, content: bytes, message: str
) -> None:
    publisher.put("ml-latest-small", content)
    with pytest.raises(DataError, match=message):
        fetch("ml-latest-small", tmp_path, opener=publisher.open)


def test_an_incomplete_folder_is_not_overwritten(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / "ml-100k").mkdir()
    with pytest.raises(DataError, match=r"exists without u\.data"):
        fetch("ml-100k", tmp_path, opener=publisher.open)


@pytest.mark.parametrize("url", ["http://example.org/a.zip", "file:///etc/passwd", "a.zip"])
def test_only_https_is_fetched(tmp_path: Path, url: str) -> None:
    with pytest.raises(DataError, match="is no https address"):
        fetch("ml-100k", tmp_path, url=url)


def test_a_redirect_may_not_leave_https() -> None:
    request = urllib.request.Request("https://example.org/a.zip")
    headers = http.client.HTTPMessage()
    redirects = _HttpsRedirects()
    with pytest.raises(urllib.error.URLError, match="no https address"):
        redirects.redirect_request(request, io.BytesIO(), 302, "Found", headers, "http://example.org/b.zip")
    followed = redirects.redirect_request(
        request, io.BytesIO(), 302, "Found", headers, "https://example.org/b.zip"
    )
    assert followed is not None
    assert followed.full_url == "https://example.org/b.zip"


def test_the_default_opener_knows_no_other_scheme(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(urllib.error.URLError, match="unknown url type"):
        _open_https((tmp_path / "a").as_uri(), 1.0)


def test_an_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'ml-100' cannot be fetched.*did you mean 'ml-100k'"):
        fetch("ml-100", tmp_path)
