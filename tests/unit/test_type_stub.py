"""What type checkers are told of the classes that are made of systems and central models."""

import ast
from pathlib import Path

import coterie.api
from coterie.api.recommenders import models
from coterie.api.type_stub import stub


def test_the_stub_is_current() -> None:
    written = Path(coterie.api.__file__).parent / "named.pyi"
    assert written.read_text() == stub(), "`make docs` writes it anew"


def test_every_class_of_the_stub_is_there_with_its_base() -> None:
    made = models()
    classes = [node for node in ast.parse(stub()).body if isinstance(node, ast.ClassDef)]
    assert len(classes) >= 20
    for node in classes:
        (base,) = node.bases
        assert isinstance(base, ast.Name)
        assert made[node.name].__mro__[1].__name__ == base.id
