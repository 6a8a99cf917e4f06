"""From a variant to a callable kernel: trace, PTX, cubin, object; for sm_90a on any machine.

Nothing here needs a GPU, a driver or an environment variable. A compiled kernel serves every shape: it is
specialised on (variant, config, dtype, major orders) alone. It is kept in memory, and on disk as one file per
kernel, written atomically and verified before it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import stat
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import registry
from .config import TileConfig
from .registry import DTYPES

if TYPE_CHECKING:
    import torch

ARCH = "sm_90a"
SUPPORTED_DSL = "4.8.1"
A_MAJORS = ("k", "m")
B_MAJORS = ("k", "n")
OPERAND_ALIGN = 16
"""Bytes. TMA needs 16-byte aligned addresses and strides (CUDA Driver API, cuTensorMapEncodeTiled)."""

ENTRY = "cute_matmul_host"
MAGIC = b"cute_matmul kernel 1\n"
CACHE_VARIABLE = "CUTE_MATMUL_CACHE"

KERNEL_MODULES = ("config", "hopper", "pipeline", "scheduler", "epilogue", "compile")
"""Modules of this package whose source can change the code that a variant compiles to."""


class CacheWarning(UserWarning):
    """A cached kernel could not be used or kept; it was compiled again. Said once per file."""


@dataclass
class CompiledKernel:
    """A variant compiled for one configuration, dtype and pair of major orders; any shape.

    ptx: the kernel's PTX. cubin: its sm_90a machine code. object_code: the host object that encodes the TMA
    descriptors and launches. symbol: the kernel's name in PTX and profilers. threads: threads per CTA.
    smem_bytes: dynamic shared memory per CTA. seconds: what compiling, or loading from disk, took.
    """

    variant: str
    config: TileConfig
    dtype: str
    a_major: str
    b_major: str
    ptx: str
    cubin: bytes
    object_code: bytes
    symbol: str
    threads: int
    smem_bytes: int
    from_cache: bool = False
    seconds: float = 0.0
    _function: Any = field(default=None, repr=False, compare=False)

    @property
    def function(self) -> Any:
        """The TVM-FFI function (a, b, out), loaded on first use. a is (M, K), b (K, N), out (M, N)."""
        if self._function is None:
            self._function = _load_object(self.object_code)
        return self._function

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the PTX: equal where two sources are the same kernel.

        Left out are line information and comments, and the ISA's version, which is not the same in the DSL's wheels
        for CUDA 12 and 13.
        """
        apart = (".loc", ".file", ".version", "//")
        lines = (line for line in self.ptx.splitlines() if not line.lstrip().startswith(apart))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Launch on torch's current stream: out (M, N) = a (M, K) @ b (K, N). CUDA tensors; nothing is checked."""
        self.function(a, b, out)


_memory: dict[tuple, CompiledKernel] = {}
_lock = threading.RLock()
_warned: set[str] = set()
_STARTED = time.time()
_loaded: dict[str, float] = {}  # module -> a time not after it was imported


def check_dsl_version() -> None:
    """Raise ImportError unless the installed DSL is the one the kernels are written against."""
    try:
        found = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        found = None
    if found != SUPPORTED_DSL:
        what = f"nvidia-cutlass-dsl {found} is installed" if found else "nvidia-cutlass-dsl is not installed"
        raise ImportError(f"{what}; this release of cute_matmul supports {SUPPORTED_DSL} exactly")


def compile_kernel(
    variant: str | None = None,
    config: TileConfig | str | None = None,
    dtype: str = "float16",
    a_major: str = "k",
    b_major: str = "k",
) -> CompiledKernel:
    """Compile a variant for sm_90a, or take it from the memory or disk cache.

    variant: a registered name (None: the registry's default). config: a TileConfig or its text (None: the
    variant's DEFAULT). dtype: "float16" or "bfloat16", of all three matrices. a_major: "k" or "m"; b_major:
    "k" or "n": the dimension with unit stride. Raises ValueError naming the argument that is not accepted.
    """
    entry = registry.get(variant) if variant is not None else registry.default()
    for name, value, accepted in (
        ("dtype", dtype, DTYPES),
        ("a_major", a_major, A_MAJORS),
        ("b_major", b_major, B_MAJORS),
    ):
        if value not in accepted:
            raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
    if isinstance(config, str):
        config = TileConfig.parse(config)
    key = (entry, config, dtype, a_major, b_major)
    kernel = _memory.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        kernel = _memory.get(key)
        if kernel is None:
            _loaded.setdefault(entry.module, _STARTED if entry.module in sys.modules else time.time())
            module = entry.load()
            chosen = check_config(entry.name, module, config)
            if dtype not in entry.dtypes:
                raise ValueError(f"dtype must be one of {', '.join(entry.dtypes)} for {entry.name}, got {dtype!r}")
            kernel = _memory.get((entry, chosen, dtype, a_major, b_major))
            kernel = kernel or _load_or_compile(entry.name, module, chosen, dtype, a_major, b_major)
            _memory[key] = _memory[(entry, chosen, dtype, a_major, b_major)] = kernel
    return kernel


