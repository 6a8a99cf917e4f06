"""What a run of the emulator found, as an object, as text and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Suppression:
    """A hazard that is known and accepted: its kind, a part of either side's line or instruction, and why.

    Raises ValueError without a kind or a reason.
    """

    kind: str
    place: str
    reason: str

    def __post_init__(self) -> None:
        if not self.kind or not isinstance(self.kind, str):
            raise ValueError(f"kind must name a kind of hazard, got {self.kind!r}")
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise ValueError(f"reason must say why {self.kind} is accepted at {self.place!r}, got {self.reason!r}")


@dataclass(frozen=True)
class Deadlock:
    """No warp could go on ("deadlock"), or the step limit was reached. One row per blocked warp.

    Rows have cta, warp, role, lanes, line, instruction, waits_for, and where they apply barrier, parity, phase,
    pending_arrivals (threads for named and cluster barriers) and pending_bytes.
    """

    reason: str
    kernel: str
    rows: tuple[dict[str, Any], ...]
    steps: int

    def table(self) -> str:
        """Who waits where for what, equal rows of neighbouring warps and CTAs merged."""
        merged: dict[tuple, list[tuple[int, int]]] = {}
        for row in self.rows:
            names = ("role", "line", "waits_for", "barrier", "parity", "phase", "pending_arrivals", "pending_bytes")
            key = tuple(str(row.get(name, "")) for name in names)
            merged.setdefault(key, []).append((row["cta"], row["warp"]))
        lines = [
            ("CTA", "warps", "role", "line", "waits for", "barrier", "parity", "phase", "arrivals due", "bytes due")
        ]
        for key, who in merged.items():
            ctas, warps = sorted({c for c, _ in who}), sorted({w for _, w in who})
            lines.append((ranges(ctas), ranges(warps), key[0], shorten(key[1]), *key[2:]))
        return table(lines)

    def __str__(self) -> str:
        head = f"{self.reason} in {shorten_kernel(self.kernel)} after {self.steps} steps"
        return f"{head}\n{self.table()}"


@dataclass
class Report:
    """Results of `emulator.run`.

    ok: no hazards left and no deadlock. hazards: `hazards.Hazard` objects, suppressed ones apart. counts: per role
    and kind of instruction, warp instructions executed. bytes: per unit. smem_bytes: static and dynamic shared
    memory of a CTA, the largest launch. seconds: wall time of execution, without compilation. steps: scheduler
    steps. timeline: `timeline.Timeline` of the last launch when traced.
    """

    kernels: tuple[str, ...] = ()
    hazards: list = field(default_factory=list)
    suppressed: list = field(default_factory=list)
    deadlock: Deadlock | None = None
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    warps: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    smem_bytes: int = 0
    seconds: float = 0.0
    steps: int = 0
    flops: int = 0
    schedule: str = "round_robin"
    seed: int = 0
    checked: bool = True
    stopped: bool = False
    timeline: Any = None

    @property
    def ok(self) -> bool:
        return not self.hazards and self.deadlock is None and not self.stopped

    @property
    def events(self) -> list:
        """Timeline events, empty when the run was not traced."""
        return list(self.timeline.events) if self.timeline is not None else []

    @property
    def exit_status(self) -> int:
        """0 when ok, 1 otherwise: for a command's exit."""
        return 0 if self.ok else 1

    def to_json(self) -> str:
        """All of the report as a JSON object, without the timeline's events."""
        return json.dumps(self.to_dict(), indent=1, default=str)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain Python objects."""
        return {
            "ok": self.ok,
            "kernels": list(self.kernels),
            "schedule": self.schedule,
            "seed": self.seed,
            "checked": self.checked,
            "stopped": self.stopped,
            "hazards": [h.to_json() for h in self.hazards],
            "suppressed": [{"hazard": h.to_json(), "reason": s.reason} for h, s in self.suppressed],
            "deadlock": None
            if self.deadlock is None
            else {
                "reason": self.deadlock.reason,
                "kernel": self.deadlock.kernel,
                "steps": self.deadlock.steps,
                "rows": list(self.deadlock.rows),
            },
            "counts": self.counts,
            "warps": self.warps,
            "bytes": self.bytes,
            "smem_bytes": self.smem_bytes,
            "seconds": round(self.seconds, 4),
            "steps": self.steps,
            "flops": self.flops,
        }

    def suppress(self, hazards: Sequence, suppressions: Sequence[Suppression]) -> None:
        """Add hazards, those that a suppression covers to `suppressed`."""
        for hazard in hazards:
            for suppression in suppressions:
                if hazard.matches(suppression.kind, suppression.place):
                    self.suppressed.append((hazard, suppression))
                    break
            else:
                self.hazards.append(hazard)

    def __str__(self) -> str:
        state = "ok" if self.ok else "NOT OK"
        checked = "" if self.checked else ", hazards not checked"
        names = ", ".join(shorten_kernel(k) for k in self.kernels)
        lines = [
            f"{state}: {names} ({self.schedule}, seed {self.seed}{checked}), {self.seconds:.2f} s, {self.steps} steps,"
            f" {self.smem_bytes} bytes of shared memory per CTA"
        ]
        kinds = sorted({k for counts in self.counts.values() for k in counts}, key=self._kind_order)
        if kinds:
            roles = list(self.counts)
            rows = [("instructions", *(f"{r} ({self.warps.get(r, 0)} warps)" for r in roles))]
            rows += [(kind, *(str(self.counts[r].get(kind, 0) or "") for r in roles)) for kind in kinds]
            lines += ["", table(rows)]
        if self.bytes:
            rows = [("bytes moved", "")] + [(unit, f"{n:,}") for unit, n in sorted(self.bytes.items())]
            lines += ["", table(rows)]
        if self.hazards:
            lines += ["", f"{len(self.hazards)} hazard{'s' if len(self.hazards) > 1 else ''}:"]
            lines += [str(h) for h in self.hazards]
        if self.suppressed:
            lines += ["", f"{len(self.suppressed)} suppressed:"]
            lines += [f"{h.kind} at {h.here.line}: {s.reason}" for h, s in self.suppressed]
        if self.deadlock is not None:
            lines += ["", str(self.deadlock)]
        return "\n".join(lines)

    def _kind_order(self, kind: str) -> tuple:
        return (-sum(counts.get(kind, 0) for counts in self.counts.values()), kind)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first row underlined; numbers to the right."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    out = []
    for n, row in enumerate(rows):
        cells = []
        for i, cell in enumerate(row):
            text = str(cell)
            number = n and text.replace(",", "").lstrip("-").isdigit()
            cells.append(text.rjust(widths[i]) if number else text.ljust(widths[i]))
        out.append("  ".join(cells).rstrip())
        if n == 0:
            out.append("  ".join("-" * w for w in widths))
    return "\n".join(out)


def ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def shorten(place: str) -> str:
    """A path with its last two parts only."""
    return "/".join(place.split(os.sep)[-2:])


def shorten_kernel(name: str) -> str:
    """The DSL's mangled kernel name without the types it appends."""
    text = name.removeprefix("kernel_cutlass_")
    for mark in ("_CopyAtom", "_Tensor", "_tensor", "_TiledM", "_object_at"):
        text = text.split(mark)[0]
    return text[:60]
