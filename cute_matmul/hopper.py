"""The DSL names that move between releases, wrapped once: tiled MMAs, shared-memory layouts, TMA atoms.

Everything here takes and returns CuTe objects inside a trace; nothing launches or allocates on its own.
Shapes follow the variants' kernels: A is (M, K), B is (N, K), C is (M, N).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import cutlass_dsl as dsl
from cutlass.cute.experimental import iket
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from .config import WGMMA_ROWS

WGMMA_K = 16  # K extent of one 16-bit WGMMA
BUFFER_ALIGN = 1024  # bytes: a 128-byte swizzle repeats every 8 rows of 128 bytes, and TMA counts from there


def is_dsl_value(value: Any) -> bool:
    """Whether a value is the DSL's, in a kernel; the state of pipeline.py and scheduler.py also runs on plain ints."""
    return isinstance(value, cutlass.Numeric)


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Branch-free choice between 32-bit values, the DSL's or plain ones."""
    if is_dsl_value(condition):
        return cutlass.Int32(dsl.select_(condition, cutlass.Int32(if_true), cutlass.Int32(if_false)))
    return if_true if condition else if_false


@contextmanager
def traced(name: str) -> Iterator[None]:
    """Name what a warp does in this function, or in this `with`, for a timeline recorded on a GPU (perf/timeline.py).

    The ranges of a warp nest. They are compiled away, to the same PTX as without them, unless the DSL's in-kernel
    event tracing is on (run-iket, or "iket" in CUTE_DSL_COMPILER_OPT).
    """
    iket.range_push(name)
    yield
    iket.range_pop()


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The same elements with the two modes exchanged: B as torch has it, (K, N), becomes (N, K)."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0]))


def is_k_major(tensor: cute.Tensor) -> bool:
    """Whether an (M, K) or (N, K) tensor has its unit stride along K. A trace-time fact."""
    return LayoutEnum.from_tensor(tensor).is_k_major_a()


def mma_major(tensor: cute.Tensor) -> OperandMajorMode:
    """The WGMMA major mode of an (M, K) or (N, K) operand."""
    return OperandMajorMode.K if is_k_major(tensor) else OperandMajorMode.MN


def smem_layout(tensor: cute.Tensor, tile: tuple[int, int], num_stages: int) -> cute.ComposedLayout:
    """Swizzled shared-memory layout of an operand tile: (tile_mn, tile_k, num_stages).

    The widest swizzle that the contiguous extent allows (128, 64 or 32 bytes), as WGMMA's matrix descriptor,
    TMA's box and ldmatrix all understand it. The contiguous extent follows the operand's major order.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    k_major = is_k_major(tensor)
    row_bytes = tile[1 if k_major else 0] * tensor.element_type.width // 8
    if k_major:
        widest_first = ((128, kinds.K_SW128), (64, kinds.K_SW64), (32, kinds.K_SW32))
    else:
        widest_first = ((128, kinds.MN_SW128), (64, kinds.MN_SW64), (32, kinds.MN_SW32))
    kind = next(kind for width, kind in widest_first if row_bytes % width == 0)
    atom = warpgroup.make_smem_layout_atom(kind, tensor.element_type)
    order = (0, 1, 2) if k_major else (1, 0, 2)
    return cute.tile_to_shape(atom, (*tile, num_stages), order=order)


def tma_load(tensor: cute.Tensor, layout: cute.ComposedLayout, tile: tuple[int, int]) -> cpasync.TmaInfo:
    """TMA atom and coordinate tensor that load `tile` of `tensor` into one stage of `layout`.

    NOTE: the coordinate tensor's element type is a coordinate: take the dtype from the operand.
    """
    one_stage = cute.slice_(layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, one_stage, tile)


def tma_slices(atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Pair shared stages with global tiles for `cute.copy`.

    shared is (tile_mn, tile_k, num_stages) and tiles (tile_mn, tile_k, k_tiles); the result is
    ((box), num_stages) and ((box), k_tiles), so that slice [(None, i)] of each is one copy.
    """
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def wgmma(
    mA: cute.Tensor, mB: cute.Tensor, tile_n: int, *, warp_groups: int = 1, acc_dtype=cutlass.Float32
) -> cute.TiledMma:
    """Tiled WGMMA over `warp_groups` stacked along M, both operands from shared memory (m64 x tile_n x k16)."""
    op = warpgroup.MmaF16BF16Op(
        mA.element_type,
        acc_dtype,
        (WGMMA_ROWS, tile_n, WGMMA_K),
        warpgroup.OperandSource.SMEM,
        mma_major(mA),
        mma_major(mB),
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (warp_groups, 1, 1))


def mma_sync(dtype: type, warps_mn: tuple[int, int], tile_n: int) -> cute.TiledMma:
    """Tiled mma.sync m16n8k16 over warps_mn warps, fp32 accumulation, for tiles tile_n wide.

    A warp's blocks of 8 columns lie side by side: so one ldmatrix.x4 of B feeds two instructions, and what a warp
    stores of a row is one piece.
    """
    op = warp.MmaF16BF16Op(dtype, cutlass.Float32, (16, 8, 16))
    columns = tile_n // warps_mn[1]
    order = cute.make_layout((8, warps_mn[1], columns // 8), stride=(1, columns, 8))
    return cute.make_tiled_mma(op, cute.make_layout((*warps_mn, 1)), permutation_mnk=(warps_mn[0] * 16, order, 16))


def ldmatrix(tensor: cute.Tensor) -> cute.CopyAtom:
    """ldmatrix.x4 for an operand of `tensor`'s type; transposing where its major order is not K."""
    op = warp.LdMatrix8x8x16bOp(transpose=not is_k_major(tensor), num_matrices=4)
    return cute.make_copy_atom(op, tensor.element_type)


def shared_memory() -> SmemAllocator:
    """A fresh allocator over the CTA's dynamic shared memory."""
    return SmemAllocator()


def operand_buffer(smem: SmemAllocator, dtype: type, layout: cute.ComposedLayout) -> cute.Tensor:
    """Allocate an operand ring: (tile_mn, tile_k, num_stages), 1024-byte aligned, swizzled."""
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=BUFFER_ALIGN, swizzle=layout.inner)


def tma_store(tensor: cute.Tensor, tile: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor, cute.ComposedLayout]:
    """TMA atom, coordinate tensor and shared layout that store `tile` of an N-contiguous (M, N) tensor.

    Rows of the shared tile are 128 bytes, swizzled over 128: the 32-bit stores of an accumulator fragment
    (8 rows by 4 lanes) then fall in 32 different banks.
    """
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, tensor.element_type)
    layout = cute.tile_to_shape(atom, tile, order=(0, 1))
    return (*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, tile), layout)
