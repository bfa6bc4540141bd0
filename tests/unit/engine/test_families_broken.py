"""Broken model files at the start of a process: one sentence that names the file, and an exit status that says so.
That every kind of damage is noticed is test_weights_formats.py's and test_families_files.py's matter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shared.engine.models import registry
from shared.engine.models.registry import check_device, load_model
from shared.engine.weights.catalog import prepare
from shared.engine.weights.errors import InvalidModel
from shared.runtime.settings import ConfigError
from tests.support_tiny_model import tiny_weights, write_gguf, write_hf

REPO = Path(__file__).parents[3]
MISSING = "model.layers.1.mlp.up_proj.weight"


def truncated_gguf(where: Path) -> Path:
    path = write_gguf(where / "model.gguf", tiny_weights())
    path.write_bytes(path.read_bytes()[:-100])
    return path


def unknown_gguf(where: Path) -> Path:
    return write_gguf(where / "model.gguf", tiny_weights(), architecture="mamba")


def without_a_tensor(where: Path) -> Path:
    return write_hf(where / "hf", {name: array for name, array in tiny_weights().items() if name != MISSING})


def run(arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=REPO,
        env=env | {"BATON_CACHE_DIR": str(cache), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [(truncated_gguf, "truncated: tensor"), (unknown_gguf, "the architecture 'mamba' is not supported")],
)
def test_preparing_says_what_is_wrong(tmp_path: Path, broken: Callable[[Path], Path], sentence: str) -> None:
    source = broken(tmp_path)
    done = run(["services.cli", "models", "prepare", str(source)], tmp_path / "cache")
    assert done.returncode == 1
    assert sentence in done.stderr
    assert str(source) in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_worker_says_what_is_wrong(tmp_path: Path, nats_url: str) -> None:
    source = without_a_tensor(tmp_path)
    flags = ["--nats-url", nats_url, "--model", str(source), "--state-dir", str(tmp_path / "state")]
    done = run(["services.decode", *flags], tmp_path / "cache")
    assert done.returncode == 1
    assert f"has no tensor {MISSING}" in done.stderr
    assert str(source) in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_device("cpu")
    with pytest.raises(ConfigError, match=r"device: cuda is asked for, but .*; set device to cpu"):
        check_device("cuda")
    prepared = prepare(str(write_hf(tmp_path / "hf", tiny_weights())), tmp_path)
    with pytest.raises(ConfigError, match="cuda"):
        load_model(prepared.directory, "cuda")


def test_what_a_gpu_lacks_or_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("shared.engine.models.registry.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="device: cuda needs CuPy; install the extra `cuda`"):
        check_device("cuda")
    with pytest.raises(ConfigError, match="the toy model is computed on a CPU only"):
        load_model(Path("toy"), "cuda")


def test_weights_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 16 GiB")

    monkeypatch.setitem(registry._LOADERS, "llama", too_large)  # type: ignore[arg-type]
    prepared = prepare(str(write_hf(tmp_path / "hf", tiny_weights())), tmp_path)
    with pytest.raises(ConfigError, match=f"too little memory for the weights of {prepared.name} in float32"):
        load_model(prepared.directory)


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_weights())
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()
    with pytest.raises(InvalidModel, match=r"Is a directory: .*/model\.safetensors"):
        prepare(str(source), tmp_path)
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(InvalidModel, match=r"could not be prepared: .*/models"):
        prepare("toy", tmp_path)


def test_a_broken_tokenizer_or_config_is_named(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "hf", tiny_weights())
    for name, content, sentence in (
        ("tokenizer_config.json", "{", r"its tokenizer_config\.json cannot be read"),
        ("tokenizer.json", json.dumps({"model": 1}), "its tokenizer cannot be read"),
        ("config.json", "", r"config\.json cannot be read"),
    ):
        (source / name).write_text(content)
        with pytest.raises(InvalidModel, match=sentence) as caught:
            prepare(str(source), tmp_path)
        assert str(source) in str(caught.value)
        assert "\n" not in str(caught.value)
