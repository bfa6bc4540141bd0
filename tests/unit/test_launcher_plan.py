"""With which settings `baton up` starts its processes, and what it refuses before it starts any."""

import pytest

from services.launcher.errors import LaunchError
from services.launcher.plan import UpOptions, chosen_settings, plan_processes, share_cores
from services.launcher.up import _choose_ports


def test_reports_that_are_too_rare_are_refused_together() -> None:
    options = UpOptions(sets=("decode.heartbeat_s=1.2",))
    with pytest.raises(LaunchError, match=r"decode-0: heartbeat_s \(1.2\).*worker_timeout_s \(2\)"):
        plan_processes(options, chosen_settings(options), {})


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("decode.page_token=32", "did you mean 'page_tokens'?"),
        ("sidecar.cores=0-1000", "sidecar: cores: "),
        ("sidecar.transfer=fast", "sidecar: transfer: no link backend 'fast', only auto, shm, tcp, nixl"),
        ("decoder.page_tokens=32", "no 'decoder' here"),
        ("common.page_token=32", "none that has 'page_token'"),
        ("page_tokens=32", "write role.field=value"),
    ],
)
def test_what_fits_nowhere_is_said(flag: str, said: str) -> None:
    options = UpOptions(sets=(flag,))
    with pytest.raises(LaunchError) as caught:
        plan_processes(options, chosen_settings(options), {})
    assert said in str(caught.value)


def test_settings_reach_the_processes_they_name() -> None:
    sets = ("common.page_tokens=32", "decode.page_tokens=64", "decode-1.num_pages=9", "decode.threads=3")
    options = UpOptions(num_decode=2, sets=sets, model="m", port=1)
    env = {spec.name: spec.env for spec in plan_processes(options, chosen_settings(options), {"nats_url": "nats://x"})}
    assert env["prefill-0"]["BATON_PREFILL_PAGE_TOKENS"] == "32"
    assert env["decode-0"]["BATON_DECODE_PAGE_TOKENS"] == "64"
    assert "BATON_DECODE_NUM_PAGES" not in env["decode-0"]
    assert env["decode-1"]["BATON_DECODE_NUM_PAGES"] == "9"
    assert env["decode-1"]["BATON_DECODE_THREADS"] == "3"
    assert env["gateway"]["BATON_GATEWAY_MODEL"] == "m"
    assert env["gateway"]["BATON_GATEWAY_PORT"] == "1"
    assert {value["BATON_DECODE_NAME"] for name, value in env.items() if "decode" in name} == {"decode-0", "decode-1"}
    assert env["kvstore"] == {
        "BATON_KVSTORE_NATS_URL": "nats://x",
        "BATON_KVSTORE_NAME": "kvstore",
        "BATON_SIDECAR_NATS_URL": "nats://x",
    }


def test_several_stores_have_names_and_directories_of_their_own() -> None:
    def stores(num: int) -> dict[str, str | None]:
        options = UpOptions(num_kvstore=num, sets=("kvstore.memory_mib=8",))
        specs = plan_processes(options, chosen_settings(options), {"state_dir": "/state"})
        return {one.name: one.env.get("BATON_KVSTORE_DRIVER_WHERE") for one in specs if one.role == "kvstore"}

    assert stores(1) == {"kvstore": None}
    assert stores(2) == {"kvstore-0": "/state/blocks-kvstore-0", "kvstore-1": "/state/blocks-kvstore-1"}
    options = UpOptions(num_kvstore=0)
    assert not [one for one in plan_processes(options, chosen_settings(options), {}) if one.role == "kvstore"]


def test_several_gateways_have_names_of_their_own_and_the_first_has_the_port() -> None:
    options = UpOptions(num_gateway=2, port=8000, sets=("gateway.max_queued=7", "gateway-1.max_active=9"))
    specs = plan_processes(options, chosen_settings(options), {})
    env = {spec.name: spec.env for spec in specs if spec.role == "gateway"}
    assert list(env) == ["gateway-0", "gateway-1"]
    assert env["gateway-0"]["BATON_GATEWAY_PORT"] == "8000"
    assert "BATON_GATEWAY_PORT" not in env["gateway-1"]
    assert {one["BATON_GATEWAY_MAX_QUEUED"] for one in env.values()} == {"7"}
    assert env["gateway-1"]["BATON_GATEWAY_MAX_ACTIVE"] == "9"
    options = UpOptions(num_gateway=2, sets=("gateway-1.heartbeat_s=0.9", "decode.heartbeat_s=1.2"))
    with pytest.raises(LaunchError, match="worker_timeout_s"):
        plan_processes(options, chosen_settings(options), {})


@pytest.mark.parametrize("sets", [(), ("gateway.port=0",), ("common.port=0",)])
def test_no_two_gateways_get_one_port(sets: tuple[str, ...]) -> None:
    options = UpOptions(num_gateway=3, port=0, sets=sets)
    chosen = chosen_settings(options)
    urls = _choose_ports(options, chosen)
    assert len({url.rpartition(":")[2] for url in urls}) == 3
    assert [chosen[f"gateway-{k}"]["port"] for k in range(3)] == [url.rpartition(":")[2] for url in urls]


@pytest.mark.parametrize(
    ("cores", "workers", "shares"), [(2, 2, [1, 1]), (8, 3, [3, 3, 2]), (1, 3, [1, 1, 1]), (4, 0, []), (16, 1, [16])]
)
def test_cores_are_shared_out(cores: int, workers: int, shares: list[int]) -> None:
    assert share_cores(cores, workers) == shares


def _spinning(monkeypatch: pytest.MonkeyPatch, *sets: str, num_decode: int = 1) -> set[str]:
    monkeypatch.setattr("services.launcher.plan.host_cores", lambda: 4)
    options = UpOptions(num_decode=num_decode, sets=sets)
    specs = plan_processes(options, chosen_settings(options), {})
    return {spec.name for spec in specs if "GOMP_SPINCOUNT" in spec.env}


def test_threads_wait_awake_only_where_no_core_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert _spinning(monkeypatch) == {"prefill-0", "decode-0"}
    assert _spinning(monkeypatch, "prefill.threads=3") == set()
    assert _spinning(monkeypatch, "decode.threads=3", "prefill.threads=1") == {"decode-0"}
    assert _spinning(monkeypatch, num_decode=4) == set()
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert _spinning(monkeypatch) == set()
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    assert _spinning(monkeypatch) == set()
