"""torch tensors -> a compiled kernel -> the GPU or the emulator.

Everything that could make a launch wrong is checked here, before it: types, extents, strides and alignment that
TMA can describe (the encoded descriptor itself is not checked by anyone), aliasing, device. What depends on
shapes and strides alone is worked out once per combination and remembered as a plan.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from . import registry
from .compile import OPERAND_ALIGN, CompiledKernel, check_config, compile_kernel
from .config import TileConfig

BACKENDS = ("auto", "gpu", "emulator")
HOPPER = (9, 0)
MAX_EXTENT = 2**31 - 1
"""Rows, columns and K elements are 32-bit signed in the kernels' coordinates."""
MAX_STRIDE_BYTES = 2**40
"""Strides a TMA descriptor can hold are below this (CUDA Driver API, cuTensorMapEncodeTiled, globalStrides)."""
MAX_GRID_Y = 65535
"""CTAs along y (CUDA C++ Programming Guide, compute capabilities)."""

EMULATOR_LIMIT_VARIABLE = "CUTE_MATMUL_EMULATOR_SECONDS"
EMULATOR_LIMIT = 120.0
"""Estimated seconds above which `backend="auto"` refuses CPU tensors."""
EMULATOR_FLOPS = 1.5e8
"""Multiply-adds per second counted on for the estimate: V0-V2 at 512x512x512 on two cores, with room."""

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Unsupported(ValueError):
    """An operand that the kernels refuse for now; the message names it, what came and what is accepted."""


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    variant: str | None = None,
    config: TileConfig | str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """a (M, K) @ b (K, N) -> (M, N), float16 or bfloat16, fp32 accumulation unless the variant says otherwise.

    out: where to write, (M, N), same type and device; must not overlap a or b. variant: a registered name (None:
    `cute_matmul.registry.default()`). config: a TileConfig or its text (None: the variant's DEFAULT).
    backend: "gpu" needs CUDA tensors on a Hopper GPU, "emulator" CPU tensors; "auto" goes by the tensors.

    Launches on torch's current stream of the tensors' device and returns without waiting for it.
    Raises TypeError or ValueError naming the argument, `Unsupported` where the kernels refuse an operand that
    torch.matmul would take, RuntimeError where there is no Hopper GPU. All before anything is launched.
    """
    entry = registry.default() if variant is None else registry.get(variant)
    try:
        plan = _plans.get(
            (entry.name, entry.module, config, a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride())
        )
    except (AttributeError, TypeError, RuntimeError):
        plan = None  # not two plain tensors: _make_plan says what is wrong
    if plan is None:
        plan = _make_plan(a, b, entry, config)
    a_ptr, b_ptr = a.data_ptr(), b.data_ptr()
    if (a_ptr | b_ptr) % OPERAND_ALIGN and not plan.empty:
        _check_alignment(a_ptr, b_ptr, a, b)
    device = a.device
    if b.device != device:
        raise ValueError(f"b must be on a's device, {device}, got {b.device}")
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
        name = "a" if a.requires_grad else "b"
        raise Unsupported(
            f"{name} requires grad, and matmul has no backward yet; call it under torch.no_grad() or detach {name}"
        )
    if out is None:
        out = torch.empty(plan.out_shape, dtype=a.dtype, device=device)
    try:
        placed = plan.outs.get((out.dtype, out.shape, out.stride()))
    except (AttributeError, TypeError, RuntimeError):
        placed = None
    if placed is None or type(out) is not torch.Tensor:
        placed = _make_output(out, a, plan)
    if out.device != device:
        raise ValueError(f"out must be on a's device, {device}, got {out.device}")
    if out.requires_grad and torch.is_grad_enabled():
        raise Unsupported("out requires grad, and matmul has no backward; pass a tensor that does not")
    out_ptr = out.data_ptr()
    out_end = out_ptr + placed.nbytes
    if (out_ptr < a_ptr + plan.a_nbytes and a_ptr < out_end) or (out_ptr < b_ptr + plan.b_nbytes and b_ptr < out_end):
        _check_overlap(out, a, b)
    if out_ptr % plan.out_align and not plan.empty:
        raise Unsupported(
            f"out must start at a multiple of {plan.out_align} bytes for variant {entry.name}, which stores it by "
            f"TMA; got an address that is {out_ptr % plan.out_align} past one"
        )

    if device.type == "cuda" and (backend == "auto" or backend == "gpu"):
        if plan.empty:
            return out.zero_()
        if device.index not in _hopper_devices:
            _check_device(device)
        if placed.function is None:
            placed.function = placed.kernel().function
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                placed.function(*placed.arguments(a, b, out))
        else:
            placed.function(*placed.arguments(a, b, out))
        return out
    if device.type == "cpu" and (backend == "auto" or backend == "emulator"):
        if plan.empty:
            return out.zero_()
        report = _emulate(placed, a, b, out, insist=backend == "emulator")
        if not report.ok:
            raise RuntimeError(f"the emulator found faults in {entry.name} with config {plan.config}:\n{report}")
        return out
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    wanted = {"gpu": "CUDA", "emulator": "CPU", "auto": "CUDA or CPU"}[backend]
    raise ValueError(f"backend {backend!r} needs {wanted} tensors, got a on {device}")


