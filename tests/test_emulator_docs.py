"""docs/emulator.md: every example shows the hazard it is about, and every kind of hazard is on the page."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest

from cute_matmul.emulator import findings, interpreter, tensormap

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "emulator.md").read_text()
KERNEL = (HERE / "data" / "hazard_example.py.txt").read_text()
EXAMPLES = re.findall(r"```python hazard=(\S+)([^\n]*)\n(.*?)```", PAGE, re.S)
NOTHING = "out[thread] = acc[0]"
WHOLE = """
warpgroup.fence()
cute.gemm(mma, acc, a, b, acc)
warpgroup.commit_group()
warpgroup.wait_group(0)
out[thread] = acc[0] + tile[thread % 64, thread // 64]
"""


def example(folder: Path, body: str, *, loaded: bool = False, cluster: int = 1):
    """The module of the page's kernel with `body` in it."""
    options = "THREADS, CLUSTER, LOADED = 128, 1, False"
    hole = '    raise NotImplementedError("the body of an example")\n'
    assert KERNEL.count(options) == KERNEL.count(hole) == 1
    source = KERNEL.replace(options, f"THREADS, CLUSTER, LOADED = 128, {cluster}, {loaded}")
    path = folder / "hazard_example.py"
    path.write_text(source.replace(hole, textwrap.indent(body.strip("\n"), "    ") + "\n"))
    spec = importlib.util.spec_from_file_location(f"hazard_example_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kinds", "options", "body"), EXAMPLES, ids=[f"{i}-{e[0]}" for i, e in enumerate(EXAMPLES)])
def test_an_example_shows_its_hazard(kinds, options, body, tmp_path):
    settings = dict(option.partition("=")[::2] for option in options.split())
    module = example(tmp_path, body, loaded="loaded" in settings, cluster=int(settings.get("cluster", 1)))
    schedules = [settings["schedule"]] if "schedule" in settings else ["round_robin", "adversarial"]
    for schedule in schedules:
        report = module.run(schedule=schedule)
        found = {hazard.kind for hazard in report.hazards}
        assert found and found <= set(kinds.split(",")), report
        assert any("hazard_example.py" in hazard.here.line for hazard in report.hazards)


@pytest.mark.parametrize(("body", "loaded"), [(NOTHING, False), (WHOLE, True)], ids=["nothing", "whole"])
def test_the_kernel_around_the_examples_is_clean(body, loaded, tmp_path):
    module = example(tmp_path, body, loaded=loaded)
    for schedule in ("round_robin", "random", "adversarial"):
        report = module.run(schedule=schedule)
        assert report.ok, report


@pytest.mark.parametrize("kind", sorted({*findings.RULES, *interpreter.RULES}))
def test_every_kind_is_on_the_page(kind):
    assert f"**{kind}**" in PAGE or f"`{kind}`" in PAGE


def test_the_page_names_no_kind_that_does_not_exist():
    named = set(re.findall(r"hazard=(\S+)", PAGE)) | set(re.findall(r"^\*\*([a-z-]+)\*\*", PAGE, re.M))
    known = {*findings.RULES, *interpreter.RULES, *(f"tensor-map-{rule}" for rule in tensormap.RULES)}
    assert {kind for names in named for kind in names.split(",")} <= known


def test_examples_are_short():
    assert len(EXAMPLES) > 20
    for kinds, _, body in EXAMPLES:
        assert len(body.strip().splitlines()) <= 6, kinds
