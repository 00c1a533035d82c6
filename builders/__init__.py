"""Offline: everything from a model to an engine directory."""

import os

# Threads of torch that wait for each other sleep instead of spinning: where other work shares the cores, spinning makes a
# build several times slower, and it gains nothing elsewhere. Heeded only if torch is not loaded yet.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
