"""Models whose weights are kept in a packed format: made once, mapped, and close to the float32 ones."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.packing import PackedWeight
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import PreparedModel, prepare
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.formats import check_weights, default_weights
from shared.engine.weights.packed import open_packed, prepare_weights
from shared.runtime.settings import ConfigError
from tests.support_model import PagedSequences
from tests.support_tiny_model import tiny_weights, write_hf

ROOT = Path(__file__).parents[3]
PROMPT = list(range(40, 75))
# Of the logits' size. The tiny weights are float16 numbers, which that format keeps exactly.
LOGIT_ERROR = {"float16": 1e-5, "int8": 0.1, "int4": 0.7}
# The same against the unpacked weights in float32: only int4 rounds x.
KERNEL_ERROR = {"float16": 1e-5, "int8": 1e-5, "int4": 0.3}

formats = pytest.mark.parametrize("name", LOGIT_ERROR)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def prepared(request: pytest.FixtureRequest, tmp_path: Path) -> PreparedModel:
    config = {"tie_word_embeddings": True} if request.param else {}
    source = write_hf(tmp_path / "hf", tiny_weights(tied=request.param), config=config)
    return prepare(str(source), tmp_path)


def logits(prepared: PreparedModel, weights: str | None) -> torch.Tensor:
    """[prompt and a step, vocab]."""
    sequences = PagedSequences(load_model(prepared.directory, weights=weights), 1, len(PROMPT) + 1)
    return torch.cat([sequences.step({0: PROMPT}, every_row=True), sequences.step({0: [7]})])


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@formats
def test_logits_stay_close(prepared: PreparedModel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, actual = logits(prepared, "float32"), logits(prepared, name)
    assert distance(actual, exact) < LOGIT_ERROR[name]
    assert name == "float16" or distance(actual, exact) > 1e-4, "the format makes no difference"
    monkeypatch.setattr("kernels.cpu.linear.has_vectors", lambda: False)
    assert distance(actual, logits(prepared, name)) < KERNEL_ERROR[name]


def test_the_identity_names_the_format(prepared: PreparedModel) -> None:
    names = ("float32", *LOGIT_ERROR)
    identities = [load_model(prepared.directory, weights=name).identity for name in names]
    assert identities == [f"{prepared.identity}:{name}:kv-float32" for name in names]
    default = default_weights("cpu", "float32", prepared.config.architecture)
    assert load_model(prepared.directory, weights=None).identity == identities[names.index(default)]


def test_what_decides_between_tokens_keeps_eight_bits_and_what_is_read_by_rows_sixteen(prepared: PreparedModel) -> None:
    packed = open_packed(prepared, "int4")
    formats = {name: value.format for name, value in packed.items() if isinstance(value, PackedWeight)}
    ends = {name: formats.pop(name) for name in ("embed", "lm_head") if name in formats}
    assert ends == ({"embed": "float16", "lm_head": "int8"} if "lm_head" in packed else {"embed": "int8"})
    assert set(formats.values()) == {"int4"}


def test_a_format_is_made_once_and_the_float32_weights_stay(prepared: PreparedModel) -> None:
    open_packed(prepared, "int8")
    first = {path.name: path.stat().st_mtime_ns for path in prepared.directory.iterdir() if path.is_file()}
    prepare_weights(prepared, "cpu", "float32", "int8")
    again = {path.name: path.stat().st_mtime_ns for path in prepared.directory.iterdir() if path.is_file()}
    assert again == first
    assert {"weights.safetensors", "weights-int8.safetensors", "weights-int8.json"} <= first.keys()
    assert not [name for name in first if name.endswith(".tmp")]


@pytest.mark.parametrize(("part", "value"), [("version", 0), ("source_digest", "0" * 32), ("size", 1)])
def test_a_file_of_another_version_or_of_other_weights_is_made_again(
    prepared: PreparedModel, part: str, value: object
) -> None:
    open_packed(prepared, "float16")
    note = prepared.directory / "weights-float16.json"
    noted = json.loads(note.read_text())
    note.write_text(json.dumps(noted | {part: value}))
    open_packed(prepared, "float16")
    assert json.loads(note.read_text()) == noted


def test_a_damaged_file_is_refused(prepared: PreparedModel) -> None:
    open_packed(prepared, "int4")
    file = prepared.directory / "weights-int4.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(InvalidModel, match=r"weights-int4\.safetensors is damaged"):
        load_model(prepared.directory, weights="int4")


def test_a_disk_without_room_is_named_and_nothing_is_left_on_it(prepared: PreparedModel) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
    try:
        with pytest.raises(InvalidModel, match="weights in int8 could not be made: File too large"):
            open_packed(prepared, "int8")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not [path for path in prepared.directory.iterdir() if "int8" in path.name and path.suffix != ".lock"]
    assert open_packed(prepared, "int8")


def test_weights_too_large_for_float16_are_refused_by_name(tmp_path: Path) -> None:
    raw = tiny_weights()
    raw["model.layers.1.mlp.down_proj.weight"] = raw["model.layers.1.mlp.down_proj.weight"] * 1e6
    prepared = prepare(str(write_hf(tmp_path / "hf", raw)), tmp_path)
    with pytest.raises(InvalidModel, match=r"layers\.1\.down cannot be kept in float16"):
        load_model(prepared.directory, weights="float16")
    assert load_model(prepared.directory, weights="int8")


@pytest.mark.parametrize(
    ("device", "dtype", "weights", "message"),
    [
        ("cuda", "float32", "int8", "int8 is for device cpu and dtype float32; here they are cuda and float32"),
        ("cpu", "bfloat16", "float16", "here they are cpu and bfloat16"),
        ("cpu", "float32", "int3", "'int3' is not a format; there are float32, float16, int8, int4"),
    ],
)
def test_what_cannot_be_had_is_told(device: str, dtype: str, weights: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_weights(device, dtype, weights)


def test_a_type_other_than_float32_keeps_its_own_weights() -> None:
    assert default_weights("cpu", "bfloat16", "llama") == default_weights("cuda", "float16", "llama") == "float32"


RACER = """
import sys
from pathlib import Path
from shared.engine.weights.catalog import open_prepared
from shared.engine.weights.packed import open_packed
print("ready", flush=True)
sys.stdin.readline()
told = []
found = open_packed(open_prepared(Path(sys.argv[1])), "float16", lambda stage, done, total: told.append(stage))
print(len(found), told.count("weights") > 0, "torch" in sys.modules)
"""


def test_processes_that_ask_at_once_make_it_once_and_without_torch(prepared: PreparedModel) -> None:
    command = [sys.executable, "-c", RACER, str(prepared.directory)]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=120)[0].split() for racer in racers]
    assert len({count for count, _, _ in answers}) == 1
    assert [made for _, made, _ in answers].count("True") == 1
    assert all(torch_there == "False" for _, _, torch_there in answers)
