"""Text of others on a terminal: titles of items that are commands are shown, and not obeyed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.cli.output import Output, printable
from coterie.cli.recommend import _ranked
from coterie.launch.local_run import Suggestion

HOSTILE = {
    "\x1b[2J": r"\x1b[2J",
    "\x1b]0;owned\x07": r"\x1b]0;owned\x07",
    "\x9b31m": r"\x9b31m",
    "line\nline": r"line\nline",
    "\u202eevil": r"\u202eevil",
    "[bold]title[/bold]": "[bold]title[/bold]",
}


@pytest.mark.parametrize("title", HOSTILE)
def test_a_title_that_is_a_command_is_written_out_in_the_table(
    title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Output("recommend").say(_ranked([Suggestion(1, title, title, 0.5)]))
    printed = capsys.readouterr().out
    assert printed.count(HOSTILE[title]) == 2
    assert all(one.isprintable() for line in printed.split("\n") for one in line)


def test_words_of_all_languages_and_spaces_stay_as_they_are() -> None:
    for text in ("Amélie (2001)", "羅生門", "Война и мир", "a\u00a0b \u3000c", "back\\slash 'quote'"):
        assert printable(text) == text


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not set(printable(text)) & {*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u2066"}
