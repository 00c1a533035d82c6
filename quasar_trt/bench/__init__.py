"""The four-cell benchmark: (BF16 or INT8 weights) x (plain or drafted), interleaved, each cell in a process of its own.

Definitions, used everywhere in this package:

- tokens/s: decode tokens / decode seconds. The clock of a prompt runs from the arrival of its first emitted tokens to the
  arrival of its last, and only tokens that arrive after the first count, so prefill is excluded.
- speed-up: a cell's tokens/s over that of BF16 plain within the same repeat (paired); the median over the repeats.
- weight bytes per step: what one pass reads of the weights, whatever its number of rows.
- peak memory: the highest resident size of the cell's process, mapped weights included.

The modules are imported one by one: a cell's process loads `cell` alone.
"""
