"""The pytest fixture that makes a user's test fail on a hazard or a deadlock."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

KERNELS = """
    import cutlass
    import cutlass.cute as cute
    import pytest
    import torch
    from cutlass.memory import SmemAllocator

    @cute.kernel
    def reverse_kernel(source: cute.Tensor, target: cute.Tensor, synchronise: cutlass.Constexpr):
        thread, _, _ = cute.arch.thread_idx()
        shared = SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64), byte_alignment=16)
        shared[thread] = source[thread]
        if cutlass.const_expr(synchronise):
            cute.arch.sync_threads()
        target[thread] = shared[63 - thread]

    @cute.jit
    def reverse(source: cute.Tensor, target: cute.Tensor, synchronise: cutlass.Constexpr):
        reverse_kernel(source, target, synchronise).launch(grid=[1, 1, 1], block=[64, 1, 1])

    @cute.kernel
    def wait_kernel(target: cute.Tensor):
        barrier = SmemAllocator().allocate_array(cutlass.Int64, 1)
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.mbarrier_wait(barrier, 0)
        target[0] = 1.0

    @cute.jit
    def wait(target: cute.Tensor):
        wait_kernel(target).launch(grid=[1, 1, 1], block=[32, 1, 1])

    def operands():
        return torch.arange(64.0), torch.zeros(64)
"""


TESTS = """
    from cute_matmul.emulator import Suppression

    def test_clean(emulate):
        source, target = operands()
        report = emulate(reverse, source, target, True)
        assert report.ok and report.schedule == "round_robin"
        assert torch.equal(target, source.flip(0))

    def test_schedules(emulate):
        report = emulate(reverse, *operands(), True, schedules=("round_robin", "random", "adversarial"), seed=2)
        assert (report.schedule, report.seed) == ("adversarial", 2)

    def test_keywords(emulate):
        source, target = operands()
        emulate(reverse, source=source, target=target, synchronise=True, schedule="random")
        assert torch.equal(target, source.flip(0))

    def test_arguments(emulate):
        with pytest.raises(TypeError, match="not both"):
            emulate(reverse, *operands(), True, schedule="random", schedules=("random",))
        with pytest.raises(TypeError, match="tuple or list"):
            emulate(reverse, *operands(), True, schedules="random")

    def test_accepted(emulate):
        accepted = Suppression("data-race", "", "this test is about suppression")
        report = emulate(reverse, *operands(), False, suppress=[accepted])
        assert report.suppressed and not report.hazards

    def test_race(emulate):
        emulate(reverse, *operands(), False)

    def test_race_of_a_later_schedule(emulate):
        emulate(reverse, *operands(), False, schedules=("adversarial",))

    def test_deadlock(emulate):
        emulate(wait, torch.zeros(1))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> subprocess.CompletedProcess:
    """One run of pytest, in its own process, over tests that use the fixture."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "test_user.py").write_text(textwrap.dedent(KERNELS) + textwrap.dedent(TESTS))
    command = [sys.executable, "-m", "pytest", "-v", "-W", "ignore"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", ["clean", "schedules", "keywords", "arguments", "accepted"])
def test_clean_kernels_pass(outcome, name):
    assert f"test_user.py::test_{name} PASSED" in outcome.stdout, outcome.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("race", ["under schedule round_robin", "data-race", "test_user.py:15", "test_user.py:12"]),
        ("race_of_a_later_schedule", ["under schedule adversarial", "data-race"]),
        ("deadlock", ["under schedule round_robin", "deadlock", "mbarrier"]),
    ],
)
def test_hazards_and_deadlocks_fail_the_test_with_the_report(outcome, name, said):
    assert outcome.returncode == 1
    assert f"test_user.py::test_{name} FAILED" in outcome.stdout, outcome.stdout
    section = outcome.stdout.split(f"_ test_{name} _")[1].split("\n____")[0]
    for words in said:
        assert words in section, section
    assert "Traceback" not in section and "def emulate" not in section
