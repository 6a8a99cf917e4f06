"""Shadow memory: who last wrote each byte, and who has read it since.

Memory is shadowed in cells of 16 bytes for as long as every access is made of whole cells. The first access
that is not (a 4-byte store, a tile clipped in mid-row) splits all cells into ones that fit it, down to single
bytes, so what is recorded is always exact.

A write is (column, epoch) in the sense of `clocks`, and the instruction. Epoch 0 means that nobody in the
kernel wrote there.
"""

from __future__ import annotations

import numpy as np

CELL = 16
READER_SLOTS = 4


def unit(addresses: np.ndarray, sizes: np.ndarray | int) -> int:
    """The largest power of two, at most 16, that divides all addresses and sizes."""
    bits = int(np.bitwise_or.reduce(addresses, axis=None)) if addresses.size else 0
    bits |= sizes if isinstance(sizes, int) else int(np.bitwise_or.reduce(sizes, axis=None))
    return min(CELL, bits & -bits) if bits else CELL


def spread(starts: np.ndarray, size: int) -> np.ndarray:
    """Cell numbers of runs of `size` cells: (n,) -> (n * size,)."""
    if size == 1:
        return starts
    return (starts[:, None] + np.arange(size)).reshape(-1)


def spread_ragged(starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of different lengths: their cells, and for each cell the run it belongs to."""
    run = np.repeat(np.arange(len(starts)), sizes)
    first = np.cumsum(sizes) - sizes
    return starts[run] + np.arange(len(run)) - first[run], run


class SharedShadow:
    """Shadow of the shared memory of the CTAs that are alive.

    Readers are kept per column, exactly: `epoch[cell, slot]` is the last epoch in which the column of that
    slot read the cell since its last write.
    """

    def __init__(self, nbytes: int, ctas: int) -> None:
        self.nbytes = -(-nbytes // CELL) * CELL
        self.cell = CELL
        self._slots = np.full(ctas, -1, np.int64)
        self._free: list[int] = []
        self._ctas = 0
        self._reader_of: dict[int, int] = {}
        self.reader_columns = np.zeros(0, np.int64)
        self._allocate(0, 4)

    def _allocate(self, ctas: int, readers: int) -> None:
        cells = ctas * (self.nbytes // self.cell)
        self.column = np.zeros(cells, np.int16)
        self.epoch = np.zeros(cells, np.int32)
        self.source = np.zeros(cells, np.int32)
        self.read_epoch = np.zeros((cells, readers), np.int32)
        self.read_source = np.zeros((cells, readers), np.int32)

    @property
    def per_cta(self) -> int:
        """Cells per CTA."""
        return self.nbytes // self.cell

    def bases(self, ctas: np.ndarray) -> np.ndarray:
        """First cell of each CTA's memory, which is made (unwritten) when it is first named."""
        slots = self._slots[ctas]
        if slots.min(initial=0) < 0:
            for cta in np.unique(ctas[slots < 0]).tolist():
                if not self._free:
                    self._resize(max(4, 2 * self._ctas))
                self._slots[cta] = self._free.pop()
            slots = self._slots[ctas]
        return slots * self.per_cta

    def _resize(self, ctas: int) -> None:
        old = (self.column, self.epoch, self.source, self.read_epoch, self.read_source)
        used = len(self.column)
        self._allocate(ctas, self.read_epoch.shape[1])
        new = (self.column, self.epoch, self.source, self.read_epoch, self.read_source)
        for was, now in zip(old, new, strict=True):
            now[:used] = was
        self._free.extend(range(ctas - 1, self._ctas - 1, -1))
        self._ctas = ctas

    def release(self, cta: int) -> None:
        """The CTA is gone: forget its memory."""
        slot = int(self._slots[cta])
        if slot < 0:
            return
        self._slots[cta] = -1
        cells = slice(slot * self.per_cta, (slot + 1) * self.per_cta)
        self.epoch[cells] = 0
        self.read_epoch[cells] = 0
        self._free.append(slot)

    def refine(self, cell: int) -> None:
        """Split all cells into cells of `cell` bytes."""
        factor = self.cell // cell
        self.cell = cell
        for name in ("column", "epoch", "source", "read_epoch", "read_source"):
            setattr(self, name, np.repeat(getattr(self, name), factor, axis=0))

    def reader(self, column: int) -> int:
        """Reader slot of a column, made on first use."""
        slot = self._reader_of.get(column)
        if slot is None:
            slot = self._reader_of[column] = len(self._reader_of)
            self.reader_columns = np.append(self.reader_columns, column)
            have = self.read_epoch.shape[1]
            if slot >= have:
                self.read_epoch = np.pad(self.read_epoch, ((0, 0), (0, have)))
                self.read_source = np.pad(self.read_source, ((0, 0), (0, have)))
        return slot

    def readers(self, columns: np.ndarray) -> np.ndarray:
        """Reader slots of several columns."""
        return np.array([self.reader(c) for c in columns.tolist()], np.int64)


class GlobalShadow:
    """Shadow of one global allocation.

    Reads are only logged until the kernel first writes the allocation, because nothing can conflict with
    them before. A cell remembers up to four readers that are not known to be over; should more than four be
    unordered with each other, the oldest are forgotten, so a conflict with them alone would be missed.
    """

    LOG_LIMIT = 1 << 22

    def __init__(self, base: int, nbytes: int, name: str) -> None:
        self.base = base
        self.nbytes = nbytes
        self.name = name
        self.cell = CELL
        self.written = False
        self.log: list[tuple] = []
        self.logged = 0
        self.read_epoch: np.ndarray | None = None

    @property
    def offset(self) -> int:
        """Bytes by which the base misses a 16-byte boundary: cells are aligned to addresses."""
        return self.base % CELL

    def open(self) -> None:
        """Start to keep writers (first write of the kernel)."""
        cells = -(-(self.nbytes + self.offset) // self.cell)
        self.written = True
        self.cluster = np.zeros(cells, np.int32)
        self.column = np.zeros(cells, np.int16)
        self.epoch = np.zeros(cells, np.int32)
        self.source = np.zeros(cells, np.int32)

    def open_readers(self) -> None:
        """Start to keep readers (first read after or before a write)."""
        shape = (len(self.epoch), READER_SLOTS)
        self.read_cluster = np.zeros(shape, np.int32)
        self.read_column = np.zeros(shape, np.int16)
        self.read_epoch = np.zeros(shape, np.int32)
        self.read_source = np.zeros(shape, np.int32)

    def refine(self, cell: int) -> None:
        """Split all cells into cells of `cell` bytes."""
        factor = self.cell // cell
        self.cell = cell
        names = ["cluster", "column", "epoch", "source"] if self.written else []
        if self.read_epoch is not None:
            names += ["read_cluster", "read_column", "read_epoch", "read_source"]
        for name in names:
            setattr(self, name, np.repeat(getattr(self, name), factor, axis=0))

    def first_cell(self, addresses: np.ndarray) -> np.ndarray:
        """Cell of each address."""
        return (addresses - (self.base - self.offset)) // self.cell
