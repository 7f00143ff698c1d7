"""The examples of documents run, those of a page one after the other in one session."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "page, count",
    [
        ("README.md", 1),
        ("docs/guide/python.md", 6),
        ("docs/guide/migration.md", 3),
        ("docs/guide/serving.md", 1),
        ("docs/guide/transformers.md", 4),
    ],
)
def test_examples_run(page, count):
    if page.endswith("transformers.md"):
        pytest.importorskip("transformers", minversion="5.24")
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == count
    session: dict = {}
    for example in examples:
        exec(compile(example, page, "exec"), session)
