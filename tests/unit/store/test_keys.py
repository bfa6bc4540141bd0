"""Keys: the same everywhere for the same state, and never the same for another."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.store.keys import Chain, Lineage, Tokens, chain, snapshot_key
from shared.transfer.formats.catalog import LOSSINESS

GOLDEN = Path(__file__).parent / "golden" / "keys.json"
REPO = Path(__file__).parents[3]
LINEAGE = Lineage("sha256:model:float32:kv-float32", "tenant", "raw", 4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
TEXTS = st.text(max_size=20)
LINEAGES = st.builds(Lineage, TEXTS, TEXTS, st.sampled_from(sorted(LOSSINESS)), st.integers(1, 9))


def golden_cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return found


def keys_of(case: dict[str, Any]) -> dict[str, Any]:
    lineage = Lineage(case["identity"], case["salt"], case["lossiest"], case["block_tokens"])
    return {
        "root": lineage.root().hex(),
        "keys": [key.hex() for key in chain(lineage, case["tokens"])],
        "snapshot": snapshot_key(lineage, case["tokens"]).hex(),
    }


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_keys_are_the_golden_ones(case: dict[str, Any]) -> None:
    """Other keys here mean that every store in the world is empty for us: give them another version instead."""
    assert keys_of(case) == {name: case[name] for name in ("root", "keys", "snapshot")}


def test_keys_are_what_the_description_says() -> None:
    """Made by hand, with nothing of the code under test."""

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words.encode())) + words.encode()

    def blake(kind: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, person=kind).digest()

    root = blake(b"baton-root-v1", text(LINEAGE.identity) + text("tenant") + text("raw") + struct.pack("<Q", 4))
    first = blake(b"baton-block-v1", root + struct.pack("<4I", 5, 0, 2**32 - 1, 7))
    second = blake(b"baton-block-v1", first + struct.pack("<4I", 1, 2, 3, 4))
    tokens = [5, 0, 2**32 - 1, 7, 1, 2, 3, 4, 9]
    assert chain(LINEAGE, tokens) == (first, second)
    assert snapshot_key(LINEAGE, tokens) == blake(b"baton-snap-v1", second + struct.pack("<QI", 9, 9))


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_processes_agree_on_every_key(seed: str) -> None:
    code = f"""
import json
from pathlib import Path
from shared.store.keys import Lineage, chain, snapshot_key
for case in json.loads(Path({str(GOLDEN)!r}).read_text()):
    lineage = Lineage(case["identity"], case["salt"], case["lossiest"], case["block_tokens"])
    keys = [key.hex() for key in chain(lineage, case["tokens"])]
    assert [lineage.root().hex(), keys] == [case["root"], case["keys"]], case["name"]
    assert snapshot_key(lineage, case["tokens"]).hex() == case["snapshot"], case["name"]
