"""The heart of a product with 4-bit weights: a few rows of 8-bit x times a panel, in whole numbers within a block.

AVX2's multiply-add of bytes takes 32 products at once, and the 16-bit sums of a block of 32 cannot overflow (8
additions of two products of at most 15 times 127), so only one widening a block is paid for.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.packing import BLOCK, PANEL

LANES = 8
BLOCK_BYTES = PANEL * BLOCK // 2
_AHEAD_BYTES = 1024
_LINE_BYTES = 64
_PAIRS = 4

insert_function: Any = cgutils.get_or_insert_function

i8, i32, i64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
bytes32, shorts = ir.VectorType(i8, 32), ir.VectorType(ir.IntType(16), 16)
ints, floats = ir.VectorType(i32, LANES), ir.VectorType(ir.FloatType(), LANES)
halves = ir.VectorType(ir.HalfType(), LANES)

Sums = list[list[Any]]


def make_nibble_tile(rows: int) -> Any:
    """tile(weights, scales, block, num_blocks, x, x_at, width, notes, out, out_at, out_width): sets `rows` rows of 16
    outputs. Flat arrays; the panel's first block is number `block` of all. scales: float16 as uint16. x: int8 rows of
    `width`; notes: for each of their blocks its step and its sum."""

    def tile(
        typing_context: Any, weights: Any, scales: Any, block: Any, num_blocks: Any, x: Any, x_at: Any, width: Any,
        notes: Any, out: Any, out_at: Any, out_width: Any,
    ) -> Any:  # fmt: skip
        n = types.intp
        signature = types.none(weights, scales, n, n, x, n, n, notes, out, n, n)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _NibbleTile(context, builder, signature, arguments, rows).emit()

        return signature, generate

    return intrinsic(tile)


class _NibbleTile:
    """Emits the code of one tile."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any, rows: int) -> None:
        self._context, self._builder, self._rows = context, builder, rows
        weights, scales, block, self._num_blocks, x, x_at, width, notes, out, out_at, out_width = arguments
        b = builder
        arrays = ((0, weights), (1, scales), (4, x), (7, notes), (8, out))
        data = [context.make_array(signature.args[i])(context, b, value).data for i, value in arrays]
        self._weights = b.bitcast(b.gep(data[0], [b.mul(block, i64(BLOCK_BYTES))]), i8.as_pointer())
        self._scales = b.gep(data[1], [b.mul(block, i64(2 * PANEL))])
        row_at = [b.add(x_at, b.mul(width, i64(r))) for r in range(rows)]
        self._x = [b.gep(data[2], [at]) for at in row_at]
        self._notes = [b.gep(data[3], [b.mul(b.sdiv(at, i64(BLOCK)), i64(2))]) for at in row_at]
        self._out = [b.gep(data[4], [b.add(out_at, b.mul(out_width, i64(r)))]) for r in range(rows)]
        kinds = {
            "llvm.fma.v8f32": ir.FunctionType(floats, [floats] * 3),
            "llvm.x86.avx2.pmadd.ub.sw": ir.FunctionType(shorts, [bytes32, bytes32]),
            "llvm.x86.avx2.pmadd.wd": ir.FunctionType(ints, [shorts, shorts]),
            "llvm.prefetch.p0i8": ir.FunctionType(ir.VoidType(), [i8.as_pointer(), i32, i32, i32]),
        }
        found = [insert_function(b.module, kind, name) for name, kind in kinds.items()]
        self._fma, self._bytes_product, self._widened, self._prefetch = found

    def emit(self) -> Any:
        b = self._builder
        before = b.block
        head, body, after = (b.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.after"))
        b.branch(head)
        b.position_at_end(head)
        block = b.phi(i64)
        block.add_incoming(i64(0), before)
        held = [[b.phi(floats) for _ in range(PANEL // LANES)] for _ in range(self._rows)]
        b.cbranch(b.icmp_signed("<", block, self._num_blocks), body, after)
        b.position_at_end(body)
        new = [list(row) for row in held]
        self._block(block, new)
        block.add_incoming(b.add(block, i64(1)), b.block)
        for row, row_after in zip(held, new, strict=True):
            for phi, value in zip(row, row_after, strict=True):
                phi.add_incoming(ir.Constant(floats, [0.0] * LANES), before)
                phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)
        for start, row in zip(self._out, held, strict=True):
            for half, value in enumerate(row):
                b.store(value, b.bitcast(b.gep(start, [i64(half * LANES)]), floats.as_pointer()), align=4)
        return self._context.get_dummy_value()

    def _block(self, block: Any, sums: Sums) -> None:
        b = self._builder
        base = b.gep(self._weights, [b.mul(block, i64(BLOCK_BYTES))])
        for line in range(0, BLOCK_BYTES, _LINE_BYTES):  # the processor's own prefetcher stops at the end of each page
            b.call(self._prefetch, [b.gep(base, [i64(_AHEAD_BYTES + line)]), i32(0), i32(3), i32(1)])
        scales = b.gep(self._scales, [b.mul(block, i64(2 * PANEL))])
        notes = [b.gep(start, [b.mul(block, i64(2))]) for start in self._notes]
        ones = ir.Constant(shorts, [1] * 16)
        for half in range(PANEL // LANES):
            products = self._products(block, base, half)
            step = self._half_floats(b.gep(scales, [i64(half * LANES)]))
            least = self._half_floats(b.gep(scales, [i64(PANEL + half * LANES)]))
            for r, product in enumerate(products):
                whole = b.sitofp(b.call(self._widened, [product, ones]), floats)
                scale = b.fmul(step, self._broadcast(b.load(notes[r]), floats))
                total = b.call(self._fma, [whole, scale, sums[r][half]])
                row_sum = self._broadcast(b.load(b.gep(notes[r], [i64(1)])), floats)
                sums[r][half] = b.call(self._fma, [least, row_sum, total])

    def _products(self, block: Any, base: Any, half: int) -> list[Any]:
        """For each row the 16-bit sums over a block for 8 outputs, two an output."""
        b = self._builder
        low_bits, shift = ir.Constant(bytes32, [15] * 32), ir.Constant(bytes32, [4] * 32)
        products: list[Any] = [None] * self._rows
        for pair in range(_PAIRS):
            address = b.gep(base, [i64((pair * 2 + half) * 32)])
            packed = b.load(b.bitcast(address, bytes32.as_pointer()), align=1)
            for group, vector in enumerate((b.and_(packed, low_bits), b.lshr(packed, shift))):
                at = b.add(b.mul(block, i64(BLOCK)), i64((pair * 2 + group) * 4))
                for r, start in enumerate(self._x):
                    four = b.load(b.bitcast(b.gep(start, [at]), i32.as_pointer()), align=1)
                    everywhere = b.bitcast(self._broadcast(four, ints), bytes32)
                    product = b.call(self._bytes_product, [vector, everywhere])
                    products[r] = product if products[r] is None else b.add(products[r], product)
        return products

    def _half_floats(self, address: Any) -> Any:
        b = self._builder
        return b.fpext(b.load(b.bitcast(address, halves.as_pointer()), align=1), floats)

    def _broadcast(self, value: Any, kind: Any) -> Any:
        b, nothing = self._builder, ir.Constant(kind, ir.Undefined)
        return b.shuffle_vector(b.insert_element(nothing, value, i32(0)), nothing, ir.Constant(ints, [0] * LANES))
