"""Finds out, before any load, whom we talk to: does it answer, what does it serve, is it Baton, and how many tokens
does it make of our words."""

import os
from typing import Any

import aiohttp

from services.bench.errors import BenchError
from services.bench.plan.prompts import Measure, PromptWriter
from services.bench.wire.answer import error_message
from services.bench.wire.client import Api, Target

_PROBE_TIMEOUT_S = 120.0
_QUICK_TIMEOUT_S = 10.0
_FEW_WORDS, _MORE_WORDS = 16, 80


def base_url(url: str) -> str:
    """`http://host:port`, also from `host:port` and from what OpenAI clients take, which ends in /v1."""
    url = url if "://" in url else f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"--url {url}: write http://HOST:PORT or https://HOST")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def find_target(
    session: aiohttp.ClientSession, url: str, api: Api, model: str | None, api_key: str | None
) -> Target:
    """Asks for the model unless it is given. BenchError in one sentence where nothing of use answers."""
    url = base_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    status, listed = await _get(session, f"{url}/v1/models", headers)
    if model is None:
        if status in (401, 403):
            raise BenchError(f"{url} answers {status}; give its key with --api-key or OPENAI_API_KEY")
        model = _first_model(listed)
        if model is None:
            raise BenchError(
                f"{url}/v1/models answers {status} and names no model; name one with --model, or check --url"
            )
    status, cluster = await _get(session, f"{url}/cluster", headers)
    is_baton = status == 200 and isinstance(cluster, dict) and isinstance(cluster.get("workers"), list)
    return Target(url, api, model, is_baton, headers, max_model_len=_max_model_len(listed, model))


async def measure_words(session: aiohttp.ClientSession, target: Target) -> Measure | None:
    """Two short prompts, each for one token: they also warm the server up. None where the server counts nothing."""
    writer = PromptWriter(seed=-1, measure=Measure())
    counts = []
    for number, words in enumerate((_FEW_WORDS, _MORE_WORDS)):
        counts.append(await _count_tokens(session, target, writer.write(number, words)))
    few, more = counts
    if few is None or more is None or more <= few:
        return None
    slope = (more - few) / (_MORE_WORDS - _FEW_WORDS)
    return Measure(few - slope * _FEW_WORDS, slope)


async def _count_tokens(session: aiohttp.ClientSession, target: Target, prompt: str) -> int | None:
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    body = target.body(prompt, 1)
    try:
        async with session.post(target.route, json=body, headers=target.headers, timeout=timeout) as response:
            text = await response.text(errors="replace")
            if response.status != 200:
                raise BenchError(f"{target.route} answers {response.status}: {error_message(text)}")
            usage = (await response.json(content_type=None)).get("usage") or {}
            count = usage.get("prompt_tokens")
            return count if isinstance(count, int) else None
    except TimeoutError as error:
        raise BenchError(f"{target.route} did not answer a short prompt within {_PROBE_TIMEOUT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise BenchError(f"{target.route} broke the connection ({error})") from error
    except (ValueError, AttributeError) as error:
        raise BenchError(f"{target.route} answers something that is not OpenAI's API: {text[:80]!r}") from error


async def _get(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> tuple[int, Any]:
    """Status and body, None where that is not JSON."""
    timeout = aiohttp.ClientTimeout(total=_QUICK_TIMEOUT_S)
    try:
        async with session.get(url, headers=headers, timeout=timeout) as response:
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                return response.status, None
    except aiohttp.InvalidURL as error:
        raise BenchError(f"{url} is not a URL; write --url http://HOST:PORT") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BenchError(
            f"nothing answers at {url} ({_why(error)}); start a cluster with `baton up`, or give --url"
        ) from error


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no host {error.host!r} is known"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or f"no answer within {_QUICK_TIMEOUT_S:g} s"


def _first_model(listed: Any) -> str | None:
    try:
        return str(listed["data"][0]["id"])
    except (LookupError, TypeError):
        return None


def _max_model_len(listed: Any, model: str) -> int | None:
    """Baton and vLLM say it."""
    try:
        found = next(each for each in listed["data"] if each["id"] == model)["max_model_len"]
        return found if isinstance(found, int) else None
    except (LookupError, TypeError, StopIteration):
        return None
