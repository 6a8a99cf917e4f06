"""Measure what TMA tensor copies do at ragged edges, and write it to a JSON file.

    python tests/gpu_probes/tma_store_clipping.py tests/data/tensormap_clipping.json

Needs a Hopper GPU, torch with CUDA and the DSL. One CTA moves one box between shared and global memory; bytes are
compared as bytes, in the physical order of shared memory, so that clipping, fill, swizzle and the element order of a
box are all seen. Every case records which bytes changed (runs) and a SHA-256 of what the moved-to memory holds then.
`tests/test_emulator_tensormap.py` repeats each case with the emulator's model from the same deterministic contents.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import sys

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

THREADS = 128
UNTOUCHED = 0xA5
SWIZZLES = {0: (0, 4, 3), 32: (1, 4, 3), 64: (2, 4, 3), 128: (3, 4, 3)}
DTYPES = {
    "uint8": (cutlass.Uint8, 1),
    "float16": (cutlass.Float16, 2),
    "bfloat16": (cutlass.BFloat16, 2),
    "float32": (cutlass.Float32, 4),
    "int32": (cutlass.Int32, 4),
    "uint32": (cutlass.Uint32, 4),
}


@cute.kernel
def probe_kernel(
    atom: cute.CopyAtom,
    coordinates: cute.Tensor,
    contents: cute.Tensor,
    dump: cute.Tensor,
    descriptor: cute.Tensor,
    tx_bytes: cutlass.Int32,
    row: cutlass.Int32,
    column: cutlass.Int32,
    layout: cute.ComposedLayout,
    tile: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    offset: cutlass.Constexpr,
    mode: cutlass.Constexpr,
):
    """Fill shared memory with `contents`, move one box at (row, column), copy shared memory to `dump`."""
    thread, _, _ = cute.arch.thread_idx()
    box_bytes = cute.size(tile) * dtype.width // 8
    smem = SmemAllocator()
    raw = smem.allocate_array(cutlass.Uint8, box_bytes + offset, byte_alignment=1024)
    barrier = smem.allocate_array(cutlass.Int64, 1)
    buffer = cute.recast_ptr((raw + offset).align(128), swizzle_=layout.inner, dtype=dtype)
    shared = cute.make_tensor(buffer, layout.outer)
    plain = cute.make_tensor(raw + offset, cute.make_layout(box_bytes))

    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    for i in cutlass.range(thread, box_bytes, THREADS):
        plain[i] = contents[i]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()

    moved = cute.local_tile(cute.domain_offset((row, column), coordinates), tile, (0, 0))
    shared_box, global_box = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(moved, 0, 2)
    )
    if cutlass.const_expr(mode == "load"):
        if thread < 32:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, box_bytes)
            cute.copy(atom, global_box, shared_box, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
    elif cutlass.const_expr(mode == "load_map"):  # with a descriptor that the driver encoded
        maps = TensorMapManager(TensorMapUpdateMode.GMEM, 128)
        pointer = maps.get_tensormap_ptr(descriptor.iterator, cute.AddressSpace.generic)
        if thread < 32:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, tx_bytes)
            cute.copy(atom, global_box, shared_box, tma_bar_ptr=barrier, tma_desc_ptr=pointer)
        # Not forever: what the hardware counts for such a box is what is being measured.
        landed = cute.arch.mbarrier_try_wait(barrier, 0)
        for _ in cutlass.range(1000):
            landed = cute.arch.mbarrier_try_wait(barrier, 0)
        if thread == 0:
            dump[box_bytes] = cutlass.Uint8(landed)
    elif cutlass.const_expr(mode.endswith("_warp")):  # by all lanes of a warp, as the DSL leaves it to the caller
        if thread < 32:
            cute.copy(atom, shared_box, global_box)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
    else:
        if thread == 0:
            cute.copy(atom, shared_box, global_box)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_threads()
    for i in cutlass.range(thread, box_bytes, THREADS):
        dump[i] = plain[i]


@cute.jit
def probe(
    matrix: cute.Tensor,
    contents: cute.Tensor,
    dump: cute.Tensor,
    descriptor: cute.Tensor,
    tx_bytes: cutlass.Int32,
    row: cutlass.Int32,
    column: cutlass.Int32,
    tile: cutlass.Constexpr,
    swizzle: cutlass.Constexpr,
    offset: cutlass.Constexpr,
    mode: cutlass.Constexpr,
):
    """matrix (rows, columns) dynamic, contents and dump (box bytes + 16,) uint8; one launch of one CTA.

    descriptor (128,) uint8 and tx_bytes count in mode load_map only.
    """
    outer = cute.make_ordered_layout(tile, order=(1, 0))
    layout = cute.make_composed_layout(cute.make_swizzle(*SWIZZLES[swizzle]), 0, outer)
    if cutlass.const_expr(mode in ("load", "load_map")):
        op = cpasync.CopyBulkTensorTileG2SOp()
    elif cutlass.const_expr(mode.startswith("store")):
        op = cpasync.CopyBulkTensorTileS2GOp()
    else:
        op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind[mode.removesuffix("_warp").upper()])
    atom, coordinates = cpasync.make_tiled_tma_atom(op, matrix, layout, tile)
    probe_kernel(
        atom,
        coordinates,
        contents,
        dump,
        descriptor,
        tx_bytes,
        row,
        column,
        layout,
        tile,
        matrix.element_type,
        offset,
        mode,
    ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def cases() -> list[dict]:
    """Every case. tile, extents and at are (rows, columns), pitch is in elements, offset in bytes."""
    result = []

    def add(dtype, swizzle, extents, pitch, at, *, columns=None, rows=16, offset=0, modes=("load", "store")):
        itemsize = DTYPES[dtype][1]
        columns = columns or (swizzle or 128) // itemsize
        for mode in modes:
            result.append(
                {
                    "dtype": dtype,
                    "tile": [rows, columns],
                    "swizzle": swizzle,
                    "offset": offset,
                    "extents": list(extents),
                    "pitch": pitch,
                    "at": list(at),
                    "mode": mode,
                }
            )

    for swizzle in (0, 32, 64, 128):
        add("float16", swizzle, (20, 136), 136, (0, 0))
        add("float16", swizzle, (20, 45), 64, (8, 0), columns=min((swizzle or 128) // 2, 64))
    for extent in range(33, 49):  # row bytes of every residue modulo 16 and 32
        add("float16", 128, (13, extent), 64, (0, 0))
    for extent in (1, 2, 15, 16, 17, 31, 33, 127):
        add("uint8", 128, (9, extent), 128, (0, 0))
        add("uint8", 0, (9, extent), 128, (0, 0), columns=64)
    for extent in (1, 3, 4, 5, 31):
        add("float32", 128, (9, extent), 36, (0, 0))
    for at in ((-3, 0), (0, -8), (-3, -8), (16, 40), (20, 0), (0, 48), (-16, 0), (400, -400)):
        add("float16", 128, (20, 45), 64, at, modes=("load",))
        add("bfloat16", 64, (20, 45), 48, at, modes=("load",))
    for at in ((16, 40), (0, 40), (20, 0), (0, 48), (400, 400)):
        add("float16", 128, (20, 45), 64, at, modes=("store",))
    for offset in (128, 256, 512, 896):
        for swizzle in (32, 64, 128):
            add("float16", swizzle, (20, 45), 64, (3, 0), offset=offset)
    for swizzle, columns in ((128, 32), (128, 16), (128, 8), (64, 16), (64, 8), (32, 8), (0, 8)):  # narrow rows
        add("float16", swizzle, (20, 45), 64, (3, 0), columns=columns)
    for dtype in ("float16", "bfloat16", "float32", "uint8", "int32"):  # what the DSL's own encoder never asks for
        for fill in (0, 1):
            add(dtype, 128, (20, 45), 64, (10, 16), modes=("load_map",))
            result[-1].update(fill=fill, element_strides=[1, 1])
    for steps in ([1, 1], [2, 1], [3, 1], [8, 1], [1, 2], [4, 4]):
        for at in ((0, 0), (-3, -8), (13, 8)):
            add("float16", 128, (20, 45), 64, at, modes=("load_map",))
            result[-1].update(fill=0, element_strides=steps)
    for mode in ("add", "min", "max"):
        for dtype in ("float16", "bfloat16", "int32", "uint32"):
            add(dtype, 64, (13, 27), 32, (2, 0), modes=(mode,))
    add("float32", 64, (13, 27), 32, (2, 0), modes=("add",))
    for dtype in ("float16", "int32"):
        add(dtype, 64, (13, 27), 32, (2, 0), modes=("store_warp", "add_warp"))
    for mode in ("inc", "dec"):
        add("uint32", 64, (13, 27), 32, (2, 0), modes=(mode,))
    for mode in ("and", "or", "xor"):
        add("int32", 64, (13, 27), 32, (2, 0), modes=(mode,))
    # What may be refused comes last: a CUDA error costs a process.
    for dtype, swizzle, at in (
        ("float16", 0, (0, 4)),
        ("float16", 0, (5, 13)),
        ("float16", 128, (0, -5)),
        ("float16", 128, (0, 1)),
        ("uint8", 0, (0, 8)),
        ("uint8", 0, (0, 4)),
        ("float32", 0, (0, 2)),
        ("float32", 0, (0, 1)),
    ):
        add(dtype, swizzle, (20, 45), 64, at, columns=64 // DTYPES[dtype][1], modes=("load",))
    for at in ((-3, 0), (0, -8), (0, 4), (5, 13)):
        add("float16", 0, (20, 45), 64, at, columns=32, modes=("store",))
    add("int32", 64, (13, 27), 32, (2, 3), modes=("add",))
    add("int32", 64, (13, 27), 32, (-2, 0), modes=("add",))
    return result


def pattern(nbytes: int, salt: int) -> np.ndarray:
    """Deterministic bytes without the value that marks memory as untouched."""
    i = np.arange(nbytes, dtype=np.uint64)
    values = ((i * 197 + (i >> 8) * 59 + salt * 31 + 17) & 0xFF).astype(np.uint8)
    values[values == UNTOUCHED] = 0x5A
    return values


def numbers(count: int, dtype: str, salt: int) -> np.ndarray:
    """Deterministic finite values of `dtype` as bytes, for the reductions."""
    i = np.arange(count, dtype=np.int64) + salt
    if dtype in ("int32", "uint32"):
        values = (i * 2654435761) % 1_000_003
        if dtype == "int32":
            values = values - 500_000
        return values.astype(np.int64).astype(np.uint32).view(np.uint8)
    values = (((i * 7919) % 2003).astype(np.float32) - 1001) / 64
    if dtype == "float32":
        return values.view(np.uint8)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # a bfloat16 by truncation


def initial(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """Global memory (rows + guard, row pitch bytes) and shared memory (box bytes) before the copy, as uint8."""
    itemsize = DTYPES[case["dtype"]][1]
    rows, columns = case["tile"]
    pitch = case["pitch"] * itemsize
    matrix_bytes = (case["extents"][0] + 4) * pitch
    box_bytes = rows * columns * itemsize
    if case["mode"].startswith("load"):
        return pattern(matrix_bytes, 1), np.full(box_bytes, UNTOUCHED, np.uint8)
    if case["mode"].startswith("store"):
        return np.full(matrix_bytes, UNTOUCHED, np.uint8), pattern(box_bytes, 2)
    return numbers(matrix_bytes // itemsize, case["dtype"], 3), numbers(box_bytes // itemsize, case["dtype"], 500)


def runs(changed: np.ndarray) -> list[list[int]]:
    """[start, stop) of every stretch of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], changed, [False])).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def outcome(case: dict, matrix: np.ndarray, shared: np.ndarray) -> dict:
    """What is recorded of the memory after the copy."""
    before = initial(case)
    loading = case["mode"].startswith("load")
    target, was = (shared, before[1]) if loading else (matrix, before[0])
    source, source_was = (matrix, before[0]) if loading else (shared, before[1])
    return {
        "changed": runs(target != was),
        "sha256": hashlib.sha256(target.tobytes()).hexdigest(),
        "source_intact": bool((source == source_was).all()),
    }


