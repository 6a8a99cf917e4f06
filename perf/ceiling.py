"""How fast this board reads memory at all: a kernel that loads every byte once and keeps a sum.

What a memory-bound matmul is held against. Plain 16-byte loads, several in flight per thread; the best of a few
block sizes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from perf import stats
from perf.measure import SAMPLE_S

BLOCKS = ((4096, 4), (8192, 8), (16384, 16))
"""32-bit words per program and warps of it: 8 loads of 16 bytes per thread each."""

REPLAYS = 10

GUESS_BYTES_PER_S = 4.5e12
"""Of an H200, for the length of the graph only."""


def measure(device: Any, nbytes: int, sets: int) -> dict[str, Any]:
    """Bytes per second of reading `nbytes`, rotated over `sets` buffers, in a CUDA graph of SAMPLE_S or more.

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
        # As long as a contender's graph: what a replay costs beyond its reads is then the same share of both.
        passes = math.ceil(SAMPLE_S / (len(buffers) * nbytes / GUESS_BYTES_PER_S))
        replay = device.capture(functools.partial(_all, read, buffers * passes))
        seconds = stats.median(device.elapsed([replay] * REPLAYS)[1:]) / (passes * len(buffers))
        if not best or nbytes / seconds > best["bytes_per_s"]:
            best = {"bytes_per_s": nbytes / seconds, "method": method, "read_bytes": nbytes, "sets": sets}
    return best


def _all(read: Any, buffers: list[Any]) -> None:
    for words in buffers:
        read(words)
