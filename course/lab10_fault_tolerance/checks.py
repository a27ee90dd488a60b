"""Lab 10, files: a commit that is killed at every point in turn, and a manifest that finds every damage.

checks.py            exercises 1 and 2, on a disk that forgets (disk.py) and on real files
checks_state.py      exercises 3 and 4: any other layout, and the same bits after a resume
checks_failures.py   exercises 5 to 7: a job under failures, slow ranks, and a branch that one rank takes alone
"""

import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from course.kit.exercises import CheckFailed, exercise
from course.kit.receipts import Receipt, receipt, row
from course.lab10_fault_tolerance.disk import CUTS, MOST_OPERATIONS, Disk, Handle, InterleavedRanks, Member
from course.shared.diagnose import expect
from course.shared.trials import run
from minillm.comm import Group

Saved = tuple[int, list[bytes]]  # a step, and the shard of each rank


@exercise(
    "atomic-commit",
    minutes=20,
    difficulty=3,
    hints=(
        "Which single operation makes the new checkpoint one that `load` looks at? Whatever is needed has to be on the "
        "disk before it, on every rank.",
        "Write to a folder that load ignores. Flush what you wrote, wait for all ranks, let rank 0 write what the load "
        "needs to know, then rename the folder and flush the folder above it.",
    ),
)
def check_commit(learner: tuple[Callable, Callable]) -> Receipt:
    save, load = learner
    expect((found := load(Disk())) is None, found, "None", "load of an empty disk")
    cuts = cuts_due = kills = kills_due = most = 0
    drawn = random.randint(11, 900)
    for n, order, first in ((3, (0, 1, 2), 9), (4, (2, 3, 1, 0), drawn), (1, (0,), drawn + 7)):
        old, before = _written(save, load, Disk(), first, n, order)
        new = first + 1, new_shards(first + 1, n)
        ahead, _ = play_save(save, old, *new, order, patience=4)
        judge_load(
            load, ahead, [new], f"nobody was killed, {n} ranks have saved, and rank {order[0]} ran ahead of others"
        )
        done, played = play_save(save, old, *new, order)
        for cut in CUTS:
            where = f"save has returned on all {n} ranks, then the power fails; of what is not flushed the disk keeps"
            judge_load(load, done.after_a_cut(cut), [new], f"{where} {cut}")
        operations = len(played.operations)
        most, cuts_due, kills_due = max(most, operations), cuts_due + 3 * (operations + 1), kills_due + operations
        for stop in range(operations + 1):
            disk, at = play_save(save, old, *new, order, stop_after=stop)
            for cut in CUTS:
                where = f"{_after(at.operations, n)}; of what is not flushed the disk keeps {cut}"
                _judge_and_go_on(save, load, disk.after_a_cut(cut), [before, new], n, where)
                cuts += 1
        for victim, own in [(rank, own) for rank in range(n) for own in range(played.by(rank))]:
            disk, _ = play_save(save, old, *new, order, victim=victim, victim_after=own)
            where = f"rank {victim} of {n} is killed after {own} of its operations"
            _judge_and_go_on(save, load, disk, [before, new], n, where)
            kills += 1
    return receipt(
        "killed at every point",
        [
            row("power cuts, after which the checkpoint is whole", cuts_due, cuts),
            row("kills of one rank, after which it is", kills_due, kills),
            row("    operations of a save on 4 ranks", None, most),
        ],
    )


def new_shards(step: int, n: int) -> list[bytes]:
    return [bytes(f"step {step}, rank {rank} of {n}: ", "ascii") + random.randbytes(8) for rank in range(n)]


def play_save(
    save: Callable, disk: Disk, step: int, shards: Sequence[bytes], order: Sequence[int], patience: int = 1, **kill: Any
) -> tuple:
    """The disk afterwards, and what was done. The disk that is given stays as it is."""
    disk = disk.copy()

    def program(group: Member, own: Handle) -> None:
        save(step, shards[group.rank], group, own)

    played = InterleavedRanks(disk, order, patience=patience, **kill).play(program)
    if not kill and len(played.returned) < len(shards):
        stuck = sorted(set(range(len(shards))) - played.returned)
        why = "after 400 operations" if len(played.operations) >= MOST_OPERATIONS else "waiting for others for ever"
        raise CheckFailed(f"nobody was killed, but save does not return on rank {stuck[0]} of {len(shards)}: {why}")
    return disk, played


def _written(save: Callable, load: Callable, disk: Disk, step: int, n: int, order: Sequence[int]) -> tuple[Disk, Saved]:
    shards = new_shards(step, n)
    disk, _ = play_save(save, disk, step, shards, order)
    judge_load(load, disk, [(step, shards)], f"nobody was killed, and {n} ranks have saved step {step}")
    return disk, (step, shards)


