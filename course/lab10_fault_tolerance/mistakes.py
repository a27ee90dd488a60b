"""Spoilers of lab 10, commits: orders that tear, and right ones that look different."""

import json
import zlib

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake
from course.lab10_fault_tolerance import experiments_breaks as breaks

right = answers_of("10_fault_tolerance")

# Commit.


def _save(step, shard, group, disk, *, flush=True, flush_folder=True, wait=True, first=False, drops=False):
    """The reference with things to leave out. first: the rename before the barrier; drops: the old one goes before."""
    draft = f"draft-{step}"
    disk.write(f"{draft}/{group.rank}", shard)
    if flush:
        disk.flush(f"{draft}/{group.rank}")
    if wait and not first:
        group.barrier()
    if group.rank == 0:
        disk.write(f"{draft}/manifest", str(group.world_size).encode())
        if flush:
            disk.flush(f"{draft}/manifest")
        if drops and disk.exists(f"step-{step - 1}"):
            disk.remove(f"step-{step - 1}")
            disk.flush(".")
        disk.rename(draft, f"step-{step}")
        if flush_folder:
            disk.flush(".")
    group.barrier()


def _commits_first(step, shard, group, disk):
    """The shard goes into the folder under its final name."""
    folder = f"step-{step}"
    if group.rank == 0:
        disk.write(f"{folder}/manifest", str(group.world_size).encode())
        disk.flush(f"{folder}/manifest")
    disk.write(f"{folder}/{group.rank}", shard)
    disk.flush(f"{folder}/{group.rank}")
    group.barrier()


mistake(
    "atomic-commit",
    "metadata before the shards",
    says="The manifest is there before the shards are: killed in between, it promises what was never written. Write "
    "it last, behind a barrier.",
)((_commits_first, right.load))


mistake(
    "atomic-commit",
    "metadata before the barrier",
    says="Rank 0 has written its own shard and says that all are there. It knows that only after the barrier.",
)((breaks.metadata_first, breaks.newest_with_a_manifest))


def _manifest_last_in_place(step, shard, group, disk):
    """Right order, final name: the manifest itself can be torn."""
    folder = f"step-{step}"
    disk.write(f"{folder}/{group.rank}", shard)
    disk.flush(f"{folder}/{group.rank}")
    group.barrier()
    if group.rank == 0:
        disk.write(f"{folder}/manifest", str(group.world_size).encode())
        disk.flush(f"{folder}/manifest")
    group.barrier()


mistake(
    "atomic-commit",
    "the manifest is not written at once",
    says="The order is right, but writing is not one step: between write and flush the manifest has its name and not "
    "its content. Write it under another name, flush, rename.",
)((_manifest_last_in_place, breaks.newest_with_a_manifest))


def _unflushed(*given):
    _save(*given, flush=False)


mistake(
    "atomic-commit",
    "no flush",
    says="What you wrote may still be in memory only when the rename reaches the disk. Flush every file before "
    "anything says that it is there.",
)((_unflushed, right.load))


def _folder_unflushed(*given):
    _save(*given, flush_folder=False)


def _renamed_flushed(step, shard, group, disk):
    """The folder that was renamed, not the one above it."""
    _save(step, shard, group, disk, flush_folder=False)
    if group.rank == 0:
        disk.flush(f"step-{step}")


for _name, _wrong in (("the rename is not flushed", _folder_unflushed), ("flushes what it renamed", _renamed_flushed)):
    mistake(
        "atomic-commit",
        _name,
        says="A rename is a change of the folder above, and that was not flushed: save has returned, and a power cut "
        "takes the checkpoint away again.",
    )((_wrong, right.load))


def _drops_first(*given):
    _save(*given, drops=True)


mistake(
    "atomic-commit",
    "the old checkpoint goes first",
    says="The old checkpoint was removed before the new one counted: killed in between, there is none. Remove it "
    "afterwards.",
)((_drops_first, right.load))


def _overwrites(step, shard, group, disk):
    disk.write(f"checkpoint/{group.rank}", step.to_bytes(2, "big") + shard)
    disk.flush(f"checkpoint/{group.rank}")
    group.barrier()


def _from_one_place(disk):
    found = [disk.read(f"checkpoint/{name}") for name in disk.list("checkpoint")]
    return (int.from_bytes(found[0][:2], "big"), [each[2:] for each in found]) if found else None


mistake(
    "atomic-commit",
    "overwrites the only checkpoint",
    says="The new shards replace the old ones in place, one after the other: in between, neither checkpoint is whole. "
    "Write beside it.",
)((_overwrites, _from_one_place))


def _whatever_is_there(disk):
    steps = [int(name.removeprefix("step-")) for name in disk.list() if name.startswith("step-")]
    if not steps:
        return None
    folder = f"step-{max(steps)}"
    return max(steps), [disk.read(f"{folder}/{name}") for name in disk.list(folder) if name != "manifest"]


mistake(
    "atomic-commit",
    "reads every shard that lies there",
    says="A shard of the killed attempt lay in the folder, of a rank that the restarted job does not have, and was "
    "taken for one of its own. Say in the manifest what belongs to the checkpoint, or clean up first.",
)((_save, _whatever_is_there))


def _nobody_waits(step, shard, group, disk):
    _save(step, shard, group, disk, wait=False)


mistake(
    "atomic-commit",
    "rank 0 does not wait",
    says="Rank 0 renames the folder without waiting for the others: their shards come too late, into a folder that is "
    "not there any more.",
)((_nobody_waits, right.load))


def _largest_text(disk):
    names = [name for name in disk.list() if name.startswith("step-")]
    if not names:
        return None
    folder = max(names)
    return int(folder[5:]), [disk.read(f"{folder}/{r}") for r in range(int(disk.read(f"{folder}/manifest")))]


mistake(
    "atomic-commit",
    "the largest name",
    says="Names are compared letter by letter, and step-9 comes after step-10. Compare numbers, or write them with "
    "zeros in front.",
)((right.save, _largest_text))


def _leaves_the_barrier(step, shard, group, disk):
    disk.write(f"draft-{step}/{group.rank}", shard)
    if group.rank:
        group.barrier()


mistake("atomic-commit", "a barrier that rank 0 does not enter", expect="waiting for others for ever")(
    (_leaves_the_barrier, right.load)
)


mistake("atomic-commit", "no return", expect="returns None|finds no checkpoint")((_save, lambda disk: None))


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


mistake(
    "atomic-commit",
    "a pointer that is overwritten",
    says="The small file that says which checkpoint counts was overwritten in place: until it is flushed, neither the "
    "old text nor the new one is safe. Write it under another name, flush, rename.",
)((_pointer_in_place, _by_pointer))


alternative("atomic-commit", "notes instead of a barrier")((_notes, _by_names))
alternative("atomic-commit", "a file that points to the latest")((_pointer, _by_pointer))
alternative("atomic-commit", "shards that prove themselves")((_self_checking, _newest_that_is_whole))
