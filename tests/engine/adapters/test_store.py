"""The store of adapters: never over its budget, never without what is in use, never half a file."""

import json
import os
import random
import shutil
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minillm.adapters import LoraConfig, attach
from minillm.adapters.grouped import NO_ADAPTER
from minillm.adapters.peft_folder import CONFIG, TENSORS, read_peft
from minillm.adapters.store import AdapterStore, fingerprint_of
from minillm.model import ModelConfig, load_hf, save_hf
from minillm.model.generate import folder_of
from minillm.predict.training.adapters import Adapters, adapters_that_fit
from minillm.serve import LLM, SamplingParams
from tests.engine.adapters.serving import CONFIG as SHAPE
from tests.engine.adapters.serving import base, merged, right, write_adapter

TINY = ModelConfig(11, 8, 12, 1, 2, 1, max_seq_len=8)
RANKS = (1, 2, 3, 5, 8, 13)
DAMAGES = ("cut", "gone", "other values", "not finite", "half a matrix", "other rank", "empty", "config gone")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return [write_adapter(folder / str(rank), number, TINY, rank) for number, rank in enumerate(RANKS)]


def damage(folder, kind: str) -> None:
    """Leaves a folder that no longer holds what it held."""
    tensors, content = folder / TENSORS, (folder / TENSORS).read_bytes()
    values = load_file(tensors)
    name, first = next(iter(values.items()))
    if kind == "cut":
        tensors.write_bytes(content[: len(content) // 2])
    elif kind in ("gone", "config gone"):
        (tensors if kind == "gone" else folder / CONFIG).unlink()
    elif kind == "empty":
        tensors.write_bytes(b"")
    elif kind == "other values":
        save_file(values | {name: first + 1}, tensors)
    elif kind == "not finite":
        save_file(values | {name: first / 0}, tensors)
    elif kind == "half a matrix":
        save_file({each: value for each, value in values.items() if each != name}, tensors)
    elif kind == "other rank":
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | {"r": config["r"] + 1}))


def restore(original, folder) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)


def is_whole(found, adapter) -> bool:
    """Whether what is resident is the adapter as it was registered, to the bit."""
    both = [(found[name], pair) for name, pair in adapter.matrices.items()]
    same = all(torch.equal(mine.a, a) and torch.equal(mine.b, b) for mine, (a, b) in both)
    return found.keys() == adapter.matrices.keys() and same


SEEN = Counter()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), budget=st.sampled_from([2_000, 4_000, 9_000]))
def test_two_thousand_steps(originals, tmp_path_factory, seed, budget):
    """40 runs of 50 random steps, each compared with what it may change."""
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("store")
    folders = {str(rank): folder / str(rank) for rank in RANKS}
    for original, copy in zip(originals, folders.values(), strict=True):
        restore(original, copy)
    store = AdapterStore(base(config=TINY), folders, budget_bytes=budget, max_adapters=3)
    adapters = [read_peft(original) for original in originals]
    known = {store.registered(name).number: store.registered(name) for name in folders if fits(store, name)}
    broken: set[int] = set()
    used: list[int] = []  # of what is resident, the least recently used first
    for _ in range(50):
        kind = rng.choices(("hold", "use", "damage", "restore"), (5, 3, 1, 1))[0]
        SEEN[kind] += 1
        number = rng.randrange(len(RANKS))
        if kind == "damage" and number not in broken:
            damage(folders[str(RANKS[number])], rng.choice(DAMAGES))
            broken.add(number)
        elif kind == "restore":
            restore(originals[number], folders[str(RANKS[number])])
            broken.discard(number)
        elif kind == "use" and store.in_use:
            number = rng.choice(sorted(store.in_use))
            with store.routed([number, NO_ADAPTER], [2, 1]):
                store.model(torch.zeros(1, 3, dtype=torch.int64))
            used = [each for each in used if each != number] + [number]
        elif kind == "hold":
            wanted = set(rng.sample(sorted(known), min(len(known), rng.randrange(5))))
            if not store.has_room(wanted):
                assert len(wanted) > 3 or sum(known[each].nbytes for each in wanted) > budget
                with pytest.raises(RuntimeError, match="ask `has_room` first"):
                    store.hold(wanted)
                continue
            before = set(store._resident)
            failed = store.hold(wanted).keys()
            after = set(store._resident)
            assert failed == {each for each in wanted - before if each in broken}
            assert store.in_use == wanted - failed <= after
            gone, idle = before - after, [each for each in used if each not in wanted]
            assert gone == set(idle[: len(gone)]), "evicted is what was idle, the least recently used first"
            used = [each for each in used if each in after] + sorted(after - before)
            SEEN["evicted"] += len(gone)
            SEEN["failed"] += len(failed)
        assert store.nbytes <= budget and store.in_use <= set(store._resident)
        assert all(is_whole(found, adapters[each]) for each, found in store._resident.items())
        held = sum(m.a.nbytes + m.b.nbytes for layers in store._resident.values() for m in layers.values())
        assert held == store.nbytes


