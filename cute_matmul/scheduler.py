"""Which tile a CTA computes: the order in which a 1-D grid walks the tiles of C.

CTAs with neighbouring indices run at the same time, so what they read stays in L2 only if their tiles share rows
of A or columns of B. Tiles are therefore walked in groups of `raster_group` rows of tiles: down the group's rows
first, then one column of tiles on. A group of G rows keeps G tiles of A and about `resident CTAs / G` tiles of B
in use together, where plain order keeps one of the two and streams the other.

The order works on DSL values inside a kernel, with division by multiplication (the divisors are known on the
host), and on plain ints outside, where its law (each tile exactly once) is tested.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import cutlass_dsl as dsl

from . import hopper


class TileOrder:
    """Bijection from a linear index, 0 <= index < m_tiles * n_tiles, to (m_tile, n_tile).

    m_tiles, n_tiles: extent of C in tiles. raster_group: rows of tiles per group; the last group may have fewer.
    """

    def __init__(self, m_tiles: Any, n_tiles: Any, raster_group: int) -> None:
        if not isinstance(raster_group, int) or raster_group < 1:
            raise ValueError(f"raster_group must be a positive integer, got {raster_group!r}")
        self.raster_group = raster_group
        self.full_groups = m_tiles // raster_group
        tail_rows = m_tiles % raster_group
        # A divisor of 0 is never used where there is no tail, but a reciprocal of 0 cannot be computed.
        self.tail_rows = _divisor(hopper.select(tail_rows == 0, 1, tail_rows))
        self.group_tiles = _divisor(n_tiles * raster_group)

    def locate(self, index: Any) -> tuple[Any, Any]:
        """(m_tile, n_tile) of a linear tile index."""
        group, within = divmod(index, self.group_tiles)
        n_tile, row = within // self.raster_group, within % self.raster_group
        tail_n_tile, tail_row = divmod(within, self.tail_rows)
        in_tail = group == self.full_groups
        first_row = group * self.raster_group
        return first_row + hopper.select(in_tail, tail_row, row), hopper.select(in_tail, tail_n_tile, n_tile)

    def __extract_mlir_values__(self) -> list:
        parts = (self.full_groups, self.tail_rows, self.group_tiles)
        return [value for part in parts for value in dsl.extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values: list) -> TileOrder:
        new = object.__new__(TileOrder)
        new.raster_group = self.raster_group
        remaining = list(values)
        for name in ("full_groups", "tail_rows", "group_tiles"):
            part = getattr(self, name)
            count = len(dsl.extract_mlir_values(part))
            setattr(new, name, dsl.new_from_mlir_values(part, remaining[:count]))
            remaining = remaining[count:]
        return new


def _divisor(value: Any) -> Any:
    """A divisor for divmod: a reciprocal computed once on the host, or the plain int."""
    return cute.FastDivmodDivisorV2(value) if hopper.is_dsl_value(value) else value
