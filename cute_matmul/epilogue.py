"""Epilogues: accumulators to global memory.

`store_direct` stores from registers, without shared memory. Nothing outside the output is written whatever its extents
and strides.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.typing import AddressSpace

from . import hopper

QUAD = 4  # lanes that hold a row of an MMA's 8x8 block of sums between them
PAIR = 2  # columns of it that each has: in 16 bits a word, and a row is 16 bytes, the most that a thread stores at once


@hopper.traced("epilogue")
@cute.jit
def store_direct(
    thr_mma: cute.core.ThrMma,
    acc: cute.Tensor,
    mC: cute.Tensor,
    tile_mn: cutlass.Constexpr[tuple[int, int]],
    coord_mn: tuple,
):
    """Convert this warp's accumulators to mC's 16-bit type and store those that lie inside mC.

    acc is the thread's fragment of a tile_mn tile, mC the whole (M, N) output with unit stride along N, coord_mn
    the tile's index. What a store writes goes by the output's address, row stride and columns: 16 bytes where all are
    multiples of that, 4 bytes likewise, else one element.
    """
    out = cute.make_rmem_tensor_like(acc, mC.element_type)
    out.store(acc.load().to(mC.element_type))

    tCgC = thr_mma.partition_C(cute.local_tile(mC, tile_mn, coord_mn))
    tiles = cute.local_tile(cute.make_identity_tensor(mC.shape), tile_mn, coord_mn)
    tCcC = thr_mma.partition_C(tiles)  # the (m, n) of each accumulator, same shape as acc
    if starts_at_multiples(mC, PAIR * QUAD):
        store_rows(out, tCgC, tCcC, mC.shape)
    elif starts_at_multiples(mC, PAIR):
        store_each(pairs(out), pairs(tCgC), by_block(tCcC)[0, None, None, None], mC.shape)
    else:
        store_each(out, tCgC, tCcC, mC.shape)


def starts_at_multiples(mC: cute.Tensor, elements: int) -> cutlass.Boolean:
    """Whether every row begins, and ends, at a multiple of so many elements, a power of two."""
    address = mC.iterator.toint() // (mC.element_type.width // 8)
    return (mC.shape[1] | mC.stride[0] | address) % elements == 0


@cute.jit
def store_each(values: cute.Tensor, places: cute.Tensor, where: cute.Tensor, shape: tuple):
    """Store the values whose (m, n) in `where` lie inside `shape`."""
    for i in cutlass.range(cute.size(values), unroll_full=True):
        if cute.elem_less(where[i], shape):
            places[i] = values[i]


@cute.jit
def store_rows(out: cute.Tensor, tCgC: cute.Tensor, tCcC: cute.Tensor, shape: tuple):
    """Store a fragment 16 bytes at a time: of four blocks along N each lane of a quad stores the row of one.

    Stored as the MMA leaves them, in pairs, they would take four times as many instructions, each through the same
    eight rows. So the quad exchanges: a lane gives its pairs of three blocks away and gets the other three of the
    fourth. All four lanes take part, whatever the output's extents; a row of a block is inside or outside as a whole.
    """
    words, places, where = pairs(out), by_block(tCgC), by_block(tCcC)
    _, halves, m_blocks, n_blocks = places.shape
    if cutlass.const_expr(n_blocks % QUAD):  # too narrow a tile to exchange
        store_each(words, pairs(tCgC), where[0, None, None, None], shape)
    else:
        _, to_half, to_m, to_n = places.stride
        lane = cute.arch.lane_idx() % QUAD
        shift = lane * (to_n - PAIR)  # columns from this lane's own pair to the row that it stores
        # One address, of the first row that this lane stores; the rest are offsets from it, most of them known now. An
        # address for each row would cost registers.
        first = places.iterator.toint() + shift * (out.element_type.width // 8)
        rows = cute.make_tensor(
            cute.make_ptr(out.element_type, first, AddressSpace.gmem, assumed_align=16),
            cute.make_layout((PAIR * QUAD, halves, m_blocks, n_blocks // QUAD), stride=(1, to_half, to_m, QUAD * to_n)),
        )
        row = cute.make_rmem_tensor(QUAD, cutlass.Int32)
        for m in cutlass.range_constexpr(m_blocks):
            for n in cutlass.range_constexpr(n_blocks // QUAD):
                for half in cutlass.range_constexpr(halves):
                    exchange([words[half, m, QUAD * n + i] for i in range(QUAD)], row, lane)
                    at_m, at_n = where[0, half, m, QUAD * n]
                    if cute.elem_less((at_m, at_n + shift), shape):
                        cute.autovec_copy(cute.recast_tensor(row, out.element_type), rows[None, half, m, n])


def pairs(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment of 16-bit elements as words of two columns: (rows r and r + 8, blocks along M, blocks along N)."""
    blocks = by_block(fragment)
    if blocks.memspace == AddressSpace.gmem:
        address = blocks.iterator.toint()
        pointer = cute.make_ptr(fragment.element_type, address, AddressSpace.gmem, assumed_align=4)
        blocks = cute.make_tensor(pointer, blocks.layout)
    return cute.recast_tensor(blocks, cutlass.Int32)[0, None, None, None]


def by_block(fragment: cute.Tensor) -> cute.Tensor:
    """An accumulator fragment as (columns of a pair, rows r and r + 8, blocks along M, blocks of 8 columns along N).

    WGMMA has the blocks along N inside the instruction, ((2, 2, N), M, 1), mma.sync outside, ((2, 2), M, N).
    """
    (pair, half, *inside), m, n = fragment.shape
    (to_column, to_half, *to_inside), to_m, to_n = fragment.stride
    if inside:
        if n != 1:
            raise ValueError(f"acc must be of one WGMMA along N, got a fragment of shape {fragment.shape}")
        n, to_n = inside[0], to_inside[0]
    layout = cute.make_layout((pair, half, m, n), stride=(to_column, to_half, to_m, to_n))
    return cute.make_tensor(fragment.iterator, layout)


def exchange(words: list[cutlass.Int32], row: cute.Tensor, lane: cutlass.Int32) -> None:
    """Transpose the 4x4 words of a quad: word i of `row` becomes word number `lane` of lane i."""
    for distance in (1, 2):
        upper = lane & distance != 0
        for i in range(QUAD):
            j = i | distance
            if i != j:
                # The lower lane of a pair keeps word i and gives word j for the upper's word i.
                got = cute.arch.shuffle_sync_bfly(hopper.select(upper, words[i], words[j]), distance)
                words[i], words[j] = hopper.select(upper, got, words[i]), hopper.select(upper, words[j], got)
    for i, word in enumerate(words):
        row[i] = word
