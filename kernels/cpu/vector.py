"""Eight float32 lanes as one value, so that kernels say themselves what stays in registers.

The compiler's own vectoriser neither shares a load between several query heads nor widens half floats. Arrays are flat
and contiguous, and nothing is checked.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8

_intrinsic: Any = intrinsic
_models: Any = models
_insert_function: Any = cgutils.get_or_insert_function

F32, I32 = ir.FloatType(), ir.IntType(32)
VECTOR, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_FUSED = ("contract",)
_LOWEST = -125.0
# 2 ** f for f in [-0.5, 0.5], highest power first; Cephes' expf with powers of ln 2 taken in.
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1, 1.0)  # fmt: skip


class Floats8(types.Type):
    """The type of such a value."""

    def __init__(self) -> None:
        super().__init__(name="floats8")


class _Model(_models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


register_model(Floats8)(_Model)
floats8 = Floats8()


def lanes(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def ints(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def pointer_at(context: Any, builder: Any, array: Any, where: Any, kind: Any) -> Any:
    """Where array[index] begins, as a pointer to `kind`. where: (array, index) as the compiled code has them."""
    value, index = where
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def spread(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def _on_vectors(build: Callable[[Any, tuple[Any, ...]], Any]) -> Callable[[Any, Any, Any, tuple[Any, ...]], Any]:
    return lambda context, builder, signature, arguments: build(builder, arguments)


def _zeros(typing_context: Any) -> Any:
    return floats8(), _on_vectors(lambda builder, _: lanes(0.0))


def _splat(typing_context: Any, scalar: Any) -> Any:
    return floats8(types.float32), _on_vectors(lambda builder, a: spread(builder, a[0]))


def _splat_at(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointer_at(context, builder, array, arguments, F32)
        return spread(builder, builder.load(pointer, align=4))

    return floats8(array, types.intp), generate


def _add(typing_context: Any, x: Any, y: Any) -> Any:
    return floats8(floats8, floats8), _on_vectors(lambda builder, a: builder.fadd(a[0], a[1]))


def _subtract(typing_context: Any, x: Any, y: Any) -> Any:
    return floats8(floats8, floats8), _on_vectors(lambda builder, a: builder.fsub(a[0], a[1]))


def _multiply(typing_context: Any, x: Any, y: Any) -> Any:
    return floats8(floats8, floats8), _on_vectors(lambda builder, a: builder.fmul(a[0], a[1]))


def _divide(typing_context: Any, x: Any, y: Any) -> Any:
    return floats8(floats8, floats8), _on_vectors(lambda builder, a: builder.fdiv(a[0], a[1]))


def _add_product(typing_context: Any, total: Any, x: Any, y: Any) -> Any:
    return floats8(floats8, floats8, floats8), _on_vectors(lambda builder, a: _fused(builder, a[1], a[2], a[0]))


def _fused(builder: Any, x: Any, y: Any, total: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=_FUSED), total, flags=_FUSED)


def _larger(typing_context: Any, x: Any, y: Any) -> Any:
    def build(builder: Any, a: tuple[Any, ...]) -> Any:
        return builder.select(builder.fcmp_ordered(">", a[0], a[1]), a[0], a[1])

    return floats8(floats8, floats8), _on_vectors(build)


def _where_at_most(typing_context: Any, x: Any, limit: Any, then: Any, otherwise: Any) -> Any:
    def build(builder: Any, a: tuple[Any, ...]) -> Any:
        return builder.select(builder.fcmp_ordered("<=", a[0], a[1]), a[2], a[3])

    return floats8(floats8, floats8, floats8, floats8), _on_vectors(build)


def _exp2(typing_context: Any, x: Any) -> Any:
    def build(builder: Any, a: tuple[Any, ...]) -> Any:
        low = builder.fcmp_ordered("<", a[0], lanes(_LOWEST))
        bounded = builder.select(low, lanes(_LOWEST), a[0])  # a NaN stays
        number = builder.select(builder.fcmp_ordered(">", a[0], lanes(_LOWEST)), a[0], lanes(_LOWEST))  # no NaN
        kind = ir.FunctionType(VECTOR, [VECTOR])
        whole = builder.call(_insert_function(builder.module, kind, "llvm.rint.v8f32"), [number])
        fraction = builder.fsub(bounded, whole)
        power = lanes(_EXP2[0])
        for factor in _EXP2[1:]:
            power = _fused(builder, power, fraction, lanes(factor))
        exponent = builder.shl(builder.add(builder.fptosi(whole, INTS), ints(127)), ints(23))
        return builder.fmul(power, builder.bitcast(exponent, VECTOR))

    return floats8(floats8), _on_vectors(build)


def _pick(builder: Any, x: Any, y: Any, *which: int) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(which)), list(which)))


def _pairs_added(builder: Any, x: Any, y: Any) -> Any:
    """[x0+x1, x2+x3, y0+y1, y2+y3] of each half, as the processor's own pairwise sum has it."""
    even = _pick(builder, x, y, 0, 2, 8, 10, 4, 6, 12, 14)
    return builder.fadd(even, _pick(builder, x, y, 1, 3, 9, 11, 5, 7, 13, 15))


def _store_totals(typing_context: Any, array: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        four = arguments[2:]
        quarter = _pairs_added(builder, _pairs_added(builder, *four[:2]), _pairs_added(builder, *four[2:]))
        low, high = _pick(builder, quarter, quarter, 0, 1, 2, 3), _pick(builder, quarter, quarter, 4, 5, 6, 7)
        totals = builder.fadd(low, high)
        pointer = pointer_at(context, builder, array, arguments[:2], ir.VectorType(F32, 4))
        builder.store(totals, pointer, align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, *[floats8] * 4), generate


def _folded(fold: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def build(builder: Any, a: tuple[Any, ...]) -> Any:
        four = fold(builder, _pick(builder, a[0], a[0], 0, 1, 2, 3), _pick(builder, a[0], a[0], 4, 5, 6, 7))
        two = fold(builder, _pick(builder, four, four, 0, 1), _pick(builder, four, four, 2, 3))
        return fold(builder, builder.extract_element(two, I32(0)), builder.extract_element(two, I32(1)))

    return build


def _sum_up(builder: Any, x: Any, y: Any) -> Any:
    return builder.fadd(x, y)


def _larger_of(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _total(typing_context: Any, x: Any) -> Any:
    return types.float32(floats8), _on_vectors(_folded(_sum_up))


def _largest(typing_context: Any, x: Any) -> Any:
    return types.float32(floats8), _on_vectors(_folded(_larger_of))


zeros: Any = _intrinsic(_zeros)
splat: Any = _intrinsic(_splat)
splat_at: Any = _intrinsic(_splat_at)
add: Any = _intrinsic(_add)
subtract: Any = _intrinsic(_subtract)
multiply: Any = _intrinsic(_multiply)
divide: Any = _intrinsic(_divide)
add_product: Any = _intrinsic(_add_product)
"""add_product(total, x, y): total + x * y, rounded once where the processor can."""
larger: Any = _intrinsic(_larger)
"""Of each lane the larger; y where one is NaN."""
where_at_most: Any = _intrinsic(_where_at_most)
"""where_at_most(x, limit, then, otherwise), lane by lane."""
exp2: Any = _intrinsic(_exp2)
"""2 ** x for x up to 0, within 2 ulp; below -125 it is 2 ** -125, and NaN stays NaN."""
store_totals: Any = _intrinsic(_store_totals)
"""store_totals(array, i, a, b, c, d): the sum of each vector's lanes to array[i : i + 4]."""
total: Any = _intrinsic(_total)
largest: Any = _intrinsic(_largest)
