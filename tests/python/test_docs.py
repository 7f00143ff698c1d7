"""The examples in docs/guide/python.md run, one after the other in one session."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "guide" / "python.md"


def test_examples_run():
    examples = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 5
    session: dict = {}
    for example in examples:
        exec(compile(example, str(DOCS), "exec"), session)
