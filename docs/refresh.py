"""Regenerate everything that is generated in the pages: python docs/refresh.py [--check].

The figures are timelines of kernels that the emulator executed (`FIGURES`), written to docs/figures. The tables
stand between markers:

    <!-- docs:ladder -->       the rungs: what each adds, what its CTA needs, how fast it was measured
    <!-- docs:inspect v3 -->   what the compiler made of a rung and of the rung below it
    <!-- docs:barriers v3 -->  the mbarriers of one CTA, from one run: who arrives, how often, who waits first for what
    <!-- /docs -->

What stands between perf markers comes from perf/render.py, whose other pages and plots are refreshed too.
`--check` writes nothing, names what is stale and exits with 1. Needs no GPU; needs nvdisasm (the extra `sass`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script
    sys.path[0] = str(ROOT)

from tabulate import tabulate  # noqa: E402

from cute_matmul import inspection, registry  # noqa: E402
from cute_matmul.compile import compile_kernel  # noqa: E402
from cute_matmul.emulator import timeline  # noqa: E402
from cute_matmul.emulator.timeline import LOAD, STORE, TENSOR, WAIT, Timeline  # noqa: E402
from cute_matmul.launch import emulate  # noqa: E402
from cute_matmul.problem import Problem  # noqa: E402
from perf import render, results, tables  # noqa: E402

COMMAND = "python docs/refresh.py"
RUNGS = tuple(variant.name for variant in registry.BUILTIN)


@dataclass(frozen=True)
class Panel:
    """One variant on one problem. config: None for the variant's DEFAULT."""

    variant: str
    mnk: tuple[int, int, int]
    config: str | None = None


@dataclass(frozen=True)
class Figure:
    """Timelines of CTA 0 under one another. kinds: rows drawn.

    lines: whether tooltips name the kernel's lines, as `python -m cute_matmul trace` has them. A comment added to a
    kernel then makes the figure stale.
    """

    panels: tuple[Panel, ...]
    kinds: tuple[str, ...] = (LOAD, TENSOR, STORE, WAIT)
    lines: bool = False


SMALL = (128, 128, 512)
RING = (128, 128, 768)
WIDE = (256, 128, 768)

FIGURES = {
    "v0-v1": Figure((Panel("v0", SMALL), Panel("v1", SMALL))),
    "v1-v2": Figure((Panel("v1", SMALL), Panel("v2", SMALL)), (LOAD, TENSOR), lines=True),  # README.md has the command
    "v2": Figure((Panel("v1", SMALL), Panel("v2", SMALL))),
    "v3": Figure((Panel("v2", RING, "128x128x64,stages=4"), Panel("v3", RING, "128x128x64,stages=4"))),
    "v4": Figure((Panel("v3", RING, "128x128x64,stages=3"), Panel("v4", (128, 256, 768)))),
    "v5": Figure((Panel("v4", WIDE, "256x128x64,stages=3"), Panel("v5", WIDE, "256x128x64,stages=3"))),
    "v6": Figure((Panel("v5", (128, 256, 512)), Panel("v6", (256, 256, 512))), (LOAD, TENSOR, STORE)),
    "v6-epilogue": Figure((Panel("v6", (256, 256, 64)),), (TENSOR, STORE, WAIT)),
}

BARRIER_PROBLEM = 512
"""K of the runs that the tables of barriers are made from: each stage is filled twice or more."""

BLOCK = re.compile(
    r"(?P<open><!-- docs:(?P<kind>\w+)(?: (?P<variant>\w+))? -->\n)(?P<body>.*?)(?P<close><!-- /docs -->)", re.S
)


# --- Runs in the emulator ----------------------------------------------------------------------------------


@dataclass
class Barrier:
    """What one mbarrier of CTA 0 was used for. arrivals: by role; waits: by role, the first phase waited for."""

    expected: int
    tx_bytes: int
    arrivals: dict[str, int]
    waits: dict[str, int]
    loaded: bool

    @property
    def name(self) -> str:
        if self.loaded:
            return "full"
        if min(self.waits.values()) < 0:
            return "empty"
        return "epi_full" if "producer" in self.waits else "epi_empty"


