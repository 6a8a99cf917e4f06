"""Run the host side of a CuTe DSL program with no GPU: compile it, execute its own launch code, catch its launches.

A `@cute.jit` host function is compiled for sm_90a to PTX and to an object for this machine's CPU. The object is
loaded into this process with the names of the CUDA runtime bound to Python functions (`launches`), so that the
DSL's own code computes grid, cluster, shared memory, kernel parameters and TMA descriptors. What would have been a
launch becomes a `Launch` handed to a Python function, which may execute the PTX. Nothing here needs a driver or a
C compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import inspect
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .launches import (
    CUDA_SUCCESS,
    RUNTIME,
    HostError,
    KernelSignature,
    Launch,
    LaunchError,
    Session,
    bind_runtime,
    kernel_signatures,
    running,
)
from .operands import Allocation, Memory, Operands, OutOfBounds, View, capsule_tensor, stream

__all__ = [
    "Allocation",
    "HostError",
    "KernelSignature",
    "Launch",
    "LaunchError",
    "Memory",
    "OutOfBounds",
    "Program",
    "View",
    "compile_host",
    "kernel_signatures",
    "stream",
]

SUPPORTED_DSL = "4.8.1"
ARCH = "sm_90a"

_ENTRY = "emulator_entry"
_FFI_PREFIX = "__tvm_ffi_"


class Program:
    """A compiled host function: run it any number of times, with any operands its compiled types accept.

    ptx: the kernels' PTX. kernels: their names. host_object: the ELF object with the host code. name: the host
    function's name in it. Make one with `compile`, `from_compiled`, `from_object` or `of`.
    """

    def __init__(self, host_object: bytes, ptx: str, name: str) -> None:
        self.host_object = host_object
        self.ptx = ptx
        self.name = name
        target = re.search(r"^\.target\s+sm_(\d+)(\w*)", ptx, re.M)
        if target is None or int(target[1]) > 90 or (target[2] and target[1] != "90"):
            found = target[0] if target else "no .target"
            raise HostError(f"the PTX of {name} has {found}, the emulator runs {ARCH} and what Hopper runs too")
        self.signatures = kernel_signatures(ptx)
        self._engine: Any = None
        self._lock = threading.Lock()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in the PTX."""
        return tuple(self.signatures)

    @staticmethod
    def compile(host_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
        """Compile a `@cute.jit` function, method or callable object for the given arguments.

        A torch or NumPy argument becomes a CuTe tensor with a dynamic layout, as the DSL itself converts it, with
        up to 16 bytes of alignment where its address has it. A CuTe tensor keeps the caller's marks; a fake tensor
        will do too. Needs no GPU, and no environment variable.

        Raises TypeError for an argument that has no place in a kernel, HostError where the DSL is not the
        supported release, and the DSL's own errors for what it refuses.
        """
        _check_dsl()
        import cutlass.cute as cute
        from cutlass.base_dsl.compiler import DumpDir

        operands = Operands(fakes=True)
        with tempfile.TemporaryDirectory(prefix="cute_matmul_") as scratch:
            options = (
                cute.GPUArch(ARCH),
                cute.KeepPTX(True),
                cute.GenerateLineInfo(True),
                cute.EnableTVMFFI(False),
                DumpDir(scratch),
            )
            try:
                converted, named = _convert_call(operands, _signature(host_fn), args, kwargs)
                compiled = cute.compile[options](host_fn, *converted, no_jit_engine=True, **named)
            finally:
                operands.restore()
        return Program.from_compiled(compiled)

    @staticmethod
    def from_compiled(compiled: Any) -> Program:
        """A program from what `cute.compile[cute.GPUArch("sm_90a"), cute.KeepPTX(True)]` returned.

        Raises HostError where no PTX was kept, or another architecture's.
        """
        _check_dsl()
        ptx = compiled.__ptx__
        if not ptx:
            raise HostError("the compiled function kept no PTX; compile it with cute.compile[cute.KeepPTX(True)]")
        if hasattr(compiled, "_create_tvm_ffi_function"):  # the TVM-FFI flavour has an entry of its own
            with tempfile.TemporaryDirectory(prefix="cute_matmul_") as scratch:
                path = Path(scratch) / "host.o"
                compiled.export_to_c(object_file_path=str(path), function_name="host")
                return Program.from_object(path, ptx)
        host_object = _host_object(compiled.ir_module, compiled.function_name)
        return _PackedProgram(host_object, ptx, compiled.function_name, compiled.execution_args)

    @staticmethod
    def from_object(host_object: bytes | str | Path, ptx: str, *, names: Sequence[str] = ()) -> Program:
        """A program from an object that a function compiled with `--enable-tvm-ffi` exported, and its PTX.

        host_object: the object's bytes or its path. names: of the arguments, for labels and messages.

        Its `run` takes what the TVM-FFI function takes: neither constants nor the environment's stream. The
        entry's own checks of dtypes and shapes raise their TypeError or ValueError.
        """
        data = host_object if isinstance(host_object, bytes) else Path(host_object).read_bytes()
        entries = [name for name in _symbols(data, defined=True) if name.startswith(_FFI_PREFIX)]
        if len(entries) != 1:
            raise HostError(
                f"the object defines {len(entries)} TVM-FFI functions, accepted are objects with one; "
                "compile with --enable-tvm-ffi and export_to_c"
            )
        return _FfiProgram(data, ptx, entries[0].removeprefix(_FFI_PREFIX), tuple(names))

    @staticmethod
    def of(thing: Any, *args: Any, **kwargs: Any) -> Program:
        """The program of a Program, a compiled kernel (with `object_code` and `ptx`), what `cute.compile` returned,
        or a host function, which is compiled for the arguments."""
        if isinstance(thing, Program):
            return thing
        if hasattr(thing, "object_code") and hasattr(thing, "ptx"):
            return _of_object(thing.object_code, thing.ptx, tuple(inspect.signature(thing).parameters))
        if hasattr(thing, "__ptx__") and hasattr(thing, "ir_module"):
            return Program.from_compiled(thing)
        return Program.compile(thing, *args, **kwargs)

    def run(
        self,
        *args: Any,
        on_launch: Callable[[Launch], Any] | None = None,
        memory: Sequence[tuple[str, Any]] = (),
        **kwargs: Any,
    ) -> tuple[Launch, ...]:
        """Execute the host code on `args` and hand each launch to `on_launch` as it happens.

        args, kwargs: as the compiled function takes them.
        memory: (label, CPU torch tensor) pairs that kernels reach by pointer only.

        Returns the launches in order. Raises what `on_launch` raised, LaunchError for a launch that the CUDA
        runtime would refuse, HostError where the host code returns an error of its own.
        """
        operands = Operands()
        try:
            call = self._marshal(operands, args, kwargs)
        finally:
            operands.restore()
        session = Session(self.signatures, self.ptx, operands.allocations(memory), on_launch)
        with self._lock:
            if self._engine is None:
                self._engine = _load(self.host_object, self.name)
        with running(session):
            status = call()
        if status != CUDA_SUCCESS:
            raise HostError(f"the host code of {self.name} returned error {status}")
        return tuple(session.launches)

    def _marshal(self, operands: Operands, args: tuple, kwargs: dict) -> Callable[[], int]:
        raise NotImplementedError

    def _invoke(self, symbol: str, *args: int) -> int:
        address = self._engine.get_function_address(symbol)
        if not address:
            raise HostError(f"the host object of {self.name} does not define {symbol}")
        return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * len(args))(address)(*args)


