"""Headers of safetensors files that somebody spoiled: the file is read as it says, or refused by name."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.safetensors_file import SafetensorsFile

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 1 << 65), max_size=3),
    st.lists(st.lists(st.integers(), max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "good.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, dtype=np.float16)}, path)
    return path


def read_all(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in file.names:
        assert file.read(name).shape == file.shape(name)


@given(place=st.integers(0, 400), length=st.integers(0, 9), noise=st.binary(max_size=9))
def test_spoiled_bytes(good: Path, place: int, length: int, noise: bytes) -> None:
    data = good.read_bytes()
    spoiled = good.with_name("spoiled.safetensors")
    spoiled.write_bytes(data[:place] + noise + data[place + length :])
    with suppress(InvalidModel):
        read_all(spoiled)


@given(
    name=st.sampled_from(["a", "b", "__metadata__"]),
    field=st.sampled_from(["dtype", "shape", "data_offsets", "x"]),
    value=ODD,
    drop=st.booleans(),
)
def test_odd_entries(good: Path, name: str, field: str, value: Any, drop: bool) -> None:
    data = good.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    entry = header.setdefault(name, {})
    if drop:
        entry.pop(field, None)
    else:
        entry[field] = value
    body = json.dumps(header).encode()
    spoiled = good.with_name("odd.safetensors")
    spoiled.write_bytes(struct.pack("<Q", len(body)) + body + data[8 + size :])
    with suppress(InvalidModel):
        read_all(spoiled)
