"""Tile configurations, and the arithmetic that says which of them a Hopper SM can hold.

Nothing here imports the DSL: every refusal is known before anything is traced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

SMEM_CAPACITY = 227 * 1024
"""Bytes of shared memory one CTA may use on sm_90 (CUDA C++ Programming Guide, compute capability 9.0)."""

MAX_REGISTERS = 255
"""Registers a thread can address (same source); accumulators beyond what is left of them spill."""

WARP = 32

WARP_GROUP = 128
"""Threads of a warp group, the unit that issues one WGMMA (PTX ISA, wgmma)."""

WGMMA_ROWS = 64
"""Rows of D that one warp group's WGMMA computes (PTX ISA, wgmma.mma_async: m64nNk16)."""

BARRIER_BYTES = 8
"""Size of one mbarrier object (PTX ISA, mbarrier)."""

NON_ACCUMULATOR_REGISTERS = 40
"""Registers a thread is reckoned to need beside its accumulators: descriptors, coordinates, loop state, the epilogue.

With 128 accumulators that makes 168, the most that lets three CTAs of 128 threads share an SM.
"""

LEAST_OTHER_REGISTERS = 24
"""Fewer than any of the variants needs beside its accumulators, as compiled: 26 in V1 to V6 (one configuration 27), 27
to 75 in V0, which keeps operands in registers too."""

# Per SM of compute capability 9.0: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"; allocation granularities: `cuda_occupancy.h` of the CUDA toolkit 13.0, with which `ctas_per_sm`
# agreed on all of 184,320 combinations of threads, registers and shared memory.
SM_THREADS = 2048
SM_CTAS = 32
SM_REGISTERS = 65536
SM_PARTITIONS = 4
SM_SMEM = 228 * 1024
CTA_RESERVED_SMEM = 1024
SMEM_GRANULE = 128
REGISTER_GRANULE = 256
"""32-bit registers; a warp is given a multiple of these."""


