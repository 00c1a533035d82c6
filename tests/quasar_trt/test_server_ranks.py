"""The server on several ranks: rank 0 speaks HTTP, the others follow, and a signal ends all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from mpi import start_ranks

from quasar_trt import Runner, SamplingParams
from quasar_trt.builders.build import build
from quasar_trt.recipe import Recipe

OPTIONS = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def complete(url: str, **body) -> dict:
    data = json.dumps(OPTIONS | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def stream(url: str, **body):
    data = json.dumps(OPTIONS | {"stream": True} | body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def rank_0(launcher: int) -> int:
    """Process id of the rank that speaks HTTP."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (found,) = [pid for pid in children if b"OMPI_COMM_WORLD_RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    return int(found)


@pytest.fixture(scope="module")
def engine_dir(hf_dir, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ranks") / "engine"
    build(str(hf_dir), directory, Recipe("none"), tp_size=2, progress=False)
    return directory


@pytest.mark.parametrize("end", ["SIGTERM to rank 0", "SIGUSR1 to mpirun"])
def test_two_ranks_answer_as_one_process_and_end_in_order(engine_dir, engine_dirs, end):
    prompts = ["hello there", "one two three"]
    expected = Runner.from_dir(engine_dirs["BF16"]).generate(prompts, SamplingParams(**OPTIONS))
    process = start_ranks(2, "-m", "quasar_trt.cli", "serve", engine_dir, "--port", "0")
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"serving engine at (http://\S+)\n", line):
                break
        else:
            raise AssertionError("".join(lines))
        answer = complete(found[1], prompt=prompts)
        assert [choice["text"] for choice in answer["choices"]] == [each.outputs[0].text for each in expected]
        with stream(found[1], prompt=prompts[0], max_tokens=200) as running:
            first = running.readline()
            if end == "SIGTERM to rank 0":
                os.kill(rank_0(process.pid), signal.SIGTERM)
            else:
                process.send_signal(signal.SIGUSR1)
            events = first + running.read()
        assert events.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in events
        _, rest = process.communicate(timeout=30)
        assert "stopped: 0 bytes of keys and values left over" in rest, rest
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
