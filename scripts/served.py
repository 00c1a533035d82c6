"""What the scripts about the server share: the server as a process, and words that prompts are made of."""

import collections
import re
import signal
import subprocess
import sys
import threading
from urllib.parse import urlsplit

WORDS = [
    "the",
    "sea",
    "is",
    "wide",
    "and",
    "old",
    "so",
    "we",
    "sail",
    "on",
    "until",
    "night",
    "falls",
    "over",
    "us",
    "all",
    "and",
    "no",
    "one",
    "knows",
    "the",
    "way",
]


class Server:
    """`quasar-trt serve` in a process of its own. url, address: where it listens; log: its last lines."""

    def __init__(self, engine_dir: str, *options: str):
        command = [sys.executable, "-m", "quasar_trt.cli", "serve", engine_dir, "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = collections.deque(maxlen=20)
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.fullmatch(r"serving \S+ at (\S+)\n", line):
                self.url = found[1]
                break
        else:
            sys.exit("".join(self.log))
        self.address = urlsplit(self.url).hostname, urlsplit(self.url).port
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self._reader.start()

    def end(self) -> str | None:
        """What went wrong."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        self._reader.join()
        if code or not self.log[-1].endswith("stopped: 0 bytes of keys and values left over\n"):
            return f"exit code {code}, {self.log[-1].strip()}"
        return None
