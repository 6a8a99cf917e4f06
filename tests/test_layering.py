"""Imports go down only: read from the sources, so that a lazy import counts like any other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cute_matmul"

# Top to bottom. A module may import what is below its own line; the modules of one line are peers.
LAYERS = (
    ("__main__",),
    ("harness", "difference"),
    ("inspection",),
    ("launch",),
    ("tuner",),
    ("compile",),
    ("registry",),
    ("variants",),
    ("epilogue", "scheduler"),
    ("pipeline",),
    ("hopper",),
    ("problem",),
    ("config",),
    ("emulator",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

FOR_VARIANTS = {"pipeline", "scheduler", "hopper", "epilogue", "config"}

# registry loads kernels by name, so it is above them; that its names are served by the folder of kernels,
# `cute_matmul.variants()`, is the one way up.
UPWARD = {("variants/__init__.py", "registry")}

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(path: Path, tree: ast.AST) -> set[str]:
    """Dotted names of this package that a source imports, relative imports resolved."""
    here = ["cute_matmul", *path.relative_to(PACKAGE).parent.parts]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] == "cute_matmul"}


def parts(dotted: str) -> list[str]:
    return dotted.split(".")[1:]


def under_main(tree: ast.Module) -> ast.Module:
    """The body of `if __name__ == "__main__":`."""
    bodies = [node.body for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.dump(node.test)]
    return ast.Module([statement for body in bodies for statement in body], [])


def outside_main(tree: ast.Module) -> ast.Module:
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test))]
    return ast.Module(kept, [])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path):
    relative = path.relative_to(PACKAGE)
    unit = relative.parts[0].removesuffix(".py")
    assert unit in LEVEL, f"{relative} has no place among the layers"
    tree = ast.parse(path.read_text())
    if unit == "variants":
        tree = outside_main(tree)
    for name in imported(path, tree):
        other = parts(name)[0] if parts(name) else ""
        if other == unit or other not in LEVEL or (str(relative), other) in UPWARD:
            continue
        assert LEVEL[other] > LEVEL[unit], f"{relative} imports {name}, which is not below it"


@pytest.mark.parametrize("path", sorted((PACKAGE / "variants").glob("v*.py")), ids=lambda path: path.stem)
def test_a_variant_imports_no_other_and_only_what_it_may(path):
    tree = ast.parse(path.read_text())
    units = {parts(name)[0] for name in imported(path, outside_main(tree))}
    assert units <= FOR_VARIANTS
    assert {parts(name)[0] for name in imported(path, under_main(tree))} == {"harness"}


def test_the_folder_of_variants_imports_nothing_of_its_own_accord():
    tree = ast.parse((PACKAGE / "variants" / "__init__.py").read_text())
    modules = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("cute_matmul" in ast.dump(node) for node in modules)


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "emulator").rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_the_emulator_knows_nothing_of_matmul(path):
    names = imported(path, ast.parse(path.read_text()))
    assert {parts(name)[0] for name in names if parts(name)} <= {"emulator"}


def test_the_dsl_is_imported_where_it_is_meant_to_be():
    allowed = {"compile", "hopper", "pipeline", "epilogue", "scheduler", "variants", "emulator"}
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] == "cutlass" for name in names):
                found.add(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    assert "compile" in found
    assert found <= allowed


def test_the_reader_of_imports_sees_every_form():
    source = (
        "import cute_matmul.launch\n"
        "from cute_matmul import harness\n"
        "from . import v1\n"
        "from .. import registry\n"
        "from ..config import TileConfig\n"
        "def f():\n    from cute_matmul.compile import compile_kernel\n"
        "import os\n"
    )
    assert imported(PACKAGE / "variants" / "v9.py", ast.parse(source)) == {
        "cute_matmul.launch",
        "cute_matmul.harness",
        "cute_matmul.variants.v1",
        "cute_matmul.registry",
        "cute_matmul.config.TileConfig",
        "cute_matmul.compile.compile_kernel",
    }