def check_config(name: str, module: ModuleType, config: TileConfig | None) -> TileConfig:
    """The configuration to use, or a ValueError that says why an SM or the variant refuses it."""
    if config is None:
        return module.DEFAULT
    if config in module.SPACE or config == module.DEFAULT:
        return config
    resources = getattr(module, "RESOURCES", None)
    reason = resources.refusal(config) if resources else None
    space = ", ".join(map(str, module.SPACE))
    raise ValueError(f"config {config} is not one of {name}'s{': ' + reason if reason else ''}; accepted: {space}")


def forget() -> None:
    """Empty the memory cache (the disk cache stays)."""
    with _lock:
        _memory.clear()


def _load_or_compile(
    name: str, module: ModuleType, config: TileConfig, dtype: str, a_major: str, b_major: str
) -> CompiledKernel:
    started = time.perf_counter()
    facts = {
        "variant": name,
        "config": str(config),
        "dtype": dtype,
        "a_major": a_major,
        "b_major": b_major,
    }
    folder = cache_folder()
    path = None
    edited = _edited_since_import(module) if folder is not None else None
    if edited is not None:
        _warn(edited, "has changed since it was imported", "kernels of it are kept in memory only")
    elif folder is not None:
        key = _key(module, facts)
        path = folder / f"{name}-{key}.kernel"
        kernel = _read(path, key, config)
        if kernel is not None:
            kernel.seconds = time.perf_counter() - started
            return kernel
    kernel = _compile(module, config, facts)
    kernel.seconds = time.perf_counter() - started
    if path is not None:
        _write(path, key, kernel, facts)
    return kernel


