"""Drafting changes the speed, never the tokens: python examples/same_tokens.py ENGINE_DIR

Holds at any temperature: with a seed, the token of each position is the same whoever drafts, and however many tokens.
"""

import sys

from quasar_trt import Runner, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)
params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48)
prompt = "One two three four. One two three four. One two"
answers = []
for drafter, options in (
    (None, {}),
    ("ngram", {"num_speculative_tokens": 2}),
    ("suffix", {"num_speculative_tokens": 8}),
):
    runner = Runner.from_dir(sys.argv[1], drafter=drafter, drafter_options=options)
    token_ids = list(runner.generate(prompt, params)[0].outputs[0].token_ids)
    answers.append(token_ids)
    print(f"drafter {drafter} {options}: {len(token_ids)} tokens in {runner.stats.num_verify_steps} verify steps")
assert answers[0] == answers[1] == answers[2]
print("the same tokens each time")
