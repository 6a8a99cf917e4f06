"""State spaces of a running kernel: loads, stores and atomics by generated code, checked for bounds and alignment.

Addresses are arrays that broadcast to (warps, 32). Global addresses are host addresses of the tensors. A shared
address is an offset in the CTA's window, which starts with 1 KB that sm_90 keeps for itself; in shared::cluster
addresses the bits from 24 on are the CTA's rank plus one, or zero for the own CTA.

Inside the engine a place in shared memory is one int64: slot << 32 | offset, `slot` being the CTA's row in `smem`.
"""

from __future__ import annotations

import bisect

import numpy as np

from cute_matmul.emulator import ops, translate
from cute_matmul.emulator.errors import EmulatorError

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
CLUSTER_SHIFT = 24
OFFSET_MASK = (1 << CLUSTER_SHIFT) - 1
SLOT_SHIFT = 32


class Stop(Exception):
    """A hazard after which going on has no meaning (out of bounds, misaligned, trap); it has been reported."""


def _float_add(kind: str, old: np.ndarray, value: np.ndarray) -> np.ndarray:
    if kind in ("f32", "f64"):
        return old + value
    if kind in ("f16", "bf16"):
        return ops.half_op("add", kind, (old, value))
    return ops.join_halves(ops.half_op("add", kind.removesuffix("x2"), (ops.halves(old), ops.halves(value))))


