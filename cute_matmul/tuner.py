"""The fastest configuration of a variant for a shape, found by measuring it, and remembered.

`python -m cute_matmul tune v2 --shape 8192x8192x8192` compiles the variant's space in processes side by side (they
only fill the disk cache), then times it on the GPU: all configurations a little, the better ones more, always in
turn, so that heat and power meet all of them alike. What was found is kept in the cache folder per (GPU, variant,
shape, type, major orders); a run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from . import registry
from .config import TileConfig

FORMAT = 2  # 1: what was remembered had been timed in rounds of 30 ms
FILE = "tuned.json"


@dataclass(frozen=True)
class Stage:
    """Times what the stage before kept, and the variant's DEFAULT, in turn.

    rounds: how often each is timed. keep, least: the fraction and the number that go on. seconds: of calls that are
    timed per configuration and round (three calls at least), after lead_s of calls that are not.
    """

    rounds: int
    keep: float
    least: int
    seconds: float
    lead_s: float = 0.0


STAGES = (Stage(2, 0.34, 4, 0.03), Stage(4, 0.34, 3, 0.03), Stage(6, 0.0, 1, 0.4, lead_s=0.2))
"""The last stage lets each meet the power limit alone. In short turns all run, presumably, at one clock, which the
limiter sets by their mean power: what needs more energy per FLOP is flattered there (perf/NOTES.md, "Tuning")."""

TIE_GAIN = 1.005
TIE_WINS = 6
"""DEFAULT is displaced by what beats it in at least TIE_WINS of the last stage's 6 rounds (by chance alone 1 time in
64) and by more than TIE_GAIN in the median: a tie leaves it in place."""

WORTH_KEEPING = 1.10
"""Configurations slower than this many times the stage's best are not kept."""

NEAR = 2.0
"""`best_config` takes a shape's neighbour for it while no extent differs by more than this factor."""


class Unavailable(RuntimeError):
    """Nothing can be tuned here, and why."""


@dataclass(frozen=True)
class Job:
    """One kernel to compile; config is the text of a TileConfig, or None for the variant's DEFAULT."""

    variant: str
    config: str | None
    dtype: str = "float16"
    a_major: str = "k"
    b_major: str = "k"

    def __str__(self) -> str:
        return f"{self.variant} {self.config or 'default'} {self.dtype} A {self.a_major}, B {self.b_major}"


@dataclass(frozen=True)
class Target:
    """What a configuration is tuned for. mnk: M, N, K of C (M, N) = A (M, K) @ B (K, N)."""

    gpu: str
    variant: str
    mnk: tuple[int, int, int]
    dtype: str = "float16"
    a_major: str = "k"
    b_major: str = "k"

    @property
    def key(self) -> str:
        shape = "x".join(map(str, self.mnk))
        return "|".join((self.gpu, self.variant, shape, self.dtype, self.a_major, self.b_major))

    @classmethod
    def from_key(cls, key: str) -> Target:
        gpu, variant, shape, dtype, a_major, b_major = key.split("|")
        m, n, k = map(int, shape.split("x"))
        return cls(gpu, variant, (m, n, k), dtype, a_major, b_major)


# What is remembered


def memory_path() -> Path | None:
    """The file of remembered configurations, or None where the cache is turned off."""
    from .compile import cache_folder

    folder = cache_folder()
    return None if folder is None else folder / FILE


def _read() -> dict[str, Any]:
    path = memory_path()
    empty: dict[str, Any] = {"format": FORMAT, "best": {}, "unfinished": {}}
    if path is None:
        return empty
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return empty
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read ({error}); remove it to tune again") from error
    return found if found.get("format") == FORMAT else empty


@contextlib.contextmanager
def _changed() -> Iterator[dict[str, Any]]:
    """The remembered state, to be changed: written back atomically; other processes wait meanwhile."""
    path = memory_path()
    if path is None:
        raise Unavailable("the cache is turned off (CUTE_MATMUL_CACHE=0), so nothing could be remembered")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = _read()
        yield state
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=FILE, suffix=".part")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
        os.replace(temporary, path)


def _accepted(variant: str, text: str) -> TileConfig | None:
    """The configuration, unless the variant's space no longer has it."""
    config, module = TileConfig.parse(text), registry.get(variant).load()
    return config if config in module.SPACE or config == module.DEFAULT else None


