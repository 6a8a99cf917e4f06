"""torch tensors -> a compiled kernel -> the GPU or the emulator.

Everything that could make a launch wrong is checked here, before it: types, extents, strides and alignment that
TMA can describe (the encoded descriptor itself is not checked by anyone), aliasing, device. What depends on
shapes and strides alone is worked out once per combination and remembered as a plan.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from . import registry
from .compile import OPERAND_ALIGN, CompiledKernel, check_config, compile_kernel
from .config import TileConfig

if TYPE_CHECKING:
    from .emulator import Report

BACKENDS = ("auto", "gpu", "emulator")
HOPPER = (9, 0)
MAX_EXTENT = 2**31 - 256
"""Rows, columns and K elements are 32-bit signed in the kernels' coordinates, and so is the end of the last tile."""
MAX_STRIDE_BYTES = 2**40
"""Strides a TMA descriptor can hold are below this (CUDA Driver API, cuTensorMapEncodeTiled, globalStrides)."""
MAX_GRID_Y = 65535
"""CTAs along y (CUDA C++ Programming Guide, compute capabilities)."""

EMULATOR_LIMIT_VARIABLE = "CUTE_MATMUL_EMULATOR_SECONDS"
EMULATOR_LIMIT = 120.0
"""Estimated seconds above which `backend="auto"` refuses CPU tensors."""
EMULATOR_FLOPS = 6e7
"""Multiply-adds per second counted on for the estimate: the slowest of V0-V6 at 512x512x512 on two cores."""

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
    if out is None:
        out = _allocate(a, b)
    try:
        key = (
            variant or registry.default_name(),
            registry.generation,
            config,
            a.dtype,
            a.shape,
            a.stride(),
            b.dtype,
            b.shape,
            b.stride(),
            out.dtype,
            out.shape,
            out.stride(),
        )
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        key = plan = None  # something is not a plain tensor: _make_plan says what
    if plan is None:
        plan = _make_plan(a, b, out, variant, config)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    elif not (type(a) is type(b) is type(out) is torch.Tensor):
        _check_tensors(a, b, out)  # the plan may be of plain tensors with these shapes
    try:
        a_ptr, b_ptr, out_ptr = a.data_ptr(), b.data_ptr(), out.data_ptr()
    except RuntimeError:
        _check_tensors(a, b, out)  # says which of them holds no data
        raise
    if a.is_neg() or b.is_neg() or out.is_neg() or not (a_ptr and b_ptr and out_ptr):
        _check_tensors(a, b, out)
    if (a_ptr | b_ptr) % OPERAND_ALIGN or out_ptr % plan.out_align:
        _check_alignment(a, b, out, plan)
    out_end = out_ptr + plan.out_nbytes
    if (out_ptr < a_ptr + plan.a_nbytes and a_ptr < out_end) or (out_ptr < b_ptr + plan.b_nbytes and b_ptr < out_end):
        _check_overlap(out, a, b)
    if (a.requires_grad or b.requires_grad or out.requires_grad) and torch.is_grad_enabled():
        name = "a" if a.requires_grad else "b" if b.requires_grad else "out"
        raise Unsupported(
            f"{name} requires grad, and matmul has no backward yet; call it under torch.no_grad() or detach {name}"
        )
    if forward_ad._current_level >= 0:
        _check_tangents(a, b, out)
    device = a.get_device()
    if b.get_device() != device or out.get_device() != device:
        _check_same_device(a, b, out)

    if device >= 0 and (backend == "auto" or backend == "gpu"):
        if plan.empty:
            return out.zero_()
        if plan.function is None or device not in _hopper_devices:
            _check_device(device)
            plan.function = plan.kernel().function
        if _several_devices and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                plan.function(*plan.arguments(a, b, out))
        elif plan.as_given:
            plan.function(a, b, out)
        else:
            plan.function(*plan.arguments(a, b, out))
        return out
    if device < 0 and (backend == "auto" or backend == "emulator"):
        _check_tensors(a, b, out)  # meta tensors have no device number either
        _check_same_device(a, b, out)
        if backend == "auto":
            _check_patience(plan)
        report = _emulate(plan, a, b, out)
        if report is not None and not report.ok:
            raise RuntimeError(f"the emulator found faults in {plan.variant} with config {plan.config}:\n{report}")
        return out
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    wanted = {"gpu": "CUDA", "emulator": "CPU"}[backend]
    raise ValueError(f"backend {backend!r} needs {wanted} tensors, got a on {a.device}")


