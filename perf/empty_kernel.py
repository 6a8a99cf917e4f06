"""A kernel that does nothing, launched with three matrices through TVM-FFI: what a call costs whatever it computes."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


@cute.kernel
def empty_kernel(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor):
    pass


@cute.jit
def host(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream):
    empty_kernel(mA, mB, mC).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_empty(dtype: str) -> Any:
    """The TVM-FFI function (a, b, out) for 2-D tensors with unit stride along their rows."""
    element = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[dtype]

    def matrix() -> Any:
        return make_fake_tensor(element, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=16)

    options = (cute.GPUArch("sm_90a"), cute.EnableTVMFFI(True))
    return cute.compile[options](host, matrix(), matrix(), matrix(), make_fake_stream(use_tvm_ffi_env_stream=True))
