"""``simmoe validate --url``: an endpoint whose engines could not be simulated is refused before it is sent anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.cli import run as cli

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.server.state import STEPS_PATH

FACTS = {
    "k_max": 32, "max_num_batched_tokens": 8192, "max_num_seqs": 64, "enable_chunked_prefill": True, "block_size": 16,
    "num_gpu_blocks": 1000, "enable_prefix_caching": False, "async_scheduling": False, "captured_ks": [],
    "captured_sizes": [], "vocab_size": 1000, "monotonic_s": 0.0, "steps": [],
}  # fmt: skip
POLICY = {"policy": {"given": "fifo", "parameters": {}, "files": {}, "clairvoyant": False}}

REFUSED: dict[str, tuple[dict[str, Any] | None, int, str]] = {
    "plain vLLM": (None, 8, "does not tell its engines' limits and the policy they run, which the simulator needs; "),
    "simmoe serve over engines elsewhere": (
        {"ranks": {"0": FACTS}, "deployment": {}}, 8, "does not tell the policy they run, which the simulator needs; "
    ),
    "a model of other budgets": (
        {"ranks": {"0": FACTS | {"k_max": 8}}, "deployment": POLICY}, 2, "has k_max 32; the live engines have 8"
    ),
    "limits that no engine has": (
        {"ranks": {"0": FACTS | {"max_num_seqs": 0}}, "deployment": POLICY}, 3, "max_num_seqs is 0"
    ),
    "a policy that is not here": (
        {"ranks": {"0": FACTS}, "deployment": {"policy": {"given": "gone.py:Mine"}}}, 4, "policy cannot be simulated"
    ),
}  # fmt: skip
"""What it answers where a ``simmoe serve`` hands out steps; exit code and words of the refusal."""


@contextmanager
def endpoint(steps: dict[str, Any] | None) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of an endpoint, and the paths that it has been asked for."""
    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.answer({"object": "list", "data": [{"id": "tiny"}]} if self.path == "/v1/models" else None)

        def do_POST(self) -> None:
            asked.append(self.path)
            self.answer(steps if self.path == STEPS_PATH else None)

        def answer(self, content: dict[str, Any] | None) -> None:
            body = json.dumps(content).encode()
            self.send_response(404 if content is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("who", REFUSED)
def test_what_cannot_be_simulated_is_refused_before_anything_is_sent(
    who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, exit_code, told = REFUSED[who]
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,5\n1,20,5\n")
    with endpoint(steps) as (url, asked):
        out = tmp_path / "out"
        assert cli(["validate", "--url", url, "--trace", str(trace), "--out", str(out)]) == exit_code
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("simmoe: ") and told in line
    assert "/v1/completions" not in asked and STEPS_PATH in asked
    assert not out.exists()
    if exit_code == 8:
        assert url in line and "simmoe serve --model DIR --record-steps" in line
