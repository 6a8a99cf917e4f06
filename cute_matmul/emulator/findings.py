"""Hazards as the user sees them, and their collection while a kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

RULES = {
    "read-before-copy-waited": "bytes are read before the copy that fills them was waited for",
    "overwrite-before-copy-waited": "bytes are overwritten while an earlier copy into them may still land",
    "overwrite-while-wgmma-reads": "bytes are overwritten while a WGMMA group may still read them; "
    "a wgmma.wait_group of that warp group must come before",
    "overwrite-while-copy-reads": "bytes are overwritten while a copy may still read them; "
    "its issuer's wait_group must come before",
    "overwrite-while-read": "bytes are overwritten by a copy while another thread may still read them",
    "missing-proxy-fence": "bytes written by ordinary stores are accessed by the async proxy with no "
    "fence.proxy.async between",
    "data-race": "two threads access the same bytes, at least one writes, and nothing orders them",
    "uninitialised-shared-memory": "shared memory is read that nothing in this CTA has written",
    "accumulator-in-flight": "a register of a WGMMA in flight is accessed before wgmma.wait_group",
    "missing-wgmma-fence": "a WGMMA uses registers accessed by other instructions since the last wgmma.fence",
    "mbarrier-not-initialised": "an mbarrier is used where none was initialised",
    "mbarrier-init-not-visible": "an mbarrier is used before its initialisation is visible to the user: "
    "a barrier after mbarrier.init, and fence.mbarrier_init before that for copies and other CTAs",
    "mbarrier-reinitialised": "an mbarrier is initialised again without mbarrier.inval, or invalidated while in use",
    "mbarrier-phase-unordered": "an arrival, or a copy's bytes, may count in another phase than meant: its "
    "thread has not seen the previous phase complete (too many arrivals, or a wait is missing)",
    "mbarrier-phase-overrun": "an mbarrier may complete a further phase before this waiter has looked: "
    "the parity it waits for then means another phase",
    "mbarrier-tx-bytes": "the bytes that copies bring to an mbarrier differ from the bytes it expects",
    "exit-with-copy-in-flight": "a CTA exits while a copy or WGMMA may still access its shared memory",
    "exit-before-remote-access": "a CTA exits while another CTA may still access its shared memory",
    "access-to-exited-cta": "shared memory of a CTA that has exited is accessed",
}
"""The rule that each kind of hazard breaks."""


@dataclass(frozen=True)
class Site:
    """One side of a hazard: an instruction, and who executed it."""

    line: str
    text: str
    cta: int | None = None
    warps: tuple[int, ...] = ()
    role: str = ""
    unit: str = ""

    def __str__(self) -> str:
        who = [self.unit] if self.unit else []
        if self.warps:
            first, last = self.warps[0], self.warps[-1]
            who.append(f"warp {first}" if first == last else f"warps {first}-{last}")
        if self.role:
            who.append(self.role)
        if self.cta is not None:
            who.append(f"CTA {self.cta}")
        return f"{self.line}  {self.text}" + (f"  [{', '.join(who)}]" if who else "")


@dataclass(frozen=True)
class Hazard:
    """A rule that the kernel breaks, with both places.

    `first_byte` and `last_byte` are inclusive: offsets in the CTA's shared memory, or in the global allocation
    named by `object`. `barrier` numbers the CTA's mbarriers by address. `stage` is the place of the barrier in
    its ring, `phase` its phase, both counted from 0. `count` says how often it was seen.
    """

    kind: str
    rule: str
    here: Site
    there: Site | None = None
    space: str = ""
    object: str = ""
    first_byte: int | None = None
    last_byte: int | None = None
    barrier: int | None = None
    stage: int | None = None
    phase: int | None = None
    detail: str = ""
    count: int = 1

    def matches(self, kind: str, place: str = "") -> bool:
        """Whether this is hazard `kind` at `place`, a part of either side's source line or instruction."""
        sides = [self.here] + ([self.there] if self.there else [])
        return self.kind == kind and any(place in side.line or place in side.text for side in sides)

    def to_json(self) -> dict:
        """Plain dict of all fields."""
        return asdict(self)

    def __str__(self) -> str:
        head = self.kind + (f" (seen {self.count} times)" if self.count > 1 else "")
        where = []
        if self.first_byte is not None:
            name = f"{self.space} memory" + (f" {self.object}" if self.object else "")
            where.append(f"{name} bytes {self.first_byte:#x}..{self.last_byte:#x}")
        for label in ("barrier", "stage", "phase"):
            value = getattr(self, label)
            if value is not None:
                where.append(f"{label} {value}")
        lines = [f"{head}: {', '.join(where)}" if where else head, f"  rule: {self.rule}"]
        if self.detail:
            lines.append(f"  {self.detail}")
        lines.append(f"  here:  {self.here}")
        if self.there is not None:
            lines.append(f"  other: {self.there}")
        return "\n".join(lines)


