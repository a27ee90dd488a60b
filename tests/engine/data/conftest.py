import pytest

from minillm.data import Tokenizer, corpus, tokenize


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.load()


@pytest.fixture(scope="session")
def library_tokens(tokenizer, tmp_path_factory):
    """(train, validation) tokens of the whole standard library, made once."""
    cache = tmp_path_factory.mktemp("tokens")
    return tuple(tokenize(corpus(), tokenizer, split, cache) for split in ("train", "validation"))
