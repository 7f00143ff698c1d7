"""`torchrun … -m nsa.train ARGUMENTS`: the program's `nsa train ARGUMENTS` on several ranks, data parallel.

A rank for each GPU over NCCL, or processes of a CPU over gloo. The training is the program's, which is found as
NSA_PROGRAM, in the package, on PATH, or where the repository builds it.
"""

import ctypes
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

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


def main() -> NoReturn:
    """Trains as one rank."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        stop("start it as torchrun --nproc-per-node N -m nsa.train ARGUMENTS; one process is nsa train ARGUMENTS")
    library = load_program()
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the program's own handling, not Python's
    arguments = [os.fsencode(argument) for argument in ["nsa", "train", *sys.argv[1:]]]
    values = (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None)
    sys.stdout.flush()
    group = dist.group.WORLD
    assert group is not None  # since init_process_group()
    code = library.nsa_program(len(arguments), values, group.group_name.encode())
    os._exit(code)  # gloo's threads sometimes outlive the interpreter's end, which then aborts


if __name__ == "__main__":
    main()
