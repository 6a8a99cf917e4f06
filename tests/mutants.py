"""What a mutation test needs: a seeded bug as data, the mutated kernel as a module, and what came of running it.

A mutant is a clean kernel with exact pieces of its source replaced. The DSL reads the source of what it traces, so
the mutant is a package of real files: the kernel and the shared modules it is built from, copied under another
name into a folder of the test.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cute_matmul import emulator, problem

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "cute_matmul"
KERNELS = HERE / "mutation_kernels.py"
SHARED = ("config", "hopper", "pipeline", "scheduler", "epilogue")
SCHEDULES = ("round_robin", "random", "adversarial")

DEADLOCK = "deadlock"
WRONG = "wrong result"


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which stands `count` times in a file, by `new`. The file is the kernel's own if not named."""

    old: str
    new: str
    count: int = 1
    file: str = ""


@dataclass(frozen=True)
class Setting:
    """How a kernel is run: its configuration's text, and the extents of the problem (in elements).

    out_buffer: extents of the buffer that the output is a window of, and the window's first element's (row, column);
    None: the output is a buffer of its own. edits: what makes the kernel smaller, and is no bug.
    """

    config: str
    mnk: tuple[int, int, int]
    out_buffer: tuple[tuple[int, int], tuple[int, int]] | None = None
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Mutant:
    """A seeded bug and what must come of it.

    kernel: "v0" to "v6", or a class of mutation_kernels.py.
    why: one line on what is broken, and where nothing but happens-before shows it, why hardware need not forgive it.
    hazards: kinds that must be reported under every schedule. "a|b" asks for one of the two; "a|deadlock" takes a
    deadlock for it where one schedule leads there, but the hazard itself must come under another.
    also: kinds, or DEADLOCK, that may come of it besides.
    shows: what proves that the mutant is no equivalent of the kernel, without the hazards: DEADLOCK (under every
    schedule), WRONG (a wrong result or a deadlock under at least one schedule), or "" where `why` argues it.
    """

    name: str
    kernel: str
    edits: tuple[Edit, ...]
    why: str
    hazards: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    shows: str = ""
    setting: Setting | None = None

    def __str__(self) -> str:
        return f"{self.kernel}-{self.name}"


@dataclass(frozen=True)
class Outcome:
    """What one run showed."""

    kinds: frozenset[str]
    deadlock: bool
    wrong: bool
    report: Any


_packages = itertools.count()


def build(folder: Path, kernel: str, edits: Sequence[Edit] = ()) -> ModuleType:
    """The kernel with the edits, as a module of a package in `folder`. Raises AssertionError where one does not fit."""
    package = f"mutant_{next(_packages)}"
    target = folder / package
    target.mkdir()
    (target / "__init__.py").touch()
    variant = PACKAGE / "variants" / f"{kernel}.py"
    files = {kernel: KERNELS}
    if variant.exists():
        files = {kernel: variant, **{part: PACKAGE / f"{part}.py" for part in SHARED}}
    for part, path in files.items():
        source = path.read_text()
        for edit in edits:
            if (edit.file or kernel) == part:
                found = source.count(edit.old)
                assert found == edit.count, f"{part}.py has {found} of {edit.old!r}, not {edit.count}"
                source = source.replace(edit.old, edit.new)
        (target / f"{part}.py").write_text(source.replace("from cute_matmul", f"from {package}"))
    unknown = {edit.file for edit in edits} - {"", *files}
    assert not unknown, f"edits of files that are not copied: {unknown}"
    sys.path.insert(0, str(folder))
    try:
        invalidate_caches()
        return import_module(f"{package}.{kernel}")
    finally:
        sys.path.remove(str(folder))


class Matmul:
    """A variant with operands, as the classes of mutation_kernels.py are."""

    def __init__(self, module: ModuleType, setting: Setting) -> None:
        self.host = module.host
        self.config = module.TileConfig.parse(setting.config)
        self.accumulator = getattr(module, "ACCUMULATOR", "float32")
        self.a, self.b = _operands(setting.mnk)
        m, n, _ = setting.mnk
        extents, (row, column) = setting.out_buffer or ((m, n), (0, 0))
        self.out = torch.empty(extents, dtype=torch.float16)[row : row + m, column : column + n]

    def arguments(self, stream: Any) -> tuple:
        return self.a, self.b, self.out, stream, self.config


class Runner:
    """A kernel with edits, built in `folder` and compiled, with operands, to be run under several schedules.

    setting: for a variant; the classes of mutation_kernels.py know their own.
    """

    def __init__(self, folder: Path, kernel: str, setting: Setting | None, edits: Sequence[Edit] = ()) -> None:
        module = build(folder, kernel, (*edits, *(setting.edits if setting else ())))
        self.work = Matmul(module, setting) if setting else getattr(module, kernel)()
        self.judged: dict[bytes, bool] = {}
        self.program = emulator.Program.compile(self.work.host, *self.work.arguments(emulator.stream()))

    def run(self, schedule: str, seed: int = 0) -> Outcome:
        """Run it once on an output of nans."""
        self.work.out.fill_(float("nan"))
        arguments = self.work.arguments(emulator.stream())
        report = emulator.run(self.program, *arguments, schedule=schedule, seed=seed)
        kinds = frozenset(hazard.kind for hazard in report.hazards)
        return Outcome(kinds, report.deadlock is not None, not self._right(), report)

    def _right(self) -> bool:
        """Whether the output is right; asked once for each output there is, as schedules mostly agree in every bit."""
        work = self.work
        bits = work.out.numpy().tobytes()
        if bits not in self.judged:
            if isinstance(work, Matmul):
                self.judged[bits] = bool(problem.check(work.out, work.a, work.b, accumulator=work.accumulator))
            else:
                self.judged[bits] = torch.allclose(work.out, work.expected(), atol=1e-5)
        return self.judged[bits]


@lru_cache
def _operands(mnk: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """a (M, K) and b (K, N), both with unit stride along K."""
    m, n, k = mnk
    generator = torch.Generator().manual_seed(0)
    pitch = -(-k // 8) * 8  # TMA: rows are a multiple of 16 bytes apart
    a = torch.randn(m, pitch, generator=generator).half()[:, :k]
    b = torch.randn(n, pitch, generator=generator).half()[:, :k].t()
    return a, b


def shortcomings(mutant: Mutant, outcomes: dict[str, Outcome]) -> list[str]:
    """How what was seen departs from what the mutant must show; empty where it does not."""
    wanted = [set(entry.split("|")) for entry in mutant.hazards]
    accepted = set(mutant.also).union({mutant.shows}, *wanted)
    found = []
    for schedule, outcome in outcomes.items():
        seen = outcome.kinds | ({outcome.report.deadlock.reason} if outcome.deadlock else set())
        found += [f"{schedule}: no {' or '.join(sorted(entry))}" for entry in wanted if not seen & entry]
        if mutant.shows == DEADLOCK and not outcome.deadlock:
            found.append(f"{schedule}: no deadlock")
        if seen - accepted:
            found.append(f"{schedule}: {', '.join(sorted(seen - accepted))}, which this bug does not explain")
    for entry in wanted:
        if not any(outcome.kinds & entry for outcome in outcomes.values()):
            found.append(f"{' or '.join(sorted(entry - {DEADLOCK}))} under no schedule")
    if mutant.shows == WRONG and not any(outcome.wrong for outcome in outcomes.values()):
        found.append("the result is right under every schedule")
    return found
