"""Spoilers of lab 10, commits: orders that tear, and right ones that look different."""

import json
import zlib

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers
from course.lab10_fault_tolerance import experiments_breaks

right = answers_of("10_fault_tolerance")

# Commit.


def _commits_first(step, shard, group, disk):
    """The shard goes into the folder under its final name."""
    folder = f"step-{step}"
    if group.rank == 0:
        disk.write(f"{folder}/manifest", str(group.world_size).encode())
        disk.flush(f"{folder}/manifest")
    disk.write(f"{folder}/{group.rank}", shard)
    disk.flush(f"{folder}/{group.rank}")
    group.barrier()


atomic_commit = KnownAnswers("atomic-commit")

atomic_commit.mistake(
    "metadata before the shards",
    says="The manifest is there before the shards are: killed in between, it promises what was never written. Write "
    "it last, behind a barrier.",
)((_commits_first, right.load))
atomic_commit.mistake(
    "metadata before the barrier",
    says="Rank 0 has written its own shard and says that all are there. It knows that only after the barrier.",
)((experiments_breaks.metadata_first, experiments_breaks.newest_with_a_manifest))
atomic_commit.mistake(
    "the manifest is not written at once",
    {
        'f"draft-{step}"': 'f"step-{step}"',
        'disk.rename(draft, f"step-{step}")': "pass",
        'if name.startswith("step-")]': 'if disk.exists(f"{name}/manifest")]',
    },
    says="The order is right, but writing is not one step: between write and flush the manifest has its name and not "
    "its content. Write it under another name, flush, rename.",
)
atomic_commit.mistake(
    "no flush",
    {'    disk.flush(f"{draft}/{group.rank}")\n': "", '        disk.flush(f"{draft}/manifest")\n': ""},
    says="What you wrote may still be in memory only when the rename reaches the disk. Flush every file before "
    "anything says that it is there.",
)


for _name, _instead in (
    ("the rename is not flushed", "pass"),
    ("flushes what it renamed", 'disk.flush(f"step-{step}")'),
):
    atomic_commit.mistake(
        _name,
        {'disk.flush(".")': _instead},
        says="A rename is a change of the folder above, and that was not flushed: save has returned, and a power cut "
        "takes the checkpoint away again.",
    )


atomic_commit.mistake(
    "the old checkpoint goes first",
    {
        "        disk.rename(draft": (
            '        if disk.exists(f"step-{step - 1}"):\n'
            '            disk.remove(f"step-{step - 1}")\n'
            '            disk.flush(".")\n'
            "        disk.rename(draft"
        )
    },
    says="The old checkpoint was removed before the new one counted: killed in between, there is none. Remove it "
    "afterwards.",
)


def _overwrites(step, shard, group, disk):
    disk.write(f"checkpoint/{group.rank}", step.to_bytes(2, "big") + shard)
    disk.flush(f"checkpoint/{group.rank}")
    group.barrier()


def _from_one_place(disk):
    found = [disk.read(f"checkpoint/{name}") for name in disk.list("checkpoint")]
    return (int.from_bytes(found[0][:2], "big"), [each[2:] for each in found]) if found else None


atomic_commit.mistake(
    "overwrites the only checkpoint",
    says="The new shards replace the old ones in place, one after the other: in between, neither checkpoint is whole. "
    "Write beside it.",
)((_overwrites, _from_one_place))
atomic_commit.mistake(
    "reads every shard that lies there",
    {
        'int(disk.read(f"{folder}/manifest"))': '[name for name in disk.list(folder) if name != "manifest"]',
        "range(ranks)": "ranks",
    },
    says="A shard of the killed attempt lay in the folder, of a rank that the restarted job does not have, and was "
    "taken for one of its own. Say in the manifest what belongs to the checkpoint, or clean up first.",
)
atomic_commit.mistake(
    "rank 0 does not wait",
    {"    group.barrier()  # all": "    # all"},
    says="Rank 0 renames the folder without waiting for the others: their shards come too late, into a folder that is "
    "not there any more.",
)
atomic_commit.mistake(
    "the largest name",
    {'int(name.removeprefix("step-"))': 'name.removeprefix("step-")', "return max(steps)": "return int(max(steps))"},
    says="Names are compared letter by letter, and step-9 comes after step-10. Compare numbers, or write them with "
    "zeros in front.",
)
atomic_commit.mistake(
    "a barrier that rank 0 does not enter",
    {"    group.barrier()  # all": "    if group.rank:\n        group.barrier()  # all"},
    expect="waiting for others for ever",
)
atomic_commit.mistake(
    "no return", {"return max(steps),": "found = max(steps),"}, expect="returns None|finds no checkpoint"
)


