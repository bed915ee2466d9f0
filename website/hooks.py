"""Hooks of MkDocs: the site's pages are those of the repository, its navigation is the list in docs/index.md.

Pages and the files that they link to stay where they are, so that a link between two of them is the same on the site
and in the repository.  A page that docs/index.md does not list, and a page of the site that asks another host for
anything, end the build.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/index.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
LISTING = "files.md"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOLDERS = {
    "docs/exit-codes": "Exit statuses",
    "docs/spec": "Protocol book",
    "docs/systems": "Systems",
    "services": "Services",
}
"""Folders whose pages stand together in the navigation, with the title that they get there."""


def tracked() -> set[str]:
    """Return the paths of all files of the repository, those not yet committed too."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    return {path for path in listed if path and (ROOT / path).is_file()}


def targets(page: str) -> list[str]:
    """Return the paths that a page links to, in its order, whether they exist or not."""
    content = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    places = (urlsplit(target) for target in LINK.findall(content))
    return [
        posixpath.normpath(posixpath.join(posixpath.dirname(page), place.path))
        for place in places
        if place.path and not place.scheme
    ]


def pages_of(paths: set[str]) -> set[str]:
    """Return the pages that are reached from the list of pages, and that list."""
    found: set[str] = set()
    ahead = [INDEX, "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in found:
            found.add(page)
            ahead += [one for one in targets(page) if one.endswith(".md") and one in paths]
    return found


def folder_of(page: str) -> str | None:
    """Return the folder in the navigation that a page stands in, if any."""
    return next((folder for folder in FOLDERS if page.startswith(f"{folder}/")), None)


def navigation() -> list[Any]:
    """Return the navigation: the four parts of docs/index.md, each with the pages that it lists, in its order."""
    parts: list[Any] = [{"Start": ["README.md", INDEX]}]
    listed: set[str] = {"README.md", INDEX}
    for part in re.split(r"^## ", (ROOT / INDEX).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, content = part.partition("\n")
        entries: list[Any] = []
        folders: dict[str, list[str]] = {}
        for target in LINK.findall(content):
            page = posixpath.normpath(posixpath.join("docs", target.partition("#")[0]))
            if not page.endswith(".md") or page in listed:
                continue
            for one in [page, *chapters(page)]:
                listed.add(one)
                folder = folder_of(one)
                if folder is None:
                    entries.append(one)
                elif folder in folders:
                    folders[folder].append(one)
                else:
                    folders[folder] = [one]
                    entries.append({FOLDERS[folder]: folders[folder]})
        parts.append({title.strip(): entries})
    return parts


def chapters(page: str) -> list[str]:
    """Return the pages that the first page of a folder lists, which docs/index.md leaves to it."""
    folder = posixpath.dirname(page)
    if posixpath.basename(page) != "README.md" or folder not in FOLDERS:
        return []
    beside = [one for one in targets(page) if one.endswith(".md") and posixpath.dirname(one) == folder]
    return list(dict.fromkeys(beside))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, and the choice of versions where mike builds the site."""
    config.nav = navigation()
    if os.environ.get("MIKE_DOCS_VERSION"):
        config.extra["version"] = {"provider": "mike"}
    return config


def folders_of(paths: set[str], pages: set[str]) -> set[str]:
    """Return the folders of the repository that pages link to."""
    holding = {posixpath.dirname(path) for path in paths}
    return {one for page in pages for one in targets(page)} & holding


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to folders into links to the lists of their files."""
    here = posixpath.dirname(page.file.src_uri)

    def listed(link: re.Match[str]) -> str:
        target = link[1].rstrip("/")
        listing = posixpath.join(posixpath.normpath(posixpath.join(here, target)), LISTING)
        return f"]({target}/{LISTING})" if files.get_file_from_path(listing) else link[0]

    return LINK.sub(listed, markdown)


def listing(folder: str, paths: set[str]) -> str:
    """Return the page of a folder: its files, each with a link."""
    names = sorted(posixpath.basename(path) for path in paths if posixpath.dirname(path) == folder)
    return "\n".join([f"# Files in `{folder}`", "", *(f"- [{name}]({name})" for name in names), ""])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository and every file that one of them links to."""
    paths = tracked()
    pages = pages_of(paths)
    wanted = pages | {one for page in pages for one in targets(page) if one in paths}
    pictures = {
        posixpath.normpath(posixpath.join(posixpath.dirname(page), one))
        for page in pages
        for one in re.findall(r'src="([^":]+)"', (ROOT / page).read_text(encoding="utf-8"))
    }
    folders = folders_of(paths, pages)
    wanted |= {path for path in paths if posixpath.dirname(path) in folders}
    for path in sorted(wanted | (pictures & paths)):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for folder in sorted(folders):
        page = File.generated(config, f"{folder}/{LISTING}", content=listing(folder, paths))
        # Reached from the pages that name the folder, not from the navigation.
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


class Requests(HTMLParser):
    """Collects the addresses from which a browser fetches parts of a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the address of one element, if it is fetched."""
        given = dict(attrs)
        if tag == "link" and "canonical" not in (given.get("rel") or ""):
            self.found.append(given.get("href") or "")
        self.found += [given[key] or "" for key in ("src", "srcset", "poster") if key in given]


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that makes a browser ask another host; name the theme's search for those who listen to the page."""
    requests = Requests()
    requests.feed(output)
    elsewhere = [one for one in requests.found if urlsplit(one).netloc]
    if elsewhere:
        raise PluginError(f"{page.file.src_uri} is fetched in part from elsewhere: {', '.join(elsewhere)}")
    return output.replace(
        'data-md-component="search" role="dialog"',
        'data-md-component="search" role="dialog" aria-label="Search"',
    )
