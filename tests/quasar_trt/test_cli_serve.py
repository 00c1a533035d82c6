"""`quasar-trt serve` as a process: options, the configuration file, refusals at start, and the end by a signal."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from openai import OpenAI

from quasar_trt import Runner, SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


@contextlib.contextmanager
def serving(*arguments):
    """(process, URL, lines on stderr so far) of a server at a free port; it is ended by SIGTERM and must end well."""
    command = [sys.executable, "-m", "quasar_trt.cli", "serve", *map(str, arguments)]
    if "--config" not in arguments:
        command += ["--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.fullmatch(r"serving (\S+) at (http://\S+)\n", line):
                yield process, found[2], lines
                break
        process.send_signal(signal.SIGTERM)
        lines += process.stderr
        assert process.wait(30) == 0, "".join(lines)
    finally:
        process.kill()
        process.wait()


def refused(*arguments) -> str:
    command = [sys.executable, "-m", "quasar_trt.cli", "serve", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_engine_is_served_until_a_signal_ends_it(engine_dirs):
    runner = Runner.from_dir(engine_dirs["INT8"])
    expected = runner.chat(HELLO, SamplingParams(seed=5, max_tokens=24))[0].outputs[0]
    with serving(engine_dirs["INT8"]) as (_, url, lines):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["int8"]
        body = {"model": "int8", "messages": HELLO, "seed": 5, "max_tokens": 24}
        assert client.chat.completions.create(**body).choices[0].message.content == expected.text
        pieces = client.chat.completions.create(**body, stream=True)
        assert "".join(piece.choices[0].delta.content for piece in pieces) == expected.text
    log = "".join(lines)
    assert log.count("24 emitted in") == 2 and "mean acceptance length" in log
    assert log.endswith("stopped: 0 bytes of keys and values left over\n")


def test_configuration_file_sets_options_and_the_command_line_counts_first(engine_dirs, tmp_path):
    config, template = tmp_path / "serve.yaml", tmp_path / "template.jinja"
    template.write_text("<{{ messages[0]['content'] }}>")
    config.write_text(
        "port: 0\nserved_model_name: from the file\napi-key: secret\nmax_requests: 3\nmax-body-bytes: 2K\n"
        f"chat-template: {template}\ndrafter: suffix\ndrafter_option:\n  num_speculative_tokens: 2\n"
    )
    with serving(engine_dirs["INT8"], "--config", config, "--served-model-name", "mine") as (_, url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        (model,) = client.models.list()
        assert model.id == "mine"
        answer = client.chat.completions.create(model="mine", messages=HELLO, max_tokens=2)
        assert answer.usage.prompt_tokens == len("<hello>")
        request = urllib.request.Request(f"{url}/v1/models")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 8000\n", "has 'prot', which is no option of serve; did you mean 'port'?"),
        ("engine_dir: x\n", "has 'engine_dir', which is no option of serve"),
        ("- port\n", "is no mapping"),
        ("port: [\n", "cannot read"),
        ("api_key:\n", "has 'api_key' without a value"),
        ("port: many\n", "--port is 'many'; allowed: a whole number of at least 0, at most 65535"),
        ("port: 0\ndrafter_option: {depth: 1}\n", "unknown suffix drafter option 'depth'"),
    ],
)
def test_wrong_configuration_is_refused(engine_dirs, tmp_path, text, message):
    config = tmp_path / "serve.yaml"
    config.write_text(text)
    assert message in refused(engine_dirs["INT8"], "--config", config)


def test_wrong_options_are_refused_before_the_engine_is_loaded(tmp_path):
    missing = tmp_path / "engine"
    assert "max_requests is 0; allowed: 1 or more" in refused(missing, "--max-requests", "0")
    assert "request_timeout is 0.0; allowed" in refused(missing, "--request-timeout", "0")
    assert "api_key is empty or" in refused(missing, "--api-key", "")
    assert "secret" not in refused(missing, "--api-key", "secret\n")
    assert "cannot listen at --host 203.0.113.1" in refused(missing, "--host", "203.0.113.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at --host 127.0.0.1 --port {port}: " in refused(missing, "--port", port)
    assert "served_model_name is ''; allowed: printable text" in refused(missing, "--served-model-name", "")
    assert f"--config: cannot read {missing}: No such file or directory" in refused(missing, "--config", missing)
    assert "engine" in refused(missing, "--port", "0")


def test_wrong_chat_template_is_refused(engine_dirs, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    arguments = engine_dirs["INT8"], "--port", "0", "--chat-template"
    assert f"--chat-template: {template} is no Jinja template: line 1: " in refused(*arguments, template)
    template.write_bytes(b"\xff")
    assert f"--chat-template: {template} is no UTF-8 text" in refused(*arguments, template)
    assert f"--chat-template: cannot read {tmp_path}: Is a directory" in refused(*arguments, tmp_path)


def test_help_needs_nothing_of_the_extra(tmp_path):
    for name in ("fastapi", "uvicorn", "prometheus_client", "pydantic", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no', name='{name}')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from quasar_trt.cli import main; main()"
    command = [sys.executable, "-c", code, "serve"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and "--served-model-name" in shown.stdout
    result = subprocess.run([*command, "engine"], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "pip install 'quasar-trt[serve]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_request_that_streams_ends_before_the_server_does(engine_dirs):
    with serving(engine_dirs["INT8"]) as (process, url, _):
        body = {"prompt": [1, 2], "max_tokens": 400, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            first = answer.readline()
            process.send_signal(signal.SIGINT)
            rest = answer.read()
        assert first.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n") and b'"length"' in rest
