"""A folder with a broken training run to find, and the sheet for the teacher.

DIR/README.md          what was reported
DIR/minillm/           a copy of the package with the fault in its source
DIR/run.py             the run: losses and norms of the ranks, or with --alone of one process
DIR/log.csv            what the run said, beside what one process says with minillm's own code
DIR.teacher.md         the place, the mechanism, wrong answers and what to say about them; not in the folder
"""

import csv
import inspect
import random
import shutil
import textwrap
from pathlib import Path

import minillm
from course.lab22_bug_museum import museum
from course.lab22_bug_museum.exhibit import Exhibit
from course.lab22_bug_museum.training_runs import Record, Run, text
from course.shared.faults.patches import Patch, sound
from minillm.files import write_whole

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
PLANTABLE = tuple(name for name, its in museum.EXHIBITS.items() if isinstance(its.run, Run))

_RUN = '''"""The run: `python run.py`, on as many processes as its layout has ranks; `python run.py --alone`, on one."""

import sys

import numpy as np

from minillm.comm import Group, launch
from minillm.data import Tokens
from minillm.measure import ledger
from minillm.model import ModelConfig, MoEConfig
from minillm.train import TrainConfig, Trainer
from minillm.train.parallel_config import ParallelConfig
from minillm.train.strategies.hybrid import make_strategy
from minillm.train.strategies.single_device import SingleDevice

SEED = {seed}
LAYOUT = {layout}
MODEL = {model}
RANKS = TrainConfig(MODEL, {ranks})
ALONE = TrainConfig(MODEL, {alone})


{text}

def train(strategy, config):
    trainer = Trainer(config, text(SEED), parallel=strategy)
    with ledger() as led:
        steps = [trainer.step()]
    steps += [trainer.step() for _ in range(config.steps - 1)]
    trainer.loader.close()
    return [(step.step, step.loss, step.grad_norm, step.lr) for step in steps], dict(led.calls)


def on_rank(group: Group):
    with make_strategy(group, LAYOUT) as strategy:
        return train(strategy, RANKS)


if __name__ == "__main__":
    alone = "--alone" in sys.argv
    steps, calls = train(SingleDevice(), ALONE) if alone else launch(on_rank, LAYOUT.world_size)[0]
    for step in steps:
        print("step {{}}   loss {{:.6f}}   gradient norm {{:.6f}}   learning rate {{:.6f}}".format(*step))
    print("operations of rank 0 in the first step:", calls)
'''


def plant(number: int, folder: Path) -> Path:
    """Writes the folder and returns the path of the teacher's sheet, which lies beside it.

    number: draws the exhibit and the seed, the same ones each time. ValueError if the folder exists.
    """
    if folder.exists():
        raise ValueError(f"--out {folder} exists: name a folder that is still to be made")
    its = museum.exhibit(random.Random(number).choice(PLANTABLE))
    seed = number % 1000
    record: Record = its.run(its.faults, seed)
    folder.mkdir(parents=True)
    shutil.copytree(Path(minillm.__file__).parent, folder / "minillm", ignore=LEFT_OUT)
    for fault in its.faults:
        write_fault(folder, fault)
    write_whole(folder / "run.py", _program(its, seed))
    write_whole(folder / "README.md", _task(its, record))
    _write_log(folder / "log.csv", record)
    sheet = folder.with_name(f"{folder.name}.teacher.md")
    write_whole(sheet, _sheet(its, number))
    return sheet


def write_fault(folder: Path, fault: Patch) -> None:
    """Puts the fault's code in the place of minillm's own, in the copy."""
    module, _, _ = fault.target.partition(":")
    path = folder.joinpath(*module.split(".")).with_suffix(".py")
    own, written = inspect.getsource(sound(fault.target)), path.read_text(encoding="utf-8")
    if written.count(own) != 1:
        raise RuntimeError(f"{fault.target} stands {written.count(own)} times in {path}")
    indent = own[: len(own) - len(own.lstrip())]
    path.write_text(written.replace(own, textwrap.indent(fault.source(), indent)), encoding="utf-8")


def _program(its: Exhibit, seed: int) -> str:
    scene = its.run.scene
    configs = {"ranks": scene.config(seed), "alone": scene.alone(seed)}
    names = ("seq_len", "batch_size", "accumulate", "steps", "lr", "warmup_steps", "seed")
    settings = {name: ", ".join(f"{key}={getattr(config, key)!r}" for key in names) for name, config in configs.items()}
    return _RUN.format(seed=seed, layout=repr(scene.layout), model=repr(scene.model), text=_plain(text), **settings)


def _task(its: Exhibit, record: Record) -> str:
    return f"""# A run to debug

{_wrapped(its.symptom)}

The layout: {record.scene.layout}. `python run.py` trains under it and `python run.py --alone` on one process,
both with the package in this folder. `log.csv` has the losses, gradient norms and learning rates of the run beside
those of one process with a package that has no fault.

Find the place in `minillm/` and the mechanism, say which measurement showed it, and repair it. Comparing this copy with
another copy of minillm is no measurement.
"""


def _sheet(its: Exhibit, number: int) -> str:
    clues = "\n".join(f"{n}. **{clue.measurement}**: {clue.says}" for n, clue in enumerate(its.investigation, start=1))
    wrong = "\n".join(
        f"- *{suspect}*: {suspect.innocent_because}" for suspect in its.suspects if not suspect.is_culprit
    )
    repairs = "\n".join(f"- *{fix.label}*: {fix.says}" for fix in its.wrong_fixes)
    faults = "\n\n".join(map(_diff, its.faults))
    return f"""# For the teacher: {its.name} (`museum --plant {number}`)

{_wrapped(its.symptom)}

**The culprit.** {"; ".join(map(str, its.culprits))}.

What was changed (`-` minillm's own, `+` what is planted):

{faults}

**The model investigation.**

{clues}

What misleads: **{its.misleading.measurement}**. {its.misleading.says}

**Wrong answers, and what to say.**

{wrong}

**Wrong repairs, and what to say.**

{repairs}

**To take away.** {its.lesson}

It shipped: {", ".join(f"<{thread}>" for thread in its.threads)}
"""


def _diff(fault: Patch) -> str:
    lines = [f"`{fault.target}`", ""]
    for old, new in fault.code.items():
        lines += [f"    - {line}" for line in old.splitlines()] + [f"    + {line}" for line in new.splitlines()]
    return "\n".join(lines)


def _write_log(path: Path, record: Record) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["step", "loss", "gradient_norm", "learning_rate", "loss_of_one_process", "norm_of_one_process"]
        )
        for a, b in zip(record.steps, record.alone.steps, strict=True):
            writer.writerow([a.step, a.loss, a.grad_norm, a.lr, b.loss, b.grad_norm])


def _wrapped(paragraph: str) -> str:
    return "\n".join(textwrap.wrap(paragraph, 120))


def _plain(function) -> str:
    """A function's source without decorators: ranks are sent a function of the script, not a cache of one."""
    source = inspect.getsource(function)
    return source[source.index("def ") :]
