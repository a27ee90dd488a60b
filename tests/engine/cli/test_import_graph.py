"""Modules of minillm import each other in one direction, also under TYPE_CHECKING; formulas and names stay light."""

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import minillm

PUBLIC = {  # what the course and the README import, by subpackage
    "minillm.comm": "launch Group Mesh Link RankError HangError ring_all_reduce ring_all_gather ring_reduce_scatter "
    "tree_broadcast tree_reduce recursive_doubling_all_reduce hierarchical_all_reduce pairwise_all_to_all",
    "minillm.measure": "ledger wire memory timeline machine",
    "minillm.model": "ModelConfig Transformer load_hf save_hf",
    "minillm.data": "corpus Tokenizer TokenDataset",
    "minillm.parallel": "NaiveDDP BucketedDDP ZeroOptimizer FullyShard ColumnParallelLinear RowParallelLinear "
    "VocabParallelEmbedding vocab_parallel_cross_entropy Pipeline schedules",
    "minillm.train": "TrainConfig Trainer ParallelConfig SingleDevice Hybrid fit preset",
    "minillm.serve": "BlockPool Scheduler LLM SamplingParams",
    "course.kit": "exercise check hint receipt",
}


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The modules of each cycle: those of a strongly connected component of more than one (Tarjan 1972)."""
    number, lowest, stack, found = {}, {}, [], []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imports[module]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for module in imports:
        if module not in number:
            visit(module)
    return found


def test_the_search_finds_a_cycle():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph("minillm", exclude_type_checking_imports=False, cache_dir=None)
    assert cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def test_formulas_load_no_torch():
    """Also transitively: an import-linter contract looks at the code, this at what is loaded."""
    package = Path(minillm.__file__).parent
    files = [path.relative_to(package).with_suffix("") for path in package.glob("predict/**/*.py")]
    modules = [".".join(("minillm", *file.parts)).removesuffix(".__init__") for file in files]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; sys.exit('torch' in sys.modules)"
    root = Path(minillm.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_there(package):
    found = __import__(package, fromlist=["_"])
    assert [name for name in PUBLIC[package].split() if not hasattr(found, name)] == []
