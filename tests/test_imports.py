"""Who may import whom: `pallas_kernels <- k3jax <- serve <- train`, and which files stay free of jax."""

import ast
import fnmatch
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["pallas_kernels", "k3jax", "serve", "train"]  # each may import those before it
FIRST_PARTY = {*PACKAGES, "benchmarks", "tests"}

# The first pattern that fits a file says which first-party packages it may import.
MAY_IMPORT = {
    "pallas_kernels/*": {"pallas_kernels"},
    "k3jax/*": {"pallas_kernels", "k3jax"},
    "serve/*": {"pallas_kernels", "k3jax", "serve"},
    "train/rollout.py": {"pallas_kernels", "k3jax", "serve", "train"},
    "train/*": {"pallas_kernels", "k3jax", "train"},
}
# Outside the standard library, the kernels know these; the first pattern that fits counts.
KERNELS_MAY_IMPORT = {
    "pallas_kernels/*_triton.py": {"jax", "jaxlib", "numpy", "jax_triton", "triton"},
    "pallas_kernels/gpu.py": {"jax", "jaxlib", "numpy", "triton"},  # compiles the kernels of the files above
    "pallas_kernels/*": {"jax", "jaxlib", "numpy"},
}
WITHOUT_JAX = [
    "k3jax/config.py",
    "k3jax/config_hf.py",
    "k3jax/presets.py",
    "k3jax/sizes.py",
    "k3jax/checkpoint_map.py",
    "k3jax/chat/*",
]

FILES = sorted(path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def first_fit(rules, file):
    return next(allowed for pattern, allowed in rules.items() if fnmatch.fnmatch(file, pattern))


def imported(source: str, file: str) -> set[str]:
    """Top-level packages that a file imports, at any depth of its code, relative and dynamic imports included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(file.split("/")[0] if node.level else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"{file}: the name of a dynamic import must be a literal"
            names.add(name.value)
    return {name.split(".")[0] for name in names}


def of_file(file):
    return imported((ROOT / file).read_text(), file)


def test_the_tree_is_where_the_rules_expect_it():
    for pattern in [*MAY_IMPORT, *WITHOUT_JAX, "pallas_kernels/*"]:
        if pattern != "train/rollout.py":
            assert fnmatch.filter(FILES, pattern), f"no file fits {pattern}"


@pytest.mark.parametrize("file", FILES)
def test_direction(file):
    wrong = (of_file(file) & FIRST_PARTY) - first_fit(MAY_IMPORT, file)
    assert not wrong, f"{file} imports {sorted(wrong)}, which is above it"


@pytest.mark.parametrize("file", fnmatch.filter(FILES, "pallas_kernels/*"))
def test_kernels_depend_on_jax_alone(file):
    wrong = of_file(file) - first_fit(KERNELS_MAY_IMPORT, file) - set(sys.stdlib_module_names) - {"pallas_kernels"}
    assert not wrong, f"{file} imports {sorted(wrong)}"


@pytest.mark.parametrize("file", [file for pattern in WITHOUT_JAX for file in fnmatch.filter(FILES, pattern)])
def test_plain_files_do_not_import_jax(file):
    assert not of_file(file) & {"jax", "jaxlib", "flax", "optax"}


def test_every_way_to_import_is_seen():
    source = """
import os.path, serve.engine
from k3jax.config import K3Config
from . import sibling
def later():
    import train
    importlib.import_module("triton.language")
if TYPE_CHECKING:
    from jax import Array
"""
    assert imported(source, "pallas_kernels/x.py") == {
        "os", "serve", "k3jax", "pallas_kernels", "train", "triton", "jax",
    }  # fmt: skip
