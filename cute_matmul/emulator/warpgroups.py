"""WGMMA groups as the hazard checker sees them: which are over, and whose registers are in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cute_matmul.emulator.accesses import Conflicts
from cute_matmul.emulator.clocks import Clocks
from cute_matmul.emulator.findings import Findings


class WarpGroups:
    """WGMMA groups, numbered from 1 per warp group, and the registers of those that are pending.

    Per warp and register that some WGMMA uses: the group that it is pending in (0 for none), and whether other
    instructions have touched it since the last wgmma.fence.
    """

    def __init__(
        self, clocks: Clocks, conflicts: Conflicts, findings: Findings, agents: int, warps_per_cta: int
    ) -> None:
        self.clocks = clocks
        self.conflicts = conflicts
        self.findings = findings
        groups = -(-warps_per_cta // 4)
        self.columns = np.array(
            [clocks.column("wgmma", w // warps_per_cta * groups + w % warps_per_cta // 4) for w in range(clocks.warps)],
            np.int64,
        )
        self.committed = np.zeros(agents, np.int64)
        self.issued = np.zeros(agents, np.int64)
        self.source = np.zeros(agents, np.int64)
        self._fenced = np.zeros(agents, bool)
        self._dirty = np.zeros(agents, bool)
        self._ids: dict[int, int] = {}
        self._sets: dict[tuple[int, ...], np.ndarray] = {}
        self._pending = np.zeros((agents, 0), np.int32)
        self._touched = np.full((agents, 0), -1, np.int32)

    def _registers(self, registers: Sequence[int]) -> np.ndarray:
        """Columns of the register tables; made on first use."""
        key = tuple(registers)
        ids = self._sets.get(key)
        if ids is None:
            for register in key:
                self._ids.setdefault(register, len(self._ids))
            grow = len(self._ids) - self._pending.shape[1]
            if grow > 0:
                pad = ((0, 0), (0, max(grow, self._pending.shape[1])))
                self._pending = np.pad(self._pending, pad)
                self._touched = np.pad(self._touched, pad, constant_values=-1)
            ids = self._sets[key] = np.array([self._ids[r] for r in key], np.int64)
        return ids

    def issue(
        self, agents: np.ndarray, src: int, acc: Sequence[int], a_regs: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """A WGMMA of the warp groups `agents` (n, 4): its column and group number, (n,) each."""
        group = self.committed[agents].max(axis=1) + 1
        columns = self.columns[agents[:, 0] % self.clocks.warps]
        for warps, column in zip(agents.tolist(), columns.tolist(), strict=True):
            self.conflicts.issuers[warps[0] // self.clocks.warps, column] = tuple(warps)
        flat = agents.reshape(-1)
        self.issued[flat] = np.repeat(group, agents.shape[1])
        self.source[flat] = src
        unfenced = ~self._fenced[flat]
        if unfenced.any():
            self.findings.add("missing-wgmma-fence", src, [flat[unfenced][0]])
        ids = self._registers((*acc, *a_regs))
        if self._dirty[flat].any():
            touched = self._touched[flat[:, None], ids]
            if (touched >= 0).any():
                row, register = np.argwhere(touched >= 0)[0]
                agent = int(flat[row])
                other = touched[row, register]
                self.findings.add("missing-wgmma-fence", src, [agent], other, other_agents=(agent,))
                self._touched[flat[:, None], ids] = -1  # once is enough
        self._pending[flat[:, None], ids] = self.issued[flat][:, None]
        return columns, group

    def fence(self, agents: np.ndarray) -> None:
        """wgmma.fence."""
        self._fenced[agents] = True
        some = agents[self._dirty[agents]]
        if len(some):
            self._touched[some] = -1
            self._dirty[some] = False

    def wait(self, agents: np.ndarray, pending: int) -> None:
        """wgmma.wait_group."""
        done = np.maximum(self.committed[agents] - pending, 0)
        self.clocks.learn(agents, self.columns[agents % self.clocks.warps], done)
        kept = self._pending[agents]
        self._pending[agents] = np.where(kept <= done[:, None], 0, kept)

    def touch(self, agents: np.ndarray, src: int, registers: Sequence[int]) -> None:
        """Another instruction reads or writes these registers."""
        at = (agents[:, None], self._registers(registers))
        self._check_pending(agents, src, at)
        self._touched[at] = src
        self._dirty[agents] = True

    def fresh(self, agents: np.ndarray, src: int, registers: Sequence[int]) -> None:
        """A move sets these registers to a constant.

        This is no access that a wgmma.fence must separate: the DSL's own code puts such moves between the fence
        and the WGMMA, which is where the assembler gives the accumulators their registers.
        """
        at = (agents[:, None], self._registers(registers))
        self._check_pending(agents, src, at)
        self._touched[at] = -1

    def _check_pending(self, agents: np.ndarray, src: int, at: tuple[np.ndarray, np.ndarray]) -> None:
        pending = self._pending[at]
        if not pending.any():
            return
        row, register = np.argwhere(pending)[0]
        agent = int(agents[row])
        column = int(self.columns[agent % self.clocks.warps])
        self.findings.add(
            "accumulator-in-flight",
            src,
            [agent],
            self.source[agent],
            other_agents=self.conflicts.issuers.get((agent // self.clocks.warps, column), ()),
            other_unit=f"WGMMA group {int(pending[row, register]) - 1}",
            space="register",
        )

    def move(self, agents: np.ndarray, dst: Sequence[int], src: Sequence[int]) -> None:
        """A plain move renames registers: their state goes with them."""
        to, of = self._registers(dst), self._registers(src)
        rows = agents[:, None]
        for table in (self._pending, self._touched):
            table[rows, to] = table[rows, of]

    def leave(self, agents: np.ndarray, known: np.ndarray) -> None:
        """A CTA exits knowing `known`: its WGMMAs must be over."""
        late = self.issued[agents] > known[self.columns[agents % self.clocks.warps]]
        for agent in agents[late].tolist():
            unit = f"WGMMA group {int(self.issued[agent]) - 1}"
            self.findings.add("exit-with-copy-in-flight", self.source[agent], [agent], unit=unit)
