"""Stream the answer to a chat message: python examples/stream.py ENGINE_DIR MESSAGE"""

import sys

from quasar_trt import Runner, SamplingParams

if len(sys.argv) != 3:
    sys.exit(__doc__)
runner = Runner.from_dir(sys.argv[1])
prompt = runner.chat_ids([{"role": "user", "content": sys.argv[2]}])
for output in runner.stream(prompt, SamplingParams(temperature=0, max_tokens=128)):
    print(output.text, end="", flush=True)
print()
