"""Who takes part: the ladder's variants, and other libraries' matmuls, each behind one small adapter.

A peer that is not installed, or does not take these operands, is skipped with a reason; none is imported before it
is asked for. `accumulate` says what a contender adds up in, and stands beside every comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perf import stats
from perf.device import Launch, Layout, Operands
from perf.measure import Prepared, Skip
from perf.suites import Shape

CHOICE_ROUNDS = 3


def best_of(
    candidates: Sequence[tuple[str, Launch]], operands: Operands, seconds: Callable[[Launch], float]
) -> tuple[Launch, dict[str, Any]]:
    """The fastest candidate on these operands by short timings, and what each took (microseconds, or why not).

    Each is timed in CHOICE_ROUNDS rounds of changing order, and its median counts: the board slows down after the first
    few calls, so that in a single round the first candidate would win.
    """
    tried: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    for order in stats.interleave(len(candidates), CHOICE_ROUNDS):
        for label, launch in (candidates[i] for i in order):
            if label in tried:
                continue
            try:
                launch(operands.a, operands.b, operands.out)
                times.setdefault(label, []).append(seconds(launch))
            except Exception as error:
                tried[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                times.pop(label, None)
    medians = {label: stats.median(took) for label, took in times.items()}
    tried |= {label: round(took * 1e6, 2) for label, took in medians.items()}
    if not medians:
        raise Skip(f"no candidate ran: {tried}")
    best = min(medians, key=medians.__getitem__)
    return dict(candidates)[best], {"config": best, "candidates_us": tried}


@dataclass
class VariantContender:
    """A rung of the ladder, with its tuned configuration, its DEFAULT, or one that was asked for.

    name: as the result has it; the rung's own, with the configuration where a run compares several of one rung.
    """

    name: str
    variant: str
    config: str | None = None
    gpu: str = ""
    kind: str = "variant"

    def __post_init__(self) -> None:
        from cute_matmul import registry

        variant = registry.get(self.variant)
        self.label = variant.title
        self.accumulate = {"float32": "fp32", "float16": "fp16"}[variant.accumulator]

    def takes(self, dtype: str) -> bool:
        from cute_matmul import registry

        return dtype in registry.get(self.variant).dtypes

    def choose(self, shape: Shape, layout: Layout) -> tuple[Any, str]:
        """The configuration for a shape, and where it comes from: "given", "tuned" or "default"."""
        from cute_matmul import registry, tuner
        from cute_matmul.config import TileConfig

        if self.config is not None:
            return TileConfig.parse(self.config), "given"
        tuned = tuner.best_config(
            self.variant, shape.mnk, layout.dtype, layout.a_major, layout.b_major, gpu=self.gpu, exact=True
        )
        if tuned is not None:
            return tuned, "tuned"
        return registry.get(self.variant).load().DEFAULT, "default"

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        from cute_matmul.compile import compile_kernel

        if not self.takes(layout.dtype):
            raise Skip(f"does not take {layout.dtype}")
        config, source = self.choose(shape, layout)
        try:
            kernel = compile_kernel(self.variant, config, layout.dtype, layout.a_major, layout.b_major)
        except ValueError as error:
            raise Skip(str(error)) from error
        details = {"config": str(config), "config_from": source, "ptx": kernel.fingerprint}
        return Prepared(kernel.function, details)


@dataclass
class Cublas:
    """cuBLAS as torch calls it: torch.mm(a, b, out=out) with torch's default settings."""

    name: str = "cublas"
    label: str = "cuBLAS (torch.mm)"
    kind: str = "peer"
    accumulate: str = "fp32"

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        import torch

        def launch(a: Any, b: Any, out: Any) -> None:
            torch.mm(a, b, out=out)

        return Prepared(launch)


@dataclass
class CublasLt:
    """cuBLASLt, the fastest of the algorithms its heuristic proposes for the shape."""

    name: str = "cublaslt"
    label: str = "cuBLASLt, best of its proposals"
    kind: str = "peer"
    accumulate: str = "fp32"

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        from perf import cublaslt

        try:
            plan = cublaslt.Plan(shape, layout)
        except cublaslt.Unavailable as error:
            raise Skip(str(error)) from error
        candidates = [(f"proposal {i}", functools.partial(plan.launch, i)) for i in range(plan.count)]
        launch, details = best_of(candidates, operands, seconds)
        return Prepared(launch, {**details, "version": plan.version})


