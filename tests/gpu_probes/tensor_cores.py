"""Measure what the matrix units of a Hopper GPU do: sums, descriptors, latencies. Writes a JSON and two npz files.

    python tests/gpu_probes/tensor_cores.py OUT_FOLDER

Needs libcuda, a GPU of compute capability 9.0, and NumPy. The kernels are PTX text that the driver compiles.

- arithmetic: many random instructions of each kind, compared with the models in `cute_matmul.emulator.arithmetic`:
  how many results differ from each model, and the largest error in units of 2**-23 * (|c| + sum |a_i b_i|).
  A sample of operands and results goes to `tensor_cores_arithmetic.npz`.
- descriptors: which shared-memory element B[k][n] is, for descriptors of all swizzles, both majors, unaligned
  starts and base offsets, in `tensor_cores_descriptors.npz`.
- latency: cycles of the operations that `cute_matmul.emulator.latency` has constants for.

Each part runs in a process of its own, so that a fault in one leaves the others' results; naming a part after the
folder runs only that one and prints its JSON.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import re
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMEM = 65536
HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


class Gpu:
    """The driver API, as far as these kernels need it."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check(self.cuda.cuInit(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def check(self, result: int) -> None:
        if result:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver error {result}: {text.value.decode() if text.value else ''}")

    def load(self, ptx: str, name: str, smem: int = SMEM):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), (HEADER + ptx).encode()))
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        self.check(self.cuda.cuFuncSetAttribute(function, 8, smem))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
        return function

    def upload(self, array: np.ndarray) -> ctypes.c_uint64:
        array = np.ascontiguousarray(array)
        address = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(array.nbytes)))
        self.check(
            self.cuda.cuMemcpyHtoD_v2(address, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
        )
        return address

    def download(self, address: ctypes.c_uint64, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        self.check(self.cuda.cuMemcpyDtoH_v2(out.ctypes.data_as(ctypes.c_void_p), address, ctypes.c_size_t(out.nbytes)))
        return out

    def launch(self, function, grid: int, block: int, *arguments, smem: int = SMEM) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(argument), ctypes.c_void_p) for argument in arguments)
        )
        self.check(self.cuda.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, smem, None, pointers, None))
        self.check(self.cuda.cuCtxSynchronize())


# --- Kernels -----------------------------------------------------------------------------------------------


def registers(name: str, count: int) -> str:
    return ", ".join(f"%{name}{i}" for i in range(count))


def copy_to_shared(nbytes: int) -> str:
    """Copy `nbytes` from this block's part of parameter `s` to shared memory, 4 bytes per thread and step."""
    return f"""
    ld.param.u64 %src, [s];
    cvt.u64.u32 %t64, %cta;
    mad.lo.u64 %src, %t64, {nbytes}, %src;
    mov.u32 %at, %word;
COPY:
    cvt.u64.u32 %t64, %at;
    add.u64 %t64, %t64, %src;
    ld.global.u32 %value, [%t64];
    add.u32 %to, %base, %at;
    st.shared.u32 [%to], %value;
    add.u32 %at, %at, %step;
    setp.lt.u32 %more, %at, {nbytes};
    @%more bra COPY;
    fence.proxy.async.shared::cta;
    bar.sync 0;
"""


PROLOGUE = """
    .reg .u64 %src, %t64, %io, %da, %db, %da0, %db0;
    .reg .u32 %cta, %thread, %word, %at, %to, %value, %base, %step;
    .reg .pred %more, %keep;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %thread, %tid.x;
    shl.b32 %word, %thread, 2;
    mov.u32 %step, %ntid.x;
    shl.b32 %step, %step, 2;
    mov.u32 %base, window;
"""