@dataclass
class _Plan:
    """What follows from the operands' types, shapes and strides."""

    variant: str
    config: TileConfig
    dtype: str
    a_major: str
    b_major: str
    a_strides: tuple[int, int] | None  # strides to launch with where they differ from the tensor's
    b_strides: tuple[int, int] | None
    a_nbytes: int  # from the first element to the last
    b_nbytes: int
    out_shape: tuple[int, int]
    out_align: int
    k: int
    empty: bool
    outs: dict[tuple, _Output] = field(default_factory=dict)


@dataclass
class _Output:
    """A plan with an output of one shape and one pair of strides."""

    plan: _Plan
    nbytes: int
    flipped: bool  # column-major output: out.t() = b.t() @ a.t() is the same problem with a row-major one
    strides: tuple[int, int] | None
    function: Any = None  # loaded at the first launch

    def kernel(self) -> CompiledKernel:
        plan = self.plan
        a_major, b_major = plan.a_major, plan.b_major
        if self.flipped:
            a_major, b_major = ("k" if b_major == "k" else "m"), ("k" if a_major == "k" else "n")
        return compile_kernel(plan.variant, plan.config, plan.dtype, a_major, b_major)

    def arguments(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the kernel takes, (M, K), (N, K) and (M, N), with strides that TMA can describe."""
        if self.plan.a_strides is not None:
            a = a.as_strided(a.shape, self.plan.a_strides)
        if self.plan.b_strides is not None:
            b = b.as_strided(b.shape, self.plan.b_strides)
        if self.strides is not None:
            out = out.as_strided(out.shape, self.strides)
        return (b.t(), a, out.t()) if self.flipped else (a, b.t(), out)


_plans: dict[tuple, _Plan] = {}
_MAX_PLANS = 4096
_hopper_devices: set[int] = set()


def _make_plan(a: Any, b: Any, entry: registry.Variant, config: TileConfig | str | None) -> _Plan:
    for name, tensor in (("a", a), ("b", b)):
        _check_tensor(name, tensor)
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} must be float16 or bfloat16, got {_text(tensor.dtype)}")
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got {tensor.dim()}: shape {tuple(tensor.shape)}")
    if a.dtype != b.dtype:
        raise TypeError(f"b must have a's type, {_text(a.dtype)}, got {_text(b.dtype)}")
    m, k = a.shape
    if b.shape[0] != k:
        raise ValueError(f"b must have a's K = {k} rows, got {b.shape[0]}: a is ({m}, {k}), b {tuple(b.shape)}")
    n = b.shape[1]

    key = (entry.name, entry.module, config, a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride())
    if isinstance(config, str):
        config = TileConfig.parse(config)
    module = entry.load()
    chosen = check_config(entry.name, module, config)
    accepted = getattr(module, "DTYPES", tuple(_NAMES.values()))
    if _NAMES[a.dtype] not in accepted:
        raise TypeError(f"a must be {' or '.join(accepted)} for variant {entry.name}, got {_text(a.dtype)}")

    for name, extent in (("M", m), ("N", n), ("K", k)):
        if extent > MAX_EXTENT:
            raise Unsupported(f"{name} must be at most {MAX_EXTENT}, got {extent}")
    empty = m == 0 or n == 0 or k == 0
    a_major = b_major = "k"
    a_strides = b_strides = None
    if not empty:
        a_major, a_strides = _operand("a", a, 1, "km")
        b_major, b_strides = _operand("b", b, 0, "kn")
        if module.RESOURCES.grid_dims == 2 and -(-n // chosen.tile_shape_mnk[1]) > MAX_GRID_Y:
            limit = MAX_GRID_Y * chosen.tile_shape_mnk[1]
            raise Unsupported(f"N must be at most {limit} for variant {entry.name} with config {chosen}, got {n}")
    plan = _Plan(
        variant=entry.name,
        config=chosen,
        dtype=_NAMES[a.dtype],
        a_major=a_major,
        b_major=b_major,
        a_strides=a_strides,
        b_strides=b_strides,
        a_nbytes=_extent(a),
        b_nbytes=_extent(b),
        out_shape=(m, n),
        out_align=getattr(module, "OUT_ALIGN", a.element_size()),
        k=k,
        empty=empty,
    )
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a 2-D tensor's first element to the end of its last; 0 if it has none."""
    if not tensor.numel():
        return 0
    (rows, columns), (row, column) = tensor.shape, tensor.stride()
    return ((rows - 1) * row + (columns - 1) * column + 1) * tensor.element_size()


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise Unsupported(f"{name} must be a dense strided tensor, got layout {tensor.layout}")
    if tensor.device.type not in ("cuda", "cpu") or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Unsupported(
            f"{name} must be a plain CUDA or CPU tensor that holds data, got {type(tensor).__name__} on {tensor.device}"
        )


def _operand(name: str, tensor: torch.Tensor, k_dim: int, majors: str) -> tuple[str, tuple[int, int] | None]:
    """Major order of an operand, and the strides to launch with if they are not the tensor's own.

    The stride of a dimension of extent 1 is never used, so it is replaced by one that TMA can describe.
    Raises Unsupported where TMA cannot describe the operand: no unit stride, a stride that is 0, not a multiple
    of 16 bytes or too large.
    """
    size = tensor.element_size()
    reasons = []
    for major, unit in zip(majors, (k_dim, 1 - k_dim), strict=True):
        other = 1 - unit
        strides = list(tensor.stride())
        if tensor.shape[unit] == 1:
            strides[unit] = 1
        if tensor.shape[other] == 1:
            per_row = OPERAND_ALIGN // size
            strides[other] = -(-tensor.shape[unit] // per_row) * per_row
        step = strides[other] * size
        if strides[unit] != 1:
            continue
        if step == 0:
            reasons.append(f"stride 0 along dimension {other}")
        elif step % OPERAND_ALIGN:
            reasons.append(f"stride of {step} bytes along dimension {other}, not a multiple of {OPERAND_ALIGN}")
        elif step >= MAX_STRIDE_BYTES:
            reasons.append(f"stride of {step} bytes along dimension {other}, not below {MAX_STRIDE_BYTES}")
        else:
            return major, None if tuple(strides) == tensor.stride() else (strides[0], strides[1])
    reason = "; ".join(reasons) or f"no dimension of unit stride (strides {tensor.stride()})"
    raise Unsupported(
        f"{name} has {reason}; TMA describes one unit stride and another that is a non-zero multiple of "
        f"{OPERAND_ALIGN} bytes: pass {name}.contiguous(), or pad its rows"
    )


def _check_alignment(a_ptr: int, b_ptr: int, a: torch.Tensor, b: torch.Tensor) -> None:
    for name, pointer, tensor in (("a", a_ptr, a), ("b", b_ptr, b)):
        if pointer % OPERAND_ALIGN and tensor.numel():
            raise Unsupported(
                f"{name} must start at a multiple of {OPERAND_ALIGN} bytes for TMA, got an address that is "
                f"{pointer % OPERAND_ALIGN} past one (storage offset {tensor.storage_offset()}): pass {name}.clone()"
            )


def _make_output(out: Any, a: torch.Tensor, plan: _Plan) -> _Output:
    _check_tensor("out", out)
    if out.dtype != a.dtype:
        raise TypeError(f"out must have a's type, {_text(a.dtype)}, got {_text(out.dtype)}")
    if tuple(out.shape) != plan.out_shape:
        raise ValueError(f"out must have shape {plan.out_shape}, got {tuple(out.shape)}")
    (m, n), (row, column) = plan.out_shape, out.stride()
    if (m > 1 and row == 0) or (n > 1 and column == 0):
        raise ValueError(f"out must not overlap itself, got shape {(m, n)} with strides {(row, column)}")
    if m > 1 and n > 1 and row < (n - 1) * column + 1 and column < (m - 1) * row + 1:
        raise ValueError(f"out must not overlap itself, got shape {(m, n)} with strides {(row, column)}")
    # The stride of a dimension of extent 1 is never used: take one that suits the kernel.
    per_row = plan.out_align // out.element_size()
    strides = (row, column)
    if n == 1 and (m == 1 or row != 1):
        strides = (row, 1)
    if m == 1 and strides[1] == 1:
        strides = (-(-n // per_row) * per_row, 1)
    elif n == 1 and strides[0] == 1:
        strides = (1, -(-m // per_row) * per_row)
    flipped = strides[1] != 1
    pitch = strides[0] if not flipped else strides[1]
    if 1 not in strides:
        raise Unsupported(f"out must have a dimension of unit stride, got strides {(row, column)}")
    if pitch % per_row and not plan.empty:
        raise Unsupported(
            f"out must have rows that start at multiples of {plan.out_align} bytes for variant {plan.variant}, which "
            f"stores it by TMA; got a stride of {pitch * out.element_size()} bytes"
        )
    placed = _Output(plan, _extent(out), flipped, None if strides == (row, column) else strides)
    if len(plan.outs) >= _MAX_PLANS:
        plan.outs.clear()
    plan.outs[(out.dtype, out.shape, out.stride())] = placed
    return placed


def _check_overlap(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if out.numel() and tensor.numel() and _overlap(out, tensor):
            raise ValueError(f"out must not overlap {name}: {name} is read while out is written")


def _overlap(out: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two 2-D tensors share a byte: exact for windows of one row-major buffer, else by their extents."""
    begin, start = out.data_ptr(), tensor.data_ptr()
    if start >= begin + _extent(out) or begin >= start + _extent(tensor):
        return False
    pitch = out.stride(0)
    if tensor.stride() != (pitch, 1) or out.stride(1) != 1:
        return True
    # Windows of one buffer with rows of `pitch` elements share a byte where both their rows and columns meet,
    # and their extents meet, so only the columns can keep them apart.
    shift = (start - begin) // out.element_size() % pitch
    return not (out.shape[1] <= shift and shift + tensor.shape[1] <= pitch)


def _check_device(device: torch.device) -> None:
    found = torch.cuda.get_device_capability(device)
    if found != HOPPER:
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"the kernels need a Hopper GPU (compute capability 9.0), found {name} ({found[0]}.{found[1]}); "
            "with CPU tensors they run in the emulator"
        )
    _hopper_devices.add(device.index)


def estimate_emulator_seconds(m: int, n: int, k: int, config: TileConfig) -> float:
    """Rough seconds that the emulator takes for one product: whole tiles, at EMULATOR_FLOPS multiply-adds a second."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    padded = (-(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n, -(-k // tile_k) * tile_k)
    return padded[0] * padded[1] * padded[2] / EMULATOR_FLOPS


def _emulate(placed: _Output, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, insist: bool) -> Any:
    plan = placed.plan
    seconds = estimate_emulator_seconds(*plan.out_shape, plan.k, plan.config)
    limit = float(os.environ.get(EMULATOR_LIMIT_VARIABLE, EMULATOR_LIMIT))
    if seconds > limit and not insist:
        raise RuntimeError(
            f"a is on the CPU, where the emulator would take about {seconds:.0f} s for this product (limit "
            f"{limit:.0f} s, {EMULATOR_LIMIT_VARIABLE}); pass backend='emulator' to insist, or CUDA tensors"
        )
    from . import emulator

    return emulator.run(placed.kernel(), *placed.arguments(a, b, out))
