"""Entry points: run a host function, or one launch, in the emulator."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cute_matmul.emulator import arithmetic, schedule, translate
from cute_matmul.emulator.hazards import HazardEngine
from cute_matmul.emulator.interpreter import Engine
from cute_matmul.emulator.report import Deadlock, Report, Suppression

ARITHMETIC = {"fast": arithmetic.FAST, "truncating": arithmetic.TRUNCATING}


def run(
    host_fn: Any,
    *args: Any,
    schedule: str = "round_robin",
    seed: int = 0,
    check: bool = True,
    trace: bool = False,
    max_steps: int | None = None,
    suppress: Sequence[Suppression] = (),
    arithmetic: str = "fast",
    memory: Sequence[tuple[str, Any]] = (),
    **kwargs: Any,
) -> Report:
    """Execute a CuTe DSL host function on the CPU and report what happened. No GPU or driver is needed.

    Args:
        host_fn: a `@cute.jit` function or callable object, something already compiled (`cute.compile`'s result, this
            package's `CompiledKernel`), or a `host.Program`.
        args, kwargs: its arguments: CPU torch tensors, CuTe tensors made from them, compile-time constants, scalars,
            `host.stream()` or None for a stream. Outputs appear in the tensors.
        schedule: "round_robin", "random" or "adversarial" (see `emulator.schedule`). Same schedule and seed, same run.
        check: look for hazards. trace: record a timeline.
        max_steps: scheduler steps after which the run stops with the table of a deadlock.
        suppress: hazards to set apart, each with a reason.
        memory: (label, CPU tensor) pairs of further global memory, for kernels that get raw pointers in tensors.
        arithmetic: "fast" (sums in float32) or "truncating" (closer to the hardware's adder, much slower).

    Raises:
        ValueError for an unknown schedule or arithmetic, EmulatorError for what the emulator does not know,
        HostError and LaunchError where compilation or the launch fails as it would on a GPU.
    """
    from cute_matmul.emulator.host import Program

    check_options(schedule, seed, arithmetic, suppress)
    if not callable(host_fn) and not isinstance(host_fn, Program):
        raise TypeError(
            "host_fn must be a @cute.jit function, a callable object, a compiled function or a host.Program,"
            f" got {type(host_fn).__name__}"
        )
    program = Program.of(host_fn, *args, **kwargs)
    report = Report(schedule=schedule, seed=seed, checked=check)

    def on_launch(launch: Any) -> None:
        if report.deadlock is not None or report.stopped:
            return
        run_launch(
            launch,
            schedule=schedule,
            seed=seed,
            check=check,
            trace=trace,
            max_steps=max_steps,
            suppress=suppress,
            arithmetic=arithmetic,
            report=report,
        )

    program.run(*args, on_launch=on_launch, memory=memory, **kwargs)
    return report


def check_options(name: str, seed: int, arithmetic_name: str, suppress: Sequence[Suppression]) -> None:
    """Raises ValueError or TypeError for options that `run` does not accept."""
    schedule.make(name, 0)
    if not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {type(seed).__name__}")
    if arithmetic_name not in ARITHMETIC:
        raise ValueError(f"arithmetic {arithmetic_name!r}; accepted: {', '.join(ARITHMETIC)}")
    for suppression in suppress:
        if not isinstance(suppression, Suppression):
            raise TypeError(f"suppress must hold emulator.Suppression objects, got {type(suppression).__name__}")


def run_launch(
    launch: Any,
    *,
    schedule: str = "round_robin",
    seed: int = 0,
    check: bool = True,
    trace: bool = False,
    max_steps: int | None = None,
    suppress: Sequence[Suppression] = (),
    arithmetic: str = "fast",
    report: Report | None = None,
) -> Report:
    """Execute one `launches.Launch`. Options as in `run`; results are added to `report` where one is given."""
    check_options(schedule, seed, arithmetic, suppress)
    report = report if report is not None else Report(schedule=schedule, seed=seed, checked=check)
    program = translate.program(launch.ptx, launch.kernel)
    started = time.perf_counter()
    instructions = program.instructions
    block, cluster = launch.block, launch.cluster
    warps_per_cta = -(-(block[0] * block[1] * block[2]) // 32)
    cluster_size = cluster[0] * cluster[1] * cluster[2]
    ctas = launch.grid[0] * launch.grid[1] * launch.grid[2]

    def describe(src: int) -> tuple[str, str]:
        ins = instructions[src]
        place = f"{os.path.relpath(ins.source[0])}:{ins.source[1]}" if ins.source else f"PTX line {ins.line}"
        text = ins.text if len(ins.text) <= 100 else f"{ins.text[:97]}..."
        return place, text

    engine: Engine | None = None
    names: list[str] = []

    def role(agent: int) -> str:
        if not names:
            names.extend(roles(engine))
        return names[agent]

    hazards = tracer = None
    if check:
        smem = max(program.dynamic_start + launch.smem_bytes, program.static_shared_end)
        hazards = HazardEngine(
            ctas=ctas,
            warps_per_cta=warps_per_cta,
            cluster_size=cluster_size,
            smem_bytes=-(-smem // 16) * 16,
            describe=describe,
            role=role,
        )
    if trace:
        from cute_matmul.emulator.timeline import Tracer

        tracer = Tracer(
            ctas=ctas,
            warps_per_cta=warps_per_cta,
            cluster_size=cluster_size,
            kernel=launch.kernel,
            describe=describe,
        )
    engine = Engine(
        launch,
        program,
        schedule_name=schedule,
        seed=seed,
        hazards=hazards,
        tracer=tracer,
        max_steps=max_steps,
        arithmetic_model=ARITHMETIC[arithmetic],
    )
    engine.run()
    report.kernels += (launch.kernel,)
    # In a true deadlock what is still due at the barriers is its cause; after a cut it means nothing.
    cut = engine.stopped or (engine.deadlock is not None and engine.deadlock["reason"] != "deadlock")
    found = hazards.finish(stopped=cut) if hazards is not None else _plain(engine, describe)
    report.suppress(found, suppress)
    if engine.deadlock is not None:
        report.deadlock = Deadlock(
            engine.deadlock["reason"],
            launch.kernel,
            tuple(row | {"role": role(row["cta"] * warps_per_cta + row["warp"])} for row in engine.deadlock["rows"]),
            engine.deadlock["steps"],
        )
    report.stopped |= engine.stopped
    _count(report, engine)
    if tracer is not None:
        report.timeline = tracer.timeline(role=role)
    report.seconds += time.perf_counter() - started
    return report


def _plain(engine: Engine, describe) -> list:
    """Hazards that the engine itself saw, when the checker is off."""
    from cute_matmul.emulator.hazards import Hazard, Site
    from cute_matmul.emulator.interpreter import rule

    out = []
    for kind, src, agent, space, first, last, detail in engine.own_hazards:
        line, text = describe(src)
        per = engine.warps_per_cta
        here = Site(line, text, cta=agent // per, warps=(agent % per,))
        out.append(Hazard(kind, rule(kind), here, space=space, first_byte=first, last_byte=last, detail=detail))
    return out


def _kind_table(engine: Engine) -> dict[str, np.ndarray]:
    """Warp instructions executed by each agent, by kind."""
    table: dict[str, np.ndarray] = {}
    for node in engine.program.nodes:
        executed = engine.node_counts[node.index]
        if not executed.any():
            continue
        for kind, n in node.counts.items():
            have = table.get(kind)
            table[kind] = n * executed.astype(np.int64) if have is None else have + n * executed
    return table


def roles(engine: Engine) -> list[str]:
    """A name for every agent from what it did.

    Where some warps only load and others only multiply: producer and consumer, with the warp group's number where
    there are several. Else load+mma, mma, load. Warps that only store tiles: store; anything else: other.
    """
    table = _kind_table(engine)
    total = engine.node_counts.shape[1]
    zero = np.zeros(total, np.int64)
    loads = sum((table.get(k, zero) for k in ("tma load", "bulk copy", "cp.async")), zero) > 0
    multiplies = sum((table.get(k, zero) for k in ("wgmma", "mma")), zero) > 0
    stores = table.get("tma store", zero) > 0
    per = engine.warps_per_cta
    specialised = bool((loads & ~multiplies).any() and (multiplies & ~loads).any())
    groups: dict[int, int] = {}
    names = []
    for agent in range(total):
        if loads[agent] and multiplies[agent]:
            names.append("load+mma")
        elif loads[agent]:
            names.append("producer" if multiplies.any() else "load")
        elif multiplies[agent]:
            group = agent % per // 4
            groups[group] = groups.get(group, 0) + 1
            names.append(f"consumer {group}" if specialised else "mma")
        else:
            names.append("store" if stores[agent] else "other")
    if specialised:
        order = {
            f"consumer {g}": f"consumer {i}" if len(groups) > 1 else "consumer" for i, g in enumerate(sorted(groups))
        }
        names = [order.get(n, n) for n in names]
    return names


def _count(report: Report, engine: Engine) -> None:
    names = np.array(roles(engine))
    table = _kind_table(engine)
    for name in dict.fromkeys(names.tolist()):
        which = names == name
        counts = report.counts.setdefault(name, {})
        for kind, executed in table.items():
            n = int(executed[which].sum())
            if n:
                counts[kind] = counts.get(kind, 0) + n
        report.warps[name] = report.warps.get(name, 0) + int(which.sum())
    for unit, moved in engine.bytes.items():
        report.bytes[unit] = report.bytes.get(unit, 0) + int(moved.sum())
    report.smem_bytes = max(report.smem_bytes, engine.smem_limit - translate.SHARED_START)
    report.steps += engine.steps
    report.flops += engine.flops