@dataclass(frozen=True)
class TileConfig:
    """How one CTA cuts the problem.

    tile_shape_mnk: elements of C per CTA (M, N), and K elements per stage.
    num_stages: slots of the operand ring in shared memory.
    cluster_shape_mn: CTAs of a cluster along M and N.
    raster_group: tiles along M that are walked together before N advances (1: one row of tiles after another).
    """

    tile_shape_mnk: tuple[int, int, int]
    num_stages: int = 1
    cluster_shape_mn: tuple[int, int] = (1, 1)
    raster_group: int = 1

    def __post_init__(self) -> None:
        for name, length in (("tile_shape_mnk", 3), ("cluster_shape_mn", 2)):
            value = getattr(self, name)
            if len(value) != length or any(not isinstance(v, int) or v < 1 for v in value):
                raise ValueError(f"{name} must be {length} positive integers, got {value!r}")
        for name in ("num_stages", "raster_group"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")

    def __str__(self) -> str:
        text = "x".join(map(str, self.tile_shape_mnk))
        if self.num_stages != 1:
            text += f",stages={self.num_stages}"
        if self.cluster_shape_mn != (1, 1):
            text += f",cluster={self.cluster_shape_mn[0]}x{self.cluster_shape_mn[1]}"
        if self.raster_group != 1:
            text += f",raster={self.raster_group}"
        return text

    @classmethod
    def parse(cls, text: str) -> TileConfig:
        """Read `str(config)` back: "128x128x64,stages=3,cluster=2x1,raster=8" (all but the tile optional).

        Raises ValueError with the text and the accepted form.
        """
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)((?:,[a-z]+=[\dx]+)*)", text.strip())
        names = {"stages": "num_stages", "cluster": "cluster_shape_mn", "raster": "raster_group"}
        if not match:
            raise ValueError(f"config must look like 128x128x64,stages=3,cluster=2x1,raster=8, got {text!r}")
        config = cls(tuple(int(v) for v in match.groups()[:3]))  # type: ignore[arg-type]
        for item in filter(None, match.group(4).split(",")):
            key, _, value = item.partition("=")
            if key not in names:
                raise ValueError(f"config key must be one of {', '.join(names)}, got {key!r} in {text!r}")
            parsed = tuple(int(v) for v in value.split("x"))
            config = replace(config, **{names[key]: parsed if key == "cluster" else parsed[0]})
        return config

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def tx_bytes(config: TileConfig, element_bytes: int = 2) -> int:
    """Bytes that land in one stage: an A tile and a B tile. What its full barrier expects."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    return (tile_m + tile_n) * tile_k * element_bytes


def ctas_per_sm(threads: int, registers: int, smem_bytes: int) -> tuple[int, str]:
    """(CTAs that fit one sm_90 SM at once, what stops one more), by arithmetic.

    threads: per CTA; registers: 32-bit, per thread; smem_bytes: static and dynamic, per CTA. The largest
    shared-memory carve-out is assumed.
    """
    warps = -(-threads // WARP)
    warp_registers = _round_up(registers * WARP, REGISTER_GRANULE)
    # Each of the four partitions holds a quarter of the registers and takes whole warps. A CTA's warps may
    # lie anywhere, but whether one fits at all is decided as if it took the same number from each partition.
    register_warps = SM_REGISTERS // SM_PARTITIONS // warp_registers * SM_PARTITIONS
    startable = warp_registers * _round_up(warps, SM_PARTITIONS) <= SM_REGISTERS
    shared = _round_up(smem_bytes + CTA_RESERVED_SMEM, SMEM_GRANULE)
    limits = {
        "shared memory": SM_SMEM // shared,
        "registers": register_warps // warps if startable else 0,
        "threads": SM_THREADS // (warps * WARP),
        "CTA slots": SM_CTAS,
    }
    fit = min(limits.values())
    return fit, " and ".join(what for what, limit in limits.items() if limit == fit)


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


@dataclass(frozen=True)
class Resources:
    """What a variant's CTA is made of; with a TileConfig it says what the SM must provide.

    threads: threads of the CTA. warp_groups: warp groups that hold the accumulators between them.
    barriers_per_stage, other_barriers: mbarriers. accumulator_bytes: 4 for fp32, 2 for fp16.
    epilogue_fraction: the epilogue's shared buffer, as a fraction 1/n of the output tile (0: none).
    grid_dims: 2 if the grid is (m_tiles, n_tiles), 1 if a TileOrder walks it.
    max_ctas_per_sm: no more CTAs than this shall share an SM (0: as many as fit). A CTA then asks for shared memory
    that it does not use, where it would leave room for another.
    """

    threads: int
    warp_groups: int = 1
    barriers_per_stage: int = 1
    other_barriers: int = 0
    accumulator_bytes: int = 4
    epilogue_fraction: int = 0
    grid_dims: int = 2
    max_ctas_per_sm: int = 0

    def accumulator_registers(self, config: TileConfig) -> int:
        """32-bit registers per thread that hold accumulators."""
        tile_m, tile_n, _ = config.tile_shape_mnk
        return tile_m * tile_n * self.accumulator_bytes // (4 * self.warp_groups * WARP_GROUP)

    def register_limit(self) -> int:
        """Registers a thread can have, by the number of warps that share the register file."""
        # NOTE: not SM_REGISTERS / threads. A launch is checked as if every partition took the same number of warps.
        warps = _round_up(-(-self.threads // WARP), SM_PARTITIONS)
        warp_registers = SM_REGISTERS // warps // REGISTER_GRANULE * REGISTER_GRANULE
        return min(MAX_REGISTERS, warp_registers // WARP)

    def epilogue_bytes(self, config: TileConfig, element_bytes: int = 2) -> int:
        """Bytes of the epilogue's shared buffer."""
        tile_m, tile_n, _ = config.tile_shape_mnk
        return tile_m * tile_n * element_bytes // self.epilogue_fraction if self.epilogue_fraction else 0

    def smem_bytes(self, config: TileConfig, element_bytes: int = 2) -> int:
        """Bytes of shared memory a CTA asks for at launch: operand ring, epilogue buffer, barriers, reserve."""
        barriers = self.barriers_per_stage * config.num_stages + self.other_barriers
        buffers = config.num_stages * tx_bytes(config, element_bytes) + self.epilogue_bytes(config, element_bytes)
        used = buffers + barriers * BARRIER_BYTES
        if not self.max_ctas_per_sm:
            return used
        too_little = SM_SMEM // (self.max_ctas_per_sm + 1) - CTA_RESERVED_SMEM  # one more CTA would fit
        return max(used, too_little + SMEM_GRANULE)

    def ctas_asked_for(self, config: TileConfig, element_bytes: int = 2) -> int:
        """CTAs that the compiler is asked to let share an SM: by NON_ACCUMULATOR_REGISTERS, an estimate of the code."""
        registers = self.accumulator_registers(config) + NON_ACCUMULATOR_REGISTERS
        by_registers = SM_REGISTERS // (registers * self.threads)
        by_smem = SM_SMEM // (self.smem_bytes(config, element_bytes) + CTA_RESERVED_SMEM)
        return max(1, min(by_registers, by_smem))

    def refusal(self, config: TileConfig, element_bytes: int = 2) -> str | None:
        """Why an SM cannot hold this configuration, or None if it can."""
        tile_m, tile_n, tile_k = config.tile_shape_mnk
        rows = WGMMA_ROWS * self.warp_groups
        if tile_m % rows:
            return f"tile_m must be a multiple of {rows} ({WGMMA_ROWS} rows per warp group), got {tile_m}"
        if tile_n % 8 or tile_n > 256:
            return f"tile_n must be a multiple of 8 up to 256 (one WGMMA), got {tile_n}"
        if tile_k % 16:
            return f"tile_k must be a multiple of 16 (one WGMMA K step), got {tile_k}"
        registers = self.accumulator_registers(config)
        if registers + NON_ACCUMULATOR_REGISTERS > MAX_REGISTERS:
            return (
                f"{config} needs {registers} accumulator registers a thread over {self.warp_groups * WARP_GROUP} "
                f"threads; a thread has {MAX_REGISTERS} in all and {NON_ACCUMULATOR_REGISTERS} go elsewhere, so the "
                "rest would spill"
            )
        limit = self.register_limit()
        if registers + LEAST_OTHER_REGISTERS > limit:
            return (
                f"{config} needs {registers} accumulator registers a thread; each of {self.threads} threads has "
                f"{limit} in all and at least {LEAST_OTHER_REGISTERS} go elsewhere, so the rest would spill"
            )
        used = self.smem_bytes(config, element_bytes)
        if used > SMEM_CAPACITY:
            return f"{config} needs {used} bytes of shared memory; a CTA has {SMEM_CAPACITY}"
        return None
