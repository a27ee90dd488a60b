"""Spoilers of lab 10, damage: manifests that miss it, cannot name it or cannot be read again, and one more that can."""

import hashlib

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("10_fault_tolerance")


checkpoint_manifest = KnownAnswers("checkpoint-manifest")

checkpoint_manifest.mistake(
    "lengths only",
    {" or zlib.crc32(path.read_bytes()) != checksum": ""},
    says="Lengths find files that end early. A flipped bit leaves the length as it is: take a checksum of the content.",
)
checkpoint_manifest.mistake(
    "the sum of the bytes",
    {
        " or path.stat().st_size != size": "",
        "zlib.crc32(path.read_bytes())]": "sum(path.read_bytes())]",
        "zlib.crc32(path.read_bytes()) != checksum": "sum(path.read_bytes()) != checksum",
    },
    says="The sum of the bytes does not see two parts of a file that have changed places, nor zeros at its end. A "
    "checksum such as CRC-32 depends on where each byte stands.",
)
checkpoint_manifest.mistake(
    "the beginning of each file",
    {
        " or path.stat().st_size != size": "",
        "zlib.crc32(path.read_bytes())]": "zlib.crc32(path.read_bytes()[:1024])]",
        "zlib.crc32(path.read_bytes()) != checksum": "zlib.crc32(path.read_bytes()[:1024]) != checksum",
    },
    says="Only the beginning of each file was looked at, and the damage is behind it.",
)
checkpoint_manifest.mistake(
    "time stamps",
    {
        "zlib.crc32(path.read_bytes())]": "path.stat().st_mtime_ns]",
        "zlib.crc32(path.read_bytes()) != checksum": "path.stat().st_mtime_ns != checksum",
    },
    says="When a file was written says nothing about what is in it: a copy has another time, a damaged disk the same.",
)
checkpoint_manifest.mistake(
    "the last file is left out", {"sorted(folder.iterdir()):": "sorted(folder.iterdir())[:-1]:"}, expect="damaged names"
)
checkpoint_manifest.mistake(
    "files kept between calls",
    {"def describe(folder):": "def describe(folder, files={}):", "    files = {}\n": ""},
    expect="a second folder was described",
)
checkpoint_manifest.mistake(
    "the manifest is not signed", {"hashlib.sha256(text.encode()).hexdigest() != digest": "not text"}, expect="manifest"
)
checkpoint_manifest.mistake(
    "Python's hash()",
    {
        "zlib.crc32(path.read_bytes())]": "hash(path.read_bytes())]",
        "zlib.crc32(path.read_bytes()) != checksum": "hash(path.read_bytes()) != checksum",
    },
    expect="is another there",
)
checkpoint_manifest.mistake(
    "every second byte",
    {
        "zlib.crc32(path.read_bytes())]": "zlib.crc32(path.read_bytes()[::2])]",
        "zlib.crc32(path.read_bytes()) != checksum": "zlib.crc32(path.read_bytes()[::2]) != checksum",
    },
    says="Only some of the bytes were looked at, and the damage is between them.",
)
checkpoint_manifest.mistake(
    "a copy of the files",
    {
        "zlib.crc32(path.read_bytes())]": "path.read_bytes().hex()]",
        "zlib.crc32(path.read_bytes()) != checksum": "path.read_bytes().hex() != checksum",
    },
    expect="not the files",
)
checkpoint_manifest.mistake(
    "looks at the files that are there",
    {
        ("for name, (size, checksum) in json.loads(text).items():\n        path = folder / name"): (
            "for path in folder.iterdir():\n        name, (size, checksum) = path.name, json.loads(text)[path.name]"
        )
    },
    says="A file that is missing is not in the folder, so it was not looked at. Go through the names in the manifest.",
)
checkpoint_manifest.mistake(
    "full paths",
    {
        "files[path.name]": "files[str(path)]",
        "not path.is_file()": "str(folder) not in name or not path.is_file()",
        "found.append(name)": 'found.append(name.split("/")[-1])',
    },
    says="The manifest has the files' full paths, and a checkpoint that is copied or mounted elsewhere has others. "
    "Write down the names within the folder.",
)


def _one_for_all(folder):
    data = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return hashlib.sha256(data).hexdigest()


def _says_all(folder, manifest):
    return [] if _one_for_all(folder) == manifest else sorted(path.name for path in folder.iterdir())


checkpoint_manifest.mistake(
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


checkpoint_manifest.alternative("sha256sum's format")((_lines, _by_lines))
