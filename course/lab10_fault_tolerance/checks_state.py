"""Lab 10, state: bytes that another layout needs, and all that the next step depends on."""

import io
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import cloudpickle
import torch

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab10_fault_tolerance.loop import PARTS, Loop
from course.shared.diagnose import expect
from course.shared.trials import run
from minillm.comm import Group, RankError

BEFORE, AFTER = 7, 8  # steps before the save, and compared after it


@dataclass(frozen=True)
class SavedPart:
    """Elements start to stop (not included) of the flattened tensor: in file `file`, from byte `offset` on."""

    file: int
    offset: int
    start: int
    stop: int


class CheckpointFiles:
    """A tensor in the files of n ranks, among other things, and how it is read. even: rank r has the r-th of
    n equal parts; otherwise it is cut anywhere, and any rank has any part."""

    def __init__(self, numel: int, itemsize: int, n: int, even: bool) -> None:
        self.numel, self.itemsize = numel, itemsize
        self.whole = random.randbytes(numel * itemsize)
        cuts, place = [numel * rank // n for rank in range(n + 1)], list(range(n))
        if not even:
            cuts[1:-1] = sorted(random.randint(0, numel) for _ in range(n - 1))
            random.shuffle(place)
        self.files, self.parts = [], []
        for file in range(n):
            start, stop = cuts[place[file]], cuts[place[file] + 1]
            offset = random.randint(1, 40)
            own = self.whole[start * itemsize : stop * itemsize]
            self.files.append(random.randbytes(offset) + own + random.randbytes(random.randint(1, 40)))
            self.parts.append(SavedPart(file, offset, start, stop))
        random.shuffle(self.parts)
        self.reads: list[tuple[int, int, int]] = []

    def own(self, rank: int, n: int) -> bytes:
        """What rank `rank` of n holds."""
        first, last = (self.numel * each // n * self.itemsize for each in (rank, rank + 1))
        return self.whole[first:last]

    def read(self, file: int, offset: int, nbytes: int) -> bytes:
        if not 0 <= file < len(self.files):
            raise CheckFailed(f"read of file {file}: there are files 0 to {len(self.files) - 1}")
        if offset < 0 or nbytes < 0 or offset + nbytes > len(self.files[file]):
            raise CheckFailed(
                f"read of {nbytes} bytes from byte {offset} on, but file {file} has {len(self.files[file])} bytes: "
                "where in the file does the part begin, and how many of its elements come before yours?",
                evidence=[file, offset, nbytes],
            )
        self.reads.append((file, offset, nbytes))
        return self.files[file][offset : offset + nbytes]


@exercise(
    "reshard",
    minutes=15,
    difficulty=3,
    hints=(
        "Both the saved parts and yours are ranges of one flattened tensor. What do two ranges have in common?",
        "For each part, in the order of the tensor: begin = max(first, part.start), end = min(last, part.stop). If "
        "begin < end these elements are in its file, (begin - part.start) elements after its offset.",
    ),
)
def check_reshard(learner: Callable) -> Receipt:
    read = held = layouts = parts = 0
    for even, n, target in product((True, False), (1, 2, 3, 4, 8), (1, 2, 3, 4, 8)):
        files = CheckpointFiles(random.choice((3, 64, random.randint(65, 300))), random.choice((2, 4, 8)), n, even)
        saved = f"saved by {n}" if even else f"saved in {n} uneven parts"
        for rank in range(target):
            files.reads.clear()
            found = learner(files.read, tuple(files.parts), files.numel, files.itemsize, rank, target)
            read += sum(nbytes for *_, nbytes in files.reads)
            held += _judge_part(files, found, rank, target, f"{saved}, loaded by {target}, rank {rank}")
            parts += bytes(found) == files.own(rank, target)
        layouts += n != target
    return receipt(
        "saved by N ranks, loaded by N'",
        [
            row(f"bytes read, {layouts} changes of layout: those that are held", held, read, "B"),
            row("parts with the right bytes", 2 * 5 * (1 + 2 + 3 + 4 + 8), parts),
        ],
    )


def _judge_part(files: CheckpointFiles, found: Any, rank: int, target: int, where: str) -> int:
    wanted = files.own(rank, target)
    expect(isinstance(found, bytes | bytearray | memoryview), found, "bytes", f"{where}: you")
    found = bytes(found)
    if len(found) != len(wanted):
        raise CheckFailed(
            f"{where}: {len(found)} bytes, but it holds {len(wanted)}", evidence=[where, len(found), len(wanted)]
        )
    if found != wanted:
        raise CheckFailed(f"{where}: as many bytes as it holds, but others", evidence=[where, list(found)])
    read = sum(nbytes for *_, nbytes in files.reads)
    if read > len(wanted):
        raise CheckFailed(
            f"{where}: right, but {read} bytes were read where it holds {len(wanted)}: read its bytes only"
        )
    first, last = files.numel * rank // target, files.numel * (rank + 1) // target
    overlaps = sum(max(part.start, first) < min(part.stop, last) for part in files.parts)
    if len(files.reads) > overlaps + len(files.parts):
        raise CheckFailed(
            f"{where}: right, but {len(files.reads)} reads where {overlaps} are enough: neighbouring elements are read "
            "together, one range per part"
        )
    return len(wanted)


# Resume.


@exercise(
    "resume-state",
    minutes=15,
    difficulty=3,
    hints=(
        "Read Loop.step line by line. What does each line read that an earlier step has changed?",
        "model, optimizer and scheduler have state_dict(); the order has three numbers; torch.get_rng_state() and "
        "random.getstate() are the generators. A state_dict refers to tensors that training goes on changing.",
    ),
)
def check_resume(learner: tuple[Callable, Callable]) -> Receipt:
    capture, restore = learner
    python, generator = random.getstate(), torch.get_rng_state()
    seed = random.randrange(1000)
    try:
        return _check_resume(capture, restore, seed)
    finally:
        random.setstate(python)
        torch.set_rng_state(generator)


def _check_resume(capture: Callable, restore: Callable, seed: int) -> Receipt:
    before = cloudpickle.dumps(restore)  # with the globals as they are before anything is captured
    torch.manual_seed(seed)
    random.seed(seed)
    loop = Loop(seed, seed)
    for step in range(BEFORE):
        if step == 3:
            capture(loop)  # an earlier state, which must not be that of a later save
        loop.step()
    expected_parts = loop.parts()
    state = capture(loop)
    if state is None:
        raise CheckFailed("capture returned nothing (None): is there a return?")
    at_once = _written(state)
    if loop.parts() != expected_parts:
        raise CheckFailed("capture changed the loop, whose next step is another now")
    expected = [loop.step() for _ in range(AFTER)]
    late = _written(state)
    same = 0
    for number, (blob, when) in enumerate(((at_once, "at once"), (late, "while training went on"), (late, "again"))):
        torch.manual_seed(seed + 1 + number)
        random.seed(seed + 1 + number)
        resumed = Loop(seed + 1, seed)
        if when == "again":
            blob = _restored_twice(restore, blob, resumed)
        restore(resumed, torch.load(io.BytesIO(blob), weights_only=True))
        parts = resumed.parts()
        other = [part for part in PARTS if not _equal(parts[part], expected_parts[part])]
        found = [resumed.step() for _ in range(AFTER)]
        if found != expected:
            step = next(i for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)) if mine != theirs)
            raise CheckFailed(_say_other(other, step, when), evidence=[other, when])
        same += sum(mine == theirs for mine, theirs in zip(found, expected, strict=True))
    _judge_elsewhere(before, at_once, seed, expected)
    return receipt(
        "saved after 7 steps, resumed in a fresh loop",
        [
            row(f"losses of the next {AFTER} steps, resumed 3 times: the same bits", 3 * AFTER, same),
            row("    bytes of the state", None, len(at_once), "B"),
        ],
    )


