"""The emulator's entry on compiled kernels: what the DSL emits for ordinary code, and the ladder's own kernels."""

from __future__ import annotations

import importlib
import json
import os

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
pytest.importorskip("cutlass")

from cute_matmul import emulator  # noqa: E402

SCHEDULES = ["round_robin", "random", "adversarial"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_launches_and_scalars(schedule):
    import emulator_kernels as kernels

    x = torch.arange(200, dtype=torch.float32)
    scaled, total = torch.zeros_like(x), torch.zeros(1)
    report = emulator.run(kernels.scale_then_sum, x, scaled, total, 0.5, emulator.stream(), schedule=schedule)
    assert report.ok, str(report)
    assert torch.equal(scaled, x * 0.5) and total.item() == (x * 0.5).sum().item()
    assert len(report.kernels) == 2
    assert report.bytes["global write"] == 200 * 4 + 4
    parsed = json.loads(report.to_json())
    assert parsed["ok"] and parsed["schedule"] == schedule and len(parsed["kernels"]) == 2
    assert "scale" in str(report) and "sum" in str(report)


def test_inline_ptx_register_arrays_and_printf(capsys):
    import emulator_kernels as kernels

    x = torch.arange(7, 39, dtype=torch.int32)
    out = torch.zeros_like(x)
    report = emulator.run(kernels.inline, x, out, 5)
    assert report.ok, str(report)
    up = torch.tensor([-(-100 // v) * v for v in x.tolist()], dtype=torch.int32)
    assert torch.equal(out, up + 10 * (x % 5))
    assert capsys.readouterr().out == "lane 3 has 100\n"


@pytest.mark.parametrize("variant", ["v0", "v2", "v5"])
def test_schedules_change_nothing_in_a_correct_kernel(variant):
    """Bit for bit the same result, whatever lands when, and the same run again from the same seed."""
    module = importlib.import_module(f"cute_matmul.variants.{variant}")
    torch.manual_seed(0)
    a, b = torch.randn(200, 136, dtype=torch.float16), torch.randn(136, 264, dtype=torch.float16)
    arguments = (a, b, torch.zeros(200, 264, dtype=torch.float16), emulator.stream(), module.DEFAULT)
    program = emulator.Program.of(module.host, *arguments)
    results, steps = [], []
    for schedule, seed in [("round_robin", 0), ("random", 1), ("random", 1), ("random", 2), ("adversarial", 0)]:
        arguments[2].zero_()
        report = emulator.run(program, *arguments, schedule=schedule, seed=seed)
        assert report.ok, str(report)
        results.append(arguments[2].clone())
        steps.append(report.steps)
    assert all(torch.equal(results[0], r) for r in results)
    assert steps[1] == steps[2]
    error = (results[0].float() - a.float() @ b.float()).abs().max().item()
    assert error < 0.05
    roles = set(report.counts)
    expected = {"v0": {"load+mma", "mma"}, "v2": {"load+mma", "mma"}, "v5": {"producer", "consumer 0", "consumer 1"}}
    assert roles == expected[variant]
    assert report.flops >= 2 * 200 * 264 * 136


def test_host_functions_that_are_no_host_functions_are_refused():
    with pytest.raises(TypeError, match="host_fn must be"):
        emulator.run(3, torch.zeros(1))
    with pytest.raises(ValueError, match="schedule"):
        emulator.run(lambda: None, schedule="fastest")
