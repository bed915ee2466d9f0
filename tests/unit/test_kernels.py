"""`tests.kernels`: which test files run under another kernel of BLAS, too."""

import ast

from ..kernels import ROOT, chosen, imported, multiplies, reaching


def test_files_that_train_are_chosen_and_those_of_sums_and_certificates_are_not():
    files = chosen()
    assert all((ROOT / file).is_file() for file in files)
    for name in ("user_codes", "fedmf_sides", "output_bias", "ncf", "drift_shielded", "attacks_rounds"):
        assert f"tests/unit/test_{name}.py" in files, name
    for name in ("paillier_vector", "tokens", "masking"):
        assert f"tests/unit/test_{name}.py" not in files, name


def test_a_product_is_found_through_imports_of_any_kind(tmp_path):
    sources = {
        "a.product": "def f(x):\n    return x @ x",
        "a.between": "from .product import f",
        "a.late": "def g():\n    from a import between",
        "a.beside": "import numpy as np\nx = np.einsum('k,k', [1], [1])",
        "a.unrelated": "import a.beside",
    }
    files = {}
    for name, text in sources.items():
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(text)
    assert reaching(files) == {"a.product", "a.between", "a.late"}


def test_products_are_the_operator_and_the_names_that_lead_to_blas():
    for text in ("a @ b", "a @= b", "np.matmul(a, b)", "np.linalg.solve(a, b)", "a.dot(b)"):
        assert multiplies(ast.parse(text)), text
    assert not multiplies(ast.parse("@cache\ndef f(): return a * b"))


def test_a_package_imports_from_itself(tmp_path):
    tree = ast.parse("from . import b\nfrom .c import d")
    found = set(imported("p.q", tmp_path / "__init__.py", tree))
    assert {"p.q", "p.q.b", "p.q.c", "p.q.c.d"} <= found
    found = set(imported("p.q", tmp_path / "q.py", tree))
    assert {"p", "p.b", "p.c", "p.c.d"} <= found
