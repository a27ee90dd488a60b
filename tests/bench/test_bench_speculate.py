"""bench speculate: its rows on little text; what is timed was right before."""

from types import SimpleNamespace

import pytest

from minillm.bench import bench, speculate
from minillm.data import Tokenizer, corpus


@pytest.mark.full
def test_rows_and_formulas(monkeypatch):
    for name, value in (
        ("PROMPTS", 1),
        ("NEW_TOKENS", 8),
        ("PROMPT_TOKENS", 24),
        ("BATCHES", (1,)),
        ("KINDS", ("code",)),
    ):
        monkeypatch.setattr(speculate, name, value)
    report = bench("speculate", proposers=("draft",))
    names = [(row.name.split(":")[0], row.peer) for row in report.rows]
    assert len(report.rows) == 5 and len(set(names)) == 3 and report.ok
    assert {row.peer for row in report.rows} == {
        "minillm without guesses",
        "formula",
        "transformers, assistant_model",
    }
    assert all(row.ratio > 0 and row.ours > 0 for row in report.rows)
    [formula] = [row for row in report.rows if row.name.startswith("draft") and "per pass" in row.name][:1]
    assert 1 <= formula.theirs <= speculate.K["draft"] + 1
    assert len(bench("speculate", proposers=("draft",), peers=False).rows) == 4


def test_prompts_are_the_same_every_time_and_of_one_length(monkeypatch):
    tokenizer, some = Tokenizer.load(), sorted(corpus().documents("validation"), key=lambda each: each.name)[:12]
    monkeypatch.setattr(speculate, "corpus", lambda: SimpleNamespace(documents=lambda split: some))
    first = speculate.prompts("prose", tokenizer)
    assert first == speculate.prompts("prose", tokenizer) and len(first) == speculate.PROMPTS
    assert {len(ids) for ids in first} == {speculate.PROMPT_TOKENS}
    assert speculate.prompts("code", tokenizer) != first


def test_too_few_repeats():
    with pytest.raises(ValueError, match="repeats=2 is too few"):
        bench("speculate", repeats=2)