def fits(store, name) -> bool:
    try:
        store.registered(name)
    except ValueError as refused:
        assert "raise budget_bytes" in str(refused)
        return False
    return True


def test_the_steps_met_everything():
    assert sum(SEEN[kind] for kind in ("hold", "use", "damage", "restore")) >= 2000
    assert SEEN["evicted"] > 50 and SEEN["failed"] > 20, SEEN


def test_as_many_fit_as_predicted(tmp_path):
    predicted = Adapters(TINY, 3, ("q_proj", "v_proj")).nbytes(4)
    folders = {str(number): write_adapter(tmp_path / str(number), 1, TINY, 3) for number in range(5)}
    budget = 3 * predicted + 1
    store = AdapterStore(base(config=TINY), folders, budget_bytes=budget)
    assert {store.registered(name).nbytes for name in folders} == {predicted}
    fit = adapters_that_fit(budget, predicted)
    assert fit == 3 and store.has_room(range(fit)) and not store.has_room(range(fit + 1))
    store.hold(range(2))
    store.hold(range(2, 5))
    assert store.nbytes == fit * predicted and store.resident == ["2", "3", "4"] and store.evictions == 2


def test_a_file_that_is_written_while_it_is_read_is_refused(originals, tmp_path, monkeypatch):
    folder = tmp_path / "adapter"
    restore(originals[2], folder)
    store = AdapterStore(base(config=TINY), {"mine": folder})

    def meanwhile(path):
        adapter = read_peft(path)
        damage(folder, "other values")
        return adapter

    monkeypatch.setattr("minillm.adapters.store.read_peft", meanwhile)
    with pytest.raises(ValueError, match="is being written: ask again once it is whole"):
        store.registered("mine")
    assert store.resident == []


def test_what_was_read_does_not_change_with_the_file(originals, tmp_path):
    """A mapped file would: its pages are read when they are needed, and a shorter one ends the process."""
    folder = tmp_path / "adapter"
    restore(originals[2], folder)
    adapter = read_peft(folder)
    os.truncate(folder / TENSORS, 0)
    again = read_peft(originals[2])
    for name, pair in adapter.matrices.items():
        assert all(torch.equal(*both) for both in zip(pair, again.matrices[name], strict=True))


# What a user can get wrong: one sentence each, and what else runs goes on.


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    folders = {name: write_adapter(folder / name, number) for number, name in enumerate(("good", "other"))}
    return folders, {name: right(merged(folders[name]), [1, 2, 3], 6) for name in folders}


def config_with(folder, **changes):
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | changes))


BAD = {
    "other shapes": (lambda f: (shutil.rmtree(f), write_adapter(f, 2, TINY)), "was trained on another base: its model"),
    "more layers": (lambda f: _three_blocks(f), "which this model lacks: use its own base"),
    "rank 0": (lambda f: config_with(f, r=0), "rank 0 must be a whole number of at least 1: 8 and 16 are usual."),
    "not LoRA": (lambda f: config_with(f, peft_type="IA3"), "is of kind 'IA3': only LORA is covered."),
    "DoRA": (lambda f: config_with(f, use_dora=True), "use_dora True is not covered: only False is."),
    **{kind: (lambda f, kind=kind: damage(f, kind), said) for kind, said in (
        ("cut", "is damaged"), ("gone", "does not exist: the folder is not complete."), ("empty", "is damaged"),
        ("not finite", "has values that are not finite numbers."), ("half a matrix", "is damaged"),
        ("other rank", "which does not fit r"), ("config gone", "is not a folder of peft's adapters."),
    )},
}  # fmt: skip


