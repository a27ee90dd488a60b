"""Text to token ids and back, losslessly for any text and any bytes.

The work is done by the `tokenizers` library on a Hugging Face `tokenizer.json`, so `transformers` reads the same file
and minillm reads the byte-level tokenizers of Llama 3, Qwen and GPT-2. Lab 11 builds the mechanism itself.

The committed tokenizer.json (4096 tokens) was made by `python -m minillm.data tokenizer` from the training files of
the corpus; tokenizer.source.json beside it says from which text.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SEPARATOR = "<|endoftext|>"
COMMITTED = Path(__file__).with_name("tokenizer.json")
# What other byte-level tokenizers call their end of text, when no tokenizer_config.json says so.
_KNOWN_EOS = (SEPARATOR, "<|end_of_text|>", "<|im_end|>", "</s>")

# A printable stand-in for each byte (GPT-2's): itself where it prints, else the next code point from 256 up.
_PRINTS = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTS]
BYTE_TO_CHAR = {byte: chr(byte) for byte in _PRINTS} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> "Tokenizer":
    """Byte-level BPE with GPT-2's cuts and one special token, the document separator (id 0).

    The same texts give the same tokenizer. Raises ValueError if `vocab_size` cannot hold the separator and 256 bytes.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size {vocab_size} is too small: the 256 bytes and {SEPARATOR} need 257 tokens")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, SEPARATOR)


class Tokenizer:
    """`Tokenizer.load()` is the committed one, `Tokenizer.load(path)` that of a file or a checkpoint folder."""

    def __init__(self, backend: tokenizers.Tokenizer, eos: str | None, bos: str | None = None):
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if not vocabulary.keys() >= CHAR_TO_BYTE.keys():
            raise ValueError(
                "this tokenizer is not byte-level BPE: minillm reads those of Llama 3, Qwen, GPT-2 and its own"
            )
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.eos, self.bos = eos, bos
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.specials = {t.content: i for i, t in sorted(backend.get_added_tokens_decoder().items()) if t.special}
        self._special_ids = frozenset(self.specials.values())

    @classmethod
    def load(cls, path: str | Path = COMMITTED) -> "Tokenizer":
        """Reads a tokenizer.json, or the one in a folder (tokenizer_config.json beside it names the special tokens).

        Raises ValueError if there is none, if it cannot be parsed or if it is not byte-level.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text("utf-8"))
        except OSError as error:
            raise ValueError(
                f"no tokenizer at {file} ({error.strerror}): give a tokenizer.json or its folder"
            ) from None
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file} is not a readable tokenizer.json: {error}") from None
        known = backend.get_vocab(with_added_tokens=True)
        config_file = file.with_name("tokenizer_config.json")
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        names = {key: config.get(key) for key in ("eos_token", "bos_token")}
        eos, bos = (name["content"] if isinstance(name, dict) else name for name in names.values())
        eos = eos or next((name for name in _KNOWN_EOS if name in known), None)
        return cls(backend, eos, bos)

    def save(self, path: str | Path) -> None:
        """Writes `path` if it ends in .json, else tokenizer.json and tokenizer_config.json into that folder."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(self._backend.to_str() + "\n", "utf-8")
            return
        path.mkdir(parents=True, exist_ok=True)
        self.save(path / "tokenizer.json")
        names = {"eos_token": self.eos, "bos_token": self.bos}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {key: name for key, name in names.items() if name is not None}
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. What looks like a special token is plain text unless `special` is set:
        text from a corpus or a user must not be able to end a document."""
        if not special or not self.specials:
            return self.encode_batch([text])[0].tolist()
        parts = re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text)
        ids = ([self.specials[part]] if part in self.specials else self.encode(part) for part in parts)
        return [token for part in ids for token in part]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, as int64 arrays; uses all cores. Raises ValueError for half a surrogate pair."""
        self._backend.encode_special_tokens = True  # that is: as the plain text they are
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise ValueError(
                "the text is no Unicode string (a lone surrogate?): use encode_bytes for raw bytes"
            ) from None
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes: valid UTF-8 as `encode` does, each other byte as its own token."""
        ids: list[int] = []
        while data:
            try:
                return ids + self.encode(data.decode("utf-8"))
            except UnicodeDecodeError as error:
                ids += self.encode(data[: error.start].decode("utf-8")) if error.start else []
                ids += [self._backend.token_to_id(BYTE_TO_CHAR[byte]) for byte in data[error.start : error.end]]
                data = data[error.end :]
        return ids

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of each token, joined. Raises ValueError for an id outside the vocabulary."""
        table, skipped = self._token_bytes, self._special_ids if skip_special else ()
        ids = [int(token) for token in ids]
        if wrong := [token for token in ids if token not in table]:
            raise ValueError(
                f"token id {wrong[0]} is not in this vocabulary of {self.vocab_size}: use the tokenizer it came from"
            )
        return b"".join(table[token] for token in ids if token not in skipped)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD. Raises as `decode_bytes`."""
        return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")

    def stream(self, skip_special: bool = True) -> Callable[..., str]:
        """A function to call with each new id: it returns the text that is now complete.

        A character spread over several tokens appears with its last one; `final=True` flushes what is left.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def push(*ids: int, final: bool = False) -> str:
            return decoder.decode(self.decode_bytes(ids, skip_special), final)

        return push

    @property
    def eos_id(self) -> int:
        """Id of the document separator. Raises ValueError if the tokenizer has none."""
        token_id = None if self.eos is None else self._backend.token_to_id(self.eos)
        if token_id is None:
            raise ValueError(
                f"this tokenizer has no end-of-text token (eos {self.eos!r}): name it in tokenizer_config.json"
            )
        return token_id

    @property
    def bos_id(self) -> int | None:
        """Id of the token a prompt begins with, if the tokenizer has one."""
        return None if self.bos is None else self._backend.token_to_id(self.bos)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's definition: equal fingerprints give equal ids and separators."""
        return hashlib.sha256(f"{self._backend.to_str()}\n{self.eos}".encode()).hexdigest()

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        plain = self._backend.get_vocab(with_added_tokens=False)
        table = {
            i: bytes(map(CHAR_TO_BYTE.get, token)) for token, i in plain.items() if CHAR_TO_BYTE.keys() >= set(token)
        }
        added = self._backend.get_added_tokens_decoder()
        return table | {token_id: token.content.encode() for token_id, token in added.items()}
