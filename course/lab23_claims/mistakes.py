"""Lab 23's answers that refute nothing, and others that do."""

import numpy as np
import torch

from course.kit.exercises import KnownAnswers

counterexample = KnownAnswers("counterexample")

counterexample.mistake("equal shards", {"[12, 4]": "[8, 8]"}, expect="no losses refute it")
counterexample.mistake("equal losses", {"[2.0, 4.0]": "[3.0, 3.0]"}, expect="every mean is the same")
counterexample.mistake("nearly equal shards", {"[12, 4]": "[9, 8]"}, expect="asked for are 15 %")
counterexample.mistake("a rank without tokens", {"[12, 4]": "[16, 0]"}, expect="at least 1")
counterexample.mistake("sums instead of means", {"[2.0, 4.0]": "[24.0, 16.0]"}, expect="mean loss in nats")
counterexample.mistake("a boolean for a loss", {"[2.0, 4.0]": "[True, 3.0]"}, expect="a number in nats")
counterexample.mistake("no number for a loss", {"[2.0, 4.0]": "[None, 4.0]"}, expect="a number in nats")
counterexample.mistake("integer pairs", {"[12, 4], [2.0, 4.0]": "[12, 2], [4, 4]"}, expect="first list is the tokens")
counterexample.mistake("one rank", {"[12, 4], [2.0, 4.0]": "[12], [2.0]"}, expect="at least 2")
counterexample.mistake("pairs", {"return tokens, losses": "return [(12, 2.0), (4, 4.0)]"}, expect="asks for two lists")


@counterexample.alternative("many ranks, one of them short")
def one_short():
    return [64] * 3 + [1], [2.0] * 3 + [9.0]


@counterexample.alternative("the long shard is the easy one")
def long_and_easy():
    return [100, 1], [1, 10]


@counterexample.alternative("15 % exactly, a little less in floating point")
def exactly_fifteen():
    return [1, 2], [0.4, 1.3]


@counterexample.alternative("elements of tensors")
def of_tensors():
    return list(torch.tensor([12, 4])), list(torch.tensor([2.0, 4.0]))


@counterexample.alternative("narrow types, in which products overflow")
def narrow():
    return list(np.array([8192] * 4 + [64], dtype=np.int16)), list(np.array([2.0] * 4 + [9.0], dtype=np.float16))
