"""Given block indices (`indices=`) compared with block selection by the scores of the compressed keys.

Each query has a needle: one key that it matches, whose value is the answer. Block selection finds it through compressed
keys, an oracle gets its position, and random blocks contain it with the probability of their fraction.

    python examples/own_indices.py
"""

import torch
from torch import Tensor

import nsa

LENGTH, QUERIES, DIM = 2048, 64, 64
CFG = nsa.NSAConfig(kernel_size=16, kernel_stride=8, block_size=32, topk=8, window_size=64)
BLOCKS = LENGTH // CFG.block_size


def needles() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries at the end of the text, keys, values, and for each query the position of the key that it matches."""
    k, v = torch.randn(2, 1, LENGTH, 1, DIM)
    at = torch.randperm(LENGTH - 4 * CFG.block_size)[:QUERIES] + CFG.block_size  # in no block that is forced
    q = 5 * k[0, at, 0] / k[0, at, 0].norm(dim=-1, keepdim=True) * DIM**0.5
    return q[None, :, None], k, v, at


def forced(own: Tensor) -> Tensor:
    """The blocks that NSA always selects: the first, the query's own and the one before."""
    return torch.stack((torch.zeros_like(own), own - 1, own), -1)


def main() -> None:
    """Attends by the selected branch alone, with three block selections."""
    torch.manual_seed(0)
    q, k, v, at = needles()
    gates = torch.tensor([0.0, 1.0, 0.0]).expand(1, QUERIES, 1, 3)  # compressed, selected, window
    own = torch.arange(LENGTH - QUERIES, LENGTH) // CFG.block_size

    def given(others: Tensor) -> Tensor:
        """int32 (B, Sq, Hkv, topk). Any order; -1 is no block, and a block that is named twice counts once."""
        blocks = torch.cat((forced(own), others), -1)
        blocks = torch.nn.functional.pad(blocks, (0, CFG.topk - blocks.shape[-1]), value=-1)
        return blocks[None, :, None].int()

    random = torch.rand(QUERIES, BLOCKS - 4).argsort(-1)[:, : CFG.topk - 3] + 1  # neither the first nor the last ones
    choices = {"scores": None, "oracle": given(at[:, None] // CFG.block_size), "random": given(random)}

    found = {}
    for name, indices in choices.items():
        o, selected = nsa.native_sparse_attention(q, k, v, gates, cfg=CFG, indices=indices, return_indices=True)
        blocks = selected if indices is None else indices  # `selected` is what the scores choose, whatever is given
        answer = (o[0, :, 0] @ v[0, :, 0].T).argmax(-1)  # whose value it is
        found[name] = (answer == at).float().mean().item()
        hit = (blocks[0, :, 0] == at[:, None] // CFG.block_size).any(-1).float().mean()
        print(
            f"{name:8} the needle's block among {CFG.topk} of {BLOCKS}: {hit:4.0%}   right answers: {found[name]:4.0%}"
        )

    assert found["oracle"] == 1
    assert found["oracle"] >= found["scores"] > 2 * found["random"]


if __name__ == "__main__":
    main()
