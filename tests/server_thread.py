"""A server over loopback in a thread of the test's own process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

from openai import OpenAI
from stubs import ByteTokenizer

from quasar_trt.runner import Runner
from quasar_trt.server.options import ServerOptions
from quasar_trt.server.run import bind, serve


class ChatTokenizer(ByteTokenizer):
    """Its template writes each message as "role: content", a line each."""

    chat_template = "lines"

    def apply_chat_template(self, conversation, tokenize, add_generation_prompt, continue_final_message, **values):
        lines = [f"{message['role']}: {message['content']}" for message in conversation]
        lines += [f"{name} is {value}" for name, value in values.items()]
        return "\n".join(lines) + ("\nassistant:" if add_generation_prompt else "")


class ServerThread:
    """Serves a runner from construction on until `stop` is over; a context manager.

    url, host, port: where it listens.
    """

    def __init__(self, runner: Runner, tokenizer=None, sampling=None, **options):
        options = {"served_model_name": "tiny"} | options
        self.runner = runner
        self.failure: BaseException | None = None
        started = threading.Event()

        def note(server) -> None:
            self.server = server
            started.set()

        def run() -> None:
            bound = bind("127.0.0.1", 0)
            try:
                serve(runner, tokenizer, ServerOptions(**options), bound, sampling or {}, note)
            except BaseException as error:
                self.failure = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(30)
        self.url = self.server.url
        self.host, self.port = urlsplit(self.url).hostname, urlsplit(self.url).port

    def signal(self) -> None:
        """What SIGTERM does."""
        self.server.handle_exit(15, None)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *exception) -> None:
        if self._thread.is_alive():
            self.signal()
        self.join()

    def request(self, path: str, body=None, headers=None, method: str | None = None):
        """(status, headers, JSON or bytes) of one request on a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | (headers or {})
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        response = connection.getresponse()
        text = response.read()
        connection.close()
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.status, response.headers, json.loads(text) if is_json else text

    def refusal(self, path: str, body, **options) -> tuple[int, dict]:
        """Status and error of a request that is refused."""
        status, _, answer = self.request(path, body, **options)
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
        return status, answer["error"]

    def client(self) -> OpenAI:
        """OpenAI's own, to be closed."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=30)