def fragment_io(name: str, count: int, verb: str, parameter: str) -> str:
    """Load or store `count` 32-bit registers per thread: word [block][register][thread]."""
    text = f"""
    ld.param.u64 %io, [{parameter}];
    cvt.u64.u32 %t64, %cta;
    mov.u32 %value, %ntid.x;
    mul.lo.u32 %value, %value, {4 * count};
    cvt.u64.u32 %src, %value;
    mad.lo.u64 %io, %t64, %src, %io;
    cvt.u64.u32 %t64, %word;
    add.u64 %io, %io, %t64;
    cvt.u64.u32 %src, %step;
"""
    for i in range(count):
        text += f"    ld.global.b32 %{name}{i}, [%io];\n" if verb == "ld" else f"    st.global.b32 [%io], %{name}{i};\n"
        text += "    add.u64 %io, %io, %src;\n"
    return text


def wgmma_kernel(opcode: str, tail: str, d_registers: int, nbytes: int) -> str:
    """One wgmma per block: A and B from the block's shared image, descriptors from the block's pair of words."""
    return f"""
.extern .shared .align 1024 .b8 window[];
.visible .entry probe(.param .u64 s, .param .u64 descriptors, .param .u64 c, .param .u64 d) {{
    .reg .b32 %d<{d_registers}>;
{PROLOGUE}{copy_to_shared(nbytes)}
    ld.param.u64 %io, [descriptors];
    cvt.u64.u32 %t64, %cta;
    mad.lo.u64 %io, %t64, 16, %io;
    ld.global.u64 %da, [%io];
    ld.global.u64 %db, [%io+8];
    shr.u32 %value, %base, 4;
    cvt.u64.u32 %t64, %value;
    add.u64 %da, %da, %t64;
    add.u64 %db, %db, %t64;
{fragment_io("d", d_registers, "ld", "c")}
    wgmma.fence.sync.aligned;
    {opcode} {{{registers("d", d_registers)}}}, %da, %db, 1{tail};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
{fragment_io("d", d_registers, "st", "d")}
    ret;
}}
"""


def mma_kernel(opcode: str, a: int, b: int, c: int, d: int) -> str:
    """One mma.sync per warp, fragments as given."""
    return f"""
.extern .shared .align 1024 .b8 window[];
.visible .entry probe(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) {{
    .reg .b32 %a<{a}>, %b<{b}>, %c<{c}>, %d<{d}>;
{PROLOGUE}
{fragment_io("a", a, "ld", "a")}{fragment_io("b", b, "ld", "b")}{fragment_io("c", c, "ld", "c")}
    {opcode} {{{registers("d", d)}}}, {{{registers("a", a)}}}, {{{registers("b", b)}}}, {{{registers("c", c)}}};
{fragment_io("d", d, "st", "d")}
    ret;
}}
"""


# --- Arithmetic --------------------------------------------------------------------------------------------

K_BYTES = 32
BLOCKS = 128
WGMMAS = [
    ("f16", "f32"),
    ("bf16", "f32"),
    ("tf32", "f32"),
    ("e4m3", "f32"),
    ("e5m2", "f32"),
    ("f16", "f16"),
    ("e4m3", "f16"),
    ("e5m2", "f16"),
]
MMAS = [
    ("f16", 16, "f32"),
    ("f16", 8, "f32"),
    ("bf16", 16, "f32"),
    ("bf16", 8, "f32"),
    ("tf32", 8, "f32"),
    ("tf32", 4, "f32"),
    ("f16", 16, "f16"),
    ("f16", 8, "f16"),
    ("e4m3", 32, "f32"),
    ("e4m3", 16, "f32"),
    ("e5m2", 32, "f32"),
    ("e5m2", 32, "f16"),
]
DISTRIBUTIONS = ("normal", "wide", "bits", "cancel", "integers")


