"""Hand-written PTX kernels for tests of the emulator: no compiler, no DSL."""

from __future__ import annotations

import re

import numpy as np

from cute_matmul.emulator.api import run_launch
from cute_matmul.emulator.launches import Launch
from cute_matmul.emulator.operands import Allocation, View

HEADER = """.version 8.8
.target sm_90a
.address_size 64
"""

REGISTERS = """
	.reg .pred %p<32>;
	.reg .b16 %h<32>;
	.reg .b32 %r<64>;
	.reg .b64 %d<64>;
	.reg .f32 %f<32>;
"""


def allocation(label: str, array: np.ndarray) -> Allocation:
    """Global memory over a contiguous NumPy array."""
    data = array.view(np.uint8).reshape(-1)
    strides = tuple(s // array.itemsize for s in array.strides)
    view = View(label, 0, array.shape, strides, array.itemsize)
    return Allocation(label, data.ctypes.data, data.nbytes, data, (view,))


def kernel_text(body: str, pointers: int, *, smem: str = "", module: str = "", threads: int | None = None) -> str:
    """A kernel `k` with pointer parameters p0, p1, ...: loaded into %d0, %d1, ... and %r0 = %tid.x."""
    params = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    loads = "\n".join(f"\tld.param.u64 %d{i}, [p{i}];" for i in range(pointers))
    required = f".reqntid {threads}, 1, 1" if threads else ""
    return (
        f"{HEADER}{module}\n.visible .entry k({params})\n{required}\n{{{REGISTERS}{smem}\n{loads}\n"
        f"\tmov.u32 %r0, %tid.x;\n{body}\n\tret;\n}}\n"
    )


def launch(
    text: str,
    arrays: dict[str, np.ndarray],
    *,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    smem_bytes: int = 0,
) -> Launch:
    """A launch of kernel `k` with the arrays' addresses as parameters, in order."""
    params = tuple(np.array([a.ctypes.data], np.uint64).tobytes() for a in arrays.values())
    return Launch(
        kernel="k",
        ptx=text,
        grid=(grid, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1),
        smem_bytes=smem_bytes,
        params=params,
        stream=0,
        cooperative=False,
        programmatic=False,
        allocations=tuple(allocation(name, a) for name, a in arrays.items()),
        index=0,
    )


def run(
    body: str, arrays: dict[str, np.ndarray], *, smem: str = "", module: str = "", options: dict | None = None, **how
):
    """Run a kernel body (see `kernel_text`) and return the report."""
    text = kernel_text(body, len(arrays), smem=smem, module=module)
    return run_launch(launch(text, arrays, **how), **(options or {}))


_WIDTHS = {1: ("b8", "h"), 2: ("b16", "h"), 4: ("b32", "r"), 8: ("b64", "d")}


def lanes(instruction: str, inputs: list[np.ndarray], out: np.dtype | type) -> np.ndarray:
    """Execute one instruction (or several) in each of n threads.

    In the text, $0 is the destination and $1, $2, ... the inputs; arrays have one element per thread. $P is a
    scratch predicate. A bool output stands for a predicate destination.
    """
    n = len(inputs[0])
    predicate = np.dtype(out) == np.bool_
    result = np.zeros(n, np.uint32 if predicate else out)
    arrays = {f"in{i}": np.ascontiguousarray(a) for i, a in enumerate(inputs)}
    arrays["out"] = result
    body = []
    names = {}
    for i, array in enumerate(inputs):
        kind, prefix = _WIDTHS[array.dtype.itemsize]
        name = names[f"${i + 1}"] = f"%{prefix}{10 + i}"
        body += [f"\tmad.wide.u32 %d30, %r0, {array.dtype.itemsize}, %d{i};", f"\tld.global.{kind} {name}, [%d30];"]
    kind, prefix = _WIDTHS[result.dtype.itemsize]
    names["$0"] = "%p1" if predicate else f"%{prefix}20"
    names["$P"] = "%p2"
    text = re.sub(r"\$[0-9P]", lambda m: names[m.group()], instruction)
    body.append("\t" + text.replace("\n", "\n\t"))
    if predicate:
        body.append("\tselp.b32 %r20, 1, 0, %p1;")
    body.append(f"\tmad.wide.u32 %d30, %r0, {result.dtype.itemsize}, %d{len(inputs)};")
    body.append(f"\tst.global.{kind} [%d30], {'%r20' if predicate else names['$0']};")
    report = run("\n".join(body), arrays, threads=n)
    assert report.ok, str(report)
    return result.astype(bool) if predicate else result
