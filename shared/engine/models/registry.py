"""From a prepared directory to a model that computes: one row for each architecture, as in weights/families.py."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from shared.engine.models.base import Model
from shared.engine.weights.catalog import PreparedModel, open_prepared
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.formats import check_weights, default_weights
from shared.engine.weights.toy import TOY
from shared.runtime.settings import ConfigError


def load_model(
    prepared_dir: Path,
    device: str = "cpu",
    dtype: str = "float32",
    weights: str | None = "float32",
    kv_dtype: str = "float32",
) -> Model:
    """Maps the weights of a prepared directory, or makes the toy model, which needs no files, knows one device and one
    type, and is asked for as Path("toy"). dtype: what is computed in: float32, bfloat16 or float16; weights: the format
    they are kept in (None: the default of the device and the family), other than float32 on a CPU in float32 only.
    kv_dtype: what the state is kept in: float32, float16 or fp8. All three are part of the identity. Raises
    InvalidModel, or ConfigError where this cannot be had."""
    import torch

    if str(prepared_dir) == TOY and not prepared_dir.exists():
        return _toy(device)
    check_device(device)
    check_weights(device, dtype, weights)
    prepared = open_prepared(prepared_dir)
    loader = _LOADERS.get(prepared.config.architecture)
    if loader is None:
        raise InvalidModel(f"{prepared_dir}: the architecture {prepared.config.architecture!r} is not supported")
    family = prepared.config.architecture
    chosen = weights or default_weights(device, dtype, family)
    try:
        return loader(prepared, device, dtype, chosen, kv_dtype)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"device: {device} has too little memory for the weights of {prepared.name} in {dtype}; take a larger GPU, "
            f"a smaller model{' or dtype bfloat16' if dtype == 'float32' else ''}"
        ) from error


def check_device(device: str) -> None:
    """ConfigError where a GPU is asked for and none can be used: better known before a model is fetched."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
        raise ConfigError(f"device: cuda is asked for, but {why}; set device to cpu, or install what is missing")
    if device == "cuda" and find_spec("cupy") is None:
        raise ConfigError("device: cuda needs CuPy; install the extra `cuda` (docs/gpu.md), or set device to cpu")


def _toy(device: str) -> Model:
    if device != "cpu":
        raise ConfigError(f"device: the toy model is computed on a CPU only, not on {device}")
    from shared.engine.models.toy import Toy

    return Toy()


def _load_toy(prepared: PreparedModel, device: str, dtype: str, weights: str, kv_dtype: str) -> Model:
    return _toy(device)


def _load_dense(prepared: PreparedModel, device: str, dtype: str, weights: str, kv_dtype: str) -> Model:
    from shared.engine.models import dense

    return dense.load(prepared, device, dtype, weights, kv_dtype)


_LOADERS: dict[str, Callable[[PreparedModel, str, str, str, str], Model]] = {
    "llama": _load_dense,
    "mistral": _load_dense,
    "qwen2": _load_dense,
    "qwen3": _load_dense,
    TOY: _load_toy,
}