class _PackedProgram(Program):
    """The plain entry: one pointer per argument, as the DSL's own executor passes them."""

    def __init__(self, host_object: bytes, ptx: str, name: str, execution_args: Any) -> None:
        super().__init__(host_object, ptx, name)
        self._execution_args = execution_args

    def _marshal(self, operands: Operands, args: tuple, kwargs: dict) -> Callable[[], int]:
        signature = self._execution_args.original_signature
        converted, named = _convert_call(operands, signature, args, kwargs)
        if "self" in signature.parameters:  # bound when it was compiled; the DSL drops whatever stands here
            converted.insert(0, None)
        runtime = self._execution_args.get_rectified_args_from_original_args(converted, named)
        pointers, adapted = self._execution_args.generate_execution_args(runtime, {})
        operands.keep += [runtime, pointers, adapted]  # each pointer keeps its value alive
        packed = (ctypes.c_void_p * max(len(pointers), 1))(
            *(p.value if isinstance(p, ctypes.c_void_p) else p for p in pointers)
        )
        return lambda: self._load_kernels() or self._invoke(_ENTRY, ctypes.addressof(packed))

    def _load_kernels(self) -> int:
        if not self._engine.get_function_address("cuda_num_binaries"):
            return CUDA_SUCCESS
        libraries = (ctypes.c_uint64 * max(self._invoke("cuda_num_binaries"), 1))()
        at = ctypes.addressof(libraries)
        return self._invoke("cuda_init", at) or self._invoke("cuda_load_to_device", at, 0)


