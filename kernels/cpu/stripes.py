"""Blocks of bytes as the processor moves and hashes them: stores that pass the cache by, and xxh3's inner loop.

A block is 1,024 bytes, sixteen stripes of 64, which is also what xxh3 takes between two scrambles. Moving and hashing
in one go reads the bytes once, so that a copy that waits for memory has its digest for nothing. Addresses are plain
integers, and nothing is checked.
"""

import struct
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

STRIPE = 64
BLOCK = 1024
ALIGN = 32
"""Of a target that `move` and `move_and_hash` may write."""

_intrinsic: Any = intrinsic
_cgutils: Any = cgutils

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""xxh3's own, what it hashes with when no other is given."""

PRIME32_1 = 0x9E3779B1
_SCRAMBLE_AT, _LAST_AT = len(SECRET) - STRIPE, len(SECRET) - STRIPE - 7
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FOUR = ir.VectorType(_I64, 4)


def _lanes(value: int) -> Any:
    return ir.Constant(_FOUR, [value] * 4)


def _secret(at: int) -> Any:
    return ir.Constant(_FOUR, list(struct.unpack_from("<4Q", SECRET, at)))


def _at(builder: Any, address: Any, offset: int) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), _FOUR.as_pointer())


def _accumulate(builder: Any, sums: Any, data: Any, secret: Any) -> Any:
    """sums[i ^ 1] += data[i] and sums[i] += low half times high half of data[i] ^ secret[i]."""
    key = builder.xor(data, secret)
    product = builder.mul(builder.and_(key, _lanes(0xFFFFFFFF)), builder.lshr(key, _lanes(32)))
    swapped = builder.shuffle_vector(data, data, ir.Constant(ir.VectorType(_I32, 4), [1, 0, 3, 2]))
    return builder.add(builder.add(sums, product), swapped)


def _scramble(builder: Any, sums: Any, secret: Any) -> Any:
    mixed = builder.xor(builder.xor(sums, builder.lshr(sums, _lanes(47))), secret)
    return builder.mul(mixed, _lanes(PRIME32_1))


def _prefetch(builder: Any, address: Any, offset: int) -> None:
    pointer = builder.inttoptr(builder.add(address, _I64(offset)), _I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    builder.call(
        _cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8"),
        [pointer, _I32(0), _I32(3), _I32(1)],
    )


def _over(
    builder: Any, target: Any, source: Any, sums: Any, ahead: Any, secrets: tuple[int, ...], *, scramble: bool
) -> None:
    """One stripe for each secret. target, sums: an address, or None: not moved, not hashed. ahead: of what is fetched
    meanwhile for the next call, None: nothing."""
    halves = (0, STRIPE // 2)
    held = [builder.load(_at(builder, sums, half), align=8) for half in halves] if sums else []
    temporal = builder.module.add_metadata([_I32(1)])
    for number, secret in enumerate(secrets):
        start = number * STRIPE
        if ahead:
            _prefetch(builder, ahead, start)
        data = [builder.load(_at(builder, source, start + half), align=1) for half in halves]
        for k, half in enumerate(halves):
            if target:
                written = builder.store(data[k], _at(builder, target, start + half), align=ALIGN)
                written.set_metadata("nontemporal", temporal)
            if sums:
                held[k] = _accumulate(builder, held[k], data[k], _secret(secret + half))
    if sums:
        for k, half in enumerate(halves):
            if scramble:
                held[k] = _scramble(builder, held[k], _secret(_SCRAMBLE_AT + half))
            builder.store(held[k], _at(builder, sums, half), align=8)


_WHOLE = tuple(range(0, 8 * (BLOCK // STRIPE), 8))
_END = (*_WHOLE[:-1], _LAST_AT)


def _block(secrets: tuple[int, ...], *, move: bool, hashed: bool, scramble: bool) -> Any:
    """An intrinsic over one block."""

    def typed(typing_context: Any, target: Any, source: Any, sums: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, source, sums, ahead = arguments
            into, onto = target if move else None, sums if hashed else None
            _over(builder, into, source, onto, ahead, secrets, scramble=scramble)
            return context.get_dummy_value()

        return types.none(types.int64, types.int64, types.int64, types.int64), generate

    return _intrinsic(typed)


def _hash_stripe(typing_context: Any, source: Any, sums: Any, number: Any) -> Any:
    """number: of the stripe in its block."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, sums, number = arguments
        words = [ir.Constant(_I8, byte) for byte in SECRET]
        table = _cgutils.global_constant(
            builder.module, "xxh3_secret", ir.Constant(ir.ArrayType(_I8, len(words)), words)
        )
        base = builder.ptrtoint(table, _I64)
        secret = builder.add(base, builder.mul(number, _I64(8)))
        for half in (0, STRIPE // 2):
            held = builder.load(_at(builder, sums, half), align=8)
            data = builder.load(_at(builder, source, half), align=1)
            key = builder.load(_at(builder, secret, half), align=1)
            builder.store(_accumulate(builder, held, data, key), _at(builder, sums, half), align=8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


def _hash_last(typing_context: Any, source: Any, sums: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _over(builder, None, arguments[0], arguments[1], None, (_LAST_AT,), scramble=False)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


def _move_bytes(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(address, _I8.as_pointer()) for address in arguments[:2]]
        _cgutils.raw_memcpy(builder, *pointers, arguments[2], 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


def _touch(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0], 0)
        return context.get_dummy_value()

    return types.none(types.int64), generate


def _settle(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


move_block: Any = _block(_WHOLE, move=True, hashed=False, scramble=False)
"""move_block(target, source, sums, ahead): past the cache. All of these fetch the block at `ahead`, which is next, and
do not look at an address that their name says nothing of."""
hash_block: Any = _block(_WHOLE, move=False, hashed=True, scramble=True)
"""Into the eight running sums of xxh3."""
move_and_hash_block: Any = _block(_WHOLE, move=True, hashed=True, scramble=True)
hash_end: Any = _block(_END, move=False, hashed=True, scramble=False)
"""The input's last block, if it is whole."""
move_and_hash_end: Any = _block(_END, move=True, hashed=True, scramble=False)
hash_stripe: Any = _intrinsic(_hash_stripe)
"""hash_stripe(source, sums, number): one stripe of a block that is not whole."""
hash_last: Any = _intrinsic(_hash_last)
"""hash_last(source, sums): the input's last 64 bytes, if its last block is not whole."""
move_bytes: Any = _intrinsic(_move_bytes)
"""move_bytes(target, source, size), by way of the cache."""
touch: Any = _intrinsic(_touch)
"""touch(address): so that the processor knows where it is when it writes there."""
settle: Any = _intrinsic(_settle)
"""Makes stores that passed the cache by visible before whatever the thread does next."""
