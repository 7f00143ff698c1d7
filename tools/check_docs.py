#!/usr/bin/env python3
"""Do the documents agree with the tree? Prints what does not, a line each; exit code 1 if anything does not.

Checked are the Markdown files that git tracks: every relative link leads to a file, and its anchor to a heading there.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(text):
    """What GitHub calls the headings of a page."""
    slugs = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slugs.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return slugs


def broken_links(page):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: no such heading"


def main():
    tracked = subprocess.check_output(["git", "ls-files", "-z", "*.md"], cwd=ROOT, text=True).split("\0")
    found = 0
    for name in filter(None, tracked):
        for complaint in broken_links(ROOT / name):
            print(f"{name}: {complaint}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
