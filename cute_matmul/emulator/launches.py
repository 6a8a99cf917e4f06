"""The part of the CUDA runtime that a DSL program's host code calls, as Python functions that catch its launches.

`bind_runtime` gives the runtime's names to objects that llvmlite loads. What host code asks is answered as for an
H200; what would launch a kernel becomes a `Launch`, handed to the function of the running `Session`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import re
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .operands import Allocation
from .ptx import parse

# CUDA C programming guide, technical specifications of compute capability 9.0.
MAX_SHARED_BYTES = 232_448  # per block, opt-in
MAX_THREADS_PER_BLOCK = 1024
MAX_PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16  # with the non-portable attribute, which the DSL sets on every kernel
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)

# cudaDeviceAttr (CUDA runtime API) of an H200, the ones that host code asks for.
DEVICE_ATTRIBUTES = {
    1: MAX_THREADS_PER_BLOCK,  # MaxThreadsPerBlock
    2: MAX_BLOCK[0],
    3: MAX_BLOCK[1],
    4: MAX_BLOCK[2],
    5: MAX_GRID[0],
    6: MAX_GRID[1],
    7: MAX_GRID[2],
    8: 49_152,  # MaxSharedMemoryPerBlock
    10: 32,  # WarpSize
    12: 65_536,  # MaxRegistersPerBlock
    16: 132,  # MultiProcessorCount
    39: 2048,  # MaxThreadsPerMultiProcessor
    75: 9,  # ComputeCapabilityMajor
    76: 0,  # ComputeCapabilityMinor
    81: 233_472,  # MaxSharedMemoryPerMultiprocessor
    82: 65_536,  # MaxRegistersPerMultiprocessor
    95: 1,  # CooperativeLaunch
    97: MAX_SHARED_BYTES,  # MaxSharedMemoryPerBlockOptin
    106: 32,  # MaxBlocksPerMultiprocessor
    111: 1024,  # ReservedSharedMemoryPerBlock
}

CUDA_SUCCESS = 0
_CUDA_ERROR_UNKNOWN = 999


class HostError(RuntimeError):
    """Host code could not be compiled, loaded or run, or it returned a CUDA error."""


class LaunchError(HostError):
    """A launch that the CUDA runtime would refuse: its message names the figure and the limit."""


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch as the host code asked for it. Dimensions are (x, y, z), sizes bytes."""

    kernel: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[bytes, ...]
    stream: int
    cooperative: bool
    programmatic: bool
    allocations: tuple[Allocation, ...]
    index: int


_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAM_BYTES = re.compile(r"\.param\b[^\[\]]*?\.b8\s+[\w$.]+\s*\[\s*(\d+)\s*\]\s*$", re.S)
_PARAM_SCALAR = re.compile(r"\.param\s+\.[a-z]+(\d+)\b", re.S)


@dataclasses.dataclass(frozen=True)
class KernelSignature:
    """What a PTX `.entry` declares: parameter sizes in bytes, and the block and cluster it insists on."""

    name: str
    param_bytes: tuple[int, ...]
    reqntid: tuple[int, int, int] | None
    maxntid: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None


