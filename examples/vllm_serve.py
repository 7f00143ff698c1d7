"""Serves a sparse model with vLLM's OpenAI server and streams a completion from it.

    python examples/vllm_serve.py [FOLDER] [OPTION OF THE SERVER ...]

FOLDER is a model of nsa.hf with its tokenizer. Without it the example makes a tiny random one, with words t0 ... t511.
On a GPU, `vllm serve FOLDER` is the same server.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


def make_model(folder: str) -> None:
    """A random model of three layers."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from nsa.hf import NsaLlamaConfig, NsaLlamaForCausalLM

    words = {f"t{i}": i for i in range(512)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    torch.manual_seed(0)
    config = NsaLlamaConfig.recipe(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=len(words),
        num_hidden_layers=3,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    NsaLlamaForCausalLM(config).save_pretrained(folder)


@contextmanager
def serve(folder: str, *options: str, timeout: float = 600) -> Iterator[str]:
    """Address of a server, which runs until the block is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--served-model-name",
        "nsa",
    ]
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", port, *options], start_new_session=True)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + timeout
    try:
        while True:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: exit code {server.poll()}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(server.pid, signal.SIGKILL)  # the engine has processes of its own
        except ProcessLookupError:
            pass


def main() -> None:
    """Runs the example."""
    from openai import OpenAI

    with tempfile.TemporaryDirectory() as made:
        folder, *options = sys.argv[1:] or [made, "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
        if folder == made:
            make_model(folder)
        with serve(folder, *options) as url:
            client = OpenAI(base_url=f"{url}/v1", api_key="none")
            prompt = " ".join(f"t{i * i % 512}" for i in range(200))
            answer = client.completions.create(model="nsa", prompt=prompt, max_tokens=16, temperature=0, stream=True)
            for part in answer:
                print(part.choices[0].text, end="", flush=True)
            print()


if __name__ == "__main__":
    main()
