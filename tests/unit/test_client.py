"""Requests to several servers: shared, tried again, and refused where an answer would not be what was said."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from eaglebook.engine import client, server
from eaglebook.errors import UserError


@contextmanager
def endpoint(answer) -> Iterator[tuple[str, list]]:
    """A server whose completions are ``answer(prompt)``: a status and an object. Yields its address and what it was asked."""
    asked: list = []

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "big-model"}]} if self.path == "/v1/models" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            self._send(*answer(body["prompt"]))

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}", asked
        running.shutdown()


def well(prompt):
    return 200, {"choices": [{"token_ids": [prompt[0] + 1], "finish_reason": "stop"}]}


def broken(prompt):
    return 500, {"error": "EngineDeadError"}


def test_several_endpoints_share_and_one_that_breaks_is_made_up_for() -> None:
    with endpoint(well) as (good, asked), endpoint(broken) as (bad, tried):
        servers = [server.connect(f"{bad}/v1/"), server.connect(good)]
        assert [s.model for s in servers] == ["big-model"] * 2
        done, _ = client.complete(servers, [[n] for n in range(6)], max_tokens=4, concurrency=3, retries=1)
        assert [d.token_ids for d in done] == [[n + 1] for n in range(6)]
        assert (len(tried), len(asked)) == (3, 6)
        assert all(body["temperature"] == 0 and body["model"] == "big-model" for body in asked)
        with pytest.raises(UserError, match="status 500"):
            client.complete(servers, [[1]], max_tokens=4, concurrency=1)


def test_a_prompt_that_is_refused_is_not_asked_again() -> None:
    with endpoint(lambda prompt: (400, {"error": "too long"})) as (address, asked):
        with pytest.raises(UserError, match="refused a prompt of 3 tokens"):
            client.complete(server.connect(address), [[1, 2, 3]], max_tokens=4, concurrency=1, retries=3)
        assert len(asked) == 1


def test_text_instead_of_ids_is_refused() -> None:
    text = {"choices": [{"text": "hello", "finish_reason": "stop"}]}
    with (
        endpoint(lambda prompt: (200, text)) as (address, _),
        pytest.raises(UserError, match="text instead of token ids"),
    ):
        client.complete(server.connect(address), [[1]], max_tokens=4, concurrency=1)


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "nonsense", "http://["])
def test_an_endpoint_that_is_not_there_is_named(address) -> None:
    with pytest.raises(UserError, match="no model at"):
        server.connect(address)


def test_a_request_that_is_never_answered_is_given_up() -> None:
    """What a dead engine behind a living server looks like: the connection is open, and nothing comes."""
    hang = threading.Event()

    def silent(prompt):
        hang.wait(30)
        return 500, {}

    with endpoint(silent) as (address, _):
        try:
            with pytest.raises(UserError, match=r"no token for 1 s[\s\S]*load ladder"):
                client.complete(server.connect(address), [[1]], max_tokens=4, concurrency=1, stall_s=1)
        finally:
            hang.set()


def test_a_slow_server_that_goes_on_is_not_given_up() -> None:
    def slow(prompt):
        time.sleep(0.7)
        return well(prompt)

    with endpoint(slow) as (address, _):
        done, _ = client.complete(
            server.connect(address), [[n] for n in range(4)], max_tokens=4, concurrency=1, stall_s=1.5
        )
        assert len(done) == 4
