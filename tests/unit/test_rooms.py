"""Rooms of systems: what a room may know, what may know a room, and what every room has."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest

from coterie.privacy.declarations import KINDS
from coterie.systems.description import System
from coterie.systems.registry import combination, distribution_of, systems

ROOT = Path(__file__).parents[2]
ROOMS = tuple(
    path.parent.name
    for path in sorted((ROOT / "coterie" / "systems").glob("*/__init__.py"))
    if path.parent.name != "shared"
)
"""Folders of `coterie/systems`, but for what rooms share."""

LIBRARY = ("shared", "description", "settings", "run_settings", "registry")
"""Modules of `coterie.systems` that a room may import beside itself."""

BUILT_ON = {"fedidcf": ("fedmf",)}
"""Rooms whose system is another one and more: its first phase is the other's training."""

SERVICES = tuple(sorted(path.name for path in ROOT.glob("services/*/coterie_*")))

PURE = ("mathematics", "local_step", "central", "networks", "blocks", "sequential", "declared")
"""Modules of a room that compute and do nothing else."""

IMPURE = (
    "grpc",
    "asyncio",
    "sqlalchemy",
    "structlog",
    "coterie.store",
    "coterie.net",
    "coterie.parties",
    "coterie.process",
)


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("coterie", *SERVICES, include_external_packages=True, cache_dir=None)


def modules_below(package: str) -> set[str]:
    return {package, *graph().find_descendants(package)}


def test_every_room_is_registered_under_its_own_name_and_every_registered_system_of_ours_has_a_room() -> None:
    ours = {name for name in systems() if distribution_of(name).startswith("coterie ")}
    assert set(ROOMS) == ours
    for name in ROOMS:
        assert importlib.import_module(f"coterie.systems.{name}").SYSTEM is systems()[name]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_itself_and_what_rooms_share(room: str) -> None:
    allowed = tuple(f"coterie.systems.{one}" for one in (room, *BUILT_ON.get(room, ()), *LIBRARY))
    strange = {
        (module, imported)
        for module in modules_below(f"coterie.systems.{room}")
        for imported in graph().find_modules_directly_imported_by(module)
        if re.match(r"coterie\.systems\.", imported)
        if not imported.startswith(tuple(f"{one}." for one in allowed)) and imported not in allowed
    }
    assert strange == set()


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_knows_the_mathematics_of_another_through_what_is_shared(room: str) -> None:
    shared = modules_below("coterie.systems.shared")
    assert not any(
        imported.startswith(f"coterie.systems.{room}.") or imported == f"coterie.systems.{room}"
        for module in shared
        for imported in graph().find_modules_directly_imported_by(module)
    )


@pytest.mark.parametrize(
    "module",
    sorted(
        f"coterie.systems.{room}.{name}"
        for room in ROOMS
        for name in PURE
        if (ROOT / "coterie" / "systems" / room / f"{name}.py").exists()
    ),
)
def test_a_module_of_mathematics_only_computes(module: str) -> None:
    reached = graph().find_upstream_modules(module)
    impure = {one for one in reached if one in IMPURE or one.startswith(tuple(f"{name}." for name in IMPURE))}
    assert impure == set()


def contracts() -> dict[str, dict[str, Any]]:
    """Return the contracts of import-linter by name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {one["name"]: one for one in settings["tool"]["importlinter"]["contracts"]}


def test_import_linter_keeps_all_rooms_apart() -> None:
    contract = contracts()["Rooms of systems are independent of each other"]
    assert contract["type"] == "independence"
    assert sorted(contract["modules"]) == [f"coterie.systems.{room}" for room in ROOMS]


def test_import_linter_keeps_all_services_from_what_starts_or_studies_them() -> None:
    contract = contracts()["Services import neither studies nor launchers nor commands"]
    assert sorted(contract["source_modules"]) == list(SERVICES)
    assert contract["forbidden_modules"] == ["coterie.studies", "coterie.launch", "coterie.cli"]


def test_a_room_imports_no_launcher() -> None:
    reached = graph().find_upstream_modules("coterie.systems", as_package=True)
    assert not {one for one in reached if one.startswith(("coterie.launch", "coterie.cli"))}


def test_what_is_reached_through_other_modules_is_noticed() -> None:
    assert {"grpc", "asyncio", "sqlalchemy"} <= graph().find_upstream_modules("coterie_cos.service")


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_studies(service: str) -> None:
    imported = {
        one for module in modules_below(service) for one in graph().find_modules_directly_imported_by(module)
    }
    assert not {one for one in imported if one.startswith("coterie.studies")}
    assert any(one.startswith("coterie.") for one in imported)


# --- Outside the rooms nobody knows a system's name ----------------------------------------------------------------


def product_files() -> Iterator[Path]:
    """Yield the files of the product that know no system."""
    for path in sorted([*ROOT.glob("coterie/**/*.py"), *ROOT.glob("services/**/*.py")]):
        place = path.relative_to(ROOT)
        in_room = place.parts[:2] == ("coterie", "systems") and place.parts[2] in (*ROOMS, "shared")
        # What only DRIFT's forms need of a service lies in a folder of its own.
        of_a_service = place.parts[0] == "services" and "drift" in place.parts[:-1]
        made = place.parts[:3] == ("coterie", "wire", "v1")
        if not (in_room or of_a_service or made):
            yield path


def docstrings(tree: ast.AST) -> set[int]:
    """Return the strings that stand alone: docstrings of modules, classes, functions and attributes."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def names_of(given: tuple[System, ...]) -> frozenset[str]:
    return frozenset(name for system in given for name in (system.name, system.table, system.title))


