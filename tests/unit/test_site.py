"""The documentation site: its navigation has every page of docs/index.md, and its build refuses what leads nowhere."""

import os
import posixpath
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
LINK = re.compile(r"\]\(([^)\s#]+\.md)[^)]*\)")
needs_mkdocs = pytest.mark.skipif(
    not (MKDOCS.parents[1] / ".ready").exists(), reason="`make site` installs MkDocs into .venv-docs"
)


def copy(folder: Path) -> Path:
    """Return a small repository of two pages with the settings of the site."""
    root = folder / "clone"
    (root / "docs").mkdir(parents=True)
    shutil.copytree(ROOT / "website", root / "website", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "README.md").write_text("# Start\n\n[All pages](docs/index.md), [file](examples/run.toml).\n")
    (root / "docs" / "index.md").write_text("# Pages\n\n## Learn\n\n- [one.md](one.md): one.\n")
    (root / "docs" / "one.md").write_text(
        "# One\n\n## A part\n\n[Its part](#a-part), [runs](../examples/).\n"
    )
    (root / "examples").mkdir()
    (root / "examples" / "run.toml").write_text('name = "run"\n')
    (root / ".pre-commit-config.yaml").write_text("repos: []\n")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def built(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MKDOCS, "build", "--config-file", "website/mkdocs.yml"],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@needs_mkdocs
def test_the_site_has_the_pages_and_the_files_that_they_link_to(tmp_path: Path) -> None:
    root = copy(tmp_path)
    done = built(root)
    assert done.returncode == 0, done.stdout
    site = root / "build" / "site"
    home = (site / "index.html").read_text()
    assert 'href="docs/one/"' in home
    assert (site / "examples" / "run.toml").read_text() == 'name = "run"\n'
    assert 'href="run.toml"' in (site / "examples" / "files" / "index.html").read_text() or (
        'href="../run.toml"' in (site / "examples" / "files" / "index.html").read_text()
    )
    assert (site / "search" / "search_index.json").is_file()


@needs_mkdocs
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[gone](two.md)", "two.md"),
        ("[gone](#another-part)", "#another-part"),
        ("[gone](../examples/other.toml)", "other.toml"),
        ('<img src="https://example.org/a.png" alt="">', "is fetched in part from elsewhere"),
    ],
)
def test_the_site_is_refused_where_something_leads_nowhere_or_elsewhere(
    tmp_path: Path, content: str, said: str
) -> None:
    root = copy(tmp_path)
    page = root / "docs" / "one.md"
    page.write_text(f"{page.read_text()}\n{content}\n")
    done = built(root)
    assert done.returncode != 0
    assert said in done.stdout


@needs_mkdocs
def test_a_page_that_no_list_names_is_refused(tmp_path: Path) -> None:
    root = copy(tmp_path)
    page = root / "docs" / "one.md"
    (root / "docs" / "two.md").write_text("# Two\n")
    page.write_text(f"{page.read_text()}\n[Two](two.md)\n")
    done = built(root)
    assert done.returncode != 0
    assert "docs/two.md" in done.stdout


@needs_mkdocs
def test_the_navigation_has_every_page_that_the_index_lists() -> None:
    script = "import json, hooks; print(json.dumps(hooks.navigation()))"
    done = subprocess.run(
        [MKDOCS.with_name("python"), "-c", script],
        cwd=ROOT / "website",
        capture_output=True,
        text=True,
        check=True,
    )
    listed = LINK.findall((ROOT / "docs" / "index.md").read_text())
    assert len(listed) > 40
    for target in listed:
        assert f'"{posixpath.normpath(posixpath.join("docs", target))}"' in done.stdout
    assert re.findall(r'\[?\{"(Learn|Do one thing|Look up|Understand)"', done.stdout) == [
        "Learn",
        "Do one thing",
        "Look up",
        "Understand",
    ]
