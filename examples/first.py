"""Generate from an engine directory: python examples/first.py ENGINE_DIR"""

import sys

from quasar_trt import Runner, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)
runner = Runner.from_dir(sys.argv[1])  # drafter="suffix" is the default
prompts = ["The capital of France is", "def fibonacci(n):"]
for output in runner.generate(prompts, SamplingParams(temperature=0, max_tokens=32)):
    print(repr(output.prompt), "->", repr(output.outputs[0].text))
print(f"mean acceptance length {runner.stats.mean_acceptance_length:.2f}")