def judge_load(load: Callable, disk: Disk, right: Sequence[Saved], where: str) -> Saved:
    try:
        found = load(disk.copy())
    except (NotImplementedError, NameError, AttributeError, TypeError):
        raise
    except Exception as error:
        steps = [step for step, _ in right]
        raise CheckFailed(
            f"{where}: load raises {type(error).__name__} ({error}): it has taken something torn for a checkpoint. "
            f"Whole and on the disk was step {steps[0]}",
            evidence=[where, type(error).__name__],
        ) from error
    if found is not None and not _is_saved(found):
        raise CheckFailed(f"{where}: load returns {found!r:.60}; the exercise asks for (step, list of shards)")
    for each in right:
        if _same(found, each):
            return each
    raise CheckFailed(f"{where}: load {_tell(found, right)}", evidence=[where, found])


def _judge_and_go_on(save: Callable, load: Callable, disk: Disk, right: Sequence[Saved], n: int, where: str) -> None:
    """And after the restart one rank fewer saves the next step over what is left."""
    step = judge_load(load, disk, right, where)[0] + 1
    ranks = max(1, n - 1)
    shards = new_shards(step, ranks)
    try:
        disk, _ = play_save(save, disk, step, shards, range(ranks))
    except OSError as error:
        raise CheckFailed(
            f"{where}. After the restart {ranks} ranks save step {step}, and what the killed save left is in the way: "
            f"{error}",
            evidence=where,
        ) from error
    judge_load(load, disk, [(step, shards)], f"{where}. After the restart {ranks} ranks have saved step {step}")


def _is_saved(found: Any) -> bool:
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[0], Integral):
        return False
    return isinstance(found[1], tuple | list) and all(isinstance(shard, bytes | bytearray) for shard in found[1])


def _same(found: Any, right: Saved) -> bool:
    return found is not None and found[0] == right[0] and list(found[1]) == list(right[1])


def _tell(found: Any, right: Sequence[Saved]) -> str:
    if found is None:
        return f"finds no checkpoint; step {right[0][0]} was whole and on the disk"
    step, shards = found[0], list(found[1])
    wanted = dict(right).get(step)
    if wanted is None:
        return f"returns step {step}; whole and on the disk was step {right[0][0]}"
    if len(shards) != len(wanted):
        return f"returns step {step} with {len(shards)} shards of {len(wanted)}"
    rank = next(rank for rank, (mine, theirs) in enumerate(zip(shards, wanted, strict=True)) if mine != theirs)
    what = "cut short: it was not flushed" if wanted[rank].startswith(shards[rank]) else "another's or an older one"
    return f"returns step {step}, but the shard of rank {rank} is {what}"


def _after(operations: Sequence[tuple[int, str]], n: int) -> str:
    if not operations:
        return f"the power fails before the first operation of {n} ranks"
    rank, last = operations[-1]
    return f"the power fails after operation {len(operations)} of {n} ranks (rank {rank}: {last})"


# Damage.


@exercise(
    "checkpoint-manifest",
    minutes=15,
    difficulty=2,
    hints=(
        "For each file: what two numbers would change if any byte of it did, or if it ended early? And who checks the "
        "manifest itself?",
        "describe: name, length and checksum (zlib.crc32, or hashlib.sha256) of each file's bytes, as JSON, and a "
        "checksum of that text in front. damaged: first the text, then each file that it names.",
    ),
)
def check_manifest(learner: tuple[Callable, Callable]) -> Receipt:
    describe, damaged = learner
    names = [f"rank-{rank:04d}.bin" for rank in range(4)]
    with tempfile.TemporaryDirectory(prefix="minillm-lab10-") as place:
        folder, other, size = Path(place, "here"), Path(place, "elsewhere"), 2 * random.randint(1500, 2500) + 1
        folder.mkdir()
        other.mkdir()
        whole = {name: random.randbytes(size) for name in names}
        _lay(folder, whole)
        manifest = describe(folder)
        _judge_manifest(manifest, whole, folder, damaged)
        _judge_second(describe, damaged, Path(place, "second"))
        _lay(other, whole)
        _lay(folder, {})
        _judge_damage(damaged(other, manifest), [], "all files were moved to another folder")
        damages, spoilt = list(_damages(whole)), list(_spoilt(manifest))
        for what, files, wrong in damages:
            _lay(folder, files)
            _judge_damage(damaged(folder, manifest), wrong, what)
        _lay(folder, whole)
        for what, text in spoilt:
            try:
                found = damaged(folder, text)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise CheckFailed(
                    f"{what}: damaged raises {type(error).__name__}; the exercise asks for ['manifest']", evidence=what
                ) from error
            _judge_damage(found, ["manifest"], what)
        found = run(_elsewhere, 1, damaged, other, manifest)[0]
        if found:
            raise CheckFailed(
                f"read by another process, which finds every byte as it was: damaged names {sorted(map(str, found))}. "
                "A run that is started again is another process: Python's hash() is another there, zlib.crc32 and "
                "hashlib are not"
            )
    return receipt(
        "damage found and named",
        [
            row("bytes of the manifest: below 1,000 per file", True, len(manifest) <= 1000 * len(whole)),
            row("    of the manifest, of files", None, (len(manifest), 4 * size), "B"),
            row("    kinds of damage tried, and all named", None, len(damages) + len(spoilt)),
        ],
    )