class _FfiProgram(Program):
    """The TVM-FFI entry: an array of tagged values (TVMFFIAny), tensors as DLTensor pointers."""

    def __init__(self, host_object: bytes, ptx: str, name: str, names: tuple[str, ...]) -> None:
        super().__init__(host_object, ptx, name)
        self._names = names

    def _marshal(self, operands: Operands, args: tuple, kwargs: dict) -> Callable[[], int]:
        if kwargs:
            raise TypeError(f"{self.name} takes positional arguments only, got {', '.join(kwargs)}")
        values = bytearray()
        for i, value in enumerate(args):
            label = self._names[i] if i < len(self._names) else f"args[{i}]"
            values += _ffi_value(operands, operands.convert(value, label), label)
        packed = (ctypes.c_uint8 * max(len(values), 16)).from_buffer_copy(values.ljust(16, b"\0"))
        result = (ctypes.c_uint8 * 16)()

        def call() -> int:
            address = self._engine.get_function_address(_FFI_PREFIX + self.name)
            types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
            function = ctypes.CFUNCTYPE(ctypes.c_int32, *types)(address)
            # The entry checks that tensors are device memory when it is called, not when it is compiled.
            operands.as_device_again()
            try:
                return function(None, ctypes.addressof(packed), len(args), ctypes.addressof(result))
            finally:
                operands.restore()

        return call


def _ffi_value(operands: Operands, value: Any, label: str) -> bytes:
    """One TVMFFIAny (tvm/ffi/c_api.h): type index, padding, value."""
    if value is None:
        return struct.pack("<iiq", 0, 0, 0)
    if isinstance(value, bool):
        return struct.pack("<iiq", 2, 0, value)
    if isinstance(value, int):
        return struct.pack("<iiq", 1, 0, value)
    if isinstance(value, float):
        return struct.pack("<iid", 3, 0, value)
    if hasattr(value, "_dlpack_data"):
        return struct.pack("<iiQ", 7, 0, capsule_tensor(value._dlpack_data))
    if hasattr(value, "getPtr"):  # a stream
        return struct.pack("<iiQ", 4, 0, 0)
    raise TypeError(f"argument {label}: {type(value).__qualname__} is not supported by a TVM-FFI entry")


@functools.lru_cache(maxsize=64)
def _of_object(host_object: bytes, ptx: str, names: tuple[str, ...]) -> Program:
    return Program.from_object(host_object, ptx, names=names)


