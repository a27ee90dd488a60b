"""The next token: `reference.py` for one sequence, `batch.py` for all sequences of a step.

`selection.py` finds the cut of top-p and of a large top-k without sorting a vocabulary, and `next_tokens.py` adds the
sampled tokens to their answers.
"""