def _judge_elsewhere(restore: bytes, blob: bytes, seed: int, expected: list[float]) -> None:
    """CheckFailed unless a process that never saw the first loop goes on with the same losses."""
    try:
        found = run(_resumed_elsewhere, 1, restore, blob, seed)[0]
    except RankError as error:
        found = str(error).splitlines()[0]
    if found != expected:
        raise CheckFailed(
            "right in this process, but not in another one, which is what a resume is: put everything into the state, "
            "nothing into globals",
            evidence=found,
        )


def _resumed_elsewhere(_: Group, restore: bytes, blob: bytes, seed: int) -> list[float]:
    """The losses after a resume in a process that never saw the first loop."""
    resumed = Loop(seed + 5, seed)
    cloudpickle.loads(restore)(resumed, torch.load(io.BytesIO(blob), weights_only=True))
    return [resumed.step() for _ in range(AFTER)]


def _restored_twice(restore: Callable, blob: bytes, loop: Loop) -> bytes:
    """A state that is restored, trained from, and asked for again is still itself."""
    state = torch.load(io.BytesIO(blob), weights_only=True)
    restore(loop, state)
    for _ in range(3):
        loop.step()
    return _written(state)


def _written(state: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except Exception as error:
        raise CheckFailed(
            f"torch.save cannot write the state ({type(error).__name__}: {error}): it holds objects, not only tensors, "
            "numbers, texts, tuples, lists and dicts"
        ) from error
    try:
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise CheckFailed(
            f"the state holds objects{f' ({named[1]})' if named else ''}, not only tensors, numbers, texts, tuples, "
            "lists and dicts: a checkpoint that needs your classes to be unpickled cannot be read by a later version"
        ) from error
    if any(map(_is_pickle, _leaves(state))):
        raise CheckFailed(
            "the state holds pickled objects, as bytes: a checkpoint that needs your classes to be unpickled cannot be "
            "read by a later version. Save tensors, numbers, texts, tuples, lists and dicts"
        )
    return file.getvalue()


def _leaves(state: Any) -> Iterator[Any]:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else None
    if parts is None:
        yield state
    for part in parts or ():
        yield from _leaves(part)


def _is_pickle(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.uint8:
        leaf = leaf.flatten().numpy().tobytes()
    if not isinstance(leaf, bytes | bytearray):
        return False
    try:
        pickle.loads(leaf)
    except Exception:
        return False
    return True


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


def _say_other(other: Sequence[str], step: int, when: str) -> str:
    if when == "while training went on":
        return (
            f"the state was right when it was taken, but it was written {when}, and by then it had changed "
            f"({', '.join(other)}): a state_dict refers to the tensors that training changes. Take a copy"
        )
    if when == "again":
        return (
            "restored once, it is right; but training from it changed the state that was given to restore "
            f"({', '.join(other)}): put copies into the loop"
        )
    if not other:
        return (
            f"all parts are as they were, and yet the loss of step {step} differs: does restore draw random numbers, "
            "or is the scheduler's optimizer another optimizer than the loop's?"
        )
    return f"not as it was when it was saved: {', '.join(other)}. The first loss that differs is that of step {step}"
