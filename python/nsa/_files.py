"""Readers of untrusted files, with the limits of the program `nsa`."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

MAX_BYTES = 100_000_000
"""Maximum size of a file that is read into memory: safetensors' limit for its header."""

MAX_LEVELS = 64
"""Maximum nesting depth of objects and arrays in JSON."""


def shown(text: str, length: int = 80) -> str:
    """Text from a file in at most `length` characters of one line; what is not printable is escaped."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: length + 1])
    return line if len(line) <= length else f"{line[: length - 3]}..."


def open_regular(path: Path, mode: Literal["rb", "ab"] = "rb", *, follow: bool = True) -> BinaryIO:
    """Opens a regular file for reading, or for appending, which creates it for this user alone.

    Raises:
        ValueError: `path` is a FIFO, which open() would wait for, a device or a folder; or a link without `follow`.
    """
    more = os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    if not follow and path.is_symlink():
        raise ValueError(f"{path}: not a regular file, but a link")
    try:
        file = open(path, mode, opener=lambda path, flags: os.open(path, flags | more, 0o600))
    except IsADirectoryError:
        raise ValueError(f"{path}: not a regular file") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: not a regular file")
    return file


def read_regular(path: Path, *, follow: bool = True, most: int = MAX_BYTES) -> bytes:
    """Contents of a regular file of at most `most` bytes. Raises ValueError as open_regular() does."""
    with open_regular(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path}: too large: must be at most {most} bytes")
    return content


def check_model(name: str) -> None:
    """Raises ValueError unless FOLDER is one, or may be a model on the Hugging Face Hub, USER/NAME.

    `from_pretrained` would ask the Hub for a folder that does not exist.
    """
    if os.path.isdir(name):
        return
    *parents, last = name.split("/")
    may_be_remote = len(parents) == 1 and last and not name.startswith((".", "~")) and not Path(parents[0]).is_dir()
    if not may_be_remote or os.path.lexists(name):
        raise ValueError(f"FOLDER = {name}: not a folder")


def named_path(text: str) -> Path:
    """An argument of the command line; Path("") would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def read_object(path: Path, *, follow: bool = True) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, also for a field given twice and for more than MAX_LEVELS."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number in JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise ValueError(f"field '{shown(twice)}' is given twice")
        return fields

    try:
        content = json.loads(read_regular(path, follow=follow), parse_constant=refuse, object_pairs_hook=unique)
        too_deep = _levels(content) > MAX_LEVELS
    except RecursionError:
        too_deep = True
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(f"{path}: ") else f"{path}: {error}") from None
    if too_deep:
        raise ValueError(f"{path}: nested deeper than {MAX_LEVELS} levels")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be an object")
    return content


def _levels(value: Any) -> int:
    """Nesting depth of objects and arrays, computed without recursion."""
    levels, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, (dict, list))]:
        levels += 1
        layer = [inner for item in layer for inner in (item.values() if isinstance(item, dict) else item)]
    return levels
