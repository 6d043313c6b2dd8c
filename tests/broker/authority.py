"""An authority that a test plays: answers with what the test makes of each request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

ALL = {"topic": ".*", "channels": [".*"], "permissions": ["publish", "subscribe"]}


def answer(*authorizations: Any, ttl: int = 60) -> dict[str, Any]:
    return {"ttl": ttl, "identity": "me", "identity_url": "http://me", "authorizations": authorizations}


class Authority:
    """Answers with what `judge` makes of a request; `asked` keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.judge: Callable[[dict[str, str]], Any] = lambda _: answer(ALL)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                asked = {key: value[0] for key, value in parse_qs(parts.query, keep_blank_values=True).items()}
                outer.asked.append(asked)
                found = outer.judge(asked) if parts.path == "/auth" else None
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(200 if found is not None else 403)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

        self.server = Server(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
