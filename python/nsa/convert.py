"""python -m nsa.convert SRC OUT: makes a folder that from_pretrained of nsa.hf loads.

SRC is a folder of a dense model that `nsa.hf.convert` takes, which becomes sparse, or a run of the program `nsa`,
whose model is renamed. SRC is only read; OUT is written atomically. Exit codes are those of the program: 2 when
options or SRC are at fault, 1 when something else fails.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import named_path, open_regular, read_object, read_regular, shown
from .config import NSAConfig
from .hf import NsaLlamaConfig, NsaQwen3Config  # first: it says what to install
from .hf.conversion import (
    ARCHITECTURES,
    PRESETS,
    added_tensors,
    compare_logits,
    layers_prefix,
    on_a_cpu,
    preset_options,
    sparse_config,
    targets,
)
from .hf.models import CAUSAL_MODELS

# isort: split
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.hub import CHAT_TEMPLATE_DIR

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION_CONFIG = "generation_config.json"
CARRIED = (".json", ".jinja", ".model", ".txt", "LICENSE", "NOTICE")
"""Ends of names of files that are copied with the weights: tokenizer, generation_config, licence."""

LIMITS = {
    ("vocab_size",): (2, 1 << 20),
    ("num_hidden_layers", "num_layers"): (1, 1024),
    ("hidden_size",): (4, 1 << 16),
    ("num_attention_heads", "num_heads"): (1, 1024),
    ("num_key_value_heads", "num_kv_heads"): (1, 1024),
    ("head_dim",): (8, 1024),
    ("intermediate_size", "ffn_size"): (1, 1 << 18),
    ("depth",): (1, 1024),
}
"""Sizes that the program takes, by their names in transformers and in a run."""

USERS_FAULTS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES),
    *(errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL),
}
"""Errors that blame a name or a permission, not the machine."""

BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "ffn_norm": "post_attention_layernorm",
    "ffn": "mlp",
}
"""Parts of a layer in a run of the program, and in transformers."""


DTYPES = ("F32", "BF16", "F16")


class Folder:
    """An untrusted model folder: its configuration, and the file of each tensor.

    Everything that is read or copied is a regular file. In a run folder, and for what is copied, it is no link either,
    unless one into the folder or the cache of the Hugging Face Hub that it belongs to. Raises ValueError naming what is
    damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        folder = Path(os.path.realpath(path))
        # The hub's cache: snapshots/COMMIT/FOLDERS/NAME is a link to blobs/HASH.
        caches = [parent.with_name("blobs") for parent in folder.parents if parent.name == "snapshots"]
        self.link_targets = [folder, *caches]
        self.config = read_object(path / CONFIG)
        self.is_run = "model" in self.config
        if self.is_run:
            self.config = read_object(self._own(CONFIG), follow=False)
        _check_sizes(path / CONFIG, self.config["model"] if self.is_run else self.config)
        for part in ("text_config", "vision_config"):
            if not self.is_run and part in self.config:
                _check_sizes(path / CONFIG, self.config[part], part)
        if not self.is_run and os.path.lexists(path / INDEX):
            index = read_object(path / INDEX)
            weight_map = index.get("weight_map")
            if not isinstance(index.get("metadata"), dict):  # transformers wants it
                raise ValueError(f"{path / INDEX}: metadata: must be an object")
            if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
                raise ValueError(f"{path / INDEX}: weight_map: must name a file for each tensor")
            self.files = sorted(set(weight_map.values()))
            if any(Path(file).name != file or not file.endswith(".safetensors") for file in self.files):
                raise ValueError(f"{path / INDEX}: weight_map: must name .safetensors files in the same folder")
        elif os.path.lexists(path / SINGLE):
            self.files = [SINGLE]
        else:
            raise ValueError(f"{path}: no {SINGLE} and no {INDEX}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            with self.open(file) as tensors:
                for name in tensors.keys():
                    if name in self.shapes:
                        raise ValueError(f"{path / file}: {shown(name)}: in another file, too")
                    part = tensors.get_slice(name)
                    self.shapes[name] = tuple(part.get_shape())
                    dtype = part.get_dtype()
                    if dtype not in DTYPES:
                        raise ValueError(f"{path / file}: {shown(name)}: {dtype}: must be {' or '.join(DTYPES)}")

    @contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """One of the files, as safetensors reads it."""
        path = self._own(file) if self.is_run else self.path / file
        open_regular(path, follow=not self.is_run).close()
        try:
            with safe_open(path, framework="pt") as tensors:
                yield tensors
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{self.path / file}: {error}") from None

    def _own(self, file: str) -> Path:
        """The path of a file, or of what its link leads to. Raises ValueError where that is elsewhere."""
        path = self.path / file
        if not path.is_symlink():
            return path
        target = Path(os.path.realpath(path))
        if target.parent not in self.link_targets:
            raise ValueError(f"{path}: a link out of the folder: must be a file of its own")
        return target

    def tensor(self, source: Any, file: str, name: str) -> Tensor:
        """One of the tensors of an open file. Raises ValueError where it is not finite."""
        tensor: Tensor = source.get_tensor(name)
        if not tensor.isfinite().all():
            raise ValueError(f"{self.path / file}: {shown(name)}: holds values that are not finite")
        return tensor

    def carried(self) -> Iterator[tuple[str, bytes]]:
        """Files that are copied with the weights: paths within the folder and contents."""
        templates = self.path / CHAT_TEMPLATE_DIR
        self._own(CHAT_TEMPLATE_DIR)  # raises where a link leads elsewhere
        for file in sorted((*self.path.iterdir(), *(templates.iterdir() if templates.is_dir() else ()))):
            if not file.name.endswith(CARRIED) or file.name in (CONFIG, INDEX):
                continue
            if file.is_dir() and not file.is_symlink():
                continue
            name = str(file.relative_to(self.path))
            yield name, read_regular(self._own(name), follow=False)

    def check(self, expected: dict[str, Tensor], optional: set[str]) -> None:
        """Raises ValueError unless there are exactly these tensors, in their shapes."""
        for name, tensor in expected.items():
            if name not in self.shapes:
                if name in optional:
                    continue
                raise ValueError(f"{self.path}: {name}: missing")
            if self.shapes[name] != tuple(tensor.shape):
                shape = shown(str(self.shapes[name]))
                raise ValueError(f"{self.path}: {name}: {shape}: must be {tuple(tensor.shape)}")
        for name in self.shapes:
            if name not in expected and not name.endswith("rotary_emb.inv_freq"):
                raise ValueError(f"{self.path}: {shown(name)}: not a tensor of the architecture")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A temporary folder next to `out`: renamed to `out` if the block succeeds, removed if it raises."""
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists: must be a new folder")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}: not a folder")
    made = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield made
        made.chmod(0o755)
        os.rename(made, out)  # fails if a folder with files has appeared there meanwhile
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def make_sparse(
    folder: Folder, out: Path, nsa: dict[str, Any], *, separate_kv: bool, dense_layers: list[int], seed: int
) -> None:
    """Converts a dense folder, one file of weights at a time."""
    src = folder.path
    architectures = folder.config.get("architectures") or ["none"]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(f"{src}: architecture = {shown(str(architecture))}: must be {' or '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[architecture][0]
    if folder.config.get("model_type") != kind.model_type:
        found = shown(repr(folder.config.get("model_type")))
        raise ValueError(f"{src}: model_type = {found}: must be {kind.model_type} with architecture {architecture}")
    if folder.config.get("quantization_config"):
        raise ValueError(f"{src}: quantization_config: must be absent")
    if os.path.lexists(src / "adapter_config.json"):
        raise ValueError(f"{src / 'adapter_config.json'}: must be absent: merge the adapter into the weights first")
    carried = dict(folder.carried())
    if GENERATION_CONFIG in carried:  # transformers reads it with either folder
        with _understanding(src / GENERATION_CONFIG):
            GenerationConfig.from_dict(read_object(src / GENERATION_CONFIG))
    with _understanding(src / CONFIG), torch.device("meta"):
        dense = kind.from_dict(folder.config)
        _check_layers(folder, "num_hidden_layers", dense.get_text_config().num_hidden_layers, layers_prefix(dense))
        made_dense = getattr(transformers, architecture)(dense)
        expected = revert_weight_conversion(made_dense, made_dense.state_dict())  # files name each expert
        options = {**nsa, "share_kv": not separate_kv}
        config = sparse_config(dense, architecture, options, dense_layers)
        model = CAUSAL_MODELS[type(config)](config)
    folder.check(expected, {"lm_head.weight"} if dense.tie_word_embeddings else set())
    config.architectures = [type(model).__name__]
    config.dtype = dense.dtype
    with appearing(out) as made:
        config.save_pretrained(made)
        for name, content in carried.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_bytes(content)
        places, total = {}, 0
        for file in folder.files:
            tensors: dict[str, Tensor] = {}
            with folder.open(file) as source:
                for name in source.keys():
                    if name not in expected:
                        continue
                    tensor = folder.tensor(source, file, name)
                    tensors.update(targets(config, name, tensor))
                    if name.endswith("self_attn.q_proj.weight"):
                        for added, value in added_tensors(model, seed, [int(name.split(".")[-4])]):
                            tensors[added] = value.to(tensor.dtype)
            save_file(tensors, made / file, metadata={"format": "pt"})
            places.update(dict.fromkeys(tensors, file))
            total += sum(tensor.nbytes for tensor in tensors.values())
        if folder.files != [SINGLE]:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (made / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def rename_run(folder: Folder, out: Path) -> None:
    """Makes the model of a run folder of the program one of transformers: nsa, or with full or window attention."""
    src, given = folder.path, folder.config["model"]
    with _understanding(src / CONFIG), torch.device("meta"):
        if given["v_head_dim"] != given["head_dim"]:
            raise ValueError(f"{src}: v_head_dim = {given['v_head_dim']}: must be head_dim = {given['head_dim']}")
        fields = {
            "vocab_size": given["vocab_size"],
            "hidden_size": given["hidden_size"],
            "intermediate_size": given["ffn_size"],
            "num_hidden_layers": given["num_layers"],
            "num_attention_heads": given["num_heads"],
            "num_key_value_heads": given["num_kv_heads"],
            "head_dim": given["head_dim"],
            "rms_norm_eps": given["norm_eps"],
            "rope_parameters": _rope_parameters(given),
            "max_position_embeddings": folder.config["train"]["context"],
            "tie_word_embeddings": given.get("tied_head", True),
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float32",
        }
        if given.get("gated", False):
            raise ValueError(f"{src}: gated = true: must be false, no model of transformers has such gates")
        names = (*NSAConfig.__dataclass_fields__, "share_kv", "phi", "phi_hidden", "phi_per_kv_head")
        qk_norm = given.get("qk_norm", False)
        kind: Any
        config: PreTrainedConfig
        if given["attention"] == "nsa":
            options = {name: given[name] for name in names}
            config = (NsaQwen3Config if qk_norm else NsaLlamaConfig)(
                **fields, nsa=options, dense_layers=given.get("dense_layers", [])
            )
            kind = CAUSAL_MODELS[type(config)]
        elif given["attention"] == "window" and not qk_norm:
            kind, config = MistralForCausalLM, MistralConfig(**fields, sliding_window=given["window_size"])
        elif given["attention"] == "full":
            kind = Qwen3ForCausalLM if qk_norm else LlamaForCausalLM
            config = (Qwen3Config if qk_norm else LlamaConfig)(**fields)
        else:
            raise ValueError(f"{src}: attention = {given['attention']}: must be nsa, full or, without qk_norm, window")
        _check_layers(folder, "num_layers", config.num_hidden_layers, "layers.")
        expected = kind(config).state_dict()
    config.architectures = [kind.__name__]
    with folder.open(SINGLE) as source:
        tensors = {_renamed(name): folder.tensor(source, SINGLE, name) for name in source.keys()}
    folder.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    folder.check(expected, {"lm_head.weight"} if config.tie_word_embeddings else set())
    with appearing(out) as made:
        config.save_pretrained(made)
        save_file(tensors, made / SINGLE, metadata={"format": "pt"})


def compare(src: Path, out: Path, lengths: list[int], seed: int) -> Iterator[dict[str, Any]]:
    """Difference between the logits of the two folders on random tokens, for each length."""
    config = AutoConfig.from_pretrained(src, trust_remote_code=False)
    language = config.get_text_config() is config
    kind: Any = AutoModelForCausalLM if language else AutoModelForImageTextToText
    attention = "nsa" if language else {"text_config": "nsa"}
    dense = kind.from_pretrained(src, attn_implementation=attention, trust_remote_code=False)
    dense, sparse = on_a_cpu(dense), on_a_cpu(kind.from_pretrained(out))
    generator = torch.Generator().manual_seed(seed)
    for length in lengths:
        ids = torch.randint(config.get_text_config().vocab_size, (1, length), generator=generator)
        with torch.no_grad():
            expected, given = (model(ids, use_cache=False).logits.float() for model in (dense, sparse))
        yield {"length": length, **compare_logits(expected, given)}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m nsa.convert", description=__doc__)
    option = parser.add_argument
    option("src", type=named_path, metavar="SRC", help="a dense model's folder, or a run folder of the program nsa")
    option("out", type=named_path, metavar="OUT", help="a folder that does not exist")
    option("--separate-kv", action="store_true", help="a copy of the key and value projections for each branch")
    option("--dense-layers", type=_numbers, default=[], metavar="0,1", help="layers that keep full attention")
    option(
        "--preset", choices=list(PRESETS), default="paper", help="recipe: smaller blocks and phi = mlp, to train OUT"
    )
    option("--phi", choices=["mean", "linear", "mlp"], help="linear and mlp start as the mean; default: the preset's")
    option(
        "--lengths", type=_numbers, default=[256, 1024], metavar="N,N", help="lengths to compare at, tokens; 0: none"
    )
    option("--seed", type=int, default=0, help="seed of the gates' first layer and the tokens to compare with")
    recipe = vars(NSAConfig.recipe())
    for name, field in NSAConfig.__dataclass_fields__.items():
        option(
            f"--{name.replace('_', '-')}",
            type=int,
            metavar="N",
            help=f"default {field.default}, in the recipe {recipe[name]}",
        )
    given = parser.parse_args(arguments)
    try:
        folder = Folder(given.src)
        if folder.is_run:
            rename_run(folder, given.out)
        else:
            sizes = {name: getattr(given, name) for name in NSAConfig.__dataclass_fields__}
            sizes = {name: size for name, size in sizes.items() if size is not None}
            nsa = preset_options(given.preset, sizes, given.phi)
            made = {"separate_kv": given.separate_kv, "dense_layers": given.dense_layers}
            make_sparse(folder, given.out, nsa, **made, seed=given.seed)
        _say(f"{given.out}: written")
        lengths = [] if folder.is_run else [length for length in given.lengths if length > 0]
        for row in compare(given.src, given.out, lengths, given.seed) if lengths else ():
            _say(
                f"{row['length']:>7} random tokens: max |logit difference| {row['max_difference']:.2g}, "
                f"KL {row['kl']:.2g}, same best token {100 * row['top1']:.1f} %"
            )
    except (ValueError, StrictDataclassError) as error:
        return _fail(str(error), 2)
    except OSError as error:
        message = f"{error.filename or given.out}: {error.strerror or error}"
        return _fail(message, 2 if error.errno in USERS_FAULTS else 1)
    except SafetensorError as error:  # of reading they are ValueErrors
        return _fail(f"{given.out}: cannot be written: {error}", 1)
    except MemoryError:
        return _fail("out of memory", 1)
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        return _fail(f"out of memory: {error}", 1)
    return 0


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as error:
        error.filename = "standard output"
        raise


def _fail(message: str, code: int) -> int:
    print(f"error: {shown(' '.join(message.split()), 2000)}", file=sys.stderr)
    return code


def _check_sizes(path: Path, config: Any, part: str = "model") -> None:
    """Before anything is made of these sizes."""
    if not isinstance(config, dict):
        raise ValueError(f"{path}: {part}: must be an object")
    for names, (low, high) in LIMITS.items():
        for name in names:
            value = config.get(name)
            if type(value) is int and not low <= value <= high:
                raise ValueError(f"{path}: {name} = {shown(str(value))}: must be {low} ... {high}")


def _check_layers(folder: Folder, field: str, num_layers: int, prefix: str) -> None:
    """Before modules are made for layers that the files do not have."""
    last = f"{prefix}{num_layers - 1}."
    if not any(name.startswith(last) for name in folder.shapes):
        raise ValueError(f"{folder.path}: {field} = {num_layers}: the files have no layer {num_layers - 1}")


@contextmanager
def _understanding(path: Path) -> Iterator[None]:
    """Converts an exception of transformers about a configuration to a ValueError that names the file."""
    try:
        yield
    except (ValueError, StrictDataclassError):
        raise
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from None


def _numbers(text: str) -> list[int]:
    numbers = text.split(",") if text else []
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise argparse.ArgumentTypeError(f"{text}: must be numbers >= 0 with commas between them")
    return [int(number) for number in numbers]


def _rope_parameters(model: dict[str, Any]) -> dict[str, Any]:
    """Those of transformers for a model of the program; runs from before it knew scaling have none."""
    rope = {"rope_type": model.get("rope_type", "default"), "rope_theta": model["rope_theta"]}
    if rope["rope_type"] != "default":
        rope["factor"] = model["rope_factor"]
    partial = model.get("partial_rotary_factor", 1.0)
    if partial != 1:
        rope |= {"rope_type": "proportional", "partial_rotary_factor": partial}
    fields = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    }.get(rope["rope_type"])
    if fields:
        rope["original_max_position_embeddings"] = model["rope_original_context"]
        rope |= {name: model[f"rope_{name}"] for name in fields}
    return rope


def _renamed(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    if name == "embedding.weight":
        return "model.embed_tokens.weight"
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 2:
        parts[2] = BLOCK_NAMES.get(parts[2], parts[2])
    return ".".join(("model", *parts))


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # the unfinished OUT goes
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, _: sys.exit(128 + received))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of folders may hold any byte
    code = main()
    try:
        if sys.stdout:  # None where it is closed
            sys.stdout.flush()
    except OSError:  # said by main(): not once more by the interpreter
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)