def random_bits(rng: np.random.Generator, kind: str, distribution: str, shape: tuple[int, ...]) -> np.ndarray:
    """Operand bits: "normal" values, "wide" exponents, all finite "bits" (subnormals too), small "integers"."""
    from cute_matmul.emulator import formats
    from cute_matmul.emulator.matrix import ELEMENTS

    element = ELEMENTS[kind]
    if distribution == "bits":
        bits = rng.integers(0, 1 << 8 * element.size, shape, dtype=np.uint64).astype(element.storage)
        if kind in ("bf16", "tf32"):
            # Exponents from 2**-75 to 2**30, so that some products are subnormal and no sum overflows.
            fraction = {"bf16": 7, "tf32": 23}[kind]
            exponent = rng.integers(127 - 75, 127 + 30, shape).astype(element.storage)
            low = element.storage((1 << fraction) - 1)
            sign = element.storage(1 << (8 * element.size - 1))
            bits = bits & (low | sign) | exponent << element.storage(fraction)
        bits[~np.isfinite(element.decode(bits))] = 0
        return bits
    values = rng.standard_normal(shape).astype(np.float32)
    if distribution == "wide":
        values *= np.exp2(rng.integers(-6, 7, shape)).astype(np.float32)
    if distribution == "integers":
        values = np.round(4 * values)
    return formats.encode(values, kind, saturate="satfinite")


def random_case(rng, kind: str, d_type: str, distribution: str, m: int, n: int, k: int, count: int):
    """(a bits, b bits, c) of `count` products; "cancel" makes c nearly the negative of the sum."""
    from cute_matmul.emulator.matrix import ELEMENTS

    source = "normal" if distribution == "cancel" else distribution
    a = random_bits(rng, kind, source, (count, m, k))
    b = random_bits(rng, kind, source, (count, n, k))
    decode = ELEMENTS[kind].decode
    total = decode(a).astype(np.float64) @ decode(b).astype(np.float64).transpose(0, 2, 1)
    if distribution == "cancel":
        c = -total * (1 + rng.choice([0, 2.0**-20, 2.0**-10], total.shape))
    else:
        spread = np.exp2(rng.integers(-12, 13, total.shape)) if distribution != "integers" else 1.0
        c = np.abs(total).mean() * rng.standard_normal(total.shape) * spread
        c[:, :, 0] = 0
    with np.errstate(over="ignore"):
        c = np.clip(c, -6e4, 6e4).astype(np.float16) if d_type == "f16" else c.astype(np.float32)
    return a, b, c


def compare(kind: str, a, b, c, got: np.ndarray, run) -> dict:
    """How results (count, m, n) relate to the models; `run(model)` executes the same in the emulator."""
    from cute_matmul.emulator import arithmetic
    from cute_matmul.emulator.matrix import ELEMENTS

    decode = ELEMENTS[kind].decode
    x, y = decode(a), decode(b)
    record = {"results": int(got.size), "not_finite": int((~np.isfinite(got)).sum())}
    for name, model in (("fast", arithmetic.FAST), ("truncating", arithmetic.TRUNCATING)):
        expected = run(model)
        same = (expected == got) | (np.isnan(expected) & np.isnan(got))
        record[f"differ_from_{name}"] = int((~same).sum())
        if not same.all():
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            record[f"first_{name}"] = {
                "a": [float(v) for v in x[at[0], at[1]]],
                "b": [float(v) for v in y[at[0], at[2]]],
                "c": float(c[at]),
                "got": float(got[at]),
                "model": float(expected[at]),
            }
    exact = x.astype(np.float64) @ y.astype(np.float64).transpose(0, 2, 1) + c
    magnitude = np.abs(x).astype(np.float64) @ np.abs(y).astype(np.float64).transpose(0, 2, 1) + np.abs(c)
    for name, reference in (("exact", exact), ("fast", run(arithmetic.FAST).astype(np.float64))):
        with np.errstate(all="ignore"):
            units = np.abs(got.astype(np.float64) - reference) / (2.0**-23 * magnitude)
        units = units[np.isfinite(units)]
        record[f"largest_error_to_{name}"] = float(units.max(initial=0.0))
    return record


