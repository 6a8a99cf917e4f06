"""The SM clock of the moment, as an SM counts it: cycles over nanoseconds of some tens of microseconds.

What NVML reads follows only after tens of milliseconds; a burst is over by then.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

READS = 2000
"""Readings of both counters, one after another: some 40 us."""


@cute.kernel
def clock_kernel(mOut: cute.Tensor):
    """mOut (2,): cycles and nanoseconds between the first and the last tick of the nanosecond counter that were seen.

    From tick to tick, since that counter moves in steps (32 ns and more), and every step is seen a few cycles late.
    """
    last = cute.arch.globaltimer()
    first_ns, first_cycle = last, cute.arch.clock64()
    last_ns, last_cycle, ticks = last, first_cycle, cutlass.Int32(0)
    for _ in cutlass.range(READS, unroll=1):
        now, cycle = cute.arch.globaltimer(), cute.arch.clock64()
        if now != last:
            last, last_ns, last_cycle, ticks = now, now, cycle, ticks + 1
            if ticks == 1:
                first_ns, first_cycle = now, cycle
    mOut[0] = last_cycle - first_cycle
    mOut[1] = last_ns - first_ns


@cute.jit
def host(mOut: cute.Tensor, stream):
    """Launch on one warp's first lane."""
    clock_kernel(mOut).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


def compile_clock() -> Any:
    """The TVM-FFI function (out): out is an int64 tensor of two."""
    options = (cute.GPUArch("sm_90a"), cute.EnableTVMFFI(True))
    out = make_fake_tensor(cutlass.Int64, (2,), (1,), assumed_align=8)
    return cute.compile[options](host, out, make_fake_stream(use_tvm_ffi_env_stream=True))
