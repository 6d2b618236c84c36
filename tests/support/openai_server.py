"""A stand-in for an OpenAI-compatible server, in the test's own process: it answers as told and keeps what it was asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


@dataclass
class Answer:
    """What the server says to one request: a status, and for 200 a completion."""

    text: str | None = ""
    finish: str | None = "stop"
    tokens: int | None = 7
    status: int = 200
    delay: float = 0.0
    message: dict[str, Any] = field(default_factory=dict)
    """Further fields of the message."""


class FakeServer:
    """`url`, and the requests so far."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer], key: str | None) -> None:
        self.answer, self.key = answer, key
        self.requests: list[dict[str, Any]] = []
        self.attempts: dict[str, int] = {}
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.url = ""

    def complete(self, body: dict[str, Any]) -> Answer:
        key = json.dumps([body["messages"], body["seed"]])
        with self.lock:
            self.requests.append(body)
            self.attempts[key] = attempt = self.attempts.get(key, 0) + 1
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        try:
            found = self.answer(body, attempt)
            time.sleep(found.delay)
            return found
        finally:
            with self.lock:
                self.busy -= 1


@contextmanager
def started(answer: Callable[[dict[str, Any], int], Answer], key: str | None = None) -> Iterator[FakeServer]:
    """A server whose reply to a request's body, at its nth attempt, is `answer(body, n)`."""
    fake = FakeServer(answer, key)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def allowed(self) -> bool:
            if fake.key is None or self.headers.get("Authorization") == f"Bearer {fake.key}":
                return True
            self.reply(401, {"error": {"message": "wrong key"}})
            return False

        def do_GET(self) -> None:
            if self.allowed():
                self.reply(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "test"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            found = fake.complete(body)
            try:
                if found.status != 200:
                    self.reply(found.status, {"error": {"message": f"status {found.status}"}})
                    return
                message = {"role": "assistant", "content": found.text} | found.message
                usage = {"prompt_tokens": 1, "completion_tokens": found.tokens, "total_tokens": 8} if found.tokens is not None else None
                choice = {"index": 0, "message": message, "finish_reason": found.finish}
                common = {"id": "1", "object": "chat.completion", "created": 0, "model": MODEL}
                self.reply(200, common | {"choices": [choice], "usage": usage})
            except (BrokenPipeError, ConnectionResetError):  # the client went away
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
