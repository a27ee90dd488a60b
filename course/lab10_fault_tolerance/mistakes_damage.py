"""Spoilers of lab 10, damage: manifests that miss it, cannot name it or cannot be read again, and one more that can."""

import hashlib
import json
import zlib

from course.kit.answers import answers_of
from course.kit.exercises import alternative, mistake

right = answers_of("10_fault_tolerance")


def _by(checksum, sign=True):
    """(describe, damaged) with another checksum of the bytes."""

    def describe(folder):
        files = {path.name: checksum(path) for path in sorted(folder.iterdir())}
        text = json.dumps(files)
        return f"{hashlib.sha256(text.encode()).hexdigest() if sign else 0} {text}"

    def damaged(folder, manifest):
        digest, _, text = manifest.partition(" ")
        if sign and hashlib.sha256(text.encode()).hexdigest() != digest:
            return ["manifest"]
        found = json.loads(text)
        return [
            name for name, each in found.items() if not (folder / name).is_file() or checksum(folder / name) != each
        ]

    return describe, damaged


mistake(
    "checkpoint-manifest",
    "lengths only",
    says="Lengths find files that end early. A flipped bit leaves the length as it is: take a checksum of the content.",
)(_by(lambda path: path.stat().st_size))

mistake(
    "checkpoint-manifest",
    "the sum of the bytes",
    says="The sum of the bytes does not see two parts of a file that have changed places, nor zeros at its end. A "
    "checksum such as CRC-32 depends on where each byte stands.",
)(_by(lambda path: sum(path.read_bytes())))

mistake(
    "checkpoint-manifest",
    "the beginning of each file",
    says="Only the beginning of each file was looked at, and the damage is behind it.",
)(_by(lambda path: zlib.crc32(path.read_bytes()[:1024])))

mistake(
    "checkpoint-manifest",
    "time stamps",
    says="When a file was written says nothing about what is in it: a copy has another time, a damaged disk the same.",
)(_by(lambda path: [path.stat().st_size, path.stat().st_mtime_ns]))

mistake("checkpoint-manifest", "the manifest is not signed", expect="manifest")(
    _by(lambda path: [path.stat().st_size, zlib.crc32(path.read_bytes())], sign=False)
)

mistake("checkpoint-manifest", "Python's hash()", expect="is another there")(_by(lambda path: hash(path.read_bytes())))

mistake(
    "checkpoint-manifest",
    "every second byte",
    says="Only some of the bytes were looked at, and the damage is between them.",
)(_by(lambda path: [path.stat().st_size, zlib.crc32(path.read_bytes()[::2])]))

mistake("checkpoint-manifest", "a copy of the files", expect="not the files")(_by(lambda path: path.read_bytes().hex()))


def _among_those_there(folder, manifest):
    known = json.loads(manifest.partition(" ")[2]) if right.damaged(folder, manifest) != ["manifest"] else None
    if known is None:
        return ["manifest"]
    return [p.name for p in folder.iterdir() if known[p.name] != [p.stat().st_size, zlib.crc32(p.read_bytes())]]


mistake(
    "checkpoint-manifest",
    "looks at the files that are there",
    says="A file that is missing is not in the folder, so it was not looked at. Go through the names in the manifest.",
)((right.describe, _among_those_there))


def _by_full_path(folder):
    text = json.dumps({str(path): zlib.crc32(path.read_bytes()) for path in sorted(folder.iterdir())})
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}"


def _at_full_path(folder, manifest):
    digest, _, text = manifest.partition(" ")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        return ["manifest"]
    there = {str(path): zlib.crc32(path.read_bytes()) for path in folder.iterdir()}
    return [name.split("/")[-1] for name, each in json.loads(text).items() if there.get(name) != each]


mistake(
    "checkpoint-manifest",
    "full paths",
    says="The manifest has the files' full paths, and a checkpoint that is copied or mounted elsewhere has others. "
    "Write down the names within the folder.",
)((_by_full_path, _at_full_path))


def _one_for_all(folder):
    data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return hashlib.sha256(data).hexdigest()


def _says_all(folder, manifest):
    return [] if _one_for_all(folder) == manifest else sorted(path.name for path in folder.iterdir())


mistake(
    "checkpoint-manifest",
    "one checksum over all files",
    says="One checksum over all files says that something is wrong, not what: give each file its own.",
)((_one_for_all, _says_all))


def _lines(folder):
    """As sha256sum writes it, and a last line for the text itself."""
    text = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir()))
    return text + hashlib.sha256(text.encode()).hexdigest()


def _by_lines(folder, manifest):
    text, _, last = manifest.rpartition("\n")
    if not text or hashlib.sha256(f"{text}\n".encode()).hexdigest() != last:
        return ["manifest"]
    known = dict(reversed(line.split("  ")) for line in text.splitlines())
    there = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    return [name for name, digest in known.items() if there.get(name) != digest]


alternative("checkpoint-manifest", "sha256sum's format")((_lines, _by_lines))