@dataclass
class Quack:
    """quack's Hopper GEMM in the same DSL, the best of a few configurations of its own space."""

    name: str = "quack"
    label: str = "quack"
    kind: str = "peer"
    accumulate: str = "fp32"

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        try:
            from quack.gemm_config import GemmConfig
            from quack.gemm_interface import gemm_tuned
        except ImportError as error:
            raise Skip(f"quack-kernels is not installed ({error})") from error

        # (tile M, tile N, pingpong, cluster M, cluster N, raster group, operands swapped): the configurations
        # that led at large sizes in burst and under sustained load, and swapped ones for few rows.
        tiles = [
            (128, 192, True, 2, 1, 8, False),
            (128, 256, False, 2, 1, 8, False),
            (256, 192, False, 2, 1, 8, False),
            (256, 208, False, 2, 1, 4, False),
        ]
        if shape.m <= 128:
            tiles = [(128, 128, True, 1, 2, 8, False), (128, 128, True, 2, 1, 8, True), (192, 128, True, 2, 1, 8, True)]
        candidates = []
        for tile_m, tile_n, pingpong, cluster_m, cluster_n, group, swap in tiles:
            config = GemmConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                pingpong=pingpong,
                is_dynamic_persistent=False,
                cluster_m=cluster_m,
                cluster_n=cluster_n,
                max_swizzle_size=group,
                swap_ab=swap,
            )

            def launch(a: Any, b: Any, out: Any, config: Any = config) -> None:
                gemm_tuned.fn(a, b, out, config=config)

            label = f"{tile_m}x{tile_n}{' pingpong' if pingpong else ''} cluster {cluster_m}x{cluster_n} group {group}"
            candidates.append((label + (" swapped" if swap else ""), launch))
        launch, details = best_of(candidates, operands, seconds)
        return Prepared(launch, details)


@dataclass
class Triton:
    """A persistent matmul in Triton whose loads and stores go through TMA, best of a few block shapes."""

    name: str = "triton"
    label: str = "Triton, persistent, TMA"
    kind: str = "peer"
    accumulate: str = "fp32"

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        try:
            from perf import triton_kernels
        except ImportError as error:
            raise Skip(f"triton is not installed, or has no tensor descriptors ({error})") from error
        candidates = [
            (str(blocks), functools.partial(triton_kernels.matmul, blocks=blocks))
            for blocks in triton_kernels.CANDIDATES
        ]
        launch, details = best_of(candidates, operands, seconds)
        return Prepared(launch, details)


@dataclass
class Operators:
    """NVIDIA's CUTLASS operators package, the best of the first operators it finds for the operands."""

    name: str = "operators"
    label: str = "CUTLASS operators"
    kind: str = "peer"
    accumulate: str = "fp32"
    most: int = 6

    def prepare(self, shape: Shape, layout: Layout, operands: Operands, seconds: Callable[[Launch], float]) -> Prepared:
        try:
            import cutlass.operators as ops
        except ImportError as error:
            raise Skip(f"nvidia-cutlass-operators is not installed ({error})") from error
        import torch

        def arguments(a: Any, b: Any, out: Any) -> Any:
            return ops.GemmArguments(A=a, B=b, out=out, accumulator_type=torch.float32)

        first = arguments(operands.a, operands.b, operands.out)
        found = ops.get_operators(first, target_sm=ops.utils.device.device_or_env_target_sm())
        if not found:
            raise Skip("the package has no operator for these operands on this GPU")
        candidates = []
        for operator in found[: self.most]:
            compiled = operator.compile(first)

            def launch(a: Any, b: Any, out: Any, operator: Any = operator, compiled: Any = compiled) -> None:
                stream = torch.cuda.current_stream()
                operator.run(arguments(a, b, out), compiled, stream=stream, assume_supported_args=True)

            candidates.append((f"{len(candidates)} {operator.metadata.operator_name}", launch))
        launch, details = best_of(candidates, operands, seconds)
        return Prepared(launch, details)


PEERS: dict[str, Callable[[], Any]] = {
    "cublas": Cublas,
    "cublaslt": CublasLt,
    "quack": Quack,
    "triton": Triton,
    "operators": Operators,
}


def named(variants: Sequence[str], configs: Sequence[tuple[str, str]]) -> list[tuple[str, str, str | None]]:
    """(name, variant, configuration asked for or None) of every contender that is a variant; see `build`."""
    found: list[tuple[str, str, str | None]] = []
    for variant in variants:
        asked = list(dict.fromkeys(config for name, config in configs if name == variant))
        if len(asked) > 1:
            found += [(f"{variant} {config}", variant, config) for config in asked]
        else:
            found.append((variant, variant, asked[0] if asked else None))
    return found


def build(variants: Sequence[str], peers: Sequence[str], configs: Sequence[tuple[str, str]], gpu: str) -> list[Any]:
    """Contenders: variants in the order given, then peers. Raises ValueError for an unknown peer or variant.

    configs: (variant, configuration); a variant with several takes part once with each.
    """
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise ValueError(f"peers must be of {', '.join(PEERS)}; got {', '.join(unknown)}")
    # NOTE: variants first. Importing quack changes the DSL's tensor classes for the whole process, so nothing of
    # ours may be traced after it.
    return [
        *(VariantContender(name, variant, config, gpu) for name, variant, config in named(variants, configs)),
        *(PEERS[name]() for name in peers),
    ]
