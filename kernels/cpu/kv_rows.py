"""How a row of keys or values lies in a page: what `load` and `store` of eight lanes mean for each kind of KV.

float32; uint16, the bits of float16; uint8, fp8: D codes (e4m3) and then one float32, the row's scale. Everything else
in a kernel is the same for all three: for the first two a row's scale is the constant 1, which the compiler removes.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from kernels.cpu.vector import F32, INTS, LANES, VECTOR, floats8, ints, lanes, pointer_at
from kernels.cpu.vectors import has_vectors
from kernels.reference import FP8_MAX, FP8_SMALLEST

_intrinsic: Any = intrinsic
_HALF, _SHORTS, _BYTES = (ir.VectorType(kind, LANES) for kind in (ir.HalfType(), ir.IntType(16), ir.IntType(8)))
_KINDS = {types.float32: VECTOR, types.uint16: _HALF, types.uint8: _BYTES}
_AS_LOADED = 256.0
"""A code's bits, moved to where float16 has them, are worth the code's value over this."""


def as_rows(kv_layer: torch.Tensor, head_dim: int) -> np.ndarray | None:
    """A layer [P, 2, Hkv, B, row] as kernels take it; None for what they do not know, or cannot do here: without the
    processor's own half floats the compiler asks for functions that nobody has."""
    if head_dim % LANES or kv_layer.dtype not in (torch.float32, torch.float16, torch.uint8):
        return None
    if kv_layer.dtype != torch.float32 and not has_vectors():
        return None
    array: np.ndarray = kv_layer.numpy()
    return array.view(np.uint16) if kv_layer.dtype == torch.float16 else array


def _is_flat(array: Any) -> bool:
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype in _KINDS


def _load(typing_context: Any, array: Any, index: Any) -> Any:
    if not _is_flat(array):
        return None
    kind = _KINDS[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        raw = builder.load(pointer_at(context, builder, array, arguments, kind), align=array.dtype.bitwidth // 8)
        if array.dtype == types.uint8:
            wide = builder.shl(builder.sext(raw, _SHORTS), ir.Constant(_SHORTS, [7] * LANES))
            raw = builder.bitcast(builder.and_(wide, ir.Constant(_SHORTS, [0xBFFF] * LANES)), _HALF)
        return raw if array.dtype == types.float32 else builder.fpext(raw, VECTOR)

    return floats8(array, types.intp), generate


def _store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    if not _is_flat(array):
        return None
    kind = _KINDS[array.dtype]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes_in = arguments[2]
        if array.dtype == types.uint16:
            lanes_in = builder.fptrunc(lanes_in, _HALF)
        elif array.dtype == types.uint8:
            lanes_in = builder.trunc(_codes(builder, lanes_in), _BYTES)
        pointer = pointer_at(context, builder, array, arguments[:2], kind)
        builder.store(lanes_in, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, types.intp, floats8), generate


def _codes(builder: Any, value: Any) -> Any:
    """The nearest e4m3 codes, ties to even, of values from -448 to 448."""
    bits = builder.bitcast(value, INTS)
    size = builder.and_(bits, ints(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, ints(20)), ints(1))
    rounded = builder.lshr(builder.add(builder.add(size, ints(0x7FFFF)), odd), ints(20))
    normal = builder.sub(rounded, ints(120 << 3))
    shifted = builder.fadd(builder.bitcast(size, VECTOR), lanes(16384.0))  # whose last bit is a subnormal's, 2^-9
    subnormal = builder.sub(builder.bitcast(shifted, INTS), ints(0x46800000))
    code = builder.select(builder.icmp_signed("<", size, ints(0x3C800000)), subnormal, normal)
    sign = builder.and_(builder.lshr(bits, ints(24)), ints(0x80))
    return builder.or_(builder.select(builder.icmp_signed("<", code, ints(0x7E)), code, ints(0x7E)), sign)


def _scale_at(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype != types.uint8:
            return F32(1.0)
        scale = builder.load(pointer_at(context, builder, array, arguments, F32), align=1)
        return builder.fmul(scale, F32(_AS_LOADED))

    return (types.float32(array, types.intp), generate) if _is_flat(array) else None


def _store_scale(typing_context: Any, array: Any, index: Any, top: Any) -> Any:
    """Returns what the row's values are multiplied by before they are stored."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if array.dtype != types.uint8:
            return F32(1.0)
        top = arguments[2]
        scale = builder.fdiv(top, F32(FP8_MAX))
        builder.store(scale, pointer_at(context, builder, array, arguments[:2], F32), align=1)
        small = builder.fcmp_ordered("<", top, F32(FP8_SMALLEST))
        return builder.fdiv(F32(FP8_MAX), builder.select(small, F32(FP8_SMALLEST), top))

    return (types.float32(array, types.intp, types.float32), generate) if _is_flat(array) else None


load: Any = _intrinsic(_load)
"""load(flat, i): eight values from flat[i] on; of fp8 the codes' values in units that `scale_at` knows."""
store: Any = _intrinsic(_store)
"""store(flat, i, value): the nearest that `flat` can hold."""
scale_at: Any = _intrinsic(_scale_at)
"""scale_at(flat, i): what the loaded values of the row whose scale lies at flat[i] are to be multiplied by."""
store_scale: Any = _intrinsic(_store_scale)
"""store_scale(flat, i, top): writes the scale of a row whose largest magnitude is `top`; returns what its values are to
be multiplied by before `store`."""
