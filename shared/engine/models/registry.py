"""From a prepared directory to a model that computes: one row for each architecture, as in weights/families.py."""

from collections.abc import Callable
from pathlib import Path

from shared.engine.models.base import Model
from shared.engine.weights.catalog import PreparedModel, open_prepared
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.toy import TOY


def load_model(prepared_dir: Path, device: str = "cpu") -> Model:
    """Maps the weights of a prepared directory, or makes the toy model, which needs no files and is asked for as
    Path("toy"). Raises InvalidModel."""
    if str(prepared_dir) == TOY and not prepared_dir.exists():
        return _toy()
    prepared = open_prepared(prepared_dir)
    loader = _LOADERS.get(prepared.config.architecture)
    if loader is None:
        raise InvalidModel(f"{prepared_dir}: the architecture {prepared.config.architecture!r} is not supported")
    return loader(prepared, device)


def _toy() -> Model:
    from shared.engine.models.toy import Toy

    return Toy()


def _load_toy(prepared: PreparedModel, device: str) -> Model:
    return _toy()


def _load_llama(prepared: PreparedModel, device: str) -> Model:
    from shared.engine.models import llama

    return llama.load(prepared, device)


_LOADERS: dict[str, Callable[[PreparedModel, str], Model]] = {"llama": _load_llama, TOY: _load_toy}
