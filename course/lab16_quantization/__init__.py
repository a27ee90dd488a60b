"""Lab 16 · Quantization."""