def compile_host(host_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """`Program.compile`: compile a `@cute.jit` host function for these arguments, with no GPU."""
    return Program.compile(host_fn, *args, **kwargs)


@functools.cache
def _check_dsl() -> None:
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError as error:
        raise HostError(f"nvidia-cutlass-dsl is not installed; the emulator needs {SUPPORTED_DSL}") from error
    if version != SUPPORTED_DSL:
        raise HostError(f"nvidia-cutlass-dsl {version} is installed; the emulator needs {SUPPORTED_DSL}")


# Arguments


def _convert_call(
    operands: Operands, signature: inspect.Signature, args: tuple, kwargs: dict
) -> tuple[list[Any], dict[str, Any]]:
    """Convert positional and keyword arguments, labelled by parameter name and spared where Constexpr."""
    from cutlass.base_dsl.runtime.jit_arg_adapters import is_arg_annotation_constexpr

    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    by_name = {p.name: p for p in parameters}

    def convert(value: Any, label: str, parameter: inspect.Parameter | None) -> Any:
        annotation = parameter.annotation if parameter is not None else None
        if value is None and getattr(annotation, "__name__", "") in ("CUstream", "cudaStream_t"):
            value = stream()
        constexpr = parameter is not None and is_arg_annotation_constexpr(annotation, parameter.name, -1, None)
        return operands.convert(value, label, constexpr)

    converted = []
    for i, value in enumerate(args):
        parameter = parameters[i] if i < len(parameters) else None
        variadic = parameter is None or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        converted.append(convert(value, f"args[{i}]" if variadic else parameter.name, parameter))
    named = {name: convert(value, name, by_name.get(name)) for name, value in kwargs.items()}
    return converted, named


def _signature(host_fn: Callable[..., Any]) -> inspect.Signature:
    target = host_fn if inspect.isroutine(host_fn) else type(host_fn).__call__
    try:
        return inspect.signature(target, eval_str=True)
    except (NameError, TypeError, SyntaxError):  # annotations that only the DSL's own preprocessor can resolve
        return inspect.signature(target)


def _host_object(ir_module: Any, function_name: str) -> bytes:
    """Object code of the host function plus `emulator_entry(void** args)`, which unpacks one pointer per argument."""
    from cutlass._mlir import ir
    from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support

    with ir.Context():
        module = ir.Module.parse(str(ir_module))
        inputs = next(
            [str(kind) for kind in op.attributes["function_type"].value.inputs]
            for op in module.body.operations
            if op.operation.name == "llvm.func" and op.attributes["sym_name"].value == function_name
        )
        body = []
        for i, kind in enumerate(inputs):
            body += [
                f"%p{i} = llvm.getelementptr %args[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr",
                f"%q{i} = llvm.load %p{i} : !llvm.ptr -> !llvm.ptr",
                f"%v{i} = llvm.load %q{i} : !llvm.ptr -> {kind}",
            ]
        values = ", ".join(f"%v{i}" for i in range(len(inputs)))
        body.append(f"%r = llvm.call @{function_name}({values}) : ({', '.join(inputs)}) -> i32")
        entry = "llvm.func @{}(%args: !llvm.ptr) -> i32 {{\n{}\nllvm.return %r : i32\n}}\n"
        text = str(module).rstrip()
        wrapped = text[: text.rindex("}")] + entry.format(_ENTRY, "\n".join(body)) + "}\n"
        return _aot_support.export_module_to_bytes(ir.Module.parse(wrapped), format="o", opt_level=3, enable_pic=True)


# Objects


def _load(host_object: bytes, name: str) -> Any:
    """The llvmlite execution engine that holds the object, linked to the bound runtime."""
    import llvmlite.binding as llvm

    bind_runtime()
    unknown = [
        symbol
        for symbol in _symbols(host_object, defined=False)
        if symbol not in RUNTIME and symbol != "_GLOBAL_OFFSET_TABLE_" and not _process_has(symbol)
    ]
    if unknown:  # MCJIT would end the process
        raise HostError(f"the host code of {name} calls {', '.join(unknown)}, which the emulator does not provide")
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(host_object))
    engine.finalize_object()
    return engine


def _symbols(elf: bytes, *, defined: bool) -> list[str]:
    """Global names that an ELF64 relocatable object defines, or needs from outside."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise HostError("the host object is not a little-endian ELF64 object")
    (section_table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, section_table + i * entry_bytes) for i in range(count)]
    names = []
    for _, kind, _, _, offset, size, link, _, _, step in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]
        for at in range(offset + step, offset + size, step):
            name, info, _, section = struct.unpack_from("<IBBH", elf, at)
            if name and info >> 4 and (section != 0) == defined:  # STB_GLOBAL or STB_WEAK
                names.append(elf[strings + name : elf.index(b"\0", strings + name)].decode())
    return names


def _process_has(name: str) -> bool:
    try:
        getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return False
    return True
