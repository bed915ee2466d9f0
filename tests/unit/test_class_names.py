"""A public class has a name of its own: whoever reads `Plan` in one module need not ask which of several it is."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]


def public_classes(text: str) -> list[str]:
    """Return the names of a module's public classes."""
    body = ast.parse(text).body
    return [one.name for one in body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]


def twice(modules: dict[str, str]) -> dict[str, list[str]]:
    """Return names that several modules give to a class, with these modules; given are texts by module."""
    found = defaultdict(list)
    for module, text in modules.items():
        for name in public_classes(text):
            found[name].append(module)
    return {name: sorted(where) for name, where in found.items() if len(where) > 1}


def test_a_name_in_two_modules_is_found_and_a_private_one_may_be_there():
    modules = {
        "a": "class Plan: pass\nclass _Open: pass\nclass Sum: pass",
        "b": "class _Open: pass\nclass Plan: pass",
        "c": "def f():\n    class Sum: pass",
    }
    assert twice(modules) == {"Plan": ["a", "b"]}


def test_each_public_class_has_a_name_of_its_own():
    modules = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in ("coterie", "services")
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    }
    assert len(modules) > 300
    assert twice(modules) == {}
