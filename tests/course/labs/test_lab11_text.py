"""Lab 11: WordPiece's and Unigram's choices, and copies of texts."""

from itertools import product

from course.lab11_data_pipeline import bpe, rivals
from course.lab11_data_pipeline.copies import near_duplicates


def splits(word):
    """Every way to cut a word."""
    for cuts in product((False, True), repeat=len(word) - 1):
        pieces, start = [], 0
        for place, cut in enumerate((*cuts, True), 1):
            if cut:
                pieces.append(word[start:place])
                start = place
        yield pieces


def test_the_likeliest_split_is_that_of_all_splits():
    words = bpe.words_of("low low lower newest newest widest")
    scores = rivals.unigram_pieces(words)
    for word in (b"lowest", b"newer", b"w"):
        known = [pieces for pieces in splits(word) if all(piece in scores for piece in pieces)]
        right = max(sum(scores[piece] for piece in pieces) for pieces in known)
        found = rivals.likeliest(word, scores)
        assert b"".join(found) == word and abs(sum(scores[piece] for piece in found) - right) < 1e-12


def test_wordpiece_prefers_parts_that_are_rare_elsewhere():
    words = {tuple(b"ab"[i : i + 1] for i in range(2)): 10, (b"a", b"c"): 5, (b"x", b"y"): 2}
    assert rivals.wordpiece_merges(words, 1) == [b"xy"]  # 2 / (2 * 2) is more than 10 / (15 * 10)
    assert rivals.longest_first(b"xyab", [b"xy", b"xya"]) == [b"xya", b"b"]


def test_copies_are_found_through_small_changes():
    text = " ".join(f"w{n}" for n in range(200))
    other = " ".join(f"v{n}" for n in range(200))
    assert near_duplicates([text, other, text.replace("w77 ", "changed ")]) == [2]
    assert near_duplicates([text, other]) == []
