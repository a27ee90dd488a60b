"""A whiteboard task in words: the exercise's own text from its lab, what the group or disk can do, what else to know.

A lab's reader has all of the notebook above the exercise; a candidate has the task alone. So a task carries the text
from its heading to its code, the calls that its arguments offer, and in `NOTES` whatever the lab says elsewhere.
"""

import re
import textwrap

from nbformat import NotebookNode

from course.kit import masters

WIDTH = 100

GROUP = """`group` offers `group.rank`, this rank's number from 0, `group.world_size`, the number of ranks, and
- in place, and returned: `group.all_reduce(x, op="sum")` (or "avg", "max", "min"), `group.broadcast(x, root=0)`
- a new tensor: `group.all_gather(x)`, [n, ...] -> [N * n, ...] in rank order; `group.reduce_scatter(x, op="sum")`,
  [N * n, ...] -> [n, ...]; `group.all_to_all(x, output_splits=None, input_splits=None)`, part j goes to rank j
- `group.send(x, dst)`, `group.recv(buffer, src)` and `group.exchange(send=(x, dst), recv=(buffer, src))`
- `group.barrier()`. With `async_op=True` a call returns a handle at once; its `wait()` returns the result."""

MESSAGES = """`group` offers `group.rank`, this rank's number from 0, `group.world_size`, the number of ranks, and
point-to-point messages, no collectives:
- `group.send(x, dst)` returns when rank dst has received
- `group.recv(buffer, src)` fills a tensor of the same size
- `group.exchange(send=(x, dst), recv=(buffer, src))` does both at once
Your function runs on several sizes of group; values, messages and their bytes are looked at."""

NOTES = {
    "ring-reduce-scatter": "Send to one neighbour only, one chunk a round. x.chunk(N) cuts x into N equal chunks.",
    "token-weighted-loss": "The caller runs backward on what you return and then averages gradients over the ranks.",
    "shard-partition": "There are world_size shards of equal length; one may begin and end inside a parameter.",
    "clip-across-shards": "Send as few bytes as possible.",
    "one-f-one-b-order": 'An order is a list of strings such as ["F0", "F1", "B0", "B1"]: F for a forward, B for a '
    "backward, then the number of the microbatch, counted from 0. Stages count from 0, too.",
    "balance-stages": "costs: a number per layer, in order. parts: how many stages there are.",
    "clip-global-norm": "Gradients are tensors; scale them in place.",
    "save-interval": "First order is enough: a failure repeats half an interval of work on average and costs one "
    "restart. The first number is where that waste has its minimum over the interval.",
    "straggler": "Return the ranks' numbers in ascending order, as a list.",
    "nucleus": "The nucleus is the smallest set of likeliest tokens whose probabilities sum to top_p or more.",
    "kv-bytes": "The cache holds the keys and values of the tokens that the model has read.",
    "lru-eviction": "num_blocks: blocks of the pool, numbered from 0. The dictionaries in __init__ are all the state "
    "there is; keep them right.",
    "block-keys": "tokens: a list of ids; block_size: tokens of a full block. A block that is not full has no key.",
    "sequences-that-fit": "parameters: of the whole model; layers, kv_heads and head_dim: of its attention. Return a "
    "whole number.",
    "merge-softmax": "out_a and lse_a belong to the first set of keys, out_b and lse_b to the second.",
    "dispatch-order": "experts: [tokens, k], the numbers of the chosen experts; experts_per_rank: the n of the text.",
    "capacity-drops": "experts: [tokens, k], numbers below num_experts.",
    "residual": "In speculative decoding the target has distribution p, the draft q. A token drawn from q is kept with "
    "probability min(1, p/q); after a rejection another one is drawn so that the result is distributed as p.",
    "verifier": "The first draft token that is rejected ends the pass: it is replaced by one sampled from the residual "
    "(p - q, where positive, normalised). If all are accepted, one more is sampled from the target's last row.",
    "tiled-forward": "The tokens of q, k and v are the same positions, in order; a query sees keys up to its own.",
    "tokens-to-experts": "E is the number of experts of all ranks, N the number of ranks.",
    "crossing-bytes": 'axes: name -> size, the last one varies fastest, such as {"dp": 2, "pp": 2, "tp": 4}: rank = '
    "(dp_index * 2 + pp_index) * 4 + tp_index.",
}


