"""`torchrun … -m nsa.train ARGUMENTS`: the program's `nsa train ARGUMENTS` on several ranks, data parallel.

A rank for each GPU over NCCL, or processes of a CPU over gloo. The training is the program's, which is found as
NSA_PROGRAM, in the package, on PATH, or where the repository builds it.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import __version__


def stop(message: str) -> NoReturn:
    """Ends this rank, whose arguments or surroundings are at fault."""
    sys.exit(f"nsa.train: {message}")


def find_library() -> Path:
    """The program's library, which is in the folder lib next to the program's bin."""
    package = Path(__file__).resolve().parent
    # An empty or relative folder in PATH would name a library of the working directory.
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(folder)]
    on_path = shutil.which("nsa", path=os.pathsep.join(folders))  # the program, or the package's command
    named = os.environ.get("NSA_PROGRAM")
    programs = [named] if named else [package / "bin" / "nsa", on_path, package.parents[1] / "build" / "bin" / "nsa"]
    libraries = [Path(p).resolve().parent.parent / "lib" / "libnsa_program.so" for p in programs if p]
    for library in libraries:
        if library.is_file():
            return library
    stop(f"no {libraries[-1]}; build the program, or name it in NSA_PROGRAM")


def load_program() -> ctypes.CDLL:
    """Loads the program's library."""
    path = find_library()
    library = ctypes.CDLL(str(path))
    library.nsa_program_versions.restype = ctypes.c_char_p
    found = library.nsa_program_versions().decode()
    expected = f"{__version__} {torch.__version__.split('+')[0]}"
    if found.split("+")[0] != expected:
        stop(f"{path}: of nsa and torch {found}; this is {expected}")
    return library


_EMIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)
_OPEN = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_char_p, _EMIT, ctypes.c_void_p)
_ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_int64, ctypes.POINTER(ctypes.c_char), ctypes.c_int64, _EMIT, ctypes.c_void_p
)
_DECODE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.c_int32, _EMIT, ctypes.c_void_p)


class _Tokenizer:
    """A tokenizer.json by the package `tokenizers`, with the tokens that tokenizer_config.json names."""

    def __init__(self, text: str, config: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(text)
        self.vocab_size = max(self.tokenizer.get_vocab().values(), default=-1) + 1
        self.special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        self.bytes: dict[str, int] | None = None  # of the characters of a byte-level vocabulary
        if '"ByteLevel"' in json.dumps(json.loads(text).get("decoder")):
            shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
            hidden = [byte for byte in range(256) if byte not in shown]
            self.bytes = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
        self.config = json.loads(config) if config else {}

    def named(self, name: str) -> int:
        """The number of a token of tokenizer_config.json, or -1."""
        token = self.config.get(name)
        number = self.tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
        return -1 if number is None else number

    def encode(self, text: bytes) -> bytes:
        """int32 numbers of a text, in which U+FFFD replaces what is not UTF-8."""
        ids = self.tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return bytes((ctypes.c_int32 * len(ids))(*ids))

    def decode(self, number: int) -> bytes:
        """The bytes of a token; none of a special one."""
        token = self.tokenizer.id_to_token(number)
        if token is None or number in self.special:
            return b""
        if self.bytes is not None:
            return bytes(self.bytes[character] for character in token if character in self.bytes)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


class _TokenizerFunctions(ctypes.Structure):
    _fields_ = (("open", _OPEN), ("encode", _ENCODE), ("decode", _DECODE))


def _tokenizer_functions() -> _TokenizerFunctions:
    """For nsa_program_tokenizers()."""
    opened: list[_Tokenizer] = []

    def emitted(work: Callable[[], bytes], emit: Any, sink: Any) -> bool:
        try:
            result, done = work(), True
        except Exception as error:  # of tokenizers, which has no class of its own
            result, done = str(error).encode(errors="replace"), False
        emit(sink, result, len(result))
        return done

    def open_(text: bytes, config: bytes) -> bytes:
        tokenizer = _Tokenizer(text.decode(), config.decode())
        opened.append(tokenizer)
        tokens = {"start": tokenizer.named("bos_token"), "end": tokenizer.named("eos_token")}
        begins = tokenizer.tokenizer.encode("").ids[:1] == [tokens["start"]]
        sizes = {"handle": len(opened) - 1, "vocab_size": tokenizer.vocab_size}
        return json.dumps({**sizes, **tokens, "begins_prompts": begins}).encode()

    return _TokenizerFunctions(
        _OPEN(lambda text, config, emit, sink: emitted(lambda: open_(text, config), emit, sink)),
        _ENCODE(lambda i, text, n, emit, sink: emitted(lambda: opened[i].encode(text[:n]), emit, sink)),
        _DECODE(lambda i, number, emit, sink: emitted(lambda: opened[i].decode(number), emit, sink)),
    )


def run_program(arguments: list[str], group: str | None = None) -> NoReturn:
    """Runs the program with these arguments and ends this process with its exit code."""
    library = load_program()
    functions = _tokenizer_functions()
    library.nsa_program_tokenizers(ctypes.byref(functions))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the program's own handling, not Python's
    encoded = [b"nsa", *map(os.fsencode, arguments)]
    values = (ctypes.c_char_p * (len(encoded) + 1))(*encoded, None)
    sys.stdout.flush()
    code = library.nsa_program(len(encoded), values, group.encode() if group else None)
    os._exit(code)  # gloo's threads sometimes outlive the interpreter's end, which then aborts


def main() -> NoReturn:
    """Trains as one rank."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        stop("start it as torchrun --nproc-per-node N -m nsa.train ARGUMENTS; one process is nsa train ARGUMENTS")
    load_program()
    # The program uses the first GPU that it sees. This has to come before anything asks for one.
    local, visible = int(os.environ["LOCAL_RANK"]), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local)
    elif visible:
        if local >= len(visible.split(",")):
            stop(f"CUDA_VISIBLE_DEVICES = {visible}: LOCAL_RANK = {local} needs a GPU of its own")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[local]
    use_cuda = os.environ.get("NSA_DEVICE") != "cpu" and torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    dist.all_reduce(torch.zeros(1))  # a rank that refuses its arguments leaves when the others have connected
    group = dist.group.WORLD
    assert group is not None  # since init_process_group()
    run_program(["train", *sys.argv[1:]], group.group_name)


if __name__ == "__main__":
    main()
