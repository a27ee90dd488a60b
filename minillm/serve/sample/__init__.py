"""The next token: `reference.py` for one sequence, `batch.py` for all sequences of a step.

`next_tokens.py` turns what was sampled into answers that have grown.
"""
