"""The real model's text side, for tests that hold tokens against text."""

from functools import cache

from shared.text.tokenizer import TextModel
from tests.support_model import real_prepared


@cache
def text_model() -> TextModel:
    return TextModel.load(real_prepared().directory)
