"""Text to token ids and back, losslessly for any text and any bytes.

The work is done by the `tokenizers` library on a Hugging Face `tokenizer.json`, so `transformers` reads the same file
and minillm reads every kind of it: byte-level BPE (Llama 3, Qwen, GPT-2), SentencePiece's BPE and unigrams (Llama 2,
Gemma), WordPiece and whole words. Only byte-level ones are lossless. Lab 11 builds the mechanism itself.

The committed tokenizer.json (4096 tokens) was made by `python -m minillm.data tokenizer` from the training files of
the corpus; tokenizer.source.json beside it says from which text.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models

from minillm.data.chat import answer_spans, one_of, read_template, render, unused

SEPARATOR = "<|endoftext|>"
COMMITTED = Path(__file__).with_name("tokenizer.json")
# What other byte-level tokenizers call their end of text, when no tokenizer_config.json says so.
_KNOWN_EOS = (SEPARATOR, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")
NO_UNICODE = "the text is not a Unicode string (a lone surrogate?): use encode_bytes for raw bytes"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's, of a byte that is in no other token

# A printable stand-in for each byte (GPT-2's): itself where it prints, else the next code point from 256 up.
_PRINTS = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTS]
BYTE_TO_CHAR = {byte: chr(byte) for byte in _PRINTS} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
CHAR_TO_BYTE = {char: byte for byte, char in BYTE_TO_CHAR.items()}


class Tokenizer:
    """`Tokenizer.load()` is the committed one, `Tokenizer.load(path)` that of a file or a checkpoint folder."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos: str | None,
        bos: str | None = None,
        *,
        adds_bos: bool = True,
        chat_template: str | None = None,
    ):
        """adds_bos: whether a prompt begins with `bos`. chat_template: a Jinja program, see `chat`."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.eos, self.bos, self.adds_bos, self.chat_template = eos, bos, adds_bos, chat_template
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        steps = {step["type"]: step for step in decoder.get("decoders", [decoder]) if step}
        self.byte_level = "ByteLevel" in steps
        self._merges = isinstance(backend.model, models.BPE)
        self._renamed: dict[str, tuple] = {}  # what `_with_names` returned, by its sign
        self._spaces = "▁" in str([steps.get("Replace"), steps.get("Metaspace")])  # SentencePiece's way to write one
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.specials = {t.content: i for i, t in sorted(backend.get_added_tokens_decoder().items()) if t.special}
        self._special_ids = frozenset(self.specials.values())

    @classmethod
    def load(cls, path: str | Path = COMMITTED) -> "Tokenizer":
        """Reads a tokenizer.json, or the one in a folder (tokenizer_config.json beside it names the special tokens).

        ValueError if there is none or it cannot be parsed. A chat template is read, too; chat_template.jinja's first.
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
        return cls(
            backend, eos, bos, adds_bos=_adds_bos(backend, config), chat_template=read_template(file.parent, config)
        )

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
        names |= {"chat_template": self.chat_template, "add_bos_token": None if self.adds_bos else False}
        config |= {key: name for key, name in names.items() if name is not None}
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of `text`. What looks like a special token is plain text unless `special` is set:
        text from a corpus or a user must not be able to end a document."""
        if special and self.specials:
            return self._encode_apart(text)
        return self.encode_batch([text])[0].tolist()

    def chat(self, messages: Sequence[Mapping[str, Any]], *, reply: bool = True, **variables: Any) -> list[int]:
        """Token ids of a conversation, `[{"role": "user", "content": "..."}, ...]`, by the tokenizer's chat template.

        reply: ends with what begins the model's turn. variables: more that the template knows (`enable_thinking`).
        Special tokens count only where the template writes them. ValueError if there is no template, or if it refuses.
        """
        mark = unused(json.dumps(messages, ensure_ascii=False, default=str))
        return self._encode_apart(self._written(messages, reply, mark, **variables), mark)

    def chat_pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], bool]]:
        """A conversation in pieces: (ids, whether the assistant said them). An answer is encoded by itself, as a model
        says it, or after its prompt where that matters (`_piece`). ValueError as `answer_spans`."""
        mark = unused(json.dumps(messages, ensure_ascii=False, default=str))
        whole, spans = answer_spans(messages, lambda some, reply: self._written(some, reply, mark))
        return [(self._piece(whole, start, stop, mark), is_answer) for start, stop, is_answer in spans]

    def _piece(self, text: str, start: int, stop: int, mark: str) -> list[int]:
        """Ids of text[start:stop]. SentencePiece's tokenizers put a space before a text, which a part has not."""
        if start and not self.byte_level:
            before, through = self._encode_apart(text[:start], mark), self._encode_apart(text[:stop], mark)
            if through[: len(before)] == before:
                return through[len(before) :]
        return self._encode_apart(text[start:stop], mark)

    def _written(self, messages: Sequence[Mapping[str, Any]], reply: bool, mark: str, **variables: Any) -> str:
        """The text of a conversation by the template, with `mark` before what only looks like a special token."""
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template: give the text itself, or a model made for chats")
        names = {"bos_token": self.bos or "", "eos_token": self.eos or "", "add_generation_prompt": reply}
        return render(self.chat_template, messages, self.specials, mark, **names | variables)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, as int64 arrays; uses all cores. Raises ValueError for a lone surrogate."""
        self._backend.encode_special_tokens = True  # that is: as the plain text they are
        try:
            if not self._merges:
                return [np.array(self._encode_apart(text, special=False), dtype=np.int64) for text in texts]
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise ValueError(NO_UNICODE) from None
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes: valid UTF-8 as `encode` does, each other byte as its own token."""
        ids: list[int] = []
        while data:
            try:
                return ids + self.encode(data.decode("utf-8"))
            except UnicodeDecodeError as error:
                ids += self.encode(data[: error.start].decode("utf-8")) if error.start else []
                ids += [self._byte_id(byte) for byte in data[error.start : error.end]]
                data = data[error.end :]
        return ids

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = False) -> bytes:
        """The bytes of each token, joined; with SentencePiece a text begins with a space that `decode` leaves out.

        Raises ValueError for an id outside the vocabulary.
        """
        table, skipped = self._token_bytes, self._special_ids if skip_special else ()
        ids = self._checked(ids)
        return b"".join(table[token] for token in ids if token not in skipped)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD. Raises as `decode_bytes`."""
        if self.byte_level:
            return self.decode_bytes(ids, skip_special).decode("utf-8", errors="replace")
        return self._backend.decode(self._checked(ids), skip_special_tokens=skip_special)

    def stream(self, skip_special: bool = True) -> Callable[..., str]:
        """A function to call with each new id: it returns the text that is now complete.

        A character spread over several tokens appears with its last one; `final=True` flushes what is left.
        """
        if not self.byte_level:
            return self._stream_by_context(skip_special)
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
        """Id of the token a prompt begins with, if the tokenizer has one and adds it."""
        return None if self.bos is None or not self.adds_bos else self._backend.token_to_id(self.bos)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's definition: equal fingerprints give equal ids and separators."""
        return hashlib.sha256(f"{self._backend.to_str()}\n{self.eos}".encode()).hexdigest()

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        added = {token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items()}
        plain = {i: token for token, i in self._backend.get_vocab(with_added_tokens=False).items() if i not in added}
        if self.byte_level:
            known = CHAR_TO_BYTE.keys()
            table = {i: bytes(map(CHAR_TO_BYTE.get, token)) for i, token in plain.items() if known >= set(token)}
        elif self._spaces:
            table = {i: _sentencepiece_bytes(token) for i, token in plain.items()}
        else:  # what a token adds depends on its neighbours: this is what it is alone
            table = {i: self._backend.decode([i]).encode() for i in plain}
        return table | {i: content.encode() for i, content in added.items()}

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._token_bytes if self.byte_level else self._backend.get_vocab().values())

    def _checked(self, ids: Iterable[int]) -> list[int]:
        ids = [int(token) for token in ids]
        if wrong := [token for token in ids if token not in self._ids]:
            raise ValueError(
                f"token id {wrong[0]} is not in this vocabulary of {self.vocab_size}: use the tokenizer it came from"
            )
        return ids

    def _byte_id(self, byte: int) -> int:
        name = BYTE_TO_CHAR[byte] if self.byte_level else f"<0x{byte:02X}>"
        if (token := self._backend.token_to_id(name)) is None:
            raise ValueError(f"this tokenizer has no token for byte {byte}: give it text that is UTF-8")
        return token

    def _stream_by_context(self, skip_special: bool) -> Callable[..., str]:
        """`stream` for tokens whose text depends on the one before: it is decoded along, then cut off."""
        ids: list[int] = []
        start = end = 0  # ids[start:end] have been shown and are the context

        def push(*new: int, final: bool = False) -> str:
            nonlocal start, end
            ids.extend(new)
            shown, text = (self.decode(each, skip_special) for each in (ids[start:end], ids[start:]))
            if len(text) <= len(shown) or (text.endswith("\ufffd") and not final):
                return ""
            start, end = end, len(ids)
            return text[len(shown) :]

        return push

    def _encode_apart(self, text: str, mark: str = "", special: bool = True) -> list[int]:
        """Ids of a text in which special tokens count (`special`), but for those whose characters follow `mark`."""
        sign, pattern = unused(text + mark), one_of(self.specials, unless_after=mark)
        backend, names, ids = self._renamed.get(sign) or self._renamed.setdefault(sign, self._with_names(sign))
        if special and pattern is not None:
            text = pattern.sub(lambda hit: names[hit[0]], text)
        text = text.replace(mark, "") if mark else text
        try:
            return [ids.get(token, token) for token in backend.encode(text, add_special_tokens=False).ids]
        except TypeError:
            raise ValueError(NO_UNICODE) from None

    def _with_names(self, sign: str) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """(this tokenizer with other names for its special tokens, name -> that name, id there -> id here).

        No text without `sign` contains these names, and a special token's own name is plain text. So the library cuts
        a text in which both occur as it should.
        """
        definition = json.loads(self._backend.to_str())
        names = {name: f"{sign}{number}{sign}" for number, name in enumerate(self.specials)}
        contents = [added["content"] for added in definition["added_tokens"]]
        for added in definition["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        model = definition["model"]
        if not self._merges:  # these look up whole words, special tokens among them
            model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
            if isinstance(model["vocab"], dict):
                model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
            else:
                model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        definition["post_processor"] = None
        backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
        ours, theirs = self._backend.token_to_id, backend.token_to_id
        return backend, names, {theirs(names.get(each, each)): ours(each) for each in contents}


def _sentencepiece_bytes(token: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace("▁", " ").encode()


def _adds_bos(backend: tokenizers.Tokenizer, config: dict) -> bool:
    """What the configuration says; else what the tokenizer does by itself, if it adds tokens at all."""
    if config.get("add_bos_token") is not None:
        return bool(config["add_bos_token"])
    return backend.post_processor is None or bool(backend.encode("", add_special_tokens=True).ids)
