"""The error tree: every code leads back to its class, and the docstring names every class."""

import pytest

from shared.runtime import errors
from shared.runtime.errors import BatonError, error_from_code


def below(base: type[BatonError]) -> list[type[BatonError]]:
    """Of the tree's own file; adapters may derive classes that are reported under their base."""
    return [cls for cls in base.__subclasses__() if cls.__module__ == errors.__name__]


def tree(base: type[BatonError] = BatonError) -> list[type[BatonError]]:
    return [base] + [cls for sub in below(base) for cls in tree(sub)]


LEAVES = [cls for cls in tree() if not below(cls)]


@pytest.mark.parametrize("cls", LEAVES)
def test_a_leaf_survives_the_wire(cls: type[BatonError]) -> None:
    error = cls("what happened")
    again = error_from_code(error.code, error.message)
    assert type(again) is cls
    assert again.message == "what happened"
    assert (again.http_status, again.retryable) == (cls.http_status, cls.retryable)


def test_leaves_have_codes_of_their_own() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


@pytest.mark.parametrize("cls", tree())
def test_every_class_is_usable_and_documented(cls: type[BatonError]) -> None:
    assert cls().message
    assert 400 <= cls.http_status < 600
    assert cls.__name__ in (errors.__doc__ or "")


def test_only_errors_of_the_request_blame_the_client() -> None:
    for cls in tree():
        if 400 <= cls.http_status < 500 and cls.http_status != 429:
            assert issubclass(cls, errors.RequestError)
            assert not cls.retryable


def test_an_unknown_code_is_an_internal_error_that_names_it() -> None:
    error = error_from_code("from_the_future", "details")
    assert type(error) is BatonError
    assert error.http_status == 500
    assert "from_the_future" in error.message
    assert "details" in error.message


def test_an_adapters_own_subclass_comes_back_as_its_base() -> None:
    class Shut(errors.TransferRefused):
        def __init__(self, door: str, reason: str) -> None:
            super().__init__(f"{door}: {reason}")

    again = error_from_code(Shut.code, "front: closed")
    assert type(again) is errors.TransferRefused


def test_hints_are_kept() -> None:
    error = errors.QueueFull("busy", retry_after_s=2.5)
    assert error.retry_after_s == 2.5
    assert errors.InvalidRequest("bad", param="n").param == "n"