def kernel_signatures(ptx: str) -> dict[str, KernelSignature]:
    """The `.entry` functions of a PTX module by name. Raises `HostError` for a parameter it cannot size."""
    result = {}
    for name, params, directives in _ENTRY.findall(ptx):
        sizes = []
        for param in filter(None, (p.strip() for p in params.split(","))):
            by_bytes, scalar = _PARAM_BYTES.search(param), _PARAM_SCALAR.match(param)
            if by_bytes:
                sizes.append(int(by_bytes[1]))
            elif scalar:
                sizes.append(int(scalar[1]) // 8)
            else:
                raise HostError(f"kernel {name}: the size of parameter {param!r} is not understood")
        result[name] = KernelSignature(
            name,
            tuple(sizes),
            _dims(directives, "reqntid"),
            _dims(directives, "maxntid"),
            _dims(directives, "reqnctapercluster"),
        )
    return result


def _static_shared(text: str, kernel: str) -> int:
    """Bytes of static shared memory of one kernel of a module: its own variables, and the module's that it names."""
    module = parse(text)
    entry = module.kernels[kernel]
    words = set(re.findall(r"[\w$.]+", "\n".join(instruction.text for instruction in entry.instructions)))
    named = (variable for name, variable in module.variables.items() if name in words)
    return sum(v.nbytes for v in (*entry.variables.values(), *named) if v.space == "shared" and not v.extern)


def _dims(directives: str, name: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    return tuple(int(d or 1) for d in match.groups()) if match else None


class Session:
    """One run of one program: what the bound CUDA runtime functions read and fill in."""

    def __init__(
        self,
        signatures: dict[str, KernelSignature],
        ptx: str,
        allocations: tuple[Allocation, ...],
        on_launch: Callable[[Launch], Any] | None,
    ) -> None:
        self.signatures = signatures
        self.ptx = ptx
        self.allocations = allocations
        self.on_launch = on_launch
        self.kernels: dict[int, str] = {}
        self.launches: list[Launch] = []
        self.error: BaseException | None = None

    def launch(
        self,
        handle: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        stream_handle: int,
        attributes: dict[int, bytes],
        args: int,
    ) -> None:
        if handle not in self.kernels:
            raise HostError(f"the host code launched an unknown kernel handle {handle:#x}")
        name = self.kernels[handle]
        signature = self.signatures[name]
        params = []
        for i, nbytes in enumerate(signature.param_bytes):
            pointer = ctypes.c_uint64.from_address(args + 8 * i).value
            params.append(ctypes.string_at(pointer, nbytes))
        cluster = (1, 1, 1)
        if _ATTRIBUTE_CLUSTER in attributes:
            cluster = struct.unpack_from("<3I", attributes[_ATTRIBUTE_CLUSTER])
        elif signature.cluster:
            cluster = signature.cluster
        launch = Launch(
            kernel=name,
            ptx=self.ptx,
            grid=grid,
            block=block,
            cluster=cluster,
            smem_bytes=smem_bytes,
            params=tuple(params),
            stream=stream_handle,
            cooperative=any(attributes.get(_ATTRIBUTE_COOPERATIVE, b"\0")[:4]),
            programmatic=any(attributes.get(_ATTRIBUTE_PROGRAMMATIC, b"\0")[:4]),
            allocations=self.allocations,
            index=len(self.launches),
        )
        _check_limits(launch, signature)
        self.launches.append(launch)
        if self.on_launch is not None:
            self.on_launch(launch)


# cudaLaunchAttributeID (CUDA runtime API)
_ATTRIBUTE_COOPERATIVE = 2
_ATTRIBUTE_CLUSTER = 4
_ATTRIBUTE_PROGRAMMATIC = 6
_ATTRIBUTE_BYTES = 72
_CONFIG = struct.Struct("<3I3IQQQI")  # cudaLaunchConfig_t: grid, block, dynamic smem, stream, attributes, count


def _check_limits(launch: Launch, signature: KernelSignature) -> None:
    """Refuse what the CUDA runtime refuses on compute capability 9.0."""
    who = f"launch of {launch.kernel}"
    threads = math.prod(launch.block)
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK or any(
        not 1 <= d <= m for d, m in zip(launch.block, MAX_BLOCK, strict=True)
    ):
        raise LaunchError(f"{who}: block {launch.block}, at most {MAX_BLOCK} and {MAX_THREADS_PER_BLOCK} threads")
    if signature.reqntid is not None and launch.block != signature.reqntid:
        raise LaunchError(f"{who}: block {launch.block}, the kernel was compiled for {signature.reqntid}")
    if signature.maxntid is not None and threads > math.prod(signature.maxntid):
        raise LaunchError(f"{who}: {threads} threads, the kernel was compiled for {math.prod(signature.maxntid)}")
    if any(not 1 <= d <= m for d, m in zip(launch.grid, MAX_GRID, strict=True)):
        raise LaunchError(f"{who}: grid {launch.grid}, each dimension is from 1 to {MAX_GRID}")
    if not 1 <= math.prod(launch.cluster) <= MAX_CLUSTER:
        raise LaunchError(f"{who}: cluster {launch.cluster}, at most {MAX_CLUSTER} CTAs")
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(f"{who}: grid {launch.grid} is not a multiple of cluster {launch.cluster}")
    limit = MAX_SHARED_BYTES - _static_shared(launch.ptx, launch.kernel)
    if launch.smem_bytes > limit:
        raise LaunchError(f"{who}: {launch.smem_bytes} bytes of dynamic shared memory, at most {limit}")


_active = threading.local()


@contextlib.contextmanager
def running(session: Session) -> Iterator[None]:
    """Make `session` the one that runtime calls of this thread act on; afterwards raise what one of them raised."""
    outer = getattr(_active, "session", None)
    _active.session = session
    try:
        yield
    finally:
        _active.session = outer
    if session.error is not None:
        raise session.error


def _session() -> Session:
    return _active.session


def _library_load_data(library: int, *_rest: int) -> int:
    ctypes.c_uint64.from_address(library).value = 1
    return CUDA_SUCCESS


def _library_get_kernel(kernel: int, _library: int, name: int) -> int:
    session = _session()
    symbol = ctypes.string_at(name).decode()
    if symbol not in session.signatures:
        raise HostError(f"the host code asks for kernel {symbol}, the PTX has {', '.join(session.signatures)}")
    handle = 0x1000 + 16 * len(session.kernels)
    session.kernels[handle] = symbol
    ctypes.c_uint64.from_address(kernel).value = handle
    return CUDA_SUCCESS


def _kernel_get_attribute(value: int, attribute: int, handle: int, _device: int) -> int:
    if attribute != 1:  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, static shared memory
        raise HostError(f"the host code asks for function attribute {attribute}, known is 1 (static shared memory)")
    session = _session()
    ctypes.c_int32.from_address(value).value = _static_shared(session.ptx, session.kernels[handle])
    return CUDA_SUCCESS


def _device_get_attribute(value: int, attribute: int, _device: int) -> int:
    if attribute not in DEVICE_ATTRIBUTES:
        raise HostError(f"the host code asks for device attribute {attribute}, which the emulator does not define")
    ctypes.c_int32.from_address(value).value = DEVICE_ATTRIBUTES[attribute]
    return CUDA_SUCCESS


def _get_device(device: int) -> int:
    ctypes.c_int32.from_address(device).value = 0
    return CUDA_SUCCESS


def _get_device_count(count: int) -> int:
    ctypes.c_int32.from_address(count).value = 1
    return CUDA_SUCCESS


def _launch_kernel_ex(config: int, kernel: int, args: int) -> int:
    fields = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
    attributes = {}
    for i in range(fields[9]):
        raw = ctypes.string_at(fields[8] + i * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
        attributes[int.from_bytes(raw[:4], "little")] = raw[8:]
    _session().launch(kernel, fields[0:3], fields[3:6], fields[6], fields[7], attributes, args)
    return CUDA_SUCCESS


def _launch_kernel(
    kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, stream_handle: int, smem: int, args: int
) -> int:
    _session().launch(kernel, (gx, gy, gz), (bx, by, bz), smem, stream_handle, {}, args)
    return CUDA_SUCCESS


def _init_library_once(_state: int, init: int, load_to_device: int, _set_error: int) -> int:
    """The TVM-FFI entry's lazy loading of its library, done anew in every run."""
    libraries = (ctypes.c_uint64 * 16)()
    status = ctypes.CFUNCTYPE(_I, _P)(init)(ctypes.addressof(libraries))
    return status or ctypes.CFUNCTYPE(_I, _P, _I)(load_to_device)(ctypes.addressof(libraries), 0)


def _ignore(*_args: int) -> int:
    return CUDA_SUCCESS


def _ffi_stream(_device_type: int, _device: int) -> int:
    return 0


def _ffi_error(kind: int, message: int) -> int:
    raise _ffi_exception(ctypes.string_at(kind).decode(), ctypes.string_at(message).decode())


def _ffi_error_from_parts(kind: int, parts: int, count: int) -> int:
    pointers = (ctypes.c_uint64 * count).from_address(parts)
    message = "".join(ctypes.string_at(pointer).decode() for pointer in pointers if pointer)
    raise _ffi_exception(ctypes.string_at(kind).decode(), message)


def _ffi_exception(kind: str, message: str) -> Exception:
    """The TVM-FFI entry's own checks of its arguments raise TypeError, ValueError or RuntimeError by name."""
    known = {"TypeError": TypeError, "ValueError": ValueError, "IndexError": IndexError}
    return known[kind](message) if kind in known else HostError(f"{kind}: {message}")


def _ffi_cuda_error(_set_error: int, code: int) -> int:
    raise HostError(f"the host code met CUDA error {code}")


_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
RUNTIME: dict[str, tuple[Callable[..., int], Any, tuple[Any, ...]]] = {
    "_cudaLibraryLoadData": (_library_load_data, _I, (_P, _P, _P, _P, _I, _P, _P, _I)),
    "_cudaLibraryGetKernel": (_library_get_kernel, _I, (_P, _P, _P)),
    "_cuKernelGetAttribute": (_kernel_get_attribute, _I, (_P, _I, _P, _I)),
    "_cudaKernelSetAttributeForDevice": (_ignore, _I, (_P, _I, _I, _I)),
    "_cudaFuncSetAttribute": (_ignore, _I, (_P, _I, _I)),
    "_cudaDeviceGetAttribute": (_device_get_attribute, _I, (_P, _I, _I)),
    "_cudaGetDevice": (_get_device, _I, (_P,)),
    "_cudaGetDeviceCount": (_get_device_count, _I, (_P,)),
    "_cudaSetDevice": (_ignore, _I, (_I,)),
    "_cudaLaunchKernelEx": (_launch_kernel_ex, _I, (_P, _P, _P)),
    "_cudaLaunchKernel": (_launch_kernel, _I, (_P, _I, _I, _I, _I, _I, _I, _P, _L, _P)),
    "cuda_dialect_init_library_once": (_init_library_once, _I, (_P, _P, _P, _P)),
    "cuda_dialect_unload_library_once": (_ignore, None, (_P,)),
    "TVMFFIEnvGetStream": (_ffi_stream, _L, (_I, _I)),
    "TVMFFIErrorSetRaisedFromCStr": (_ffi_error, None, (_P, _P)),
    "TVMFFIErrorSetRaisedFromCStrParts": (_ffi_error_from_parts, None, (_P, _P, _I)),
    "CuteDSLRT_TVMFFISetRaisedCudaError": (_ffi_cuda_error, None, (_P, _I)),
}
"""What host code may call: name -> Python function, C result type (None for void), C argument types."""


def _guarded(function: Callable[..., int]) -> Callable[..., int]:
    """Keep an exception from being lost in C code: remember it, and return a CUDA error in its place."""

    @functools.wraps(function)
    def call(*args: int) -> int:
        session = getattr(_active, "session", None)
        if session is None:  # the object's own destructors, when the process ends
            return CUDA_SUCCESS
        if session.error is not None:
            return _CUDA_ERROR_UNKNOWN
        try:
            return function(*(arg or 0 for arg in args))
        except BaseException as error:
            session.error = error
            return _CUDA_ERROR_UNKNOWN

    return call


@functools.cache
def bind_runtime() -> dict[str, Any]:
    """Bind the names of `RUNTIME` for every object that llvmlite loads, once in a process."""
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):  # llvmlite 0.45 and later initialise the core themselves and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    bound = {}
    for name, (function, result, types) in RUNTIME.items():
        callback = ctypes.CFUNCTYPE(result, *types)(_guarded(function))
        llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
        bound[name] = callback
    return bound