def atomic_result(name: str, kind: str, old: np.ndarray, values: tuple[np.ndarray, ...]) -> np.ndarray:
    """The new value of an atomic operation (PTX ISA, atom). Arrays of the type's NumPy type."""
    value = values[0]
    if name == "add":
        return _float_add(kind, old, value) if kind.startswith(("f", "bf")) else old + value
    if name == "exch":
        return value
    if name == "cas":
        return np.where(old == value, values[1], old)
    if name == "inc":
        return np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))
    if name == "dec":
        return np.where((old == 0) | (old > value), value, old - old.dtype.type(1))
    functions = {
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    if name not in functions or (name in ("min", "max") and kind.startswith(("f16", "bf16"))):
        raise EmulatorError(f"atomic {name} of {kind} is not implemented")
    return functions[name](old, value)


def _covers(view, nbytes: int) -> bool:
    """Whether a view is dense and as large as its storage, so that it leaves no gaps."""
    expected = 1
    for extent, stride in sorted(zip(view.shape, view.stride, strict=True), key=lambda axis: axis[1]):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return view.offset == 0 and expected * view.itemsize == nbytes


class AddressSpaces:
    """Mixin of the engine: everything that touches memory from a register."""

    def setup_memory(self, launch, program: translate.Program) -> None:
        """Allocate what is fixed for the launch: parameters, constants, module variables, global allocations."""
        self.param = np.zeros(max(program.param_bytes, 1) + 64, np.uint8)
        for offset, data in zip(program.param_offsets, launch.params, strict=True):
            self.param[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        self.parameters: dict[tuple, np.ndarray] = {}
        self.constant = np.zeros(program.constant_bytes, np.uint8)
        self.module_globals: dict[str, np.ndarray] = {}
        spaces: list[tuple[int, int, np.ndarray, object]] = []
        for variable in [*program.module.variables.values(), *program.kernel.variables.values()]:
            data = np.frombuffer(variable.data.ljust(variable.nbytes, b"\0")[: variable.nbytes], np.uint8)
            if variable.space == "const":
                at = program.addresses[variable.name][1]
                self.constant[at : at + variable.nbytes] = data
            elif variable.space == "global":
                padded = np.zeros(variable.nbytes + 256, np.uint8)
                start = -padded.ctypes.data % 256
                array = padded[start : start + variable.nbytes]
                array[:] = data
                self.module_globals[variable.name] = array
                spaces.append((array.ctypes.data, variable.nbytes, array, None))
        for allocation in launch.allocations:
            spaces.append((allocation.base, allocation.nbytes, allocation.data, allocation))
        spaces.sort(key=lambda s: s[0])
        self.global_bases = [s[0] for s in spaces]
        self.global_ends = [s[0] + s[1] for s in spaces]
        self.global_data = [s[2] for s in spaces]
        self.global_owner = [s[3] for s in spaces]
        self.global_names = [s[3].label if s[3] is not None else "module variable" for s in spaces]
        self.global_views: dict[tuple[int, int], np.ndarray] = {}
        # Bytes of a storage that no argument covers: None where there are none.
        self.global_gaps: list[np.ndarray | None] = []
        for _, nbytes, _, owner in spaces:
            full = owner is None or any(_covers(view, nbytes) for view in owner.views)
            viewed = None if full else owner.viewed()
            self.global_gaps.append(None if viewed is None or viewed.all() else ~viewed)
        self.smem_limit = max(program.dynamic_start + launch.smem_bytes, program.static_shared_end)
        self.smem_bytes = -(-self.smem_limit // 16) * 16

    def setup_wave(self, slots: int, warps: int, program: translate.Program) -> None:
        """Fresh registers, shared and local memory. Nothing is initialised: bytes read as ones, floats as NaN."""
        counts = program.kernel.registers
        self.A1 = np.zeros((max(counts[1], 1), warps, 32), np.bool_)
        self.A16 = np.full((max(counts[16], 1), warps, 32), 0xFFFF, np.uint16)
        self.A32 = np.full((max(counts[32], 1), warps, 32), 0xFFFFFFFF, np.uint32)
        self.A64 = np.full((max(counts[64], 1), warps, 32), 0xFFFFFFFFFFFFFFFF, np.uint64)
        self.smem = np.full((slots, self.smem_bytes), 0xFF, np.uint8)
        self.smem_views = {size: self.smem.view(kind) for size, kind in UNSIGNED.items()}
        self.undefined_lanes = {(r.width, r.index): np.full((warps, 32), r in program.unset) for r in program.undefined}
        self.local = np.full((warps, 32, max(program.local_bytes, 16)), 0xFF, np.uint8)
        self.local_views = {size: self.local.view(kind) for size, kind in UNSIGNED.items()}

    # Registers that nothing has set

    def check_undefined(self, G, src: int, keys: tuple, mask) -> None:
        """Report active lanes that use one of the registers without its ever having been set."""
        for key in keys:
            bad = self.undefined_lanes[key][G.ix]
            bad = bad & G.active if mask is None else bad & mask
            if bad.any():
                row, lane = np.argwhere(bad)[0]
                text = f"lane {lane}: nothing has set it on the path taken"
                self.report("uninitialised-register", src, G.agents[row], "", None, None, text)
                return

    def spread_undefined(self, G, written: tuple, read: tuple, mask, choice=None, other: tuple = ()) -> None:
        """Results are as undefined as what they are computed from; `choice` picks between two sources by lane."""

        def join(keys: tuple):
            out = np.zeros((1, 1), bool)
            for key in keys:
                out = out | self.undefined_lanes[key][G.ix]
            return out

        new = join(read) if choice is None else np.where(choice, join(read), join(other))
        on = G.mask if mask is None else mask
        for key in written:
            table = self.undefined_lanes[key]
            table[G.ix] = new if on is None else np.where(on, new, table[G.ix])

    # Addresses

    def parameter(self, offset: int, kind: type) -> np.ndarray:
        """A kernel parameter as a (1, 1) array."""
        key = (offset, kind)
        value = self.parameters.get(key)
        if value is None:
            size = np.dtype(kind).itemsize
            value = self.param[offset : offset + size].copy().view(kind)[None]
            value.flags.writeable = False
            self.parameters[key] = value
        return value

    def global_symbol(self, name: str, offset: int) -> np.ndarray:
        return np.array([[self.module_globals[name].ctypes.data + offset]], np.uint64)

    def shared_address(self, G, space: str, address: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """slot << 32 | offset for a shared, shared::cluster or generic address. Inactive lanes may hold anything."""
        place = address.astype(np.int64)
        if mask is not None and (place >> CLUSTER_SHIFT).any():
            inactive = translate.SHARED_START | (translate.SHARED_WINDOW if space == "generic" else 0)
            place = np.where(mask, place, inactive)
        if space == "generic":
            window = place >> 56
            if (window != 1).any():
                self.stop(
                    G, "shared-out-of-bounds", "a generic address outside the shared window where one is required"
                )
            place = place & translate.WINDOW_MASK
        if space == "shared" and not (place >> CLUSTER_SHIFT).any():
            return place | (G.slotcol << SLOT_SHIFT)
        rank = place >> CLUSTER_SHIFT
        if (rank > self.cluster_size).any() or (rank < 0).any():
            self.stop(
                G,
                "shared-out-of-bounds",
                f"an address of CTA rank {int(rank.max()) - 1} in a cluster of {self.cluster_size}",
            )
        slot = np.where(rank == 0, G.slotcol, G.clustercol + rank - 1)
        return (slot << SLOT_SHIFT) | (place & OFFSET_MASK)

    def mapa(self, address: np.ndarray, rank: np.ndarray, generic: bool) -> np.ndarray:
        kind = address.dtype.type
        keep = kind(OFFSET_MASK | (translate.SHARED_WINDOW if generic else 0))
        return (address & keep) | ((rank.astype(address.dtype) + kind(1)) << kind(CLUSTER_SHIFT))

    def cta_rank_of(self, G, address: np.ndarray) -> np.ndarray:
        rank = (address.astype(np.int64) & translate.WINDOW_MASK) >> CLUSTER_SHIFT
        return np.where(rank == 0, self.special("cluster_ctarank")[G.ix].astype(np.int64), rank - 1).astype(np.uint32)

    def own_shared(self, G, address: np.ndarray) -> np.ndarray:
        """Whether generic addresses are in the shared memory of the CTA itself, not of a peer."""
        own = self.special("cluster_ctarank")[G.ix]
        return (address >> np.uint64(56) == 1) & (self.cta_rank_of(G, address) == own)

    # Loads and stores

    def _lanes(self, G, address: np.ndarray, mask: np.ndarray | None):
        """Addresses as int64 (w, 32), the lanes that count, lowest and highest active address; None for no lane."""
        lanes = np.broadcast_to(address.astype(np.int64), (G.count, 32))
        if mask is None:
            return lanes, None, int(lanes.min()), int(lanes.max())
        mask = np.broadcast_to(mask, (G.count, 32))
        active = lanes[mask]
        if active.size == 0:
            return None
        low, high = int(active.min()), int(active.max())
        return np.where(mask, lanes, low), mask, low, high

    def _check_alignment(self, G, src: int, lanes: np.ndarray, nbytes: int, space: str) -> None:
        if nbytes > 1 and (lanes & (nbytes - 1)).any():
            bad = int(lanes[(lanes & (nbytes - 1)) != 0][0])
            agent = G.agents[int(np.argwhere((lanes & (nbytes - 1)) != 0)[0][0])]
            self.report(
                "misaligned-access",
                src,
                agent,
                space,
                bad,
                bad + nbytes - 1,
                f"{nbytes} bytes at {bad:#x} are not aligned to their size",
            )
            raise Stop

    def load(self, G, src, space, address, size, count, mask, order, scope):
        found = self._lanes(G, address, mask)
        if found is None:
            return [np.zeros((1, 1), UNSIGNED[size])] * count
        lanes, mask, low, high = found
        if space == "generic":
            space, lanes, parts = self._generic(lanes, mask, low, high)
            if parts is not None:
                return self._load_mixed(G, src, parts, size, count, order, scope, lanes)
            low, high = low & translate.WINDOW_MASK, high & translate.WINDOW_MASK
        self._check_alignment(G, src, lanes, size * count, space)
        if space == "global":
            return self._load_global(G, src, lanes, mask, low, high, size, count, order, scope)
        shift = size.bit_length() - 1
        if space in ("shared", "cluster"):
            rows, offsets, cta = self._shared_rows(G, src, space, lanes, low, high, size * count)
            for o in self.observers:
                o.shared(G.agents, src, offsets, size * count, mask, write=False, cta=cta, sem=order, scope=scope)
            self.tally(G, "shared read", mask, size * count)
            view = self.smem_views[size]
            index = offsets >> shift
            return [view[rows, index + i if i else index] for i in range(count)]
        if space == "local":
            index = self._local_index(G, src, lanes, high, size * count, shift)
            view = self.local_views[size]
            return [view[G.warpcol, ops.LANES, index + i if i else index] for i in range(count)]
        if space in ("param", "const"):
            data = self.param if space == "param" else self.constant
            if high + size * count > data.nbytes:
                raise EmulatorError(f"an access at {high} of {data.nbytes} bytes of {space} space")
            view = data[: data.nbytes // size * size].view(UNSIGNED[size])
            return [view[(lanes >> shift) + i] for i in range(count)]
        raise EmulatorError(f"load from {space} space")

    def store(self, G, src, space, address, values, size, mask, order, scope):
        found = self._lanes(G, address, mask)
        if found is None:
            return
        lanes, mask, low, high = found
        if space == "generic":
            space, lanes, parts = self._generic(lanes, mask, low, high)
            if parts is not None:
                for part_space, part_mask in parts:
                    prefix = 0 if part_space == "global" else translate.WINDOW_MASK
                    where = lanes & prefix if prefix else lanes
                    self.store(G, src, part_space, where, values, size, part_mask, order, scope)
                return
            low, high = low & translate.WINDOW_MASK, high & translate.WINDOW_MASK
        nbytes = size * len(values)
        self._check_alignment(G, src, lanes, nbytes, space)
        if space == "global":
            self._store_global(G, src, lanes, mask, low, high, values, size, order, scope)
            return
        shift = size.bit_length() - 1
        if space in ("shared", "cluster"):
            rows, offsets, cta = self._shared_rows(G, src, space, lanes, low, high, nbytes)
            for o in self.observers:
                o.shared(G.agents, src, offsets, nbytes, mask, write=True, cta=cta, sem=order, scope=scope)
            self.tally(G, "shared write", mask, nbytes)
            view, index = self.smem_views[size], offsets >> shift
            rows = np.broadcast_to(rows, index.shape)
        elif space == "local":
            view, index = self.local_views[size], self._local_index(G, src, lanes, high, nbytes, shift)
            for i, value in enumerate(values):
                target = (G.warpcol, ops.LANES, index + i)
                view[target] = value if mask is None else np.where(mask, value, view[target])
            return
        else:
            raise EmulatorError(f"store to {space} space")
        for i, value in enumerate(values):
            if mask is None:
                view[rows, index + i if i else index] = value
            else:
                view[rows[mask], index[mask] + i] = np.broadcast_to(value, index.shape)[mask]

    def _generic(self, lanes, mask, low, high):
        """(space, addresses within it, None), or (_, addresses, [(space, mask)]) where lanes differ."""
        names = {0: "global", 1: "cluster", 2: "local", 3: "param", 4: "const"}
        first, last = low >> 56, high >> 56
        if first == last:
            if first not in names:
                raise EmulatorError(f"generic address {low:#x} is in no state space")
            return names[first], (lanes & translate.WINDOW_MASK if first else lanes), None
        windows = lanes >> 56
        active = np.ones(lanes.shape, bool) if mask is None else mask
        parts = [(name, active & (windows == number)) for number, name in names.items()]
        return None, lanes, [(name, part) for name, part in parts if part.any()]

    def _load_mixed(self, G, src, parts, size, count, order, scope, lanes):
        out = [np.zeros((G.count, 32), UNSIGNED[size]) for _ in range(count)]
        for space, mask in parts:
            where = lanes if space == "global" else lanes & translate.WINDOW_MASK
            got = self.load(G, src, space, where, size, count, mask, order, scope)
            out = [np.where(mask, new, old) for new, old in zip(got, out, strict=True)]
        return out

    def _shared_rows(self, G, src, space, lanes, low, high, nbytes):
        """Row indices, offsets, and CTA numbers (None for the own CTA) of shared addresses."""
        if high <= OFFSET_MASK:
            rows, offsets, cta = G.slotcol, lanes, None
        else:
            place = self.shared_address(G, "cluster", lanes, None)
            rows, offsets = place >> SLOT_SHIFT, place & OFFSET_MASK
            low, high = int(offsets.min()), int(offsets.max())
            cta = rows + self.cta_base
        if low < translate.SHARED_START or high + nbytes > self.smem_limit:
            bad = low if low < translate.SHARED_START else high
            where = (
                "before its start"
                if low < translate.SHARED_START
                else f"of {self.smem_limit - translate.SHARED_START} bytes"
            )
            self.report(
                "shared-out-of-bounds",
                src,
                G.agents[0],
                "shared",
                bad,
                bad + nbytes - 1,
                f"outside shared memory {where}",
            )
            raise Stop
        return rows, offsets, cta

    def _local_index(self, G, src, lanes, high, nbytes, shift):
        if high + nbytes > self.local.shape[2] or int(lanes.min()) < 0:
            self.stop_at(G, src, "local-out-of-bounds", f"local address {high} of {self.local.shape[2]} bytes")
        return lanes >> shift

    def find_global(self, low: int, high: int) -> int:
        """Number of the allocation that holds [low, high), or -1."""
        at = bisect.bisect_right(self.global_bases, low) - 1
        if at >= 0 and high <= self.global_ends[at]:
            return at
        return -1

    def global_view(self, number: int, size: int) -> np.ndarray | None:
        """An allocation as items of `size` bytes, or None where its start is not aligned to them."""
        key = (number, size)
        view = self.global_views.get(key)
        if view is None:
            data = self.global_data[number]
            if self.global_bases[number] % size:
                return None
            view = self.global_views[key] = data[: data.nbytes // size * size].view(UNSIGNED[size])
        return view

    def _global_places(self, G, src, lanes, mask, low, high, nbytes, write):
        """[(allocation, mask)] of a global access; reports and stops where some lane is in none."""
        number = self.find_global(low, high + nbytes)
        if number >= 0:
            places = [(number, mask)]
        else:
            active = np.ones(lanes.shape, bool) if mask is None else mask
            places, left = [], active.copy()
            for at, (base, end) in enumerate(zip(self.global_bases, self.global_ends, strict=True)):
                inside = active & (lanes >= base) & (lanes + nbytes <= end)
                if inside.any():
                    places.append((at, inside))
                    left &= ~inside
            if left.any():
                row, lane = np.argwhere(left)[0]
                address = int(lanes[row, lane])
                self.report(
                    "global-out-of-bounds",
                    src,
                    G.agents[row],
                    "global",
                    address,
                    address + nbytes - 1,
                    self.nearest(address),
                )
                raise Stop
        for number, part in places:
            gaps = self.global_gaps[number]
            if gaps is not None:
                self._check_gaps(G, src, number, gaps, lanes, part, nbytes, write)
        return places

    def _check_gaps(self, G, src, number, gaps, lanes, mask, nbytes, write) -> None:
        offsets = lanes - self.global_bases[number]
        offsets = np.clip(offsets, 0, len(gaps) - nbytes)
        hit = np.zeros(lanes.shape, bool)
        for i in range(nbytes):
            hit |= gaps[offsets + i]
        if mask is not None:
            hit &= mask
        if hit.any():
            row, lane = np.argwhere(hit)[0]
            offset = int(offsets[row, lane])
            owner = self.global_owner[number]
            verb = "written" if write else "read"
            self.report(
                "global-out-of-bounds", src, G.agents[row], "global", offset, offset + nbytes - 1,
                f"{verb} outside the tensor: {owner.describe(offset + int(np.argmax(gaps[offset : offset + nbytes])))}",
            )  # fmt: skip

    def nearest(self, address: int) -> str:
        """Where an address outside all allocations lies."""
        best, text = None, "no allocation is known"
        for base, end, name in zip(self.global_bases, self.global_ends, self.global_names, strict=True):
            distance = base - address if address < base else address - end
            side = (
                f"{base - address} bytes before {name}"
                if address < base
                else f"{address - end} bytes past the end of {name}"
            )
            if best is None or distance < best:
                best, text = distance, side
        return text

    def _load_global(self, G, src, lanes, mask, low, high, size, count, order, scope):
        nbytes = size * count
        places = self._global_places(G, src, lanes, mask, low, high, nbytes, False)
        for o in self.observers:
            o.global_(G.agents, src, lanes, nbytes, mask, write=False, sem=order, scope=scope)
        self.tally(G, "global read", mask, nbytes)
        out = [None] * count
        for number, part in places:
            base = self.global_bases[number]
            view = self.global_view(number, size)
            offsets = lanes - base if part is None or len(places) == 1 else np.where(part, lanes - base, 0)
            for i in range(count):
                if view is not None:
                    got = view[(offsets >> (size.bit_length() - 1)) + i]
                else:
                    data = self.global_data[number]
                    index = offsets[..., None] + np.arange(i * size, (i + 1) * size)
                    got = np.ascontiguousarray(data[index]).view(UNSIGNED[size])[..., 0]
                out[i] = got if out[i] is None else np.where(part, got, out[i])
        return out

    def _store_global(self, G, src, lanes, mask, low, high, values, size, order, scope):
        nbytes = size * len(values)
        places = self._global_places(G, src, lanes, mask, low, high, nbytes, True)
        for o in self.observers:
            o.global_(G.agents, src, lanes, nbytes, mask, write=True, sem=order, scope=scope)
        self.tally(G, "global write", mask, nbytes)
        for number, part in places:
            base = self.global_bases[number]
            view = self.global_view(number, size)
            offsets = lanes - base if part is None else lanes[part] - base
            for i, value in enumerate(values):
                value = np.broadcast_to(value, lanes.shape)
                value = value if part is None else value[part]
                if view is not None:
                    view[(offsets >> (size.bit_length() - 1)) + i] = value
                else:
                    data = self.global_data[number]
                    raw = np.ascontiguousarray(value).view(np.uint8).reshape(*value.shape, size)
                    data[offsets[..., None] + np.arange(i * size, (i + 1) * size)] = raw

    # Atomics

    def atomic(self, G, src, space, address, name, kind, values, mask, order, scope):
        """Lanes take effect in order of warp and lane. Returns the old values."""
        dtype = translate.numpy_dtype(kind)
        size = dtype.itemsize
        old = np.zeros((G.count, 32), dtype)
        found = self._lanes(G, address, mask)
        if found is None:
            return old
        lanes, mask, low, high = found
        if space == "generic":
            space, lanes, parts = self._generic(lanes, mask, low, high)
            if parts is not None:
                raise EmulatorError("an atomic whose lanes are in different state spaces")
            low, high = low & translate.WINDOW_MASK, high & translate.WINDOW_MASK
        self._check_alignment(G, src, lanes, size, space)
        self.changes += 1
        if space == "global":
            places = self._global_places(G, src, lanes, mask, low, high, size, True)
            for o in self.observers:
                o.global_(G.agents, src, lanes, size, mask, write=True, atomic=True, sem=order, scope=scope)
            for number, part in places:
                # From the first multiple of the size on: an allocation may begin between two.
                before = -self.global_bases[number] % size
                data = self.global_data[number][before:]
                flat = data[: data.nbytes // size * size].view(dtype)
                index = (lanes - self.global_bases[number] - before) // size
                active = np.ones(lanes.shape, bool) if part is None else part
                self._atomic_lanes(flat, index, active, name, kind, values, old)
            self.tally(G, "global write", mask, size)
            return old
        if space not in ("shared", "cluster"):
            raise EmulatorError(f"atomic on {space} space")
        rows, offsets, cta = self._shared_rows(G, src, space, lanes, low, high, size)
        for o in self.observers:
            o.shared(G.agents, src, offsets, size, mask, write=True, atomic=True, cta=cta, sem=order, scope=scope)
        flat = self.smem_views[size].reshape(-1).view(dtype)
        index = rows * (self.smem_bytes // size) + offsets // size
        active = np.ones(lanes.shape, bool) if mask is None else mask
        self._atomic_lanes(flat, np.broadcast_to(index, lanes.shape), active, name, kind, values, old)
        return old

    @staticmethod
    def _atomic_lanes(flat, index, active, name, kind, values, old) -> None:
        values = tuple(np.broadcast_to(v, index.shape) for v in values)
        chosen = index[active]
        if len(np.unique(chosen)) == chosen.size:
            before = flat[chosen]
            old[active] = before
            flat[chosen] = atomic_result(name, kind, before, tuple(v[active] for v in values))
            return
        for row, lane in np.argwhere(active):
            at = index[row, lane]
            before = flat[at : at + 1].copy()
            old[row, lane] = before[0]
            flat[at] = atomic_result(name, kind, before, tuple(v[row, lane : lane + 1] for v in values))[0]
