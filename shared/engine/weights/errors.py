"""What goes wrong with model files: one class, one sentence, naming the file and where possible the tensor."""

from shared.runtime.errors import BatonError


class InvalidModel(BatonError):
    """The model's files cannot be used."""

    code = "invalid_model"