def best_config(
    variant: str,
    mnk: tuple[int, int, int],
    dtype: str = "float16",
    a_major: str = "k",
    b_major: str = "k",
    *,
    gpu: str | None = None,
    exact: bool = False,
) -> TileConfig | None:
    """The remembered configuration of a variant for a shape (M, N, K), or None.

    gpu: the device's name (None: the current one). Where this shape was not tuned, its nearest tuned neighbour (by
    the logarithms of the extents, none off by more than NEAR) is taken, unless `exact`.
    """
    if gpu is None:
        gpu = _gpu_name()
    wanted = Target(gpu, variant, tuple(mnk), dtype, a_major, b_major)
    best = _read()["best"]
    if wanted.key in best:
        return _accepted(variant, best[wanted.key]["config"])
    if exact:
        return None
    near: list[tuple[float, str]] = []
    for key, entry in best.items():
        target = Target.from_key(key)
        same = (target.gpu, target.variant, target.dtype, target.a_major, target.b_major)
        if same != (gpu, variant, dtype, a_major, b_major) or min(mnk) < 1:
            continue
        distances = [abs(math.log(a / b)) for a, b in zip(target.mnk, mnk, strict=True)]
        if max(distances) <= math.log(NEAR):
            near.append((sum(distances), entry["config"]))
    return _accepted(variant, min(near)[1]) if near else None


def _gpu_name() -> str:
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("no CUDA GPU is visible to torch; configurations are tuned on the GPU they are for")
    return torch.cuda.get_device_name()


# Compiling


def _compile(job: Job) -> str | None:
    """Compile into the disk cache; None, or what went wrong. Runs in a process of its own."""
    from .compile import compile_kernel

    try:
        compile_kernel(job.variant, job.config, job.dtype, job.a_major, job.b_major)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def compile_jobs(
    jobs: Sequence[Job], workers: int | None = None, done: Callable[[Job], None] | None = None
) -> dict[Job, str | None]:
    """Compile kernels into the disk cache, several processes at once; for each job None or its error.

    workers: processes (None: one a core). With one, with a single job, or with the cache turned off, compiles here.
    """
    from .compile import cache_folder

    jobs = list(dict.fromkeys(jobs))
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    found: dict[Job, str | None] = {}
    if workers <= 1 or cache_folder() is None:
        for job in jobs:
            found[job] = _compile(job)
            if done:
                done(job)
        return found
    # NOTE: spawned, not forked: the parent may hold a CUDA context and the compiler's threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compile, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                job = futures[future]
                found[job] = future.result()
                if done:
                    done(job)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {job: found[job] for job in jobs}


# Timing


class Timer(Protocol):
    """Times one configuration on the operands of one target."""

    def seconds(self, config: TileConfig, stage: Stage) -> float:
        """Seconds per call, over the stage's seconds of calls and after its lead."""
        ...

    def check(self, config: TileConfig) -> None:
        """Raises RuntimeError where the configuration's result is wrong."""
        ...


