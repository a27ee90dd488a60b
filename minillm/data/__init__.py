"""Text to tokens to batches: an embedded corpus, a lossless tokenizer, packing, a resumable sampler, prefetching.

text    = corpus()                                   # or corpus("folder")
tokens  = tokenize(text, Tokenizer.load(), "train")  # cached and memory-mapped
dataset = TokenDataset(tokens, seq_len=256)
with Loader(dataset, batch_size=8, rank=group.rank, world_size=group.world_size) as loader: ...

Chats, of which the answers alone are learnt: conversations.py. Pairs of answers: preferences.py.
"""

from minillm.data.conversations import ConversationDataset, Conversations, read_conversations
from minillm.data.corpus import Corpus, Document, corpus
from minillm.data.dataset import TokenDataset
from minillm.data.loader import Batch, Loader
from minillm.data.preferences import PreferenceDataset, Preferences, dataset_of, read_preferences
from minillm.data.prefetch import Prefetcher
from minillm.data.sampler import ShardedSampler
from minillm.data.tokenizer import Tokenizer
from minillm.data.tokenizer_training import train_tokenizer
from minillm.data.tokens import Tokens, read_tokens, tokenize, write_tokens

__all__ = [
    "Batch",
    "ConversationDataset",
    "Conversations",
    "Corpus",
    "Document",
    "Loader",
    "PreferenceDataset",
    "Preferences",
    "Prefetcher",
    "ShardedSampler",
    "TokenDataset",
    "Tokenizer",
    "Tokens",
    "corpus",
    "dataset_of",
    "read_conversations",
    "read_preferences",
    "read_tokens",
    "tokenize",
    "train_tokenizer",
    "write_tokens",
]
