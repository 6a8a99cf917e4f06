"""The cases of operands.json through `matmul(..., backend="emulator")`: right, or refused in so many words.

Few kernels by default, since each takes a second to compile; every type, major order, view and configuration of
every variant, and the large shapes whole, with --all-configs.
"""

from __future__ import annotations

from itertools import product

import cases
import pytest
import torch

from cute_matmul import launch, registry
from cute_matmul.launch import emulate

QUICK_MULTIPLY_ADDS = 5e7  # what the emulator does in well under a second
LARGE = ("v1", registry.BUILTIN_DEFAULT)  # for the larger shapes: a grid of two dimensions, and a TileOrder
ENOUGH_K = 72  # of a larger shape: one k_tile and a tail; its tiles are what it is for

variants = pytest.mark.parametrize("variant", cases.variants())


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setenv(launch.EMULATOR_LIMIT_VARIABLE, "0")  # only what insists on the emulator may run


def small(variant: str, shape: cases.Shape) -> bool:
    tile_m, tile_n, _ = registry.get(variant).load().DEFAULT.tile_shape_mnk
    return (shape.m + tile_m) * (shape.n + tile_n) * shape.k <= QUICK_MULTIPLY_ADDS


def shape_rows(everything: bool):
    for variant in cases.variants():
        for index, shape in enumerate(cases.SHAPES):
            if everything:
                rows = [(shape.k, *row) for row in product(cases.DTYPES, cases.MAJORS)]
            elif small(variant, shape):
                rows = [(shape.k, *cases.quick(variant)[index % 2])]
            elif variant in LARGE:
                rows = [(ENOUGH_K, *cases.quick(variant)[index % 2])]
            else:
                rows = []
            for k, dtype, majors in rows:
                yield pytest.param(
                    variant, (shape.m, shape.n, k), dtype, majors, id=f"{variant}-{shape.m}x{shape.n}x{k}-{dtype}"
                )


def config_rows(everything: bool):
    for variant in cases.variants():
        space = registry.get(variant).load().SPACE
        for index, config in enumerate(space if everything else space[:1]):
            for dtype, majors in cases.sample(index, 1) if everything else cases.quick(variant)[1:]:
                if dtype in cases.accepted_dtypes(variant):
                    yield pytest.param(variant, config, dtype, majors, id=f"{variant}-{config}")


def view_rows(everything: bool):
    for index, view in enumerate(cases.VIEWS):
        # Outputs are stored by each thread, or by TMA; operands are read alike by all.
        few = ("v2", "v6") if view.argument == "out" else ("v2",)
        for variant in cases.variants() if everything else few:
            for dtype in cases.DTYPES if everything else ("float16",):
                yield pytest.param(variant, view, dtype, id=f"{variant}-{view}-{dtype}-{index}")


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--all-configs")
    names = metafunc.fixturenames
    if "mnk" in names:
        metafunc.parametrize(("variant", "mnk", "dtype", "majors"), list(shape_rows(everything)))
    elif "config" in names:
        metafunc.parametrize(("variant", "config", "dtype", "majors"), list(config_rows(everything)))
    elif "view" in names:
        metafunc.parametrize(("variant", "view", "dtype"), list(view_rows(everything)))


def test_shape(variant, mnk, dtype, majors):
    a, b = cases.operands(*mnk, dtype, majors, "cpu")
    cases.check_product(a, b, variant=variant, backend="emulator")


def test_config(variant, config, dtype, majors):
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    m, n = tile_m + 8, tile_n + 16
    for tiles in sorted({1, config.num_stages, 2 * config.num_stages + 1}):
        a, b = cases.operands(m, n, tiles * tile_k - 8, dtype, majors, "cpu")
        cases.check_product(a, b, variant=variant, config=config, backend="emulator")


def test_view(variant, view, dtype):
    cases.check_view(view, dtype, "cpu", variant=variant, backend="emulator")


@pytest.mark.parametrize("name", cases.NEIGHBOURS)
def test_windows_of_one_buffer(name):
    cases.check_neighbours(name, "float16", "cpu", variant="v2", backend="emulator")


@variants
def test_ones(variant):
    cases.check_ones(variant, "float16", "cpu", backend="emulator")


@variants
def test_precision_of_the_accumulators(variant):
    """In fp32 nothing is lost; in fp16, where a variant says so, the ones are: the case tells the two apart."""
    if cases.accumulates_fp32(variant):
        cases.check_accumulation(variant, "float16", "cpu", backend="emulator")
    else:
        with pytest.raises(AssertionError):
            cases.check_accumulation(variant, "float16", "cpu", backend="emulator")


@variants
def test_nonfinite_values(variant):
    cases.check_nonfinite(variant, "float16", "cpu", backend="emulator")


@variants
def test_the_same_bits_in_any_order_of_events(variant):
    a, b = cases.operands(72, 136, 328, "float16", ("k", "n"), "cpu")
    first = None
    for schedule, seed in (("round_robin", 0), ("random", 1), ("adversarial", 2)):
        out = torch.full((72, 136), float("nan"), dtype=a.dtype)
        _, report = emulate(a, b, out=out, variant=variant, schedule=schedule, seed=seed)
        assert report.ok, report
        bits = out.view(torch.int16)
        first = bits if first is None else first
        assert torch.equal(bits, first)