print(hash("differs"), "agreed")
"""
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPO)}
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert ended.stdout.endswith("agreed\n"), ended.stderr
    assert ended.stdout.split()[0] != str(hash("differs"))


@given(LINEAGES, st.lists(TOKENS, max_size=5))
def test_a_chain_that_grows_is_the_chain_of_all(lineage: Lineage, pieces: list[list[int]]) -> None:
    links, tokens, keys = Chain(lineage), [], ()
    for piece in pieces:
        keys += links.extend(piece)
        tokens += piece
        assert links.keys == keys == chain(lineage, tokens)
        assert links.num_tokens == len(tokens)
        assert links.snapshot_key() == snapshot_key(lineage, tokens)
    assert len(keys) == len(tokens) // lineage.block_tokens


@given(LINEAGES, TOKENS, TOKENS, TOKENS)
def test_what_begins_alike_has_the_same_first_keys_and_only_those(
    lineage: Lineage, prefix: list[int], one: list[int], other: list[int]
) -> None:
    ours, theirs = chain(lineage, prefix + one), chain(lineage, prefix + other)
    pairs = zip(prefix + one, prefix + other, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) // lineage.block_tokens
    assert ours[:alike] == theirs[:alike]
    assert not set(ours[alike:]) & set(theirs[alike:])


@given(LINEAGES, LINEAGES, st.lists(st.integers(0, 2**32 - 1), min_size=9, max_size=40))
def test_lineages_that_differ_in_anything_share_no_key(one: Lineage, other: Lineage, tokens: list[int]) -> None:
    exact = {"raw", "lossless"}
    alike = {one.lossiest, other.lossiest} <= exact or one.lossiest == other.lossiest
    assume(replace(one, lossiest="raw") != replace(other, lossiest="raw") or not alike)
    ours = {one.root(), *chain(one, tokens), snapshot_key(one, tokens)}
    assert not ours & {other.root(), *chain(other, tokens), snapshot_key(other, tokens)}


CHANGES = {
    "model": {"identity": "sha256:other:float32:kv-float32"},
    "adapter": {"identity": "sha256:model:float32:kv-float32:adapter-1"},
    "dtype of the state": {"identity": "sha256:model:float32:kv-fp8"},
    "tenant": {"salt": "tenant-2"},
    "no salt": {"salt": ""},
    "text moved from one field to the next": {"identity": LINEAGE.identity + "t", "salt": "enant"},
    "int8": {"lossiest": "int8"},
    "fp8": {"lossiest": "fp8"},
    "block size": {"block_tokens": 8},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_lineage_never_hits(change: str) -> None:
    tokens = list(range(32))
    other = replace(LINEAGE, **CHANGES[change])
    assert not {*chain(LINEAGE, tokens)} & {*chain(other, tokens)}
    assert snapshot_key(LINEAGE, tokens) != snapshot_key(other, tokens)


def test_all_exact_formats_are_one() -> None:
    assert chain(replace(LINEAGE, lossiest="lossless"), range(8)) == chain(LINEAGE, range(8))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=24), st.data())
def test_every_token_and_its_place_count(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[place] = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != tokens[place]))
    first = place // 4
    ours, theirs = chain(LINEAGE, tokens), chain(LINEAGE, changed)
    assert ours[:first] == theirs[:first]
    assert all(a != b for a, b in zip(ours[first:], theirs[first:], strict=True))
    assert snapshot_key(LINEAGE, tokens) != snapshot_key(LINEAGE, changed)


@given(TOKENS, TOKENS)
def test_a_snapshot_is_of_one_position(tokens: list[int], more: list[int]) -> None:
    """And never under the key of a block, also where it is of a block's last position."""
    assume(more)
    assert snapshot_key(LINEAGE, tokens) != snapshot_key(LINEAGE, tokens + more)
    assert snapshot_key(LINEAGE, tokens) not in (LINEAGE.root(), *chain(LINEAGE, tokens + more))


@pytest.mark.parametrize("kind", [list, tuple, np.uint32, ">i8", "<i4", np.uint64])
def test_tokens_may_come_in_any_integers(kind: Any) -> None:
    tokens = list(range(0, 70_000, 7))
    given_tokens: Tokens = kind(tokens) if kind in (list, tuple) else np.array(tokens, dtype=kind)
    assert chain(LINEAGE, given_tokens) == chain(LINEAGE, tokens)
    assert chain(LINEAGE, np.array(tokens * 2, dtype="u4")[::2]) == chain(LINEAGE, (tokens * 2)[::2])


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.0], [True], ["1"], [[1, 2]], [2**70], [2**63, -1]])
def test_what_is_no_token_is_refused_and_changes_nothing(tokens: Any) -> None:
    links = Chain(LINEAGE)
    links.extend([1, 2, 3])
    with pytest.raises(ValueError, match="token ids"):
        links.extend(tokens)
    links.extend([4])
    assert links.keys == chain(LINEAGE, [1, 2, 3, 4])


def test_lineages_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="no wire format"):
        Lineage("model", lossiest="zip")
    with pytest.raises(ValueError, match="0 tokens"):
        Lineage("model", block_tokens=0)


def test_any_text_that_a_request_can_bring_makes_a_salt() -> None:
    salts = ["", "\0", "\ud800", "\udc00", "é", "e\u0301", "\N{GRINNING FACE}"]
    roots = {replace(LINEAGE, salt=salt).root() for salt in salts}
    assert len(roots) == len(salts)
