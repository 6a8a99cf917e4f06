"""TileConfig, and the arithmetic on registers and shared memory beside what the compiler and the host code say."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import cases
import pytest

from cute_matmul import compile as compiling
from cute_matmul import inspection, registry
from cute_matmul.compile import compile_kernel
from cute_matmul.config import (
    MAX_REGISTERS,
    NON_ACCUMULATOR_REGISTERS,
    SMEM_CAPACITY,
    WARP_GROUP,
    WGMMA_ROWS,
    Resources,
    TileConfig,
    tx_bytes,
)
from cute_matmul.variants import v1

ONE_WARP_GROUP = Resources(threads=128)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("128x128x64", TileConfig((128, 128, 64))),
        ("64x128x16,stages=4", TileConfig((64, 128, 16), 4)),
        ("128x256x64,stages=3,cluster=2x1,raster=8", TileConfig((128, 256, 64), 3, (2, 1), 8)),
        (" 128x128x64,raster=4 ", TileConfig((128, 128, 64), raster_group=4)),
    ],
)
def test_text(text, config):
    assert TileConfig.parse(text) == config
    assert str(config) == text.strip()


def test_every_config_reads_back_from_its_text_and_is_held_by_an_sm():
    for variant, config in cases.configs():
        resources = registry.get(variant).load().RESOURCES
        assert TileConfig.parse(str(config)) == config
        assert resources.refusal(config) is None
        assert resources.smem_bytes(config) <= SMEM_CAPACITY
    for variant in cases.variants():
        module = registry.get(variant).load()
        assert module.DEFAULT in module.SPACE and len(set(module.SPACE)) == len(module.SPACE)


@pytest.mark.parametrize(
    "text", ["", "128x128", "128x128x64x2", "128x128x64 s3", "128x128x64,stages", "axbxc", "-1x2x3"]
)
def test_text_that_is_no_config(text):
    with pytest.raises(ValueError, match=r"config must look like 128x128x64,stages=3,cluster=2x1,raster=8, got "):
        TileConfig.parse(text)


def test_text_with_an_unknown_key():
    with pytest.raises(ValueError, match=r"config key must be one of stages, cluster, raster, got 'depth'"):
        TileConfig.parse("128x128x64,depth=3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((128, 128),), "tile_shape_mnk must be 3 positive integers, got (128, 128)"),
        (((128, 128, 0),), "tile_shape_mnk must be 3 positive integers, got (128, 128, 0)"),
        (((128, 128, 64.0),), "tile_shape_mnk must be 3 positive integers, got (128, 128, 64.0)"),
        (((128, 128, 64), 0), "num_stages must be a positive integer, got 0"),
        (((128, 128, 64), 2, (0, 1)), "cluster_shape_mn must be 2 positive integers, got (0, 1)"),
        (((128, 128, 64), 2, (1, 1), -8), "raster_group must be a positive integer, got -8"),
    ],
)
def test_wrong_values(arguments, message):
    with pytest.raises(ValueError) as caught:
        TileConfig(*arguments)
    assert str(caught.value) == message


def test_text_with_a_value_that_is_not_accepted():
    with pytest.raises(ValueError, match=r"num_stages must be a positive integer, got 0"):
        TileConfig.parse("128x128x64,stages=0")
    with pytest.raises(ValueError, match=r"cluster_shape_mn must be 2 positive integers, got \(2,\)"):
        TileConfig.parse("128x128x64,cluster=2")


def test_frozen_and_plain():
    config = TileConfig((128, 128, 64), 3)
    with pytest.raises(FrozenInstanceError):
        config.num_stages = 4
    assert TileConfig(**config.as_dict()) == config


def test_tx_bytes():
    assert tx_bytes(TileConfig((128, 128, 64))) == 2 * 128 * 64 * 2
    assert tx_bytes(TileConfig((64, 128, 16), 4)) == (64 + 128) * 16 * 2


# What an SM cannot hold

WIDE = {(128, 256): 256, (256, 128): 256, (256, 256): 512}


@pytest.mark.parametrize(("tile_mn", "registers"), WIDE.items())
@pytest.mark.parametrize("variant", ["v0", "v1", "v2"])
def test_wide_tiles_are_refused_with_their_registers(variant, tile_mn, registers):
    config = TileConfig((*tile_mn, 64), num_stages=2 if variant == "v2" else 1)
    resources = registry.get(variant).load().RESOURCES
    assert resources.accumulator_registers(config) == registers == tile_mn[0] * tile_mn[1] // WARP_GROUP
    assert registers + NON_ACCUMULATOR_REGISTERS > MAX_REGISTERS
    with pytest.raises(ValueError, match=rf"needs {registers} accumulator registers a thread over 128 threads"):
        compile_kernel(variant, config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TileConfig((96, 128, 64)), f"tile_m must be a multiple of {WGMMA_ROWS}"),
        (TileConfig((64, 100, 64)), "tile_n must be a multiple of 8 up to 256"),
        (TileConfig((64, 264, 64)), "tile_n must be a multiple of 8 up to 256"),
        (TileConfig((64, 128, 24)), "tile_k must be a multiple of 16"),
        (TileConfig((128, 128, 64), 8), "needs 262208 bytes of shared memory; a CTA has 232448"),
    ],
)
def test_refusals(config, reason):
    assert reason in ONE_WARP_GROUP.refusal(config)


@pytest.mark.parametrize("tile_n", [160, 176, 192])
def test_what_nine_warps_leave_a_thread(tile_n, all_configs):
    """168 registers, not 65536 / 288: the compiler spills where the arithmetic refuses, and only there."""
    resources = registry.get("v4").load().RESOURCES
    config = TileConfig((256, tile_n, 64), 3)
    assert f"each of {resources.threads} threads has 168 in all" in resources.refusal(config)
    assert resources.refusal(TileConfig((256, 128, 64), 3)) is None
    limit = resources.register_limit()
    assert inspection.ctas_per_sm(resources.threads, limit, 0)[0] == 1
    assert inspection.ctas_per_sm(resources.threads, limit + 8, 0)[0] == 0
    if tile_n == 160 or all_configs:
        if inspection.find_disassembler() is None:
            pytest.skip(inspection.NO_DISASSEMBLER)
        facts = {"variant": "v4", "config": str(config), "dtype": "float16", "a_major": "k", "b_major": "k"}
        kernel = compiling._compile(registry.get("v4").load(), config, facts)
        assert inspection.spills(kernel) > 1000
        assert inspection.resources(kernel.cubin, kernel.symbol)[0] <= limit


def test_the_last_stage_that_fits():
    assert ONE_WARP_GROUP.refusal(TileConfig((128, 128, 64), 7)) is None
    two_groups = Resources(threads=256, warp_groups=2, barriers_per_stage=2)
    assert two_groups.refusal(TileConfig((128, 256, 64), 4)) is None
    assert two_groups.accumulator_registers(TileConfig((128, 256, 64))) == 128


def test_smem_of_an_epilogue_buffer():
    resources = Resources(threads=544, warp_groups=4, barriers_per_stage=2, other_barriers=7, epilogue_fraction=4)
    config = TileConfig((256, 256, 64), 3)
    assert resources.smem_bytes(config) == 3 * 512 * 64 * 2 + 256 * 256 * 2 // 4 + 13 * 8


# The compiler and the host code agree


def sampled(all_configs: bool, variant: str) -> list[TileConfig]:
    module = registry.get(variant).load()
    return list(module.SPACE) if all_configs else [module.DEFAULT]


@pytest.mark.parametrize("variant", cases.variants())
def test_registers_are_what_the_compiler_reports(variant, all_configs):
    resources = registry.get(variant).load().RESOURCES
    for config in sampled(all_configs, variant):
        kernel = compile_kernel(variant, config)
        registers, _ = inspection.resources(kernel.cubin, kernel.symbol)
        accumulators = resources.accumulator_registers(config)
        assert accumulators < registers <= accumulators + NON_ACCUMULATOR_REGISTERS, config
        ctas, _ = inspection.ctas_per_sm(kernel.threads, registers, kernel.smem_bytes)
        assert ctas >= resources.ctas_asked_for(config), config
        assert kernel.threads == resources.threads


@pytest.mark.parametrize("variant", [name for name in cases.variants() if name != "v0"])
def test_accumulators_are_the_registers_that_wgmma_names(variant):
    kernel = compile_kernel(variant)
    named = set()
    for operands in re.findall(r"wgmma\.mma_async\S+\s*\{([^}]*)\}", kernel.ptx):
        named.update(re.findall(r"%\w+", operands))
    resources = registry.get(variant).load().RESOURCES
    assert len(named) == resources.accumulator_registers(kernel.config)


@pytest.mark.parametrize("variant", cases.variants())
def test_smem_threads_and_grid_are_what_the_host_code_launches(variant, all_configs):
    from cute_matmul.emulator.host import Program

    module = registry.get(variant).load()
    for config in sampled(all_configs, variant):
        kernel = compile_kernel(variant, config)
        a, b = cases.operands(520, 264, 128, "float16", ("k", "k"), "cpu")
        out = cases.Output.contiguous(520, 264, "float16", "cpu")
        launches = []
        Program.of(kernel).run(a, b, out.tensor, on_launch=launches.append)
        (launch,) = launches
        assert launch.smem_bytes == kernel.smem_bytes, config
        assert launch.block == (kernel.threads, 1, 1)
        assert launch.kernel == kernel.symbol and f"matmul_{variant}_kernel" in kernel.symbol
        tile_m, tile_n, _ = config.tile_shape_mnk
        tiles = (-(-520 // tile_m), -(-264 // tile_n))
        grid = (*tiles, 1) if module.RESOURCES.grid_dims == 2 else (tiles[0] * tiles[1], 1, 1)
        assert launch.grid == grid, config


@pytest.mark.parametrize("tile_mn", WIDE)
def test_the_compiler_spills_where_the_arithmetic_refuses(tile_mn, all_configs):
    """V1 as it is, compiled past the refusal."""
    if tile_mn == (256, 256) and not all_configs:
        pytest.skip("takes a minute to compile: --all-configs")
    if inspection.find_disassembler() is None:
        pytest.skip(inspection.NO_DISASSEMBLER)
    config = TileConfig((*tile_mn, 16))
    facts = {"variant": "v1", "config": str(config), "dtype": "float16", "a_major": "k", "b_major": "k"}
    kernel = compiling._compile(v1, config, facts)
    assert inspection.spills(kernel) > 100
    registers, local_bytes = inspection.resources(kernel.cubin, kernel.symbol)
    assert registers >= MAX_REGISTERS - 1 and local_bytes > 0
    assert inspection.spills(compile_kernel("v1")) == 0
