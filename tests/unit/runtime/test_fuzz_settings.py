"""Settings files that somebody spoiled: every process either gets settings or says what is wrong, and never fails
otherwise."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.settings import CONFIG_VARIABLE, ROLES, CommonSettings, ConfigError, load_settings

FIELDS = sorted({field for role in ROLES.values() for field in role.model_fields})
GOOD = """
[common]
nats_url = "nats://127.0.0.1:4222"
heartbeat_s = 0.5
[gateway]
port = 8080
body_limit_bytes = "8MiB"
[decode]
page_tokens = 32
num_pages = 100
kv_bytes = "1GiB"
tcp_host = "::1"
"""
VALUES = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.sampled_from(
        ["true", '""', '"none"', "[]", "{}", "nan", "-inf", "1979-05-27", "1_000", "0xff", '"1e9 GiB"', "[[1]]"]
    ),
    st.text(max_size=12).map(lambda text: '"' + text.replace("\\", "").replace('"', "") + '"'),
)


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CommonSettings | str]:
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    found: list[CommonSettings | str] = []
    for role in ROLES.values():
        overrides = {"control_fd": 3} if "control_fd" in role.model_fields else {}
        try:
            found.append(load_settings(role, overrides))
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "baton.toml"


def test_the_file_that_is_spoiled_is_a_good_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(GOOD)
    assert not [found for found in load(file, monkeypatch) if isinstance(found, str)]


@given(place=st.integers(0, len(GOOD) - 1), length=st.integers(0, 9), noise=st.binary(max_size=9))
def test_spoiled_bytes(file: Path, place: int, length: int, noise: bytes) -> None:
    data = GOOD.encode()
    file.write_bytes(data[:place] + noise + data[place + length :])
    with pytest.MonkeyPatch.context() as monkeypatch:
        load(file, monkeypatch)


@given(
    section=st.sampled_from(["common", *ROLES, "nobody"]),
    field=st.sampled_from([*FIELDS, "speed", "role", "model_config"]),
    value=VALUES,
)
def test_odd_values(file: Path, section: str, field: str, value: str) -> None:
    text = f"[{section}]\n{field} = {value}\n"
    file.write_text(text)
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = load(file, monkeypatch)
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        assert all(isinstance(each, str) for each in found)
    if section == "nobody" or field in ("speed", "role", "model_config"):
        assert all(isinstance(each, str) for each in found)
