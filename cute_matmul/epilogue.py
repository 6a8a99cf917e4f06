"""Epilogues: accumulators to global memory.

`store_direct` writes each thread's accumulators straight from registers. Nothing outside the output is written
whatever its extents and strides: a tile that crosses the edge is stored element by element, under a mask.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import AddressSpace

from . import hopper


@hopper.traced("epilogue")
@cute.jit
def store_direct(
    thr_mma: cute.core.ThrMma,
    acc: cute.Tensor,
    mC: cute.Tensor,
    tile_mn: cutlass.Constexpr[tuple[int, int]],
    coord_mn: tuple,
):
    """Convert this thread's accumulators to mC's 16-bit type and store those that lie inside mC.

    acc is the thread's fragment of a tile_mn tile, mC the whole (M, N) output with unit stride along N, coord_mn
    the tile's index. MMA fragments hold neighbours of a row in pairs, so a whole tile is stored as 32-bit words
    where the output's address and row stride are even; everything else goes one element at a time.
    """
    out = cute.make_rmem_tensor_like(acc, mC.element_type)
    out.store(acc.load().to(mC.element_type))

    rows, columns = mC.shape
    whole = (coord_mn[0] + 1) * tile_mn[0] <= rows and (coord_mn[1] + 1) * tile_mn[1] <= columns
    row_stride = mC.stride[0]
    if whole and row_stride % 2 == 0 and mC.iterator.toint() % 4 == 0:
        # What the branch has found is said to the copy, which then moves words. Their places are those of the
        # thread's first element and offsets known now: computed one by one they would take 128 registers.
        word_ptr = cute.make_ptr(mC.element_type, mC.iterator.toint(), AddressSpace.gmem, assumed_align=4)
        mW = cute.make_tensor(word_ptr, cute.make_layout(mC.shape, stride=(cute.assume(row_stride, divby=2), 1)))
        cute.autovec_copy(out, thr_mma.partition_C(cute.local_tile(mW, tile_mn, coord_mn)))
    else:
        tiles = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, coord_mn)
        tCcC = thr_mma.partition_C(tiles)  # the (m, n) of each accumulator, same shape as acc
        tCgC = thr_mma.partition_C(cute.local_tile(mC, tile_mn, coord_mn))
        for i in cutlass.range(cute.size(out), unroll_full=True):
            if cute.elem_less(tCcC[i], mC.shape):
                tCgC[i] = out[i]
