"""Nobody outside a system's room knows the system by name."""

import ast
from pathlib import Path

from coterie.systems.registry import systems

ROOT = Path(__file__).parents[2]


def outside():
    """Yield every product file that belongs to no system."""
    for top in ("coterie", "services"):
        for path in sorted((ROOT / top).rglob("*.py")):
            inside = path.relative_to(ROOT)
            generated = inside.parts[:3] == ("coterie", "wire", "v1")
            if not generated and inside.parts[:2] != ("coterie", "systems") and "drift" not in inside.parts:
                yield inside, ast.parse(path.read_text(encoding="utf-8"))


def named(tree, names):
    """Return names of systems in code: as a value, or as the room that is imported."""
    rooms = {f"coterie.systems.{name}" for name in names}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            found.add(node.value)
        for module in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        ):
            found |= {room for room in rooms if f"{module}.".startswith(f"{room}.")}
    return found


def test_no_product_file_outside_a_room_names_a_system():
    found = {str(path): names for path, tree in outside() if (names := named(tree, systems().keys()))}
    assert found == {}


def test_a_name_is_found_where_it_is_compared_listed_mapped_or_imported():
    for code in (
        "x == 'drift'",
        "y = ['drift']",
        "z = {'drift': 1}",
        "from coterie.systems.drift.settings import DriftSettings",
        "import coterie.systems.drift",
    ):
        assert named(ast.parse(code), {"drift"}), code
    assert not named(ast.parse("from coterie.systems.registry import systems"), {"drift"})


def test_every_system_of_ours_has_a_page():
    pages = {name: system.page for name, system in systems().items()}
    assert [name for name, page in pages.items() if not (ROOT / page).is_file()] == []
