"""Every rung once on ragged problems, to be watched by compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no \\
        python tests/gpu_probes/each_variant_once.py

Without torch's caching every tensor is an allocation of its own, so that memcheck knows where it ends. The results
are checked too. `--fault` calls a kernel with an output that claims more rows than it has: memcheck must say so.
`--device cpu` rehearses in the emulator. tests/test_gpu.py runs both on a GPU.
"""

from __future__ import annotations

import argparse

import torch

from cute_matmul import matmul, problem, registry
from cute_matmul.compile import compile_kernel

SHAPES = ((200, 136, 328), (300, 264, 640))  # rows of 16-byte multiples, as V6's TMA store needs them


class Claim:
    """Somebody else's memory, seen as a larger matrix than it is."""

    def __init__(self, memory: torch.Tensor, rows: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.data_ptr(), False),
            "shape": (rows, memory.shape[1]),
            "strides": None,
            "typestr": "<f2",
            "version": 3,
        }


def fault() -> None:
    """Store 64 rows past the end of an output of 200."""
    m, n, k = SHAPES[0]
    a = torch.randn(m + 64, k).half().cuda()
    b = torch.randn(k, n).half().cuda()
    memory = torch.empty(m, n, dtype=torch.float16, device="cuda")
    compile_kernel("v3", b_major="n")(a, b, torch.as_tensor(Claim(memory, m + 64), device="cuda"))
    torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> None:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    top.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    top.add_argument("--fault", action="store_true")
    options = top.parse_args(arguments)
    if options.fault:
        fault()
        return
    runs = 0
    for name in registry.names():
        entry = registry.get(name)
        for dtype in entry.dtypes:
            for mnk in SHAPES:
                a, b = problem.Problem(*mnk, dtype=dtype).operands()
                out = matmul(a.to(options.device), b.to(options.device), variant=name).cpu()
                checked = problem.check(out, a, b, accumulator=entry.accumulator)
                assert checked.ok, f"{name} {dtype} {mnk}: {checked}"
                runs += 1
    print(f"{runs} launches, all right")


if __name__ == "__main__":
    main()
