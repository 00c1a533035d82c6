"""Two benchmarks: the four cells, and the kernels against the speed of memory.

The four cells are (BF16 or INT8 weights) x (plain or drafted), interleaved, each in a process of its own: `run`. The benchmark of
kernels times linears and engine passes beside the read bandwidth: `kernels`.

Definitions, used everywhere in this package:

- tokens/s: decode tokens / decode seconds. The clock of a prompt runs from the arrival of its first emitted tokens to the
  arrival of its last, and only tokens that arrive after the first count, so prefill is excluded.
- speed-up: a cell's tokens/s over that of BF16 plain within the same repeat (paired); the median over the repeats.
- drafting gain: tokens/s drafted over plain with the same weights, per prompt, paired within a repeat.
- read bandwidth: bytes/s at which the threads of a pool read memory that no cache holds.
- weight bytes per step: what one pass reads of the weights, whatever its number of rows.
- peak memory: the highest resident size of the cell's process, mapped weights included.

The modules are imported one by one: a cell's process loads `cell` alone.
"""
