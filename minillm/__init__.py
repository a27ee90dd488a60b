"""minillm: distributed training and serving of large language models, from scratch, measured on your own machine."""

__version__ = "0.1.0"
