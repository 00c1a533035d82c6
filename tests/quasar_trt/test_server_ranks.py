"""The server on several ranks: rank 0 speaks HTTP, the others follow, and a signal ends all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

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


def rank_0(launcher: int) -> int:
    """Process id of the rank that speaks HTTP."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (found,) = [pid for pid in children if b"OMPI_COMM_WORLD_RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    return int(found)


def test_two_ranks_answer_as_one_process_and_end_in_order(hf_dir, engine_dirs, tmp_path):
    build(str(hf_dir), tmp_path / "engine", Recipe("none"), tp_size=2, progress=False)
    prompts = ["hello there", "one two three"]
    expected = Runner.from_dir(engine_dirs["BF16"]).generate(prompts, SamplingParams(**OPTIONS))
    process = start_ranks(2, "-m", "quasar_trt.cli", "serve", tmp_path / "engine", "--port", "0")
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
        os.kill(rank_0(process.pid), signal.SIGTERM)
        _, rest = process.communicate(timeout=30)
        assert "stopped: 0 bytes of keys and values left over" in rest, rest
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
