"""The heart of a product with packed weights: a few rows of x times a panel, sums held in vector registers.

Written as LLVM vector code, which becomes fused multiply-adds over registers of 8 floats (AVX2: 6 rows times 16 outputs
fill the 16 registers) and, for float16 weights, the processor's own conversion. Each sum runs over the width in order,
whatever the number of rows: a row's result is the same in any batch, to the bit.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.packing import PANEL

LANES = 8
AHEAD_BYTES = 1024
_LINE_BYTES = 64

insert_function: Any = cgutils.get_or_insert_function

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
floats = ir.VectorType(ir.FloatType(), LANES)
_STORED = {2: ir.VectorType(ir.HalfType(), LANES), 1: ir.VectorType(i8, LANES)}

Sums = list[list[Any]]


def make_tile(rows: int, panels: int) -> Any:
    """tile(weights, w_at, panel_size, x, x_at, width, out, out_at, out_width, count, fresh, ahead, ahead_step): adds to
    (fresh: sets) `rows` rows of out, `panels` panels of outputs each, the product over `count` elements of x. Flat
    arrays, and where in them to begin. weights: float16 as uint16, or int8 without its scales. ahead: where weights
    lie that will be wanted later, ahead_step bytes for each element of x; a tile of several panels knows by itself."""

    def tile(
        typing_context: Any, weights: Any, w_at: Any, panel_size: Any, x: Any, x_at: Any, width: Any, out: Any,
        out_at: Any, out_width: Any, count: Any, fresh: Any, ahead: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        n = types.intp
        signature = types.none(weights, n, n, x, n, n, out, n, n, n, types.boolean, n, n)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _Tile(context, builder, signature, arguments, rows, panels).emit()

        return signature, generate

    return intrinsic(tile)


class _Tile:
    """Emits the code of one tile."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any, rows: int, panels: int) -> None:
        self._context, self._builder = context, builder
        weights, w_at, panel_size, x, x_at, width, out, out_at, out_width, *rest = arguments
        self._count, self._fresh, ahead, self._ahead_step = rest
        self._size = signature.args[0].dtype.bitwidth // 8
        b = builder
        data = [self._data(signature.args[i], value) for i, value in ((0, weights), (3, x), (6, out))]
        starts = [b.gep(data[0], [b.add(w_at, b.mul(panel_size, i64(p)))]) for p in range(panels)]
        self._weights = [b.bitcast(start, i8.as_pointer()) for start in starts]
        self._ahead = b.bitcast(b.gep(data[0], [ahead]), i8.as_pointer())
        self._x = [b.gep(data[1], [b.add(x_at, b.mul(width, i64(r)))]) for r in range(rows)]
        self._out = [b.gep(data[2], [b.add(out_at, b.mul(out_width, i64(r)))]) for r in range(rows)]
        self._columns = panels * PANEL // LANES
        module = builder.module
        self._fma = insert_function(module, ir.FunctionType(floats, [floats] * 3), "llvm.fma.v8f32")
        hint = ir.FunctionType(ir.VoidType(), [i8.as_pointer(), i32, i32, i32])
        self._prefetch = insert_function(module, hint, "llvm.prefetch.p0i8")

    def emit(self) -> Any:
        b, count = self._builder, self._count
        zero = ir.Constant(floats, [0.0] * LANES)
        sums = [
            [b.select(self._fresh, zero, b.load(self._at(r, j), align=4)) for j in range(self._columns)]
            for r in range(len(self._out))
        ]
        # A line of weights a turn; where the registers are full of sums, one element of x.
        step = _LINE_BYTES // (PANEL * self._size) if len(self._out) * len(self._weights) <= 4 else 1
        whole = b.mul(b.sdiv(count, i64(step)), i64(step))
        sums = self._loop(i64(0), whole, step, sums)
        if step > 1:
            sums = self._loop(whole, count, 1, sums)
        for r, row in enumerate(sums):
            for j, value in enumerate(row):
                b.store(value, self._at(r, j), align=4)
        return self._context.get_dummy_value()

    def _loop(self, begin: Any, end: Any, step: int, sums: Sums) -> Sums:
        b = self._builder
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.after"))
        b.branch(head)
        b.position_at_end(head)
        k = b.phi(i64)
        k.add_incoming(begin, before)
        held = [[b.phi(floats) for _ in row] for row in sums]
        b.cbranch(b.icmp_signed("<", k, end), body, after)
        b.position_at_end(body)
        new = [list(row) for row in held]
        for u in range(step):
            self._element(b.add(k, i64(u)), new, hint=u == 0)
        k.add_incoming(b.add(k, i64(step)), b.block)
        for row, row_before, row_after in zip(held, sums, new, strict=True):
            for phi, value_before, value_after in zip(row, row_before, row_after, strict=True):
                phi.add_incoming(value_before, before)
                phi.add_incoming(value_after, b.block)
        b.branch(head)
        b.position_at_end(after)
        return held

    def _element(self, k: Any, sums: Sums, hint: bool) -> None:
        b = self._builder
        vectors = []
        if hint and len(self._weights) == 1:
            self._hint(b.gep(self._ahead, [b.mul(k, self._ahead_step)]))
        for start in self._weights:
            base = b.gep(start, [b.mul(k, i64(PANEL * self._size))])
            if hint and len(self._weights) > 1:
                self._hint(b.gep(base, [i64(AHEAD_BYTES)]))
            halves = (b.gep(base, [i64(half * LANES * self._size)]) for half in range(PANEL // LANES))
            vectors += [self._weight(address) for address in halves]
        for r, start in enumerate(self._x):
            value = self._broadcast(b.load(b.gep(start, [k])))
            for j, vector in enumerate(vectors):
                sums[r][j] = b.call(self._fma, [value, vector, sums[r][j]])

    def _hint(self, address: Any) -> None:
        """The processor's own prefetcher stops at the end of each page, and knows no next panel."""
        keep_in_l2 = i32(2)
        self._builder.call(self._prefetch, [address, i32(0), keep_in_l2, i32(1)])

    def _weight(self, address: Any) -> Any:
        b, stored = self._builder, _STORED[self._size]
        value = b.load(b.bitcast(address, stored.as_pointer()), align=1)
        return b.fpext(value, floats) if self._size == 2 else b.sitofp(value, floats)

    def _broadcast(self, value: Any) -> Any:
        b, nothing = self._builder, ir.Constant(floats, ir.Undefined)
        first = b.insert_element(nothing, value, i32(0))
        return b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(i32, LANES), [0] * LANES))

    def _at(self, row: int, column: int) -> Any:
        b = self._builder
        return b.bitcast(b.gep(self._out[row], [i64(column * LANES)]), floats.as_pointer())

    def _data(self, kind: Any, value: Any) -> Any:
        return self._context.make_array(kind)(self._context, self._builder, value).data
