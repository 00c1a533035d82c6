# Sourced by the other scripts: `install_into_venv EXTRA` makes .venv, installs this checkout there and activates it.
# pip's own environment variables and configuration apply (an index of CPU builds of torch, a proxy, a cache).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

install_into_venv() {
    local marker markers=(".venv/quasar-trt-$1")
    [ "$1" != gguf ] || markers+=(.venv/quasar-trt-test) # the extra `test` holds the extra `gguf`
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    . .venv/bin/activate
    # The checkout is installed editable, so only packaging and native sources ask for another installation.
    local sources=(setup.py pyproject.toml constraints.txt plugins/csrc quasar_trt/engines/csrc)
    for marker in "${markers[@]}"; do
        if [ -e "$marker" ] && [ -z "$(find "${sources[@]}" -newer "$marker")" ]; then return; fi
    done
    python -m pip install --progress-bar on -c constraints.txt -e ".[$1]"
    touch ".venv/quasar-trt-$1"
}
