"""Tests compute on tiny tensors: one thread is many times faster than several that contend for the cores."""

import torch

torch.set_num_threads(1)
