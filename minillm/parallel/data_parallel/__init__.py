"""Data parallelism: the batch is cut, gradients are averaged."""
