"""Addresses of the drivers that talk to a server, and what a server's settings mean."""

import pytest

from shared.store.redis_options import RedisOptions, durability_of
from shared.store.resp import RedisAddress
from shared.store.s3_options import S3Options


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://host", RedisAddress("host")),
        ("valkey://host:7000/3", RedisAddress("host", 7000, database=3)),
        ("rediss://:p%40ss@host/", RedisAddress("host", password="p@ss", tls=True)),
        ("valkeys://ann:secret@[::1]:1/0", RedisAddress("::1", 1, user="ann", password="secret", tls=True)),
        ("unix:///run/redis.sock?database=2", RedisAddress(path="/run/redis.sock", database=2)),
        ("unix://:s@/run/a%20b", RedisAddress(path="/run/a b", password="s")),
        ("redis://host?database=4", RedisAddress("host", database=4)),
    ],
)
def test_addresses_of_redis(url: str, address: RedisAddress) -> None:
    assert RedisOptions.parse(url).address == address


def test_options_of_redis() -> None:
    options = RedisOptions.parse("redis://h/1?prefix=mine:&timeout_s=2.5&connect_s=1&connections=7&ca_file=/ca")
    assert options == RedisOptions(RedisAddress("h", database=1), "mine:", 2.5, 1.0, 7, "/ca")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "http://host",
        "redis://",
        "redis:///0",
        "redis://host/x",
        "redis://host:port",
        "redis://host?colour=red",
        "redis://host?timeout_s=soon",
        "redis://host?timeout_s=0",
        "redis://host?timeout_s=nan",
        "redis://host?connections=0",
        "redis://host?prefix=a*",
        "redis://host?prefix=%0d%0a",
        "unix://host/path",
        "unix://path",
    ],
)
def test_what_is_no_address_of_redis(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 each says something else
        RedisOptions.parse(url)


def test_the_password_is_not_shown() -> None:
    options = RedisOptions.parse("redis://ann:s3cret@host:7/1")
    assert "s3cret" not in f"{options} {options!r} {options.address}"
    assert str(options.address) == "host:7"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "does not tell"),
        ({"appendonly": "no", "save": ""}, "Nothing survives"),
        ({"appendonly": "no", "save": "60 1"}, "once a snapshot has it (save 60 1)"),
        ({"appendonly": "yes", "appendfsync": "always"}, "and a loss of power (appendfsync always)"),
        ({"appendonly": "yes", "appendfsync": "everysec", "save": "60 1"}, "costs the last second"),
        ({"appendonly": "yes", "appendfsync": "no"}, "what the system had not written yet"),
        ({"appendonly": "no", "maxmemory-policy": "noeviction"}, "It evicts nothing."),
        (
            {"appendonly": "no", "maxmemory-policy": "allkeys-lfu"},
            "its memory is full (allkeys-lfu)",
        ),
    ],
)
def test_what_a_server_s_settings_mean(config: dict[str, str], said: str) -> None:
    text = durability_of(config)
    assert said in text
    assert "survive" in text
    assert text.endswith(".")


def test_addresses_of_s3() -> None:
    assert S3Options.parse("s3://bucket") == S3Options("bucket")
    url = "s3://b/a/c/?endpoint=https://h:1/x&region=eu&virtual_hosted=1&anonymous=0&timeout_s=3&requests=2&ca_file=/ca"
    assert S3Options.parse(url) == S3Options("b", "a/c", "https://h:1/x", "eu", True, False, 3.0, 2, "/ca")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "http://bucket",
        "s3://",
        "s3:///prefix",
        "s3://key:secret@bucket",
        "s3://key@bucket",
        "s3://bucket?endpoint=host:9000",
        "s3://bucket?secret_access_key=x",
        "s3://bucket?anonymous=yes",
        "s3://bucket?timeout_s=-1",
        "s3://bucket?timeout_s=nan",
        "s3://bucket?requests=0",
    ],
)
def test_what_is_no_address_of_s3(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 each says something else
        S3Options.parse(url)


def test_a_body_is_hashed_for_the_signature_only_without_tls() -> None:
    assert S3Options("b").config()["unsigned_payload"] is True
    assert S3Options("b", endpoint="https://h").config()["unsigned_payload"] is True
    assert S3Options("b", endpoint="http://h").config()["unsigned_payload"] is False
    assert S3Options("b", endpoint="https://h").client()["allow_http"] is False