def shared_image(bits: np.ndarray) -> np.ndarray:
    """(count, rows, k) operand bits -> (count, bytes) in the K-major layout without swizzle: 128-byte core matrices."""
    count, rows, _ = bits.shape
    raw = np.ascontiguousarray(bits).view(np.uint8).reshape(count, rows // 8, 8, 2, 16)
    return raw.transpose(0, 3, 1, 2, 4).reshape(count, rows * K_BYTES)


def plain_descriptor(offset: int, rows: int) -> int:
    """Of an operand laid out by `shared_image`, relative to the window's start."""
    return offset >> 4 | (rows * 16 >> 4) << 16 | (128 >> 4) << 32


def arithmetic_part(gpu: Gpu, folder: pathlib.Path) -> dict:
    from cute_matmul.emulator import matrix

    storage = {"f32": np.float32, "f16": np.float16}
    report, samples = {}, {}

    def sample(name: str, *arrays: np.ndarray) -> None:
        for letter, array in zip("abcd", arrays, strict=True):
            samples.setdefault(f"{name}.{letter}", []).append(array)

    for index, (kind, d_type) in enumerate(WGMMAS):
        size = matrix.ELEMENTS[kind].size
        k, n, m = K_BYTES // size, 16, 64
        opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d_type}.{kind}.{kind}"
        tail = (1, 1, 0, 0) if size == 2 else (1, 1)
        op = matrix.Wgmma.parse(opcode, tail)
        function = gpu.load(
            wgmma_kernel(opcode, "".join(f", {i}" for i in tail), op.d_registers, (m + n) * K_BYTES), "probe"
        )
        for distribution in DISTRIBUTIONS:
            rng = np.random.default_rng([index, DISTRIBUTIONS.index(distribution)])
            a, b, c = random_case(rng, kind, d_type, distribution, m, n, k, BLOCKS)
            image = np.concatenate([shared_image(a), shared_image(b)], axis=1)
            descriptors = np.tile(
                np.array([plain_descriptor(0, m), plain_descriptor(m * K_BYTES, n)], np.uint64), (BLOCKS, 1)
            )
            # Fragments: (R, 4 warps * blocks, 32) -> [block][register][thread].
            c_regs = matrix._to_fragments(c.reshape(BLOCKS * 4, 16, n)).reshape(op.d_registers, BLOCKS, 128)
            c_dev = np.ascontiguousarray(c_regs.swapaxes(0, 1))
            out = gpu.upload(np.zeros_like(c_dev))
            gpu.launch(function, BLOCKS, 128, gpu.upload(image), gpu.upload(descriptors), gpu.upload(c_dev), out)
            d_regs = gpu.download(out, c_dev).swapaxes(0, 1).reshape(op.d_registers, BLOCKS * 4, 32)
            got = matrix._from_fragments(d_regs, storage[d_type]).reshape(BLOCKS, m, n)
            name = f"wgmma.{d_type}.{kind}.{distribution}"

            def run(model, image=image, descriptors=descriptors, c=c, op=op):
                c_all = matrix._to_fragments(c.reshape(BLOCKS * 4, 16, op.n))
                groups = np.arange(BLOCKS)
                d = op.execute(c_all, descriptors[:, 0], descriptors[:, 1], image, groups, True, model)
                return matrix._from_fragments(d, storage[op.d]).reshape(c.shape)

            report[name] = compare(kind, a, b, c, got, run)
            sample(f"wgmma.{d_type}.{kind}", a[0, :16], b[0], c[0, :16], got[0, :16])
    for index, (kind, k, d_type) in enumerate(MMAS):
        opcode = f"mma.sync.aligned.m16n8k{k}.row.col.{d_type}.{kind}.{kind}.{d_type}"
        op = matrix.Mma.parse(opcode)
        counts = (op.a_registers, op.b_registers, op.c_registers, op.d_registers)
        function = gpu.load(mma_kernel(opcode, *counts), "probe")
        for distribution in DISTRIBUTIONS:
            rng = np.random.default_rng([100 + index, DISTRIBUTIONS.index(distribution)])
            a, b, c = random_case(rng, kind, d_type, distribution, 16, 8, k, 4 * BLOCKS)
            buffers = []
            operands = (a_fragments(a), b_fragments(b), matrix._to_fragments(c))
            for fragments in operands:
                per_block = fragments.reshape(len(fragments), BLOCKS, 128).swapaxes(0, 1)
                buffers.append(gpu.upload(per_block))
            like = np.zeros((BLOCKS, op.d_registers, 128), np.uint32)
            out = gpu.upload(like)
            gpu.launch(function, BLOCKS, 128, *buffers, out)
            d_regs = gpu.download(out, like).swapaxes(0, 1).reshape(op.d_registers, BLOCKS * 4, 32)
            got = matrix._from_fragments(d_regs, storage[d_type])
            name = f"mma.k{k}.{d_type}.{kind}.{distribution}"

            def run(model, operands=operands, op=op):
                return matrix._from_fragments(op.execute(*operands, model), storage[op.d])

            report[name] = compare(kind, a, b, c, got, run)
            sample(f"mma.k{k}.{d_type}.{kind}", a[0], b[0], c[0], got[0])
    stacked = {name: np.stack(parts) for name, parts in samples.items()}
    np.savez_compressed(folder / "tensor_cores_arithmetic.npz", **stacked)
    return report