def statement(name: str, lab: str, notebook: NotebookNode, code: str) -> str:
    """Everything that a candidate needs to know, as plain text. code: the stub."""
    parts = [_exercise(name, notebook)]
    if re.search(r"\bgroup\b", code) and "`group` has" not in parts[0]:
        parts.append(MESSAGES if lab == "01_collectives" else GROUP)
    if name in NOTES:
        parts.append(NOTES[name])
    return "\n\n".join(filter(None, (_plain(part) for part in parts)))


def with_edits(text: str, edits: dict[str, str]) -> str:
    """The text, and below it what a wrong program has where the right one has something else. edits: {right: wrong}."""
    lines = [text]
    for right, wrong in edits.items():
        lines += ["The program has", _quoted(wrong or "(nothing)"), "where the course's answer has", _quoted(right)]
    return "\n".join(lines)


def _quoted(code: str) -> str:
    return textwrap.indent(textwrap.dedent(code).strip("\n"), "    ")


def for_terminal(text: str, columns: int) -> str:
    """Links as words, and lines that are wider than the terminal folded between words, with their own indentation."""
    text = re.sub(r"\[([^\]]+)\]\((https?:[^)]+)\)", r"\1 (\2)", text)
    return "\n".join(_folded(line, min(columns, WIDTH)) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = re.match(r"\s*(?:- )?", line)[0]
    return textwrap.fill(
        line.strip(),
        width,
        initial_indent=line[: len(line) - len(line.lstrip())],
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_comment(text: str) -> str:
    """The same at the top of a file."""
    return "\n".join(f"# {line}".rstrip() for line in text.split("\n"))


def _exercise(name: str, notebook: NotebookNode) -> str:
    """The markdown from the exercise's heading to the cell that checks it.

    Pictures may stand between the two. Where nothing stands under the heading, the section above it is the text.
    """
    end = next(place for place, cell in enumerate(notebook.cells) if name in masters.checked(cell))
    lines: list[str] = []
    for cell in reversed(notebook.cells[:end]):
        if cell.cell_type == "markdown":
            lines = [*cell.source.split("\n"), "", *lines]
        if any(line.startswith("### ") for line in lines) or masters.checked(cell):
            break
    headings = [place for place, line in enumerate(lines) if line.startswith("#")]
    tasks = [place for place in headings if re.search(r"\(\d+ minutes", lines[place])]
    first = tasks[-1] if tasks else 0
    if not any(line.strip() for line in lines[first + 1 :]):
        first = max((place for place in headings if place < first), default=0)
    return "\n".join([_title(lines[first]), *lines[first + 1 :]])


def _title(line: str) -> str:
    """A heading without its place in the lab and its minutes, which mean nothing to a candidate."""
    found = re.fullmatch(r"#+ (?:(?:(?:Task|Exercise) )?\d+(?: ·|\.) )?(.*?)(?: \([^()]*minutes[^()]*\))?", line)
    return f"# {found[1][:1].upper()}{found[1][1:]}" if found else line


def _plain(markdown: str) -> str:
    """Without links, headings and formulas' dollars; paragraphs refilled, lists and drawings kept."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", markdown)
    text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
    text = re.sub(r"\s?In the picture [^.]*\.", "", text)  # there is none beside a whiteboard
    text = re.sub(r"\$([^$\n]+)\$", lambda formula: _formula(formula[1]), text)
    paragraphs = [_refilled(each) for each in re.split(r"\n{2,}", text.strip("\n"))]
    return "\n\n".join(filter(None, paragraphs))


def _formula(tex: str) -> str:
    tex = re.sub(r"\\text\{([^}]*)\}", r"\1", tex)
    for old, new in ((r"\lceil", "ceil("), (r"\rceil", ")"), (r"\cdot", "·"), (r"\bmod", "mod"), (r"\log_2", "log2")):
        tex = tex.replace(old, new)
    return re.sub(r"\\(big|,|\s)|[\\{}]", " ", tex).replace("  ", " ").strip()


def _refilled(paragraph: str) -> str:
    lines = paragraph.split("\n")
    if any(re.match(r"( {4}|\s*[-|>] |\s*\d+\. )", line) for line in lines):
        return paragraph.rstrip()
    return textwrap.fill(" ".join(line.strip() for line in lines), WIDTH, break_long_words=False)
