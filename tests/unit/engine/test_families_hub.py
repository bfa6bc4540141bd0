"""A model by its name on the Hugging Face hub, against a stand-in for the hub on this machine."""

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.engine.weights import hub as client
from shared.engine.weights.catalog import prepare
from shared.engine.weights.errors import InvalidModel
from tests.support_tiny_model import tiny_weights, write_hf

REPO = "Some-Lab/Tiny-1"
COMMIT = "c0ffee" + "0" * 34
SHARD = "model-00002-of-00002.safetensors"
ENDED = "the connection ended too soon"


class Hub(http.server.ThreadingHTTPServer):
    """Serves one repository as the hub does, files by way of a redirect. cut: it hangs up after so many bytes of the
    second shard, each time. tokens: who asked, by the Authorization that came."""

    daemon_threads = True

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files = files
        self.cut: int | None = None
        self.begins: list[tuple[str, int]] = []
        self.requests: list[str] = []
        self.tokens: list[tuple[str, str | None]] = []


class Answers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        kind = self.path.split("/")[1]
        self.server.tokens.append((kind, self.headers.get("Authorization")))
        if self.path.startswith(f"/api/models/{REPO}/revision/main"):
            self._info()
        elif self.path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self.send_response(302)
            self.send_header("Location", "/cdn/" + self.path.rpartition("/")[2])
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif kind == "cdn":
            self._file(self.server.files / self.path.rpartition("/")[2])
        else:
            self.send_error(404)

    def _info(self) -> None:
        siblings = []
        for file in self.server.files.iterdir():
            data = file.read_bytes()
            lfs = {"sha256": hashlib.sha256(data).hexdigest()} if file.suffix == ".safetensors" else None
            siblings.append({"rfilename": file.name, "size": len(data), **({"lfs": lfs} if lfs else {})})
        body = json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, path: Path) -> None:
        data, begin = path.read_bytes(), 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is not None:
            begin = int(asked[1])
        self.server.begins.append((path.name, begin))
        self.send_response(200 if asked is None else 206)
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        cut = self.server.cut
        self.wfile.write(data[begin : begin + cut] if cut is not None and path.name == SHARD else data[begin:])
        self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = write_hf(tmp_path / "published", tiny_weights(), num_shards=2)
    (files / "README.md").write_text("not needed")
    (files / "consolidated.safetensors").write_bytes(b"the same again")
    server = Hub(files)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(client, "_RETRY_S", 0.01)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_comes_by_its_name_and_is_then_served_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    prepared = prepare(REPO, tmp_path / "cache", lambda *progress: told.append(progress))
    assert prepared.name == "tiny-1"
    assert prepared.config.source == f"hub:{REPO}@{COMMIT}"
    local = prepare(str(hub.files), tmp_path / "cache")
    assert prepared.identity == local.identity
    fetched = [(done, total) for stage, done, total in told if stage == "fetch"]
    needed = [f for f in hub.files.iterdir() if f.suffix == ".json" or f.name.startswith("model-")]
    assert fetched[-1] == (sum(file.stat().st_size for file in needed),) * 2
    assert fetched == sorted(fetched)
    assert len(fetched) > len(needed)
    assert not [path for path in hub.requests if "README" in path or "consolidated" in path]
    hub.requests.clear()
    assert prepare(REPO, tmp_path / "cache") == prepared
    assert hub.requests == []
    assert prepare(f"{REPO}@main", tmp_path / "cache") == prepared
    assert len(hub.requests) == 1, "a revision is looked up, and is what is there already"


def test_the_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path) -> None:
    prepare(REPO, tmp_path / "cache")
    assert {kind: token for kind, token in hub.tokens} == {
        "api": "Bearer secret",
        "Some-Lab": "Bearer secret",
        "cdn": None,
    }


def test_an_interrupted_download_goes_on_where_it_stopped(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (hub.files / SHARD).stat().st_size
    hub.cut = 0
    with pytest.raises(InvalidModel, match=f"could not be fetched from http.*: {ENDED}"):
        prepare(REPO, tmp_path / "cache")
    assert hub.begins.count((SHARD, 0)) == client._TRIES

    hub.cut = size // 3

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "fetch" and (SHARD, size // 3) in hub.begins:
            raise KeyboardInterrupt

    hub.begins.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare(REPO, tmp_path / "cache", stop)
    begins = [begin for _, begin in hub.begins]
    assert begins == [0, size // 3], "broken connections are taken up again, and files that are whole left alone"

    hub.cut = None
    hub.begins.clear()
    told: list[int] = []
    prepared = prepare(REPO, tmp_path / "cache", lambda stage, done, _: told.append(done) if stage == "fetch" else None)
    assert hub.begins[0] == (SHARD, 2 * (size // 3))
    assert min(told) > size // 3, "what is there counts as done"
    assert prepared.identity == prepare(str(hub.files), tmp_path / "cache").identity


def test_what_came_damaged_is_thrown_away(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "sources" / "hub" / f"some-lab--tiny-1@{COMMIT}"
    directory.mkdir(parents=True)
    (directory / f"{SHARD}.part").write_bytes(b"of something else")
    with pytest.raises(InvalidModel, match=f"{SHARD} came damaged; try again"):
        prepare(REPO, tmp_path)
    prepare(REPO, tmp_path)


def test_what_the_hub_does_not_have_is_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"Some-Lab/Other is no path .*: there is none of this name, or it is gated"):
        prepare("Some-Lab/Other", tmp_path)
    for file in hub.files.glob("*.safetensors"):
        file.rename(file.with_suffix(".gguf"))
    with pytest.raises(InvalidModel, match=r"no model\*\.safetensors file; give the path of one of its GGUF files"):
        prepare(REPO, tmp_path)


def test_without_a_hub_the_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/")
    why = "is no path on this machine, and could not be fetched from http://127.0.0.1:9: .*Connection refused"
    with pytest.raises(InvalidModel, match=f"{REPO} {why}") as caught:
        prepare(REPO, tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidModel, match="neither a known model"):
        prepare("no-such-model", tmp_path)