def _three_blocks(folder):
    from dataclasses import replace

    shutil.rmtree(folder)
    write_adapter(folder, 0, replace(SHAPE, num_layers=3))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_one_sentence_and_others_go_on(served, tmp_path, kind):
    folders, expected = served
    spoil, said = BAD[kind]
    restore(folders["other"], tmp_path / "bad")
    spoil(tmp_path / "bad")
    llm = LLM(base(), adapters=folders | {"bad": tmp_path / "bad"})
    llm.add([1, 2, 3], SamplingParams(max_tokens=6), request_id="first", adapter="good")
    with pytest.raises(ValueError) as refused:
        llm.add([1, 2, 3], adapter="bad")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert goes_on(llm, expected)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_folder_that_is_damaged_later_fails_its_own_requests(served, tmp_path, kind, ahead):
    """It was good when the request came and is not when the adapter is loaded."""
    folders, expected = served
    restore(folders["other"], tmp_path / "bad")
    llm = LLM(base(), adapters=folders | {"bad": tmp_path / "bad"}, async_scheduling=ahead, block_size=4)
    params = SamplingParams(max_tokens=6)
    llm.add([1, 2, 3], params, request_id="first", adapter="good")
    for number in range(3):
        llm.add([1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=6, n=1 + number), adapter="bad")
    damage(tmp_path / "bad", kind)
    ended = {}
    while llm.unfinished:
        ended |= {output.request_id: output for output in llm.step()}
    assert ended.pop("first").answers[0].ids == expected["good"]
    assert len(ended) == 3
    for output in ended.values():
        assert output.error and "\n" not in output.error
        assert [(answer.ids, answer.reason) for answer in output.answers] == [([], "failed")] * len(output.answers)
    assert llm.pool.used == 0 and not llm.scheduler.running
    restore(folders["other"], tmp_path / "bad")
    [output] = llm.generate([[1, 2, 3]], params, adapter="bad")
    assert output.answers[0].ids == expected["other"]
    assert goes_on(llm, expected)


def goes_on(llm, expected):
    outputs = llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=6), adapter=list(expected))
    return [output.answers[0].ids for output in outputs] == list(expected.values())


def test_other_sentences(served, tmp_path):
    folders, _ = served
    model = base()
    llm = LLM(model, adapters=folders)
    cases = [
        (lambda: llm.add([1], adapter="goof"), "no adapter 'goof' here: there is good."),
        (lambda: llm.add([1], adapter="zzz"), "no adapter 'zzz' here: there is good, other."),
        (lambda: llm.add([1], adapter=3), "no adapter 3 here"),
        (lambda: LLM(base()).add([1], adapter="x"), "no adapter 'x' here: give the LLM its folder"),
        (lambda: llm.generate([[1]], adapter=["good", "other"]), "1 prompts but 2 adapters: give one for all"),
        (lambda: AdapterStore(base(), folders, budget_bytes=0), "budget_bytes 0 must be a whole number of at least 1."),
        (lambda: AdapterStore(base(), folders, max_adapters=True), "max_adapters True must be a whole number"),
        (
            lambda: AdapterStore(base(), folders, budget_bytes=9).registered("good"),
            "bytes: raise budget_bytes 9.",
        ),
        (lambda: llm.adapters.register("good", tmp_path), "adapter 'good' is registered already"),
        (lambda: llm.adapters.register("", tmp_path), "the name of an adapter '' must be a text"),
        (lambda: LLM(base(), adapters=llm.adapters), "this AdapterStore is of another model"),
        (lambda: LLM(base(), adapters=[tmp_path]), "must be names with their folders"),
        (lambda: LLM(base(), adapters=folders, compile="eager"), "compiled blocks have no place for updates"),
        (lambda: LLM(model, compile="eager"), "compiled blocks have no place for updates"),
        (lambda: LLM(compiled(), adapters=folders), "compiled blocks have no place for updates"),
        (lambda: LLM(attached(), adapters=folders), "this model has an adapter attached: detach it, or merge it"),
    ]
    for cause, said in cases:
        with pytest.raises(ValueError) as refused:
            cause()
        assert said in str(refused.value) and "\n" not in str(refused.value), refused.value


def compiled():
    model = base()
    LLM(model, compile="eager")
    return model


def attached():
    model = base()
    attach(model, LoraConfig(2))
    return model


def test_an_adapter_of_another_base_of_the_same_shapes_is_refused(tmp_path):
    save_hf(base(), tmp_path / "base")
    save_hf(base(seed=3), tmp_path / "other")
    fingerprint = fingerprint_of(tmp_path / "base")
    folder = write_adapter(tmp_path / "adapter", 0, fingerprint=fingerprint, base="base")
    model, other = (load_hf(tmp_path / name) for name in ("base", "other"))
    assert AdapterStore(model, {"mine": folder}, fingerprint=fingerprint).registered("mine").rank == 4
    shutil.copy(folder_of("draft") / "tokenizer.json", tmp_path / "other")
    with pytest.raises(ValueError, match="was trained on another base"):
        LLM.load(tmp_path / "other", adapters={"mine": folder}).add([1], adapter="mine")
    LLM(other, adapters={"mine": folder}).add([1], adapter="mine")  # nobody knows what it was loaded from
