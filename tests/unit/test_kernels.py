"""`tests.kernels`: which test files run under another kernel of BLAS, too, and under which."""

import ast
import os
import platform
import subprocess

import pytest

from ..kernels import CODE_OF, ROOT, another, chosen, imported, multiplies, reaching, taken

x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="OpenBLAS's names of x86-64")


def test_files_that_train_are_chosen_and_those_of_sums_and_certificates_are_not():
    files = chosen()
    assert all((ROOT / file).is_file() for file in files)
    for name in ("user_codes", "fedmf_sides", "output_bias", "ncf", "drift_shielded", "attacks_rounds"):
        assert f"tests/unit/test_{name}.py" in files, name
    for name in ("spec_vectors", "spec_interop"):
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


def test_a_package_counts_as_a_product_where_it_is_named(tmp_path):
    files = {}
    for name, text in {"a.second": "x = 1", "a.test": "from .second import x", "a.other": "y = 2"}.items():
        files[name] = tmp_path / f"{name}.py"
        files[name].write_text(text)
    assert reaching(files, {"a.second"}) == {"a.second", "a.test"}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("SkylakeX", "Haswell"),
        ("Sandybridge", "Haswell"),
        ("Haswell", "Sandybridge"),
        ("Zen", "Sandybridge"),
    ],
)
def test_another_kernel_is_haswell_s_unless_the_machine_s_own_has_its_code(own, expected):
    assert another(lambda asked: asked or own) == expected


def test_a_kernel_that_openblas_lacks_or_the_processor_cannot_run_is_passed_over():
    known = {None: "Zen", "Sandybridge": None, "Nehalem": "Zen", "Prescott": "Katmai"}
    assert another(known.get) == "Prescott"
    assert another({None: "Zen"}.get) is None
    assert another({}.get) is None


@x86
def test_this_machine_multiplies_with_another_kernel_than_its_own():
    kernel, own = another(), taken()
    assert kernel is not None
    assert CODE_OF.get(taken(kernel), taken(kernel)) != CODE_OF.get(own, own)


@x86
@pytest.mark.parametrize("given", ["", "Nehalem"])
def test_make_test_kernels_names_a_kernel_and_takes_the_one_that_is_given(given):
    clean = {name: value for name, value in os.environ.items() if name != "KERNEL"}
    command = ["make", "--dry-run", "test-kernels", *([f"KERNEL={given}"] if given else [])]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True)
    assert f"kernel={given or another()};" in done.stdout
