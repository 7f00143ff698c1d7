"""What the operations run on here."""

from __future__ import annotations

from ._registration import ops


def describe_backends() -> str:
    """A line per backend: what it takes and its variant on this machine, or why it cannot run; then which is chosen."""
    return ops.describe_backends()


def device_count() -> int:
    """CUDA devices that the operations can use; 0 as well if the package was built without CUDA."""
    return ops.device_count()