def _compile(module: ModuleType, config: TileConfig, facts: dict[str, str]) -> CompiledKernel:
    check_dsl_version()
    import cutlass
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    element = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[facts["dtype"]]

    def operand(unit_dim: int) -> Any:
        stride = cute.sym_int64(divisibility=OPERAND_ALIGN * 8 // element.width)
        strides = (1, stride) if unit_dim == 0 else (stride, 1)
        return make_fake_tensor(element, (cute.sym_int(), cute.sym_int()), strides, assumed_align=OPERAND_ALIGN)

    # Ordinary stores take any row stride and any aligned element; a variant that stores by TMA says what it needs.
    out_align = getattr(module, "OUT_ALIGN", element.width // 8)
    row_stride = cute.sym_int64(divisibility=out_align * 8 // element.width)
    out = make_fake_tensor(element, (cute.sym_int(), cute.sym_int()), (row_stride, 1), assumed_align=out_align)
    # The DSL drops PTX and cubin into a folder as well as keeping them: give it one of its own.
    with tempfile.TemporaryDirectory(prefix="cute_matmul-") as scratch:
        options = (
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GPUArch(ARCH),
            cute.EnableTVMFFI(True),
            cute.GenerateLineInfo(True),
            DumpDir(scratch),
        )
        compiled = cute.compile[options](
            module.host,
            operand(unit_dim=1 if facts["a_major"] == "k" else 0),
            operand(unit_dim=0 if facts["b_major"] == "k" else 1),
            out,
            make_fake_stream(use_tvm_ffi_env_stream=True),
            config,
        )
        object_path = Path(scratch) / "kernel.o"
        compiled.export_to_c(object_file_path=str(object_path), function_name=ENTRY)
        object_code = object_path.read_bytes()
    ptx = compiled.__ptx__
    return CompiledKernel(
        variant=facts["variant"],
        config=config,
        dtype=facts["dtype"],
        a_major=facts["a_major"],
        b_major=facts["b_major"],
        ptx=ptx,
        cubin=compiled.__cubin__,
        object_code=object_code,
        symbol=_required(r"\.entry\s+(\w+)", ptx, "kernel name"),
        threads=int(_required(r"\.reqntid\s+(\d+)", ptx, "thread count")),
        smem_bytes=_smem_bytes(module, config),
    )


def _required(pattern: str, ptx: str, what: str) -> str:
    match = re.search(pattern, ptx)
    if match is None:
        raise RuntimeError(f"no {what} in the PTX that the DSL produced (looked for {pattern!r})")
    return match.group(1)


def _smem_bytes(module: ModuleType, config: TileConfig) -> int:
    """Dynamic shared memory of the launch, by the variant's arithmetic.

    The PTX does not state it. Tests hold this equal to what the compiled host code passes to the launch.
    """
    return module.RESOURCES.smem_bytes(config)


def _load_object(object_code: bytes) -> Any:
    """The TVM-FFI function of a host object, from memory: what was verified is what is loaded."""
    check_dsl_version()
    import cutlass.cute as cute

    descriptor = os.memfd_create("cute_matmul", os.MFD_CLOEXEC)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(object_code)
        module = cute.runtime.load_module(f"/proc/self/fd/{descriptor}", enable_tvm_ffi=True)
    finally:
        os.close(descriptor)
    return getattr(module, ENTRY)


# Disk cache


def cache_folder() -> Path | None:
    """Where compiled kernels are kept, or None if CUTE_MATMUL_CACHE=0. The variable also moves it."""
    setting = os.environ.get(CACHE_VARIABLE)
    if setting == "0":
        return None
    if setting:
        return Path(setting).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("cute_matmul", appauthor=False))


@functools.lru_cache(maxsize=1)
def _environment() -> dict[str, str]:
    """Versions and sources that could change the code of any variant."""
    here = Path(__file__).parent
    sources = {}
    for name in KERNEL_MODULES:
        path = here / f"{name}.py"
        if path.exists():
            sources[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    versions = {}
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {"sources": json.dumps(sources), "versions": json.dumps(versions), "machine": os.uname().machine}


def _edited_since_import(module: ModuleType) -> Path | None:
    """A source of the kernel that is newer than what this process imported: its hash would name other code."""
    here = Path(__file__).parent
    imported = {here / f"{name}.py": _STARTED for name in KERNEL_MODULES}
    imported[Path(inspect.getfile(module))] = _loaded.get(module.__name__, _STARTED)
    for path, when in imported.items():
        if path.exists() and path.stat().st_mtime > when:
            return path
    return None


def _dsl_environment() -> dict[str, str]:
    """The DSL's own variables; those that the options of `_compile` override do not count."""
    overridden = ("CUTE_DSL_ARCH", "CUTE_DSL_DUMP_DIR")
    return {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and k not in overridden}


def _key(module: ModuleType, facts: dict[str, str]) -> str:
    """Hash of everything that could change the compiled object, or the files that its line information names."""
    from . import __version__

    path = Path(inspect.getfile(module))
    source = path.read_bytes()
    material = {
        "places": json.dumps([str(Path(__file__).parent), str(path)]),
        **_environment(),
        **facts,
        "module": hashlib.sha256(source).hexdigest(),
        "package": __version__,
        "options": f"{ARCH} tvm-ffi line-info align={OPERAND_ALIGN}",
        "dsl_environment": json.dumps(sorted(_dsl_environment().items())),
    }
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:40]


def _read(path: Path, key: str, config: TileConfig) -> CompiledKernel | None:
    """The kernel in a cache file, or None. A file that is not wholly and surely ours is never loaded."""
    try:
        # NOTE: non-blocking, or a pipe of that name would hold up the caller for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(path, f"cannot be opened ({error.strerror})")
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return _warn(path, "is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_uid != os.geteuid():
            return _warn(path, f"belongs to user {status.st_uid}, not {os.geteuid()}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return _warn(path, "can be written by other users")
        data = file.read()
    if not data.startswith(MAGIC):
        return _warn(path, "is of another kind or version")
    digest, _, payload = data[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        return _warn(path, "is damaged (its checksum does not match)")
    try:
        return _parse(payload, key, config) or _warn(path, "holds another kernel")
    except (ValueError, KeyError, TypeError) as error:
        return _warn(path, f"is of another layout ({type(error).__name__}: {error})")


def _parse(payload: bytes, key: str, config: TileConfig) -> CompiledKernel | None:
    """The kernel in a payload, None if of another key. Raises ValueError, KeyError or TypeError for another layout."""
    header_text, _, body = payload.partition(b"\n")
    header = json.loads(header_text)
    if header["key"] != key:
        return None
    parts, offset = {}, 0
    for name, length in header["parts"]:
        parts[name] = body[offset : offset + length]
        offset += length
    facts = header["facts"]
    return CompiledKernel(
        variant=facts["variant"],
        config=config,
        dtype=facts["dtype"],
        a_major=facts["a_major"],
        b_major=facts["b_major"],
        ptx=parts["ptx"].decode(),
        cubin=parts["cubin"],
        object_code=parts["object"],
        symbol=header["symbol"],
        threads=header["threads"],
        smem_bytes=header["smem_bytes"],
        from_cache=True,
    )


def _write(path: Path, key: str, kernel: CompiledKernel, facts: dict[str, str]) -> None:
    """Write a cache file next to its place and move it there: readers see all of it or nothing."""
    parts = {"object": kernel.object_code, "ptx": kernel.ptx.encode(), "cubin": kernel.cubin}
    header = {
        "key": key,
        "facts": facts,
        "symbol": kernel.symbol,
        "threads": kernel.threads,
        "smem_bytes": kernel.smem_bytes,
        "parts": [(name, len(data)) for name, data in parts.items()],
    }
    payload = json.dumps(header).encode() + b"\n" + b"".join(parts.values())
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _warn(path, f"cannot be written ({error.strerror})", "the compiled kernel is kept in memory only")


def _warn(path: Path, reason: str, consequence: str = "compiling the kernel again") -> None:
    if str(path) not in _warned:
        _warned.add(str(path))
        warnings.warn(f"cache file {path} {reason}; {consequence}", CacheWarning, stacklevel=2)