class GpuTimer:
    """On the current device, operands rotated so that they are not found in the L2."""

    def __init__(self, target: Target, seed: int = 0):
        import torch

        from .problem import Problem

        self._torch = torch
        self._target = target
        m, n, k = target.mnk
        self._problem = Problem(m, n, k, target.dtype, target.a_major, target.b_major, seed)
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        inputs = self._problem.torch_dtype.itemsize * k * (m + n)
        sets = min(256, max(2, -(-3 * l2 // max(1, inputs))))
        generator = torch.Generator(device="cuda").manual_seed(seed)

        def draw(rows: int, columns: int, transposed: bool) -> Any:
            size = (columns, rows) if transposed else (rows, columns)
            values = torch.randn(size, generator=generator, device="cuda", dtype=self._problem.torch_dtype)
            return values.t() if transposed else values

        self._sets = []
        for _ in range(sets):
            a, b = draw(m, k, target.a_major == "m"), draw(k, n, target.b_major == "k")
            self._sets.append((a, b, torch.empty((m, n), device="cuda", dtype=self._problem.torch_dtype)))

    def _kernel(self, config: TileConfig) -> Any:
        from .compile import compile_kernel

        t = self._target
        return compile_kernel(t.variant, config, t.dtype, t.a_major, t.b_major).function

    def seconds(self, config: TileConfig, stage: Stage) -> float:
        kernel = self._kernel(config)
        kernel(*self._sets[0])
        estimate = max(self._timed(kernel, 2), 1e-6)
        if stage.lead_s:
            estimate = max(self._timed(kernel, math.ceil(stage.lead_s / estimate)), 1e-6)
        return self._timed(kernel, max(3, math.ceil(stage.seconds / estimate)))

    def _timed(self, kernel: Any, calls: int) -> float:
        event = self._torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for i in range(calls):
            kernel(*self._sets[i % len(self._sets)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def check(self, config: TileConfig) -> None:
        from . import problem

        a, b, out = self._sets[0]
        out.fill_(float("nan"))
        self._kernel(config)(a, b, out)
        self._torch.cuda.synchronize()
        found = problem.check(out, a, b, accumulator=registry.get(self._target.variant).accumulator)
        if not found.ok:
            raise RuntimeError(f"{self._target.variant} with config {config} gives a wrong result: {found}")


def tune(
    target: Target,
    space: Sequence[TileConfig],
    timer: Timer,
    step: Callable[[str], None] | None = None,
    default: TileConfig | None = None,
) -> dict[str, list[float]]:
    """Find and remember the best of `space`; seconds per call of each, from the last stage that timed it.

    step: called with each configuration before it is timed. default: what stands unless it is clearly beaten.
    Goes on where a stopped run of the same space was.
    """
    texts = [str(config) for config in space]
    held = str(default) if default in space else None
    state = _read()["unfinished"].get(target.key)
    if state is None or sorted(state["space"]) != sorted(texts):
        state = {"space": texts, "stage": 0, "survivors": texts, "times": {}}
    while state["stage"] < len(STAGES):
        stage = STAGES[state["stage"]]
        survivors, times = state["survivors"], state["times"]
        done = min((len(times.get(text, ())) for text in survivors), default=0)
        for number in range(done, stage.rounds if len(survivors) > 1 else 1):
            taken = {}
            # Shuffled: in a rotation each would always follow the same one, and find the board as that leaves it.
            for text in random.Random(number).sample(survivors, len(survivors)):
                if step:
                    step(text)
                taken[text] = timer.seconds(TileConfig.parse(text), stage)
            for text, seconds in taken.items():
                times.setdefault(text, []).append(seconds)
            with _changed() as everything:
                everything["unfinished"][target.key] = state
        ranked = sorted(survivors, key=lambda text: statistics.median(times[text]))
        limit = WORTH_KEEPING * statistics.median(times[ranked[0]])
        kept = ranked[: max(stage.least, math.ceil(stage.keep * len(ranked)))]
        state["survivors"] = [text for text in kept if statistics.median(times[text]) <= limit or text == held]
        if held is not None and held not in state["survivors"]:
            state["survivors"].append(held)
        state["stage"] += 1
        state.setdefault("final", {}).update({text: times[text] for text in survivors})
        if state["stage"] < len(STAGES):
            state["times"] = {}
    best = state["survivors"][0]
    if held is not None and not _clearly_faster(state["final"][best], state["final"][held]):
        best = held
    timer.check(TileConfig.parse(best))
    seconds = statistics.median(state["final"][best])
    with _changed() as everything:
        everything["unfinished"].pop(target.key, None)
        everything["best"][target.key] = {"config": best, "seconds": seconds, "tuned": time.strftime("%Y-%m-%d")}
    return state["final"]


def _clearly_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Whether seconds per call, paired by round, are below others by more than the rounds differ on their own."""
    gains = [other / mine for mine, other in zip(times, than, strict=True)]
    return sum(gain > 1 for gain in gains) >= TIE_WINS and statistics.median(gains) > TIE_GAIN


# Command line


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m cute_matmul tune", description="Find the fastest configuration of variants for shapes."
    )
    top.add_argument("variants", nargs="*", metavar="variant", help="names that `list` shows (none: all of them)")
    top.add_argument("--shape", action="append", metavar="MxNxK", help="default 8192x8192x8192; may be repeated")
    top.add_argument("--dtype", default="float16", help="float16 (fp16) or bfloat16 (bf16)")
    top.add_argument("--a-major", default="k", choices=("k", "m"), help="unit stride of A (default k)")
    top.add_argument("--b-major", default="k", choices=("k", "n"), help="unit stride of B (default k)")
    top.add_argument("--workers", type=int, help="processes that compile (default: one a core)")
    top.add_argument("--list", action="store_true", help="only print what is remembered")
    top.add_argument("--json", action="store_true")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: tuned; 1: could not; 2: bad arguments; 130: stopped, and what was timed is kept."""
    top = parser()
    options = top.parse_args(arguments)
    try:
        if options.list:
            return _print_remembered(options.json)
        return _tune_all(options)
    except (Unavailable, RuntimeError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        top.print_usage(sys.stderr)
        print(f"tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntune: stopped; the same command goes on where it was", file=sys.stderr)
        return 130


def _tune_all(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .problem import dtype_name

    dtype = dtype_name(options.dtype)
    shapes = [_shape(text) for text in options.shape or ["8192x8192x8192"]]
    entries = [registry.get(name) for name in options.variants or registry.names()]
    gpu = _gpu_name()
    if memory_path() is None:
        raise Unavailable("the cache is turned off (CUTE_MATMUL_CACHE=0), so nothing could be remembered")
    spaces: dict[str, list[TileConfig]] = {}
    for entry in entries:
        module = entry.load()
        if dtype not in entry.dtypes:
            print(f"{entry.name}: does not take {dtype}", file=sys.stderr)
            continue
        spaces[entry.name] = list(dict.fromkeys((module.DEFAULT, *module.SPACE)))
    jobs = [
        Job(name, str(config), dtype, options.a_major, options.b_major)
        for name, space in spaces.items()
        for config in space
    ]
    with tqdm(total=len(jobs), desc="compiling", unit="kernel", leave=False, disable=None) as bar:
        errors = compile_jobs(jobs, options.workers, done=lambda job: bar.update())
    for job, error in errors.items():
        if error:
            print(f"{job}: left out, does not compile: {error}", file=sys.stderr)

    found = []
    for mnk in shapes:
        for name, space in spaces.items():
            usable = [c for c in space if not errors[Job(name, str(c), dtype, options.a_major, options.b_major)]]
            if not usable:
                continue
            target = Target(gpu, name, mnk, dtype, options.a_major, options.b_major)
            with tqdm(desc=f"{name} {'x'.join(map(str, mnk))}", unit="", leave=False, disable=None) as bar:

                def step(text: str, bar: Any = bar) -> None:
                    bar.set_postfix_str(text)
                    bar.update()

                default = registry.get(name).load().DEFAULT
                times = tune(target, usable, GpuTimer(target), step, default)
            found.append(_row(target, times, str(default)))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_rows(found)
    return 0


def _row(target: Target, times: dict[str, list[float]], default: str) -> dict[str, Any]:
    m, n, k = target.mnk
    medians = {text: statistics.median(values) for text, values in times.items()}
    best = _read()["best"][target.key]
    ranked = sorted(medians, key=lambda text: medians[text])
    return {
        "variant": target.variant,
        "shape": list(target.mnk),
        "dtype": target.dtype,
        "config": best["config"],
        "seconds": best["seconds"],
        "tflops": 2 * m * n * k / best["seconds"] / 1e12,
        "over_default": medians[default] / best["seconds"] if default in medians else None,
        "timed": {text: medians[text] for text in ranked},
    }


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    from tabulate import tabulate

    table = [
        [
            row["variant"],
            "x".join(map(str, row["shape"])),
            row["dtype"],
            row["config"],
            f"{row['seconds'] * 1e6:.1f}",
            f"{row['tflops']:.0f}",
            "" if row["over_default"] is None else f"{row['over_default']:.3f}x",
        ]
        for row in rows
    ]
    print(tabulate(table, headers=["variant", "shape", "dtype", "best config", "us", "TFLOP/s", "over default"]))


def _print_remembered(as_json: bool) -> int:
    best = _read()["best"]
    if as_json:
        print(json.dumps(best, indent=2))
        return 0
    from tabulate import tabulate

    table = []
    for key, entry in sorted(best.items()):
        t = Target.from_key(key)
        shape = "x".join(map(str, t.mnk))
        majors = f"{t.a_major}{t.b_major}"
        table.append([t.gpu, t.variant, shape, t.dtype, majors, entry["config"], f"{entry['seconds'] * 1e6:.1f}"])
    print(tabulate(table, headers=["GPU", "variant", "shape", "dtype", "majors", "config", "us"]))
    return 0


def _shape(text: str) -> tuple[int, int, int]:
    parts = text.split("x")
    if len(parts) == 1:
        parts = parts * 3
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(f"shape must look like 8192x8192x4096 (MxNxK) or 8192, got {text!r}")
    m, n, k = map(int, parts)
    return m, n, k


if __name__ == "__main__":
    sys.exit(main())