def moved_bytes(case: dict) -> int:
    """Bytes of the box after element strides (CUDA driver API: box over stride, rounded up; the inner one ignored)."""
    rows, columns = case["tile"]
    return -(-rows // case.get("element_strides", [1, 1])[0]) * columns * DTYPES[case["dtype"]][1]


def operands(case: dict, matrix: np.ndarray, shared: np.ndarray, device: str):
    """Torch tensors for one case: the matrix's storage and its view, contents, dump and (unset) descriptor."""
    import torch

    dtype = getattr(torch, case["dtype"])
    storage = torch.from_numpy(matrix.copy()).to(device)
    view = storage.view(dtype).as_strided(case["extents"], (case["pitch"], 1))
    contents = torch.from_numpy(shared.copy()).to(device)
    dump = torch.zeros(len(shared) + 16, dtype=torch.uint8, device=device)
    return storage, view, contents, dump, torch.zeros(128, dtype=torch.uint8, device=device)


def constants(case: dict) -> tuple:
    """The compile-time arguments of `probe` for a case."""
    return tuple(case["tile"]), case["swizzle"], case["offset"], case["mode"]


def driver_descriptor(case: dict, address: int) -> bytes:
    """The descriptor of a load_map case, encoded by the driver."""
    from tensormap_table import ITEMSIZE, encode

    code = {"uint8": 0, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}[case["dtype"]]
    status, encoded = encode(
        ctypes.CDLL("libcuda.so.1"),
        {
            "dtype": code,
            "address": address,
            "extents": case["extents"][::-1],
            "strides": [case["pitch"] * ITEMSIZE[code]],
            "box": case["tile"][::-1],
            "element_strides": case["element_strides"][::-1],
            "interleave": 0,
            "swizzle": {0: 0, 32: 1, 64: 2, 128: 3}[case["swizzle"]],
            "l2_promotion": 2,
            "fill": case["fill"],
        },
    )
    return bytes.fromhex(encoded).ljust(128, b"\0") if status == 0 else b""


def measure(case: dict, compiled: dict) -> dict:
    """Run one case on the GPU. A CUDA error is raised here, not later."""
    import torch
    from cutlass.cute.runtime import from_dlpack

    storage, view, contents, dump, descriptor = operands(case, *initial(case), "cuda")
    if case["mode"] == "load_map":
        encoded = driver_descriptor(case, view.data_ptr())
        if not encoded:  # NaN fill of integers, for one
            return {**case, "refused": True}
        descriptor.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
    tensors = [from_dlpack(view, assumed_align=16).mark_layout_dynamic(leading_dim=1)]
    tensors += [from_dlpack(t, assumed_align=16) for t in (contents, dump, descriptor)]
    key = (case["dtype"], *constants(case))
    if key not in compiled:
        compiled[key] = cute.compile(probe, *tensors, moved_bytes(case), *case["at"], *constants(case))
    torch.cuda.synchronize()
    compiled[key](*tensors, moved_bytes(case), *case["at"])
    torch.cuda.synchronize()
    after = dump.cpu().numpy()
    result = {**case, **outcome(case, storage.cpu().numpy(), after[:-16])}
    if case["mode"] == "load_map":
        result["landed"] = bool(after[-16])
        result["fill_bytes"] = after[:-16].tobytes().hex() if case["fill"] else ""
    return result


def worker(start: int, connection) -> None:
    """Measure the cases from `start` on and send each result; a CUDA error, which is sticky, ends the process."""
    import torch

    connection.send(torch.cuda.get_device_name())
    compiled: dict[tuple, object] = {}
    for case in cases()[start:]:
        try:
            connection.send(measure(case, compiled))
        except Exception as error:
            connection.send({**case, "error": type(error).__name__, "message": str(error).strip()[:200]})
            connection.close()
            os._exit(1)
    connection.close()


def main(path: str) -> None:
    """Measure in forked processes that share what is imported; this one never touches the GPU."""
    import torch  # noqa: F401  (once, for all the forks)

    todo, results = len(cases()), []
    context = multiprocessing.get_context("fork")
    while len(results) < todo:
        before = len(results)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(before, sender))
        process.start()
        sender.close()
        try:
            device = receiver.recv()
            while len(results) < todo:
                results.append(receiver.recv())
        except EOFError:
            pass
        process.join()
        if len(results) == before:  # it died without a word
            results.append({**cases()[before], "error": "died", "message": f"exit status {process.exitcode}"})
        write(path, device, results)
    failed = [result for result in results if "error" in result]
    print(f"{len(results)} cases to {path}, {len(failed)} of them CUDA errors")
    for result in failed:
        print(json.dumps(result))


def write(path: str, device: str, results: list[dict]) -> None:
    with open(path, "w") as file:
        file.write(json.dumps({"device": device})[:-1] + ', "cases": [\n')
        file.write(",\n".join(json.dumps(result) for result in results) + "\n]}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