def named_in(source: str, names: frozenset[str]) -> list[tuple[int, str]]:
    """Return where a source has a system's name as a string, or as a keyword or attribute: line and name."""
    tree = ast.parse(source)
    prose = docstrings(tree)
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in prose and text in names:
                found.append((node.lineno, text))
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) if name in names:
                found.append((node.lineno, name))
    return found


def rooms_in(source: str) -> list[tuple[int, str]]:
    """Return where a source imports a room, by whatever form of import or by name: line and room."""
    tree = ast.parse(source)
    prose = docstrings(tree)
    room = re.compile(rf"coterie\.systems\.({'|'.join(ROOMS)})(\.|:|$)")
    found = []
    for node in ast.walk(tree):
        modules: list[str] = []
        match node:
            case ast.Import():
                modules = [one.name for one in node.names]
            case ast.ImportFrom(module=str(module)):
                modules = [module, *(f"{module}.{one.name}" for one in node.names)]
            case ast.Constant(value=str(text)) if id(node) not in prose:
                modules = [text]
        found += [(node.lineno, match[1]) for one in modules if (match := room.match(one))]
    return found


def test_a_name_and_an_import_are_noticed() -> None:
    names = names_of(tuple(systems().values()))
    assert named_in("if system == 'fcf':\n    pass", names) == [(1, "fcf")]
    assert named_in("rows = {'FedMF': 3}\nprint(run.mvmf)\nf(drift=1)", names) == [
        (1, "FedMF"),
        (2, "mvmf"),
        (3, "drift"),
    ]
    assert named_in('"""fcf"""\nx = "as in FCF"', names) == []
    assert rooms_in("from coterie.systems.fcf import host") == [(1, "fcf"), (1, "fcf")]
    assert rooms_in("from coterie.systems import drift") == [(1, "drift")]
    assert rooms_in("import coterie.systems.fedncf.host as h\nload('coterie.systems.fcf:X')") == [
        (1, "fedncf"),
        (2, "fcf"),
    ]
    assert rooms_in("from coterie.systems.shared.host_data import HostData") == []


def test_outside_its_room_no_product_file_has_a_system_s_name() -> None:
    names = names_of(tuple(systems()[name] for name in ROOMS))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in product_files()
        # The registry has the name of the system that a run takes where its file names none.
        if path.parent != ROOT / "coterie" / "systems"
        for line, name in named_in(path.read_text(encoding="utf-8"), names)
    ]
    assert found == []


def imports_of_rooms(top: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {room}"
        for path in product_files()
        if path.relative_to(ROOT).parts[0] == top
        for line, room in rooms_in(path.read_text(encoding="utf-8"))
    ]


def test_outside_its_room_no_file_of_the_library_imports_a_room() -> None:
    assert imports_of_rooms("coterie") == []


def test_outside_drift_folders_no_file_of_a_service_imports_a_room() -> None:
    assert imports_of_rooms("services") == []


# --- What every room has ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_settings_of_its_own_in_one_module(room: str) -> None:
    assert (ROOT / "coterie" / "systems" / room / "settings.py").is_file()
    assert systems()[room].settings.__module__ == f"coterie.systems.{room}.settings"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_declares_every_kind_in_every_form_under_every_sum_that_it_runs_under(room: str) -> None:
    system = systems()[room]
    rows = {
        (form, secure_sum): system.declared(form, secure_sum)
        for form in system.forms
        for secure_sum in system.sums
        if combination(room, secure_sum, form).allowed
    }
    assert {form for form, _ in rows} == set(system.forms)
    assert {secure_sum for _, secure_sum in rows} == set(system.sums)
    assert {frozenset(each) for each in rows.values()} == {frozenset(KINDS)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_a_page_that_the_index_links_to(room: str) -> None:
    page = systems()[room].page
    assert (ROOT / page).is_file()
    assert systems()[room].title in (ROOT / page).read_text(encoding="utf-8")
    assert f"({page.removeprefix('docs/')})" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