@dataclass
class Finding:
    """A hazard as first met: numbers only, names are looked up at the end."""

    kind: str
    src: int
    agents: tuple[int, ...] = ()
    unit: str = ""
    other_src: int = -1
    other_agents: tuple[int, ...] = ()
    other_unit: str = ""
    space: str = ""
    object: str = ""
    first: int | None = None
    last: int | None = None
    bar: tuple[int, int] | None = None
    phase: int | None = None
    detail: str = ""
    rule: str = ""
    count: int = field(default=0)


class Findings:
    """Hazards met so far, each pair of instructions once per kind."""

    def __init__(
        self,
        describe: Callable[[int], tuple[str, str]],
        role: Callable[[int], str],
        warps_per_cta: int,
    ) -> None:
        self.describe = describe
        self.role = role
        self.warps_per_cta = warps_per_cta
        self._found: dict[tuple[str, int, int], Finding] = {}

    def add(self, kind: str, src: int, agents: Iterable[int] = (), other_src: int = -1, **fields) -> None:
        """Count a hazard of instruction `src` executed by `agents`; `fields` are those of `Finding`."""
        src, other_src = int(src), int(other_src)
        finding = self._found.get((kind, src, other_src))
        if finding is None:
            crew = tuple(int(a) for a in agents)
            finding = Finding(kind, src, crew, other_src=other_src, **fields)
            self._found[kind, src, other_src] = finding
        finding.count += 1

    def __bool__(self) -> bool:
        return bool(self._found)

    def seen(self, kind: str, src: int, other_src: int) -> bool:
        """Whether this hazard was met before; if so it is counted once more."""
        finding = self._found.get((kind, int(src), int(other_src)))
        if finding is not None:
            finding.count += 1
        return finding is not None

    def named(self, ring: Callable[[tuple[int, int]], tuple[int, int | None]]) -> list[Hazard]:
        """The hazards in the order in which they were met, those of the same source lines in one.

        Args:
            ring: (CTA, offset) of an mbarrier to its number in the CTA and its stage.
        """
        merged: dict[tuple, Hazard] = {}
        for finding in self._found.values():
            barrier, stage = ring(finding.bar) if finding.bar is not None else (None, None)
            there = None
            if finding.other_src >= 0:
                there = self._site(finding.other_src, finding.other_agents, finding.other_unit)
            hazard = Hazard(
                kind=finding.kind,
                rule=finding.rule or RULES[finding.kind],
                here=self._site(finding.src, finding.agents, finding.unit),
                there=there,
                space=finding.space,
                object=finding.object,
                first_byte=finding.first,
                last_byte=finding.last,
                barrier=barrier,
                stage=stage,
                phase=finding.phase,
                detail=finding.detail,
                count=finding.count,
            )
            key = (hazard.kind, hazard.here.line, there.line if there else "")
            have = merged.get(key)
            merged[key] = replace(have, count=have.count + hazard.count) if have else hazard
        return list(merged.values())

    def _site(self, src: int, agents: tuple[int, ...], unit: str) -> Site:
        line, text = self.describe(src) if src >= 0 else ("", "")
        if not agents:
            return Site(line, text, unit=unit)
        warps = tuple(sorted(a % self.warps_per_cta for a in agents))
        return Site(line, text, agents[0] // self.warps_per_cta, warps, self.role(agents[0]), unit)
