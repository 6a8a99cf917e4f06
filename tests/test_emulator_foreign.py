"""Kernels of another origin in the emulator: clusters with multicast, and a warp-specialised cutlass.pipeline."""

from __future__ import annotations

import pytest
import torch
from foreign_kernels import broadcast, row_sums

from cute_matmul import emulator
from cute_matmul.emulator import host

SCHEDULES = ("round_robin", "random", "adversarial")


@pytest.fixture(scope="module")
def broadcast_program():
    source, target = broadcast_operands(2)
    return host.Program.compile(broadcast, source, target, 2, host.stream())


@pytest.fixture(scope="module")
def row_sums_program():
    return host.Program.compile(row_sums, torch.zeros(256, 64), torch.zeros(256), 2, host.stream())


def broadcast_operands(cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(cluster)
    source = torch.randn(128, 192, dtype=torch.float32, generator=generator).half()
    target = torch.full((cluster, 128, 192), torch.nan, dtype=torch.float16).permute(1, 2, 0)
    return source, target


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_cta_of_a_cluster_receives_the_multicast(schedule, broadcast_program):
    source, target = broadcast_operands(2)
    report = emulator.run(broadcast_program, source, target, 2, host.stream(), schedule=schedule, seed=3)
    assert report.ok, str(report)
    for rank in range(2):
        assert torch.equal(target[:, :, rank], source)


def test_a_cluster_of_four():
    source, target = broadcast_operands(4)
    report = emulator.run(broadcast, source, target, 4, host.stream(), schedule="random", seed=1)
    assert report.ok, str(report)
    assert all(torch.equal(target[:, :, rank], source) for rank in range(4))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(256, 64), (300, 100)], ids=["whole tiles", "ragged"])
def test_a_warp_specialised_pipeline_sums_rows(schedule, shape, row_sums_program):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    sums = torch.full((shape[0],), torch.nan)
    report = emulator.run(row_sums_program, matrix, sums, 2, host.stream(), schedule=schedule, seed=3)
    assert report.ok, str(report)
    expected = torch.zeros(shape[0])
    for column in matrix.T:  # in the kernel's order, so that not a bit differs
        expected += column
    assert torch.equal(sums, expected)


def test_the_same_seed_gives_the_same_run(row_sums_program):
    matrix, sums = torch.randn(256, 64), torch.zeros(256)

    def steps(seed: int) -> int:
        return emulator.run(row_sums_program, matrix, sums, 2, host.stream(), schedule="random", seed=seed).steps

    assert steps(5) == steps(5)
    assert len({steps(seed) for seed in range(4)}) > 1


def test_bytes_of_a_multicast_count_at_every_destination():
    source, target = broadcast_operands(2)
    report = emulator.run(broadcast, source, target, 2, emulator.stream())
    assert report.bytes["TMA load"] == 2 * source.numel() * source.element_size()