def _notes(step, shard, group, disk):
    """No barrier: rank 0 looks for the others' notes, as minillm's threads do."""
    draft = f"tmp-{step}-{group.world_size}"
    if group.rank == 0 and disk.exists(draft):
        disk.remove(draft)
    group.barrier()
    for name, data in ((f"{group.rank}", shard), (f"note-{group.rank}", b"done")):
        disk.write(f"{draft}/{name}", data)
        disk.flush(f"{draft}/{name}")
    if group.rank == 0:
        while not all(disk.exists(f"{draft}/note-{rank}") for rank in range(group.world_size)):
            pass
        for rank in range(group.world_size):
            disk.remove(f"{draft}/note-{rank}")
        disk.rename(draft, f"save-{step:04d}")
        disk.flush(".")
    group.barrier()


def _by_names(disk):
    found = [name for name in disk.list() if name.startswith("save-")]
    if not found:
        return None
    names = [name for name in disk.list(found[-1]) if name.isdigit()]
    return int(found[-1][5:]), [disk.read(f"{found[-1]}/{name}") for name in sorted(names, key=int)]


def _self_checking(step, shard, group, disk):
    """No manifest: every shard says how many there are, and carries a checksum."""
    body = json.dumps([step, group.world_size, shard.hex()]).encode()
    disk.write(f"{step}-of-{group.world_size}/{group.rank}", zlib.crc32(body).to_bytes(4, "big") + body)
    disk.flush(f"{step}-of-{group.world_size}/{group.rank}")
    group.barrier()


def _newest_that_is_whole(disk):
    for folder in sorted(disk.list(), key=lambda name: -int(name.split("-")[0])):
        step, ranks = map(int, folder.split("-of-"))
        found = []
        for rank in range(ranks):
            data = disk.read(f"{folder}/{rank}") if disk.exists(f"{folder}/{rank}") else b""
            if len(data) > 4 and zlib.crc32(data[4:]).to_bytes(4, "big") == data[:4]:
                found.append(bytes.fromhex(json.loads(data[4:])[2]))
        if len(found) == ranks:
            return step, found
    return None


def _pointer(step, shard, group, disk, draft="latest.tmp"):
    """A small file that names the folder is replaced by a rename: DeepSpeed's `latest`, made safe."""
    folder = f"folder-{step}"
    disk.write(f"{folder}/{group.rank}", shard)
    disk.flush(f"{folder}/{group.rank}")
    group.barrier()
    if group.rank == 0:
        disk.write(draft, f"{step} {group.world_size}".encode())
        disk.flush(draft)
        if draft != "latest":
            disk.rename(draft, "latest")
            disk.flush()


def _by_pointer(disk):
    if not disk.exists("latest"):
        return None
    step, ranks = map(int, disk.read("latest").split())
    return step, [disk.read(f"folder-{step}/{rank}") for rank in range(ranks)]


def _pointer_in_place(*given):
    _pointer(*given, draft="latest")


atomic_commit.mistake(
    "a pointer that is overwritten",
    says="The small file that says which checkpoint counts was overwritten in place: until it is flushed, neither the "
    "old text nor the new one is safe. Write it under another name, flush, rename.",
)((_pointer_in_place, _by_pointer))


def _manifest_early(step, shard, group, disk):
    """No barrier before the commit, and what is in its way is removed."""
    draft, final = f"draft-{step}", f"step-{step}"
    disk.write(f"{draft}/{group.rank}", shard)
    disk.flush(f"{draft}/{group.rank}")
    if group.rank == 0:
        disk.write(f"{draft}/manifest", str(group.world_size).encode())
        disk.flush(f"{draft}/manifest")
        if disk.exists(final):
            disk.remove(final)
        disk.rename(draft, final)
        disk.flush(".")
    group.barrier()


def _with_all_shards(disk):
    steps = [int(name.removeprefix("step-")) for name in disk.list() if name.startswith("step-")]
    for step in sorted(steps, reverse=True):
        try:
            ranks = int(disk.read(f"step-{step}/manifest"))
            return step, [disk.read(f"step-{step}/{rank}") for rank in range(ranks)]
        except (FileNotFoundError, ValueError):
            continue
    return None


atomic_commit.mistake("the manifest before the others are there", expect="ran ahead of others|killed|power fails")(
    (_manifest_early, _with_all_shards)
)
atomic_commit.alternative("notes instead of a barrier")((_notes, _by_names))
atomic_commit.alternative("a file that points to the latest")((_pointer, _by_pointer))
atomic_commit.alternative("shards that prove themselves")((_self_checking, _newest_that_is_whole))
