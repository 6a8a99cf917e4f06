"""The ranges that variants name for a timeline recorded on a GPU (`hopper.traced`): free unless asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_matmul import registry
from cute_matmul.compile import compile_kernel

ROOT = Path(__file__).parent.parent
ROLES = {
    "v3": {"producer", "consumer", "epilogue"},
    "v4": {"producer", "consumer", "epilogue"},
    "v5": {"producer", "consumer", "epilogue"},
    "v6": {"producer", "consumer", "epilogue", "store"},
}

WITHOUT_RANGES = """
import contextlib, json, sys
from cute_matmul import hopper

@contextlib.contextmanager
def nothing(name):
    yield

hopper.traced = nothing
from cute_matmul.compile import compile_kernel
json.dump({name: compile_kernel(name).ptx for name in sys.argv[1:]}, sys.stdout)
"""

WITH_RANGES = """
import collections, json, sys
from iket.core.iket import IketContext
from cute_matmul.compile import compile_kernel
from cute_matmul.launch import emulate
from cute_matmul.problem import Problem

seen = {}
for name in sys.argv[1:]:
    kernel = compile_kernel(name)
    context = IketContext.create(kernel.cubin)
    events = {number: event.name for number, event in context.get_events().items()}
    points = context.get_kernel_instrument_points(kernel.symbol)
    names = collections.Counter(events[point.evt_attr.event_id] for point in points)
    a, b = Problem(200, 136, 328).operands()
    _, report = emulate(a, b, variant=name, trace=True)
    events = report.timeline.events
    seen[name] = {"points": names, "ok": report.ok}
    seen[name] |= {"roles": sorted({e.role for e in events}), "kinds": sorted({e.kind for e in events})}
json.dump(seen, sys.stdout)
"""


def run(code: str, names: list[str], **environment: str) -> dict:
    variables = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_COMPILER_OPT"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env={**variables, "CUTE_MATMUL_CACHE": "0", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def code_of(ptx: str) -> list[str]:
    """PTX without what only names places in the sources."""
    return [line for line in ptx.splitlines() if not line.lstrip().startswith((".loc", ".file", "//"))]


def test_ranges_leave_no_trace_in_the_code():
    names = list(registry.names())
    for name, ptx in run(WITHOUT_RANGES, names).items():
        assert code_of(ptx) == code_of(compile_kernel(name).ptx), name


@pytest.fixture(scope="module")
def instrumented() -> dict:
    return run(WITH_RANGES, list(ROLES), CUTE_DSL_COMPILER_OPT="iket")


@pytest.mark.parametrize("name", ROLES)
def test_tracing_names_the_roles_and_their_waits(instrumented, name):
    """As the DSL's own reader of instrumented machine code finds them."""
    points = instrumented[name]["points"]
    pops = points.pop("pop_range")
    assert set(points) == {*ROLES[name], "wait"}
    assert sum(points.values()) == pops  # every range that begins ends, in the code as it stands
    assert points["wait"] >= 3  # the producer's, and the consumers' in the unrolled loop and its remainder


@pytest.mark.parametrize("name", ROLES)
def test_instrumented_kernels_run_in_the_emulator(instrumented, name):
    assert instrumented[name]["ok"]


@pytest.mark.parametrize("name", ROLES)
def test_the_emulator_uses_the_same_names(instrumented, name):
    seen = instrumented[name]
    assert {role.split()[0] for role in seen["roles"]} >= {"producer", "consumer"} and "wait" in seen["kinds"]
