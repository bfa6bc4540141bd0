"""A hint to the processor: pages lie scattered, and its own prefetcher stops at the end of each."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

insert_function: Any = cgutils.get_or_insert_function

_READ, _KEEP_IN_L2, _DATA = 0, 2, 1


def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    if not (isinstance(array, types.Array) and array.layout == "C" and isinstance(index, types.Integer)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(array)(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), i32, i32, i32])
        hint = insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(hint, [pointer, i32(_READ), i32(_KEEP_IN_L2), i32(_DATA)])
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


prefetch: Any = intrinsic(_prefetch)
"""prefetch(flat, i): starts loading the cache line that holds flat[i] of a 1-D contiguous array. Never faults."""