class Recorder(timeline.Tracer):
    """A tracer that also keeps who initialised, arrived at and waited on the mbarriers of CTA 0."""

    last: Recorder

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.expected: dict[int, int] = {}
        self.bytes: dict[int, int] = defaultdict(int)
        self.arrived: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.awaited: dict[int, dict[int, int]] = defaultdict(dict)
        self.completed: dict[int, int] = defaultdict(int)
        self.role = None
        Recorder.last = self

    @staticmethod
    def _rows(*columns) -> Iterator[tuple[int, ...]]:
        import numpy as np

        rows = np.broadcast_arrays(*(np.asarray(column, dtype=np.int64) for column in columns))
        return zip(*(row.ravel().tolist() for row in rows), strict=True)

    def mbar_init(self, agents, src, cta, bar, count=1) -> None:
        super().mbar_init(agents, src, cta, bar, count)
        for at, barrier, number in self._rows(cta, bar, count):
            if at == 0:
                self.expected[barrier] = number

    def mbar_arrive(self, agents, src, cta, bar, count=1, expect_tx=0, release=True, arrive=True, drop=False) -> None:
        super().mbar_arrive(agents, src, cta, bar, count, expect_tx, release, arrive, drop)
        for agent, at, barrier, number, nbytes, arrives in self._rows(agents, cta, bar, count, expect_tx, arrive):
            if at == 0:
                self.bytes[barrier] += nbytes
                self.arrived[barrier][agent] += number * arrives

    def mbar_complete(self, cta, bar, phase) -> None:
        super().mbar_complete(cta, bar, phase)
        for at, barrier in self._rows(cta, bar):
            self.completed[barrier] += at == 0

    def mbar_wait(self, agents, src, cta, bar, phase) -> None:
        super().mbar_wait(agents, src, cta, bar, phase)
        for agent, at, barrier, number in self._rows(agents, cta, bar, phase):
            if at == 0:
                self.awaited[barrier].setdefault(agent, number)

    def timeline(self, role=None) -> Timeline:
        self.role = role
        return super().timeline(role)

    def barriers(self) -> list[Barrier]:
        """The barriers of CTA 0 in the order of their addresses; numbers are per completed phase."""
        found = []
        for barrier in sorted(self.expected):
            phases = self.completed[barrier]
            arrivals: dict[str, int] = defaultdict(int)
            for agent, count in self.arrived[barrier].items():
                arrivals[self.role(agent)] += count
            waits: dict[str, int] = {}
            for agent, first in self.awaited[barrier].items():
                waits[self.role(agent)] = min(first, waits.get(self.role(agent), first))
            found.append(
                Barrier(
                    self.expected[barrier],
                    self.bytes[barrier] // phases,
                    {name: count // phases for name, count in arrivals.items()},
                    waits,
                    barrier in self._load_barriers[0],
                )
            )
        return found


@contextmanager
def _recording() -> Iterator[None]:
    plain, timeline.Tracer = timeline.Tracer, Recorder
    try:
        yield
    finally:
        timeline.Tracer = plain


@cache
def executed(panel: Panel) -> tuple[str, Timeline, Recorder]:
    """(title, timeline, what was recorded) of a panel. Raises RuntimeError if the emulator finds a fault."""
    a, b = Problem(*panel.mnk).operands()
    with _recording():
        _, report = emulate(a, b, variant=panel.variant, config=panel.config, trace=True)
    if not report.ok:
        raise RuntimeError(f"{panel}: the emulator found faults:\n{report}")
    config = panel.config or str(registry.get(panel.variant).load().DEFAULT)
    # Places in the source come relative to the working directory.
    here = {event.source: os.path.relpath(os.path.abspath(event.source), ROOT) for event in report.timeline.events}
    events = tuple(replace(e, source=here[e.source] if e.source else "") for e in report.timeline.events)
    return f"{panel.variant.upper()} {config}", replace(report.timeline, events=events), Recorder.last


def draw(figure: Figure) -> str:
    """A figure as SVG."""
    panels = [executed(panel)[:2] for panel in figure.panels]
    if not figure.lines:
        panels = [(title, replace(t, events=tuple(replace(e, source="") for e in t.events))) for title, t in panels]
    return timeline.stacked_svg(panels, kinds=figure.kinds)


# --- Tables ------------------------------------------------------------------------------------------------


@cache
def inspected(variant: str) -> inspection.Inspection:
    """A variant's default kernel. Raises NoDisassembler without nvdisasm."""
    seen = inspection.inspect(compile_kernel(variant))
    if seen.sass is None:
        raise inspection.NoDisassembler(seen.sass_note)
    return seen


def _below(variant: str) -> str | None:
    at = RUNGS.index(variant)
    return RUNGS[at - 1] if at else None


def inspect_table(variant: str) -> str:
    """The rung and the rung below it, side by side."""
    names = [name for name in (_below(variant), variant) if name]
    columns = [_facts(inspected(name)) for name in names]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    rows = [row for row in rows if any(cell not in ("0", "0 / 0") for cell in row[1:])]
    return _markdown(["", *(name.upper() for name in names)], rows)


def _facts(seen: inspection.Inspection) -> dict[str, str]:
    facts = {
        "configuration": seen.config,
        "threads": str(seen.threads),
        "registers per thread": str(seen.registers),
        "shared memory, bytes": f"{seen.smem_static_bytes + seen.smem_dynamic_bytes:,}",
        "CTAs per SM": f"{seen.ctas_per_sm} ({seen.limited_by})",
        "spills": str(seen.spills),
    }
    for kind in inspection.KINDS:
        facts[f"{kind}, PTX / SASS"] = f"{seen.ptx[kind]} / {seen.sass[kind]}"
    # Zero is worth a line for spills.
    facts["spills"] = f"{facts['spills']} instructions"
    return facts


def barrier_table(variant: str) -> str:
    """The barriers of the rung's default kernel, those that are used alike in one line."""
    config = registry.get(variant).load().DEFAULT
    tile_m, tile_n, _ = config.tile_shape_mnk
    barriers = executed(Panel(variant, (tile_m, tile_n, BARRIER_PROBLEM)))[2].barriers()
    rows = []
    for name in dict.fromkeys(barrier.name for barrier in barriers):
        alike = [barrier for barrier in barriers if barrier.name == name]
        first = alike[0]
        if any(barrier != first for barrier in alike):
            raise RuntimeError(f"{variant}: barriers {name} differ: {alike}")
        arrives = " + ".join(f"{count} of {role}" for role, count in _by_kind(first.arrivals).items())
        waits = []
        for role, phase in sorted({(_kind(role), phase) for role, phase in first.waits.items()}):
            waits.append(f"{role}, {phase % 2}" + (" (passes at once)" if phase < 0 else ""))
        rows.append([f"`{name}`", len(alike), first.expected, arrives, f"{first.tx_bytes:,}", "; ".join(waits)])
    headers = ["barrier", "how many", "arrivals a phase", "whose", "bytes a phase", "who waits, first for parity"]
    return _markdown(headers, rows)


def _kind(role: str) -> str:
    """A role without its number. Where every warp loads or multiplies alike there are no roles to name."""
    return {"load+mma": "warp 0", "mma": "warps 1 to 3"}.get(role, role.split()[0])


def _by_kind(arrivals: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for role, count in arrivals.items():
        found[_kind(role)] += count
    return found


def ladder_table(page: Path, pages: render.Pages) -> str:
    """All rungs in a table; speeds from the newest ladder under perf/results."""
    found = pages.newest("ladder")
    measured = {"burst": {}, "sustained": {}}
    if found:
        shape = tables.shapes_of(found[1])[0]
        measured = {phase: tables.figures(found[1], phase, shape) for phase in measured}
    rows = []
    for name in RUNGS:
        variant, seen = registry.get(name), inspected(name)
        speeds = []
        for figures in measured.values():
            ratio = figures[name].ratio if name in figures else None
            speeds.append(tables.ratio_text(ratio) if ratio else "not measured")
        rows.append(
            [
                f"[{name.upper()}]({name}.md)",
                variant.title,
                seen.config,
                seen.threads,
                seen.registers,
                f"{(seen.smem_static_bytes + seen.smem_dynamic_bytes) / 1024:.0f} KiB",
                seen.ctas_per_sm,
                *speeds,
            ]
        )
    headers = ["rung", "adds", "configuration", "threads", "registers", "shared memory", "CTAs per SM"]
    text = _markdown([*headers, "first calls over cuBLAS", "sustained over cuBLAS"], rows)
    if found:
        chosen = {name: tables.configuration(found[1], name, shape) for name in RUNGS}
        other = [f"{n} with {config}" for n, config in chosen.items() if config not in (None, inspected(n).config)]
        text += f"\n\nMeasured in another configuration than the table's: {', '.join(other)}." if other else ""
        text += f"\n\n{pages.caption(page, *found)}"
    return text


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


# --- Writing and checking ----------------------------------------------------------------------------------


def fill(page: Path, text: str, pages: render.Pages) -> str:
    """A page's text with its docs blocks as they should be. Raises ValueError for a marker that is not known."""

    def replaced(match: re.Match[str]) -> str:
        kind, variant = match["kind"], match["variant"]
        if kind == "ladder" and variant is None:
            body = ladder_table(page, pages)
        elif kind in ("inspect", "barriers") and variant in RUNGS:
            body = (inspect_table if kind == "inspect" else barrier_table)(variant)
        else:
            marker = match["open"].strip()
            raise ValueError(f"{page}: {marker} must be docs:ladder, docs:inspect or docs:barriers with a rung's name")
        return f"{match['open']}\n{body}\n\n{match['close']}"

    marks = len(re.findall(r"^<!-- docs:", text, re.M)), len(re.findall(r"^<!-- /docs -->", text, re.M))
    if marks[0] != marks[1] or marks[0] != len(BLOCK.findall(text)):
        raise ValueError(f"{page}: {marks[0]} opening and {marks[1]} closing docs markers do not pair")
    return BLOCK.sub(replaced, text)


def refresh(root: Path, check: bool, only: Sequence[str] = ()) -> list[str]:
    """Bring the pages and figures under `root` up to date; with `check` write nothing.

    only: names of files, relative to root (all by default, and then the rest of what perf/render.py makes). Gives
    the names of what was, or is, stale.
    """
    pages = render.Pages(root, results.all_results())
    stale: list[str] = []

    def put(path: Path, text: str) -> None:
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if text != old:
            stale.append(path.relative_to(root).as_posix())
            if not check:
                results.write_atomically(path, text)

    def wanted(path: Path) -> bool:
        return not only or path.relative_to(root).as_posix() in only

    figures = {root / "docs" / "figures" / f"{name}.svg": figure for name, figure in FIGURES.items()}
    for path, figure in figures.items():
        if wanted(path):
            put(path, draw(figure))
    for path in sorted((root / "docs" / "figures").glob("*.svg")):
        if path not in figures and wanted(path):
            stale.append(f"{path.relative_to(root).as_posix()} (nothing draws it)")
    for page in sorted((root / "docs").glob("*.md")):
        if wanted(page):
            put(page, pages.fill(page, fill(page, page.read_text(encoding="utf-8"), pages)))
    if not only:
        stale += (name for name in pages.render(check) if name not in stale)
    return stale


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="docs/refresh.py", description="Regenerate the pages' figures and tables.")
    top.add_argument("--check", action="store_true", help="write nothing; exit status 1 if anything is stale")
    top.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help="where README.md and docs/ are")
    top.add_argument("files", nargs="*", metavar="FILE", help="only these, such as docs/v3.md docs/figures/v3.svg")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. 0: everything is up to date (now); 1: something was stale under --check."""
    top = parser()
    options = top.parse_args(arguments)
    root = options.root.resolve()
    known = {
        *(f"docs/figures/{name}.svg" for name in FIGURES),
        *(f"docs/{p.name}" for p in (root / "docs").glob("*.md")),
    }
    for name in options.files:
        if name not in known:
            top.error(f"FILE must be one of {', '.join(sorted(known))}; got {name!r}")
    try:
        stale = refresh(root, options.check, options.files)
    except inspection.NoDisassembler as error:
        top.exit(2, f"error: {error}\n")
    for name in stale:
        print(f"stale: {name}" if options.check else f"wrote {name}")
    if options.check and stale:
        print(f"{COMMAND} brings these up to date", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
