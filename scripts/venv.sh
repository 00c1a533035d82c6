# Sourced by the other scripts: `install_into_venv EXTRA` makes .venv, installs this checkout there and activates it.
# pip's own environment variables and configuration apply (an index of CPU builds of torch, a proxy, a cache).

cd "$(dirname "${BASH_SOURCE[0]}")/.."

install_into_venv() {
    local installed=".venv/quasar-trt-$1"
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    . .venv/bin/activate
    # The checkout is installed editable, so only packaging and native sources ask for another installation.
    if [ ! -e "$installed" ] || [ -n "$(find setup.py constraints.txt plugins/csrc quasar_trt/engines/csrc -newer "$installed")" ]; then
        python -m pip install --progress-bar on -c constraints.txt -e ".[$1]"
        touch "$installed"
    fi
}