def emulate(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    variant: str | None = None,
    config: TileConfig | str | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Report | None]:
    """matmul(..., backend="emulator") that also returns the emulator's report, and never raises for what it found.

    options go to `cute_matmul.emulator.run` (schedule, seed, check, trace, ...). The report is None where there
    was nothing to run: an extent of 0.
    """
    if out is None:
        out = _allocate(a, b)
    plan = _make_plan(a, b, out, variant, config)
    _check_alignment(a, b, out, plan)
    _check_overlap(out, a, b)
    _check_same_device(a, b, out)
    if a.device.type != "cpu":
        raise ValueError(f"the emulator needs CPU tensors, got a on {a.device}")
    return out, _emulate(plan, a, b, out, **options)


@dataclass
class _Plan:
    """What follows from the types, shapes and strides of a, b and out."""

    variant: str
    config: TileConfig
    dtype: str
    a_major: str
    b_major: str
    a_strides: tuple[int, int] | None  # strides to launch with where they differ from the tensor's
    b_strides: tuple[int, int] | None
    out_strides: tuple[int, int] | None
    a_nbytes: int  # from the first element to the end of the last
    b_nbytes: int
    out_nbytes: int
    out_align: int
    mnk: tuple[int, int, int]
    flipped: bool  # column-major output: out.t() = b.t() @ a.t() is the same problem with a row-major one
    function: Any = None  # loaded at the first launch

    def __post_init__(self) -> None:
        self.empty = 0 in self.mnk
        self.as_given = not self.flipped and self.a_strides is self.b_strides is self.out_strides is None

    def kernel(self) -> CompiledKernel:
        a_major, b_major = self.a_major, self.b_major
        if self.flipped:
            a_major, b_major = ("k" if b_major == "k" else "m"), ("k" if a_major == "k" else "n")
        return compile_kernel(self.variant, self.config, self.dtype, a_major, b_major)

    def arguments(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the kernel takes, (M, K), (K, N) and (M, N), with strides that TMA can describe."""
        if self.a_strides is not None:
            a = a.as_strided(a.shape, self.a_strides)
        if self.b_strides is not None:
            b = b.as_strided(b.shape, self.b_strides)
        if self.out_strides is not None:
            out = out.as_strided(out.shape, self.out_strides)
        return (b.t(), a.t(), out.t()) if self.flipped else (a, b, out)


_plans: dict[tuple | None, _Plan] = {}
_MAX_PLANS = 4096
_hopper_devices: set[int] = set()
_several_devices = True  # until a look at them says otherwise


def _allocate(a: Any, b: Any) -> torch.Tensor:
    _check_operands(a, b)
    return torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)


def _check_operands(a: Any, b: Any) -> None:
    for name, tensor in (("a", a), ("b", b)):
        _check_tensor(name, tensor)
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} must be float16 or bfloat16, got {_text(tensor.dtype)}")
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got {tensor.dim()}: shape {tuple(tensor.shape)}")
    if a.dtype != b.dtype:
        raise TypeError(f"b must have a's type, {_text(a.dtype)}, got {_text(b.dtype)}")
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"b must have a's K = {a.shape[1]} rows, got shape {tuple(b.shape)} for a {tuple(a.shape)}")


def _make_plan(a: Any, b: Any, out: Any, variant: str | None, config: TileConfig | str | None) -> _Plan:
    _check_operands(a, b)
    (m, k), n = a.shape, b.shape[1]
    _check_tensor("out", out)
    if out.dtype != a.dtype:
        raise TypeError(f"out must have a's type, {_text(a.dtype)}, got {_text(out.dtype)}")
    if tuple(out.shape) != (m, n):
        raise ValueError(f"out must have shape {(m, n)}, got {tuple(out.shape)}")

    entry = registry.default() if variant is None else registry.get(variant)
    if isinstance(config, str):
        config = TileConfig.parse(config)
    module = entry.load()
    chosen = check_config(entry.name, module, config)
    if _NAMES[a.dtype] not in entry.dtypes:
        raise TypeError(f"a must be {' or '.join(entry.dtypes)} for variant {entry.name}, got {_text(a.dtype)}")
    for name, extent in (("M", m), ("N", n), ("K", k)):
        if extent > MAX_EXTENT:
            raise Unsupported(f"{name} must be at most {MAX_EXTENT}, got {extent}")

    out_align = getattr(module, "OUT_ALIGN", out.element_size())
    a_major = b_major = "k"
    a_strides = b_strides = out_strides = None
    flipped = False
    if 0 not in (m, n):
        flipped, out_strides = _output(out, out_align, entry.name)
    if 0 not in (m, n, k):
        a_major, a_strides = _operand("a", a, 1, "km")
        b_major, b_strides = _operand("b", b, 0, "kn")
        columns = m if flipped else n
        limit = MAX_GRID_Y * chosen.tile_shape_mnk[1]
        if module.RESOURCES.grid_dims == 2 and columns > limit:
            name = "M" if flipped else "N"
            raise Unsupported(f"{name} must be at most {limit} for {entry.name} with config {chosen}, got {columns}")
    return _Plan(
        variant=entry.name,
        config=chosen,
        dtype=_NAMES[a.dtype],
        a_major=a_major,
        b_major=b_major,
        a_strides=a_strides,
        b_strides=b_strides,
        out_strides=out_strides,
        a_nbytes=_extent(a),
        b_nbytes=_extent(b),
        out_nbytes=_extent(out),
        out_align=out_align,
        mnk=(m, n, k),
        flipped=flipped,
    )


def _output(out: torch.Tensor, align: int, variant: str) -> tuple[bool, tuple[int, int] | None]:
    """Whether the output is column-major, and the strides to launch with if they are not its own."""
    (m, n), (row, column) = out.shape, out.stride()
    collides = m > 1 and n > 1 and row < (n - 1) * column + 1 and column < (m - 1) * row + 1
    if collides or (m > 1 and row == 0) or (n > 1 and column == 0):
        raise ValueError(f"out must not overlap itself, got shape {(m, n)} with strides {(row, column)}")
    # The stride of a dimension of extent 1 is never used: take one that suits the kernel.
    per_row = align // out.element_size()
    if n == 1 and (m == 1 or row != 1):
        column = 1
    if m == 1 and column != 1:
        row = 1
    if m == 1 and column == 1:
        row = -(-n // per_row) * per_row
    if n == 1 and row == 1 and m > 1:
        column = -(-m // per_row) * per_row
    if column != 1 and row != 1:
        raise Unsupported(f"out must have a dimension of unit stride, got strides {out.stride()}")
    flipped = column != 1
    pitch = column if flipped else row
    if pitch % per_row:
        raise Unsupported(
            f"out must have rows that start at multiples of {align} bytes for variant {variant}, which stores it by "
            f"TMA; got a stride of {pitch * out.element_size()} bytes"
        )
    # NOTE: a TMA store clips a row at the next 16 bytes, not at its end (tests/data/tensormap_clipping.json).
    length = m if flipped else n
    if length % per_row:
        raise Unsupported(
            f"out must have rows whose length is a multiple of {align} bytes for variant {variant}, which stores it by "
            f"TMA and would write up to the next such multiple; got {length * out.element_size()} bytes"
        )
    return flipped, None if (row, column) == out.stride() else (row, column)


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
    # What follows has torch's own type, and storage that does not say what its values are.
    if tensor.is_neg():
        raise Unsupported(f"{name} must hold its own values, got a view that negates them; pass {name}.resolve_neg()")
    try:
        holds_data = tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # of the tensors that torch.func's transforms pass
        holds_data = False
    if not holds_data:
        raise Unsupported(
            f"{name} must be a plain tensor that holds data, got one of a torch.func transform or of known zeros"
        )


def _check_tangents(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise Unsupported(
                f"{name} carries a tangent, and matmul has no forward-mode derivative yet; pass {name} without it"
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


def _check_alignment(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, plan: _Plan) -> None:
    if plan.empty:
        return
    for name, tensor, align in (("a", a, OPERAND_ALIGN), ("b", b, OPERAND_ALIGN), ("out", out, plan.out_align)):
        past = tensor.data_ptr() % align
        if past:
            raise Unsupported(
                f"{name} must start at a multiple of {align} bytes for TMA, got an address that is {past} past one "
                f"(storage offset {tensor.storage_offset()} elements)"
            )


def _check_tensors(a: Any, b: Any, out: Any) -> None:
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        _check_tensor(name, tensor)


def _check_same_device(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    for name, tensor in (("b", b), ("out", out)):
        if tensor.device != a.device:
            raise ValueError(f"{name} must be on a's device, {a.device}, got {tensor.device}")


def _check_overlap(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if out.numel() and tensor.numel() and _overlap(out, tensor):
            raise ValueError(f"out must not overlap {name}: {name} is read while out is written")


def _overlap(out: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two 2-D tensors share a byte: exact for windows of one buffer, else by their extents."""
    begin, start = out.data_ptr(), tensor.data_ptr()
    if start >= begin + _extent(out) or begin >= start + _extent(tensor):
        return False
    runs = _run(out), _run(tensor)
    if runs[0] is None or runs[1] is None:
        return True
    (width, pitch), (other_width, other_pitch) = runs
    # Each is runs of `width` elements, a multiple of `period` apart. The extents meet, so only their places
    # within a period can keep the two apart.
    period = math.gcd(pitch, other_pitch)
    if period == 0:
        return True
    shift = (start - begin) // out.element_size() % period
    return not (width <= shift and shift + other_width <= period)


def _run(tensor: torch.Tensor) -> tuple[int, int] | None:
    """A matrix as runs of contiguous elements: (length of one, elements from one to the next), if it is that."""
    for along, across in ((1, 0), (0, 1)):
        if tensor.stride(along) == 1 or tensor.shape[along] == 1:
            return tensor.shape[along], tensor.stride(across) if tensor.shape[across] > 1 else 0
    return None


def _check_device(device: int) -> None:
    global _several_devices
    found = torch.cuda.get_device_capability(device)
    if found != HOPPER:
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"the kernels need a Hopper GPU (compute capability 9.0), found {name} ({found[0]}.{found[1]}); "
            "with CPU tensors they run in the emulator"
        )
    _several_devices = torch.cuda.device_count() > 1
    _hopper_devices.add(device)


def estimate_emulator_seconds(m: int, n: int, k: int, config: TileConfig) -> float:
    """Rough seconds that the emulator takes for one product: whole tiles, at EMULATOR_FLOPS multiply-adds a second."""
    tile_m, tile_n, tile_k = config.tile_shape_mnk
    padded = (-(-m // tile_m) * tile_m, -(-n // tile_n) * tile_n, -(-k // tile_k) * tile_k)
    return padded[0] * padded[1] * padded[2] / EMULATOR_FLOPS


def _check_patience(plan: _Plan) -> None:
    seconds = estimate_emulator_seconds(*plan.mnk, plan.config)
    limit = float(os.environ.get(EMULATOR_LIMIT_VARIABLE, EMULATOR_LIMIT))
    if seconds > limit:
        raise RuntimeError(
            f"a is on the CPU, where the emulator would take about {seconds:.0f} s for this product (limit "
            f"{limit:.0f} s, {EMULATOR_LIMIT_VARIABLE}); pass backend='emulator' to insist, or CUDA tensors"
        )


def _emulate(plan: _Plan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> Report | None:
    if plan.empty:
        out.zero_()
        return None
    from . import emulator

    return emulator.run(plan.kernel(), *plan.arguments(a, b, out), **options)
