"""Namespaces: one name for one kind of blocks, and a pool that has one block in a unit."""

from dataclasses import replace

import pytest

from shared.protocol.store_messages import NamespaceSpec
from shared.protocol.wire import decode, encode
from shared.runtime.errors import InvalidRequest
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout, Shard
from shared.store.namespaces import bytes_of_blocks, layout_of, name_of, spec_of

KV = StateComponent("kv", IndexKind.PAGE, 16, (2, 3), (5,), "float32", (0, 1, 2), shard_axis=1)
PENDING = StateComponent("pending", IndexKind.REQUEST, 1, (2,), (9,), "float32", (0, 1))
LAYOUT = PoolLayout((KV, PENDING), num_pages=8, num_slots=2)
SPEC = spec_of("sha256:1234", LAYOUT, 64)


def test_a_worker_s_pages_and_its_room_make_no_difference() -> None:
    other = PoolLayout((replace(KV, unit_tokens=32), PENDING), num_pages=99, num_slots=7)
    assert spec_of("sha256:1234", other, 64) == SPEC
    shard = Shard((KV, PENDING), tp_size=3, rank=1)
    cut = PoolLayout((replace(KV, outer=(2, 1)), PENDING), 8, 2, shard)
    assert spec_of("sha256:1234", cut, 64) == SPEC


def test_the_name_is_the_same_everywhere_and_for_ever() -> None:
    assert name_of(SPEC) == "267b6b2c70582256e136a9f52baccfee"
    assert name_of(decode(NamespaceSpec, encode(SPEC))) == name_of(SPEC)


@pytest.mark.parametrize(
    "other",
    [
        spec_of("sha256:4321", LAYOUT, 64),
        spec_of("sha256:1234", LAYOUT, 32),
        spec_of("sha256:1234", replace(LAYOUT, components=(replace(KV, dtype="float16"), PENDING)), 64),
        spec_of("sha256:1234", replace(LAYOUT, components=(replace(KV, layers=(0, 1)), PENDING)), 64),
        spec_of("sha256:1234", replace(LAYOUT, components=(KV,)), 64),
    ],
)
def test_another_state_has_another_name(other: NamespaceSpec) -> None:
    assert name_of(other) != name_of(SPEC)


def test_a_unit_of_its_pool_is_a_block() -> None:
    layout = layout_of(SPEC, 10)
    assert layout.page_tokens == 64
    assert (layout.num_pages, layout.num_slots) == (10, 0)
    assert bytes_of_blocks(layout, 2) == [("kv", 2 * 64 * 2 * 3 * 5 * 4 * 3), ("pending", 0)]


def with_kv(**changes: object) -> NamespaceSpec:
    return SPEC.model_copy(update={"components": (SPEC.components[0].model_copy(update=changes), SPEC.components[1])})


@pytest.mark.parametrize(
    "spec",
    [
        with_kv(unit_tokens=32),
        with_kv(dtype="float33"),
        with_kv(outer=(0, 3)),
        SPEC.model_copy(update={"components": SPEC.components[1:]}),
        with_kv(index="request"),
    ],
)
def test_what_is_no_state_in_blocks_is_refused(spec: NamespaceSpec) -> None:
    with pytest.raises(InvalidRequest):
        layout_of(spec, 10)
