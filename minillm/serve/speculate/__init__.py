"""Speculative decoding: several guessed tokens checked in one pass of the target, its distribution unchanged.

llm = LLM(target, proposer=DraftModel(draft), k=4)
"""

from minillm.serve.speculate.adaptive import AdaptiveK, Counts
from minillm.serve.speculate.proposal import Draft, DraftRequest, Proposer
from minillm.serve.speculate.proposers.draft_model import DraftModel
from minillm.serve.speculate.proposers.ngram import NGram
from minillm.serve.speculate.verify import verify

__all__ = ["AdaptiveK", "Counts", "Draft", "DraftModel", "DraftRequest", "NGram", "Proposer", "verify"]
