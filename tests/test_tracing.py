"""The ranges that variants name for a timeline recorded on a GPU (`hopper.traced`): free unless asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cute_matmul import registry
from cute_matmul.compile import compile_kernel
from perf import results, timeline

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "data" / "timeline_v3_h200.trace.json"
"""What run-iket wrote of one CTA of V3 on an H200, M = N = K = 1024."""
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


def test_a_recording_of_an_h200_is_read_as_it_was():
    found = timeline.ranges(json.loads(RECORDED.read_text()))
    assert {r["name"] for r in found} == {*ROLES["v3"], "wait"}
    assert {r["warp"] for r in found if r["name"] == "consumer"} == {0, 1, 2, 3}
    assert {r["warp"] for r in found if r["name"] == "producer"} == {4}
    for warp in range(5):  # K / tile_k waits a role
        assert sum(r["warp"] == warp and r["name"] == "wait" for r in found) == 1024 // 64
    assert min(r["start"] for r in found) == 0 and all(r["start"] <= r["end"] for r in found)
    for role, warp in (("consumer", 0), ("producer", 4)):
        (whole,) = [r for r in found if r["name"] == role and r["warp"] == warp]
        waits = [r for r in found if r["name"] == "wait" and r["warp"] == warp]
        assert all(whole["start"] <= w["start"] and w["end"] <= whole["end"] for w in waits)
    rows = [line.split() for line in timeline.table(found).splitlines()]
    assert ["(0,", "0,", "0)", "0", "to", "3", "wait", "16", "64", "544", "1,344"] in rows
    assert ["(0,", "0,", "0)", "4", "producer", "1", "6,432", "6,432", "6,432"] in rows


@pytest.mark.parametrize("name", ["v3", "v5", "v6"])
def test_the_recordings_that_the_pages_show_have_the_names_of_their_roles(name):
    (recording,) = results.FOLDER.glob(f"*-h200-timeline-{name}.json")
    (m,) = results.load(recording)["measurements"]
    assert {r["name"] for r in m["ranges"]} == {*ROLES[name], "wait"}


def test_a_recording_is_kept_as_a_result(monkeypatch, tmp_path, capsys):
    writes = f"import shutil; shutil.copy({str(RECORDED)!r}, {str(tmp_path / 'out' / 'a.trace.json')!r})"
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(timeline, "command", lambda *_: [sys.executable, "-c", writes])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    arguments = ["v3", "--output", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert timeline.main(arguments) == 0
    (path,) = (tmp_path / "results").glob("*-h200-timeline-v3.json")
    record = results.load(path)
    (m,) = record["measurements"]
    assert record["complete"] and record["suite"] == "timeline"
    assert m["ranges"] == timeline.ranges(json.loads(RECORDED.read_text()))
    assert m["config"] == str(registry.get("v3").load().DEFAULT) and m["ptx"] == compile_kernel("v3").fingerprint
    assert str(path) in capsys.readouterr().out


def test_a_recorder_that_fails_is_said_and_nothing_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timeline, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    arguments = ["v3", "--output", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    assert timeline.main(arguments) == 1
    assert "ended with 3" in capsys.readouterr().err and not (tmp_path / "results").exists()
