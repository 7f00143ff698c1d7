"""What type checkers make of calls: `make lint` runs mypy over this file, nothing runs it."""

from torch import Tensor
from typing_extensions import assert_type

import nsa

Both = tuple[Tensor, Tensor]


def results(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, cache: nsa.KVCache, either: bool) -> None:
    assert_type(nsa.native_sparse_attention(q, k, v, gates), Tensor)
    assert_type(nsa.native_sparse_attention(q, k, v, gates, noise=0.5, return_indices=False), Tensor)
    assert_type(nsa.native_sparse_attention(q, k, v, gates, cfg=nsa.NSAConfig(), return_indices=True), Both)
    assert_type(nsa.native_sparse_attention(q, k, v, gates, return_indices=either), Tensor | Both)
    assert_type(nsa.nsa_attention(q, k, v, gates, k_c=k, v_c=v), Tensor)
    assert_type(nsa.nsa_attention(q, k, v, gates, k_c=k, v_c=v, return_indices=True), Both)
    assert_type(nsa.reference.native_sparse_attention(q, k, v, gates, return_indices=True), Both)
    assert_type(nsa.decode(q, k, v, gates, cache), Tensor)
    assert_type(nsa.prefill(q, k, v, gates, cache, return_indices=True), Both)
    assert_type(nsa.prefill(q, k, v, gates, cache, first_chunk=True), Tensor)
    assert_type(nsa.compressed_attention(q, k, v, nsa.NSAConfig()), Both)


def refused(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, cache: nsa.KVCache) -> None:
    nsa.native_sparse_attention(q, k, v, gates, no_such_option=1)  # type: ignore[call-overload]
    nsa.native_sparse_attention(q, k, v, gates, seed="1")  # type: ignore[call-overload]
    nsa.decode(q, k, v, gates, cache, noise=0.5)  # type: ignore[call-overload]
    nsa.decode(q, k, v, gates, cache, first_chunk=True)  # type: ignore[call-overload]
    nsa.compress(k, nsa.NSAConfig())  # type: ignore[call-arg, arg-type]