def a_fragments(bits: np.ndarray) -> np.ndarray:
    """(W, 16, k) -> registers (R, W, 32): register 2h + r of lane 4g + q is row g + 8r, bytes 16h + 4q of K."""
    words = np.ascontiguousarray(bits).view(np.uint32)
    warps, _, count = words.shape
    return words.reshape(warps, 2, 8, count // 4, 4).transpose(3, 1, 0, 2, 4).reshape(count // 2, warps, 32)


def b_fragments(bits: np.ndarray) -> np.ndarray:
    """(W, 8, k) -> registers (R, W, 32): register h of lane 4g + q is column g, bytes 16h + 4q of K."""
    words = np.ascontiguousarray(bits).view(np.uint32)
    warps, _, count = words.shape
    return words.reshape(warps, 8, count // 4, 4).transpose(2, 0, 1, 3).reshape(count // 4, warps, 32)


# --- Descriptors -------------------------------------------------------------------------------------------


def descriptor_cases() -> list[dict]:
    """Descriptors of B for m64n16k16 f16, both majors; everything within 4 KB from `start`."""
    cases = []
    for mn_major in (0, 1):
        for swizzle in (0, 1, 2, 3):
            for start in (0, 16, 32, 64, 96, 128, 256, 384, 512, 640, 1024, 1152):
                for leading, stride in ((16, 1024), (256, 512), (1024, 256), (512, 128)):
                    cases.append({"start": start, "leading": leading, "stride": stride, "base_offset": 0})
                    cases[-1] |= {"swizzle_field": swizzle, "mn_major": mn_major}
            if swizzle:
                for start in (0, 128, 256, 384, 512, 896):
                    for base_offset in range(8):
                        cases.append({"start": start, "leading": 256, "stride": 1024, "base_offset": base_offset})
                        cases[-1] |= {"swizzle_field": swizzle, "mn_major": mn_major}
    return cases


FIELDS = ("start", "leading", "stride", "base_offset", "swizzle_field", "mn_major")


def descriptor_part(gpu: Gpu, folder: pathlib.Path) -> dict:
    """For each case the index of the f16 element that B[n][k] is, counted from the window's start, as (16, 16)."""
    from cute_matmul.emulator import matrix

    n, m, image_bytes = 16, 64, 8192
    a = np.zeros((1, m, 16), np.float16)
    a[0, np.arange(16), np.arange(16)] = 1.0  # D[r][n] = B[n][k = r]
    a_image = shared_image(a.view(np.uint16))[0]
    # Element i holds i % 1024 in one run and i // 1024 in another: both exact in f16.
    elements = np.arange(image_bytes // 2)
    cases = descriptor_cases()
    for mn_major in (0, 1):
        chosen = [case for case in cases if case["mn_major"] == mn_major]
        opcode = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16"
        function = gpu.load(wgmma_kernel(opcode, f", 1, 1, 0, {mn_major}", n // 2, image_bytes + m * 32), "probe")
        words = np.array(
            [
                (
                    plain_descriptor(image_bytes, m),
                    case["start"] >> 4
                    | (case["leading"] >> 4) << 16
                    | (case["stride"] >> 4) << 32
                    | case["base_offset"] << 49
                    | case["swizzle_field"] << 62,
                )
                for case in chosen
            ],
            np.uint64,
        )
        halves = []
        for values in (elements % 1024, elements // 1024):
            one = np.concatenate([values.astype(np.float16).view(np.uint8), a_image])
            c = np.zeros((len(chosen), n // 2, 128), np.uint32)
            out = gpu.upload(c)
            image = np.tile(one, (len(chosen), 1))
            gpu.launch(function, len(chosen), 128, gpu.upload(image), gpu.upload(words), gpu.upload(c), out)
            d = gpu.download(out, c).swapaxes(0, 1).reshape(n // 2, len(chosen) * 4, 32)
            halves.append(matrix._from_fragments(d, np.float32).reshape(len(chosen), m, n)[:, :16].swapaxes(1, 2))
        index = (halves[0] + 1024 * halves[1]).astype(int)
        for case, found in zip(chosen, index, strict=True):
            case["elements"] = found
    np.savez_compressed(
        folder / "tensor_cores_descriptors.npz",
        cases=np.array([[case[name] for name in FIELDS] for case in cases], np.int16),
        elements=np.array([case["elements"] for case in cases], np.int16),
    )
    return {"cases": len(cases), "fields": FIELDS}


# --- Latency -----------------------------------------------------------------------------------------------


def timed(body: str, setup: str = "", declarations: str = "", cluster: int = 0) -> str:
    """A kernel that stores the cycles of `body` per block: clock before and after, thread 0 reports."""
    directive = f".explicitcluster .reqnctapercluster {cluster}, 1, 1" if cluster else ""
    return f"""
.extern .shared .align 1024 .b8 window[];
.visible .entry probe(.param .u64 s, .param .u64 out, .param .align 64 .b8 tm[128]) {directive} {{
    .reg .u64 %tm;
    .reg .u32 %t0, %t1, %bar, %phase, %peer, %count;
    .reg .pred %p, %first, %loop;
    .reg .u64 %g, %result;
    .reg .b32 %d<128>;
    .reg .b64 %state;
{declarations}{PROLOGUE}
    setp.eq.u32 %first, %thread, 0;
    ld.param.u64 %g, [s];
    mov.b64 %tm, tm;
    cvta.param.u64 %tm, %tm;
    add.u32 %bar, %base, {SMEM - 64};
    mov.u32 %count, 1;
    @%first mbarrier.init.shared.b64 [%bar], %count;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    bar.sync 0;
{setup}
    bar.sync 0;
    mov.u32 %t0, %clock;
{body}
{"" if "%t1, %clock" in body else "    mov.u32 %t1, %clock;"}
    sub.u32 %t1, %t1, %t0;
    ld.param.u64 %result, [out];
    cvt.u64.u32 %t64, %cta;
    shl.b64 %t64, %t64, 2;
    add.u64 %result, %result, %t64;
    @%first st.global.u32 [%result], %t1;
    ret;
}}
"""


def wait_for_phase(parity: int, label: str) -> str:
    return f"""
{label}:
    mbarrier.try_wait.parity.shared.b64 %p, [%bar], {parity};
    @!%p bra {label};
"""


def latency_kernels() -> dict[str, tuple[str, int, int]]:
    """name -> (PTX, threads, blocks); cycles as measured, overhead of reading the clock included."""
    kernels: dict[str, tuple[str, int, int]] = {"clock": (timed(""), 32, 1)}
    descriptors = """
    shr.u32 %value, %base, 4;
    cvt.u64.u32 %da, %value;
    or.b64 %da, %da, 4611686293305360384;
    mov.b64 %db, %da;
"""
    for n in (8, 16, 32, 64, 96, 128, 192, 256):
        for repeats in (1, 32):
            opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16"
            text = f"{opcode} {{{registers('d', n // 2)}}}, %da, %db, 1, 1, 1, 0, 0;\n"
            zero = "".join(f"    mov.b32 %d{i}, 0;\n" for i in range(n // 2))
            body = "wgmma.fence.sync.aligned;\n" + text * repeats
            body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
            # The results must be used, or ptxas shrinks the instruction.
            body += "mov.u32 %t1, %clock;\n" + "".join(f"xor.b32 %d0, %d0, %d{i};\n" for i in range(1, n // 2))
            body += "setp.eq.b32 %p, %d0, 1;\n@%p trap;\n"
            kernels[f"wgmma_n{n}_x{repeats}"] = (timed(body, descriptors + zero), 128, 1)
    for size in (128, 1024, 4096, 8192, 16384, 32768):
        copy = f"""
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], {size};
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%base], [%g], {size}, [%bar];
WAIT:
"""
        warm = copy + wait_for_phase(0, "WARM")
        body = copy.replace("WAIT", "WAIT2") + wait_for_phase(1, "DONE")
        kernels[f"bulk_copy_{size}"] = (timed(body, warm), 32, 1)
        kernels[f"bulk_copy_{size}_all_sms"] = (timed(body, warm), 32, 132)
    four = "".join(
        "    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%base], [%g], 32768, [%bar];\n"
        for _ in range(8)
    )
    body = f"""
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], 262144;
{four}
WAIT:
"""
    warm = body + wait_for_phase(0, "WARM")
    body = body.replace("WAIT", "WAIT2") + wait_for_phase(1, "DONE")
    kernels["bulk_copy_8x32768"] = (timed(body, warm), 32, 1)
    kernels["bulk_copy_8x32768_all_sms"] = (timed(body, warm), 32, 132)
    for rows in (8, 64, 128, 256):
        copy = f"""
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], {128 * rows};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%base], [%tm, {{0, 0}}], [%bar];
WAIT:
"""
        warm = copy + wait_for_phase(0, "WARM")
        body = copy.replace("WAIT", "WAIT2") + wait_for_phase(1, "DONE")
        kernels[f"tensor_copy_{128 * rows}"] = (timed(body, warm), 32, 1)
        kernels[f"tensor_copy_{128 * rows}_all_sms"] = (timed(body, warm), 32, 132)
    arrive = "    @%first mbarrier.arrive.shared.b64 %state, [%bar];\n"
    kernels["mbarrier_arrive_and_wait"] = (timed(arrive + wait_for_phase(0, "DONE")), 32, 1)
    ready = arrive + "    bar.sync 0;\n"
    kernels["mbarrier_wait_when_complete"] = (timed(wait_for_phase(0, "DONE"), ready), 32, 1)
    for threads in (128, 256, 384):
        kernels[f"bar_sync_{threads}_x16"] = (timed("    bar.sync 0;\n" * 16), threads, 1)
    chase = "    ld.shared.u32 %to, [%to];\n" * 16
    setup = "    st.shared.u32 [%base], %base;\n    mov.u32 %to, %base;\n    bar.sync 0;\n"
    use = "    setp.eq.u32 %p, %to, 1;\n    @%p trap;\n"
    kernels["ld_shared_x16"] = (timed(chase + use, setup), 32, 1)
    chase = "    ld.global.cg.u64 %src, [%src];\n" * 16
    setup = "    st.global.u64 [%g], %g;\n    membar.gl;\n    mov.u64 %src, %g;\n    ld.global.cg.u64 %src, [%src];\n"
    use = "    setp.eq.u64 %p, %src, 1;\n    @%p trap;\n"
    kernels["ld_global_l2_x16"] = (timed(chase + use, setup), 32, 1)
    fragments = f"{{{registers('d', 4)}}}, {{%d4, %d5, %d6, %d7}}, {{%d8, %d9}}, {{{registers('d', 4)}}}"
    mma = f"    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {fragments};\n"
    use = "    setp.eq.b32 %p, %d0, 1;\n    @%p trap;\n"
    zero = "".join(f"    mov.b32 %d{i}, 0;\n" for i in range(128))
    kernels["mma_sync_dependent_x32"] = (timed(mma * 32 + use, zero), 32, 1)
    independent = "".join(
        mma.replace(f"{{{registers('d', 4)}}}", f"{{%d{i}, %d{i + 1}, %d{i + 2}, %d{i + 3}}}")
        for _ in range(4)
        for i in range(16, 48, 4)
    )
    use = "".join(f"    setp.eq.b32 %p, %d{i}, 1;\n    @%p trap;\n" for i in range(16, 48, 4))
    # Different sums, or ptxas makes one of them.
    different = zero + "".join(
        f"    cvt.rn.f32.u32 %d{i}, %thread;\n    add.f32 %d{i}, %d{i}, 0f3F8{i:05X};\n" for i in range(16, 48)
    )
    kernels["mma_sync_independent_x32"] = (timed(independent + use, different), 128, 1)
    fma = "    fma.rn.f32 %d0, %d0, %d1, %d2;\n" * 64
    kernels["fma_dependent_x64"] = (timed(fma + "    setp.eq.b32 %p, %d0, 1;\n    @%p trap;\n", zero), 32, 1)
    # Ping-pong between two CTAs: each waits for the other's arrive; 8 round trips.
    peers = """
    mov.u32 %value, %cluster_ctarank;
    xor.b32 %to, %value, 1;
    mapa.shared::cluster.u32 %peer, %bar, %to;
    setp.eq.u32 %keep, %value, 0;
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""
    body = ""
    for i in range(8):
        arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%peer];\n"
        body += f"    @%keep {arrive}"
        body += wait_for_phase(i % 2, f"PING{i}") + f"    @!%keep {arrive}"
    after = "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"
    kernels["remote_arrive_round_trip_x8"] = (timed(body, peers, cluster=2), 1, 2)
    kernels["cluster_barrier_x16"] = (timed(after * 16, peers, cluster=2), 128, 2)
    return kernels


def tensor_map(gpu: Gpu, address: int, rows: int) -> ctypes.Array:
    """Descriptor of a box of 64 f16 by `rows` in a (512, 1024) matrix at `address`, swizzled by 128 bytes."""
    raw = (ctypes.c_uint8 * 192)()
    start = -ctypes.addressof(raw) % 64
    aligned = (ctypes.c_uint8 * 128).from_buffer(raw, start)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    gpu.check(
        gpu.cuda.cuTensorMapEncodeTiled(
            aligned, 6, 2, ctypes.c_void_p(address), (u64 * 2)(1024, 512), (u64 * 1)(2048), (u32 * 2)(64, rows),
            (u32 * 2)(1, 1), 0, 3, 2, 0,
        )
    )  # fmt: skip
    return aligned


def latency_part(gpu: Gpu, folder: pathlib.Path) -> dict:
    report = {}
    for name, (ptx, threads, blocks) in latency_kernels().items():
        try:
            function = gpu.load(ptx, "probe")
            source, out = gpu.upload(np.zeros(1 << 20, np.uint8)), gpu.upload(np.zeros(blocks, np.uint32))
            copied = re.match(r"tensor_copy_(\d+)", name)
            descriptor = tensor_map(gpu, source.value, int(copied[1]) // 128 if copied else 8)
            runs = []
            for _ in range(5):
                gpu.launch(function, blocks, threads, source, out, descriptor)
                runs.append(gpu.download(out, np.zeros(blocks, np.uint32)))
            cycles = np.array(runs)[1:]
            report[name] = {"median": float(np.median(cycles)), "min": int(cycles.min()), "max": int(cycles.max())}
        except RuntimeError as error:
            report[name] = {"error": str(error)}
            break  # a fault is sticky: nothing after it in this process can run
    return report


PARTS = {"arithmetic": arithmetic_part, "descriptors": descriptor_part, "latency": latency_part}


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 3:
        sys.path.insert(0, str(ROOT))
        print(json.dumps(PARTS[sys.argv[2]](Gpu(), folder)))
        return
    result = {}
    for part in PARTS:
        run = subprocess.run([sys.executable, __file__, str(folder), part], capture_output=True, text=True)
        result[part] = json.loads(run.stdout) if run.returncode == 0 else {"error": run.stderr[-2000:]}
        print(part, "ok" if run.returncode == 0 else run.stderr[-500:])
    (folder / "tensor_cores.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
