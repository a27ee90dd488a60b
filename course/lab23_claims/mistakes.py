"""Lab 23's answers that refute nothing, and others that do."""

from course.kit.exercises import alternative, mistake

mistake("counterexample", "equal shards", expect="no losses refute it")(lambda: ([8, 8], [2.0, 4.0]))
mistake("counterexample", "equal losses", expect="every mean is the same")(lambda: ([12, 4], [3.0, 3.0]))
mistake("counterexample", "nearly equal shards", expect="asked for are 15 %")(lambda: ([9, 8], [2.0, 4.0]))
mistake("counterexample", "a rank without tokens", expect="at least 1")(lambda: ([16, 0], [2.0, 4.0]))
mistake("counterexample", "sums instead of means", expect="mean loss in nats")(lambda: ([12, 4], [24.0, 16.0]))
mistake("counterexample", "one rank", expect="at least 2")(lambda: ([12], [2.0]))
mistake("counterexample", "pairs", expect="asked for are two lists")(lambda: [(12, 2.0), (4, 4.0)])


@alternative("counterexample", "many ranks, one of them short")
def one_short():
    return [64] * 3 + [1], [2.0] * 3 + [9.0]


@alternative("counterexample", "the long shard is the easy one")
def long_and_easy():
    return [100, 1], [1, 10]
