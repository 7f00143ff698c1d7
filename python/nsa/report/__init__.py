"""`python -m nsa.report`: pictures of training runs and measurements, as one HTML page; events for TensorBoard."""

import tempfile
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Writes a regular file; a link or a FIFO of this name is replaced, not followed or waited for."""
    with tempfile.TemporaryDirectory(prefix=".nsa-", dir=path.parent) as folder:
        made = Path(folder) / "file"
        made.write_bytes(content)
        made.replace(path)
