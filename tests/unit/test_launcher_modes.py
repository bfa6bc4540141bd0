"""Which processes `baton up` starts in which mode, and what it refuses before it starts any."""

import pytest

from services.launcher.errors import LaunchError
from services.launcher.plan import ProcessSpec, UpOptions, chosen_settings, plan_processes, settle_mode


def plan(options: UpOptions) -> list[ProcessSpec]:
    settled = settle_mode(options)
    return plan_processes(settled, chosen_settings(settled), {"nats_url": "nats://x"})


def test_a_mode_reaches_all_who_have_one() -> None:
    env = {spec.name: spec.env for spec in plan(UpOptions(num_decode=2, mode="chunked", step_tokens=96))}
    assert sorted(env) == ["decode-0", "decode-1", "gateway", "kvstore"]
    assert env["gateway"]["BATON_GATEWAY_MODE"] == env["decode-1"]["BATON_DECODE_MODE"] == "chunked"
    assert env["decode-0"]["BATON_DECODE_STEP_TOKENS"] == "96"


@pytest.mark.parametrize("given", ["variable", "set"])
def test_a_mode_that_no_flag_says_is_that_of_all(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    sets = ("gateway.mode=chunked",) if given == "set" else ()
    if given == "variable":
        monkeypatch.setenv("BATON_GATEWAY_MODE", "chunked")
    env = {spec.name: spec.env for spec in plan(UpOptions(step_tokens=64, sets=sets))}
    assert sorted(env) == ["decode-0", "gateway", "kvstore"]
    assert env["decode-0"]["BATON_DECODE_MODE"] == env["gateway"]["BATON_GATEWAY_MODE"] == "chunked"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (UpOptions(mode="colocated", num_prefill=1), "mode colocated has no prefill workers"),
        (UpOptions(sets=("common.mode=chunked",), num_prefill=2), "mode chunked has no prefill workers"),
        (UpOptions(step_tokens=64), "--step-tokens is the budget of --mode chunked"),
        (UpOptions(mode="colocated", step_tokens=64), "--step-tokens is the budget of --mode chunked"),
        (UpOptions(mode="chunked", step_tokens=8), "decode: step_tokens (8) is below max_running (64)"),
        (UpOptions(sets=("decode.mode=chunked",)), "decode-0 would run in mode chunked, the gateway in mode separated"),
        (UpOptions(mode="colocated", sets=("gateway.path=remote",)), "path remote needs prefill workers"),
    ],
)
def test_what_does_not_go_with_a_mode_is_said(options: UpOptions, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        plan(options)
    assert said in str(caught.value)
