"""Where a setting comes from, and what a person is told who got one wrong."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.runtime.credentials import masked, secret_fields
from shared.runtime.flags import parse_flags, unknown_variables
from shared.runtime.settings import (
    ROLES,
    ConfigError,
    DecodeSettings,
    GatewaySettings,
    KvstoreSettings,
    PrefillSettings,
    SidecarSettings,
    load_settings,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


def test_highest_source_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text("[common]\npage_tokens = 1\n[decode]\npage_tokens = 2\n")
    assert load_settings(DecodeSettings).page_tokens == 16
    monkeypatch.setenv("BATON_CONFIG", str(file))
    assert load_settings(DecodeSettings).page_tokens == 2
    assert load_settings(PrefillSettings).page_tokens == 1
    monkeypatch.setenv("BATON_PAGE_TOKENS", "3")
    assert load_settings(DecodeSettings).page_tokens == 3
    monkeypatch.setenv("BATON_DECODE_PAGE_TOKENS", "4")
    assert load_settings(DecodeSettings).page_tokens == 4
    assert load_settings(PrefillSettings).page_tokens == 3
    assert load_settings(DecodeSettings, {"page_tokens": "5"}).page_tokens == 5


def test_sizes_and_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_KV_BYTES", "96MiB")
    monkeypatch.setenv("BATON_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("BATON_DECODE_MAX_MODEL_LEN", "none")
    assert load_settings(DecodeSettings).kv_bytes == 96 << 20
    assert load_settings(DecodeSettings).max_model_len is None
    assert load_settings(PrefillSettings).max_model_len == 512
    assert load_settings(PrefillSettings, {"max_model_len": "none"}).max_model_len is None


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_GATEWAY_PORT", "")
    assert load_settings(GatewaySettings).port == 8000


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BATON_DECODE_PAGE_TOKENS", "0", "decode: page_tokens: Input should be greater than or equal to 1"),
        ("BATON_PAGE_TOKENS", "many", "from BATON_PAGE_TOKENS"),
        ("BATON_KV_BYTES", "12", "give a size such as 1GiB"),
        ("BATON_DEVICE", "tpu", "Input should be 'cpu' or 'cuda'"),
        ("BATON_NAME", "Decode 1", "may hold only a-z"),
        ("BATON_PREFILL_CHUNK", "4096", "max_step_tokens (512) is below prefill_chunk (4096)"),
        ("BATON_HEARTBEAT_S", "nan", "finite"),
        ("BATON_MODE", "colocate", "mode: Input should be 'separated', 'colocated' or 'chunked'"),
        ("BATON_STEP_TOKENS", "0", "step_tokens: Input should be greater than or equal to 1"),
    ],
)
def test_a_mistake_is_named_with_its_source(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings(DecodeSettings)
    assert said in str(caught.value)


def test_a_mode_and_what_does_not_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_MODE", "chunked")
    monkeypatch.setenv("BATON_PREFILL_CHUNK", "4096")  # not looked at in this mode
    assert load_settings(DecodeSettings, {"step_tokens": "64"}).step_tokens == 64
    with pytest.raises(ConfigError, match=r"decode: step_tokens \(63\) is below max_running \(64\)"):
        load_settings(DecodeSettings, {"step_tokens": "63"})
    with pytest.raises(ConfigError, match="prefill: mode chunked has no prefill workers"):
        load_settings(PrefillSettings)
    with pytest.raises(ConfigError, match="gateway: path remote needs prefill workers"):
        load_settings(GatewaySettings, {"path": "remote"})
    assert load_settings(GatewaySettings, {"path": "remote", "mode": "separated"}).path == "remote"


def test_a_mistake_says_how_to_set_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "99999")
    with pytest.raises(ConfigError, match="Set it by --port, BATON_GATEWAY_PORT, or `port = …` under \\[gateway\\]"):
        load_settings(GatewaySettings)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[decode]\npage_token = 1\n", "[decode] has no setting 'page_token'; did you mean 'page_tokens'?"),
        ("[common]\nprot = 1\n", "[common] has no setting 'prot'; did you mean 'port'?"),
        ("[decoder]\n", "no section [decoder]; did you mean 'decode'?"),
        ("page_tokens = 1\n", "no section [page_tokens]"),
        ("decode = 1\n", "decode must be a section"),
        ("[decode\n", "baton.toml"),
    ],
)
def test_a_mistake_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "baton.toml"
    file.write_text(content)
    monkeypatch.setenv("BATON_CONFIG", str(file))
    with pytest.raises(ConfigError) as caught:
        load_settings(KvstoreSettings)
    assert said in str(caught.value)


def test_a_missing_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CONFIG", "/nowhere/baton.toml")
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(KvstoreSettings)


def test_unknown_overrides_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_pages'"):
        load_settings(DecodeSettings, {"num_page": "1"})
    monkeypatch.setenv("BATON_DECODE_PAGE_TOKNES", "1")
    monkeypatch.setenv("BATON_PREFILL_CHUNK", "64")
    assert unknown_variables() == [
        "BATON_DECODE_PAGE_TOKNES is set but nothing reads it; did you mean 'BATON_DECODE_PAGE_TOKENS'?"
    ]


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode", "kvstore"])
def test_every_setting_is_a_flag_with_an_explanation(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    cls = ROLES[role]
    with pytest.raises(SystemExit) as ended:
        parse_flags(cls, ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field, info in cls.model_fields.items():
        assert (f"--{field.replace('_', '-')} VALUE" in text) == (field not in secret_fields(cls)), field
        assert info.description, field
    for field in secret_fields(cls):
        assert field in text.split("No flags, because every user of the host could read them:")[1]
    assert f"BATON_{role.upper()}_<FIELD>" in text
    assert "example: python -m services." in text


def test_flags_are_overrides() -> None:
    assert parse_flags(DecodeSettings, ["--page-tokens", "64", "--name=d"]) == {"page_tokens": "64", "name": "d"}


def test_settings_are_frozen_and_show_no_password() -> None:
    secrets = {"nats_url": "nats://me:secret@10.0.0.1:4222", "nats_user": "me", "nats_password": "s3cret"}
    settings = load_settings(DecodeSettings, secrets)
    with pytest.raises(ValidationError):
        settings.page_tokens = 1  # type: ignore[misc]
    assert settings.public()["nats_url"] == "nats://***@10.0.0.1:4222"
    bare = load_settings(DecodeSettings, {"nats_url": "me:secret@10.0.0.1:4222,10.0.0.2"})
    assert bare.nats_url == "nats://me:secret@10.0.0.1:4222,nats://10.0.0.2"
    assert bare.public()["nats_url"] == "nats://***@10.0.0.1:4222,nats://10.0.0.2"
    assert settings.public()["nats_password"] == "***"
    assert settings.public()["name"] == "decode"
    assert "s3cret" not in repr(settings) + str(settings.public())


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("nats://u:p@host:1", "nats://***@host:1"),
        ("nats://u:p/a@ss@host:1", "nats://***@host:1"),
        ("nats://a:b@one,tls://c:d@two,nats://three", "nats://***@one,tls://***@two,nats://three"),
        ("owner/name@main", "owner/name@main"),
        ("nats://token@host", "nats://***@host"),
    ],
)
def test_logins_in_addresses_are_masked(given: str, shown: str) -> None:
    assert masked(given) == shown


def test_a_wrong_secret_is_not_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "baton.toml"
    file.write_text('[gateway]\napi_keys = ["tenant:s3cret-key"]\n')
    monkeypatch.setenv("BATON_CONFIG", str(file))
    with pytest.raises(ConfigError, match="gateway: api_keys: ") as caught:
        load_settings(GatewaySettings)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nats_user": "me"}, "nats_user and nats_password go together"),
        ({"nats_tls_cert": __file__}, "nats_tls_cert and nats_tls_key go together"),
        ({"nats_user": "me", "nats_password": "x", "nats_token": "y"}, "set one of the two ways"),
        ({"nats_tls_ca": "/nowhere/ca.pem"}, "decode: nats_tls_ca: there is no such file"),
    ],
)
def test_half_a_way_into_nats_is_a_mistake(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_settings(DecodeSettings, given)


def test_a_sidecar_may_be_told_that_there_is_no_nats() -> None:
    assert load_settings(SidecarSettings, {"nats_url": ""}).nats_url == ""


def test_a_sidecar_gets_the_way_into_nats_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"nats_url": "nats://host:1", "nats_user": "me", "nats_password": "s3cret"}
    for name, value in load_settings(DecodeSettings, given).nats_variables("sidecar").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BATON_NATS_TOKEN", "of another server")
    sidecar = load_settings(SidecarSettings)
    assert (sidecar.nats_url, sidecar.nats_user, sidecar.nats_token) == ("nats://host:1", "me", None)
    assert sidecar.nats_password is not None
    assert sidecar.nats_password.get_secret_value() == "s3cret"


@pytest.mark.parametrize("timeout_s", [0.4, 1.0])
def test_a_worker_may_be_silent_between_two_reports(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=r"worker_timeout_s .* must be more than twice heartbeat_s"):
        load_settings(GatewaySettings, {"worker_timeout_s": timeout_s, "heartbeat_s": 0.5})
