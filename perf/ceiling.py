"""How fast this board reads memory at all: a kernel that loads every byte once and keeps a sum.

What a memory-bound matmul is held against. Plain 16-byte loads, several in flight per thread; the best of a few
block sizes.
"""

from __future__ import annotations

import functools
from typing import Any

from perf import stats

BLOCKS = ((4096, 4), (8192, 8), (16384, 16))
"""32-bit words per program and warps of it: 8 loads of 16 bytes per thread each."""

REPLAYS = 10


def measure(device: Any, nbytes: int, sets: int) -> dict[str, Any]:
    """Bytes per second of reading `nbytes`, rotated over `sets` buffers, in one CUDA graph.

    With Triton by its own kernel; without, by torch's sum, which is slower than the memory is: `method` says which.
    """
    largest = max(block for block, _ in BLOCKS) * 4
    nbytes = -(-nbytes // largest) * largest
    buffers = [device.words(nbytes, seed) for seed in range(sets)]
    try:
        from perf import triton_kernels
    except ImportError as error:
        candidates = {f"torch.sum ({error})": lambda words: words.sum()}
    else:
        candidates = {
            f"triton, {block} words a program": functools.partial(triton_kernels.read, block=block, warps=warps)
            for block, warps in BLOCKS
        }
    best: dict[str, Any] = {}
    for method, read in candidates.items():
        read(buffers[0])
        replay = device.capture(functools.partial(_all, read, buffers))
        seconds = stats.median(device.elapsed([replay] * REPLAYS)[1:]) / len(buffers)
        if not best or nbytes / seconds > best["bytes_per_s"]:
            best = {"bytes_per_s": nbytes / seconds, "method": method, "read_bytes": nbytes, "sets": sets}
    return best


def _all(read: Any, buffers: list[Any]) -> None:
    for words in buffers:
        read(words)