def _elsewhere(_: Group, damaged: Callable, folder: Path, manifest: str) -> Any:
    return damaged(folder, manifest)


def _lay(folder: Path, files: dict[str, bytes]) -> None:
    """With other time stamps each time: they are not what was written."""
    stamp = random.randrange(10**9)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
        os.utime(folder / name, (stamp, stamp))


def _judge_manifest(manifest: Any, whole: dict[str, bytes], folder: Path, damaged: Callable) -> None:
    expect(isinstance(manifest, str), manifest, "a text", "describe")
    if len(manifest) > 1000 * len(whole):
        raise CheckFailed(
            f"the manifest has {len(manifest):,} characters for files of {sum(map(len, whole.values())):,} bytes: keep "
            "checksums of the files, not the files"
        )
    _judge_damage(damaged(folder, manifest), [], "nothing was changed")
    _lay(folder, whole)
    _judge_damage(damaged(folder, manifest), [], "the files were copied, with new time stamps")


def _judge_second(describe: Callable, damaged: Callable, folder: Path) -> None:
    """CheckFailed unless another folder's manifest is about that folder alone."""
    folder.mkdir()
    files = {f"part-{number}": random.randbytes(100 + number) for number in range(random.randint(1, 3))}
    _lay(folder, files)
    manifest = describe(folder)
    expect(isinstance(manifest, str), manifest, "a text", "describe")
    _judge_damage(damaged(folder, manifest), [], "a second folder was described, and nothing was changed in it")
    _lay(folder, {name: data + b"0" for name, data in files.items()})
    _judge_damage(damaged(folder, manifest), list(files), "in a second folder every file has a byte more")


def _damages(whole: dict[str, bytes]) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    """What happened, the files then, and which of them to name."""
    one, two = sorted(random.sample(list(whole), 2))
    data = whole[one]
    places = [(0, "first"), (len(data) - 1, "last")]
    for start in random.sample(range(1, len(data) - 5), 3):  # neighbours: who looks at every second byte misses some
        places += [(start + more, "middle") for more in range(4)]
    for place, where in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << random.randrange(8)
        yield f"a bit of the {where} part of {one} is flipped", whole | {one: bytes(flipped)}, [one]
    yield f"{one} has lost its last byte", whole | {one: data[:-1]}, [one]
    yield f"{one} is cut in half", whole | {one: data[: len(data) // 2]}, [one]
    yield f"{one} is empty", whole | {one: b""}, [one]
    yield f"{one} has some zeros more at its end", whole | {one: data + bytes(8)}, [one]
    yield f"{one} is missing", {name: each for name, each in whole.items() if name != one}, [one]
    yield f"{one} and {two} are swapped", whole | {one: whole[two], two: data}, [one, two]
    yield f"{one} is a copy of {two}", whole | {one: whole[two]}, [one]
    yield f"two halves of {one} are swapped", whole | {one: data[1000:] + data[:1000]}, [one]
    rest = {name: each for name, each in whole.items() if name not in (one, two)}
    yield f"{two} has zeros only and {one} is missing", rest | {two: bytes(len(data))}, [one, two]
    for name, data in whole.items():
        place = random.randrange(len(data))
        flipped = data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]
        yield f"a bit of {name} is flipped", whole | {name: flipped}, [name]


def _spoilt(manifest: str) -> Iterator[tuple[str, str]]:
    digits = [match.start() for match in re.finditer(r"\d", manifest)]
    for place in (digits[0], digits[-1], random.choice(digits)):
        other = str((int(manifest[place]) + random.randint(1, 9)) % 10)
        yield "one digit of the manifest is another", manifest[:place] + other + manifest[place + 1 :]
    letters = [match.start() for match in re.finditer(r"[a-z]", manifest)]
    for place in random.sample(letters, min(3, len(letters))):
        yield "one letter of the manifest is another", manifest[:place] + "_" + manifest[place + 1 :]
    yield "the second half of the manifest is missing", manifest[: len(manifest) // 2]
    yield "the manifest is empty", ""


def _judge_damage(found: Any, wrong: Sequence[str], what: str) -> None:
    expect(isinstance(found, list | tuple | set), found, "a list of names", f"{what}: damaged")
    if sorted(map(str, found)) != sorted(wrong):
        raise CheckFailed(
            f"{what}: damaged names {sorted(map(str, found)) or 'nothing'}; the exercise asks for "
            f"{list(wrong) or 'nothing'}",
            evidence=[re.sub(r"rank-\d+", "rank", what), len(list(found))],
        )
