"""The comparison of two runs as one self-contained HTML page, without scripts, other files or network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from coterie.data.whole_file import whole_file
from coterie.errors import PreflightError
from coterie.telemetry.report_parts import Fact, ReportTable

__all__ = ["write_comparison"]


def write_comparison(
    path: Path, title: str, facts: Sequence[Fact], notes: Sequence[str], tables: Sequence[ReportTable]
) -> None:
    """Write a comparison as an HTML page, atomically.

    Parameters
    ----------
    path : Path
    title : str
    facts : sequence of Fact
        The runs that are compared.
    notes : sequence of str
        Sentences above the tables.
    tables : sequence of ReportTable

    Raises
    ------
    PreflightError
        jinja2, of the extra ``report``, is not installed, or the file cannot be written.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise PreflightError(
            f"the page of a comparison needs {error.name}",
            hint="pip install 'coterie[report]'; without --html the comparison is complete",
        ) from error
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("coterie.telemetry").joinpath("comparison.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(source).render(title=title, facts=facts, notes=notes, tables=tables)
    try:
        with whole_file(path) as beside:
            beside.write_text(page.strip() + "\n", encoding="utf-8")
    except OSError as error:
        raise PreflightError(f"cannot write {path}: {error.strerror}") from error
