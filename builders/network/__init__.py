"""The decoder as a TensorRT network: written once, for TensorRT and TensorRT-RTX."""
