"""Numbers as they are said aloud, in the unit that a question asks for."""

import re


def in_unit(guess: object, unit: str) -> float:
    """A number as it is said aloud: 1.2e9, 1.2 GB, about 3 GiB, 40 %, 1/6, 25 ms, 3.5 days, 12k. ValueError if not.

    A prefix or a unit that belongs to the question's converts; another unit is refused, never guessed. Where the
    question asks for a plain number, "rank 3" and "ZeRO-3" are 3.
    """
    unread = ValueError(f"{str(guess)[:40]!r} is no number: write it as 1.2e9, with its unit if you like.")
    if not isinstance(guess, str):
        try:
            return float(guess)
        except (TypeError, ValueError, OverflowError):
            raise unread from None
    text = _as_digits(_bare(guess))
    if not unit:
        text = re.sub(r"^(?:rank|stage|zero)\b[\s-]*(?:stage )?#?(?=\d+$)", "", text, flags=re.IGNORECASE)
    parts = re.fullmatch(r"([-+]?[\d.,]*\d\.?(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan))\s*([^\d\s].*)?", text, re.IGNORECASE)
    if not parts:
        raise unread
    digits, said = parts[1], (parts[2] or "").strip()
    if "," in digits and not re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", digits):
        raise ValueError(f"{guess!r} is no number: a comma stands between thousands, a point before decimals.")
    try:
        number = float(digits.replace(",", ""))
    except ValueError:
        raise unread from None
    return number * _times(said, unit, guess)


_BEFORE = (
    r"(?:about|around|roughly|approximately|approx\.?|circa|ca\.|some|nearly|almost|at most|up to|it takes|it is|[~≈=])"
)
_PER_ONE = r"per (?:GPU|card|rank|node|device|request|step)"
_BEHIND = rf"(?:or so|in all|in total|altogether|each|{_PER_ONE}|(?:are|is) missing|faster|slower|longer|more)"
_LONG = {
    r"(kilo|mega|giga|tera|peta)(byte|bit)s?\b": lambda said: said[1][0].upper().replace("K", "k") + _SHORT[said[2]],
    r"(kibi|mebi|gibi|tebi)bytes?\b": lambda said: said[1][0].upper() + "iB",
    r" per second\b": lambda _: "/s",
    r"per ?cent\b": lambda _: "%",
    r"\bGPU hours\b": lambda _: "GPU-hours",
    r"\b(byte)s?/s": lambda _: "B/s",
    r"\b(?:tokens?|tok|t)/s\b|\btps\b": lambda _: "tokens/s",
}
_SHORT = {"byte": "B", "bit": "bit"}


def _bare(guess: str) -> str:
    """Without the words that people say around a number, and with short names of units."""
    text = re.sub(rf"^(?:{_BEFORE}\s*)+", "", guess.strip().replace("−", "-"), flags=re.IGNORECASE)
    text = re.sub(rf"(?:\s+{_BEHIND})+$", "", text, flags=re.IGNORECASE)
    for long, short in _LONG.items():
        text = re.sub(long, short, text, flags=re.IGNORECASE)
    return f"{text.replace('$', '').strip()} dollars" if "$" in text else text


_COUNTS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_PARTS = ["half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]


def _as_digits(text: str) -> str:
    """1/6, one sixth, a quarter, three hours and 1.27 x 10^12 in plain digits."""
    text = re.sub(r"(?<=\d)\s*[x×*·]\s*10(?:\^|\*\*)(-?\d+)", r"e\1", text)
    count = rf"\b({'|'.join(_COUNTS)}|an?(?=\s))\b"
    part = re.match(rf"(?:{count}\s+)?({'|'.join(_PARTS)})s?\b", text, re.IGNORECASE)
    if part:
        return _replaced(text, part, _count(part[1] or "a") / (_PARTS.index(part[2].lower()) + 2))
    word = re.match(count, text, re.IGNORECASE)
    if word:
        return _replaced(text, word, _count(word[1]))
    fraction = re.match(r"([-+]?\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)(?![\d.,/])", text)
    if fraction and float(fraction[2]):
        return _replaced(text, fraction, float(fraction[1]) / float(fraction[2]))
    return text


def _count(word: str) -> int:
    return _COUNTS.index(word.lower()) + 1 if word.lower() in _COUNTS else 1


def _replaced(text: str, match: re.Match, number: float) -> str:
    return f"{number!r} {text[match.end() :].strip()}".strip()


_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0, "weeks": 7 * 86400.0}
_NAMES = {
    "sec": "s", "secs": "s", "second": "s", "seconds": "s", "millisecond": "ms", "milliseconds": "ms",
    "minute": "min", "minutes": "min", "mins": "min", "hour": "h", "hours": "h", "d": "days", "day": "days",
    "week": "weeks",
    "byte": "B", "bytes": "B", "flops": "FLOP", "flop": "FLOP", "percent": "%", "token": "tokens",
    "hr": "h", "hrs": "h", "usd": "dollars",
    "µs": "us", "μs": "us", "microsecond": "us", "microseconds": "us", "bit": "bits",
}  # fmt: skip
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_WORDS = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}


def _times(said: str, unit: str, guess: str) -> float:
    """What a spoken unit multiplies the number with."""
    word, _, rest = said.partition(" ")
    if word.lower() in _WORDS:
        return _WORDS[word.lower()] * _times(rest.strip(), unit, guess)
    spoken, wanted = _NAMES.get(said.lower(), said), _NAMES.get(unit.lower(), unit)
    if spoken == "%" and wanted in ("", "%"):
        return 0.01
    if spoken in _TIME and wanted in _TIME:
        return _TIME[spoken] / _TIME[wanted]
    if spoken in ("", wanted) or (wanted == "" and spoken in _COUNTED) or wanted.endswith(f"-{spoken}"):
        return 1.0
    if re.fullmatch("[kmgt]i?b(/s)?", spoken):  # typed without a shift key, bytes are meant
        spoken = spoken[0].upper() + spoken[1:].replace("b", "B")
    if wanted.endswith("Wh"):
        return _power(spoken, "Wh", guess, unit) / _power(wanted, "Wh", guess, unit)
    if wanted == "" and spoken == "B":
        return 1e9  # 70B parameters
    bits = re.sub("bits?", "b", spoken)
    if wanted in ("B", "B/s") and bits.endswith(wanted.replace("B", "b")):
        return _power(bits, wanted.replace("B", "b"), guess, unit) / 8
    return _power(spoken, wanted, guess, unit)


_COUNTED = {
    "times", "x", "parameters", "params", "tokens", "sequences", "stages", "ranks", "gpus", "GPUs", "service times",
    "rounds", "nodes", "blocks", "microbatches", "experts", "requests", "FLOP/B", "FLOP/byte",
    "FLOPs/byte", "FLOPs per byte", "steps",
}  # fmt: skip


def _power(spoken: str, base: str, guess: object, unit: str) -> float:
    """10^9 of "GB", with base "B"."""
    for prefix, factor in (*_BINARY.items(), *_DECIMAL.items()):
        stem = spoken.removeprefix(prefix).strip() if spoken.startswith(prefix) else None
        if stem is not None and (stem == base or _NAMES.get(stem.lower(), stem) in ("", base)):
            return factor
    expects = f"the question is in {unit}" if unit else "the question asks for a plain number"
    raise ValueError(f"{guess!r} cannot be read: {expects}.")
