#!/usr/bin/env python3
"""Do the documents agree with the tree? Prints what does not, a line each; exit code 1 if anything does not.

Checked are the Markdown files that git tracks:

- every relative link leads to a file, and its anchor to a heading there;
- every path, file name, identifier and option in backticks is in the tree. Findings, the changelog and generated pages
  are left out: they name earlier commits;
- src/README.md has a paragraph for every folder of src, and no other;
- README.md has at most 120 lines, each finding at most 40;
- outside of findings no sentence has more than 35 words (code blocks, tables, headings and link targets do not count);
- findings, and all other Markdown, keep their limits of words, as `wc -w` counts them.
"""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[])")
BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)*(?:\(\))?")
FILE_NAME = re.compile(r"[\w*-]+\.(?:h|cpp|cu|cuh|py|sh)")
DATA = re.compile(r"\.(?:json|jsonl|png|txt|html|safetensors|model|tmp|xml)$")
# What the documents name and the sources do not: words of torch, of PTX and of Python, and of vLLM and SGLang.
FOREIGN = {"FakeTensorMode", "to_empty", "elect", "spawn", "OMP_STACKSIZE"}
FOREIGN |= {
    "CommonAttentionMetadata",
    "query_start_loc_cpu",
    "block_table_tensor",
    "FullAttentionSpec",
    "AttentionImpl",
}
FINDING_LINES = 40  # of a file in a folder of docs/findings
FINDINGS_WORDS = 20000
DOCUMENTS_WORDS = 55000  # of the Markdown outside docs/findings
SENTENCE_WORDS = 35
FOREIGN |= {"attention_registry.py", "base_attn_backend.py", "forward_decode", "forward_extend"}


def anchors(text):
    """Anchors that GitHub gives the headings of a page."""
    slugs = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slugs.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return slugs


def long_sentences(text):
    for paragraph in PARAGRAPH_END.split(COMMENT.sub("\n\n", FENCE.sub("\n\n", text))):
        if paragraph.lstrip().startswith(("|", "#")) or all(line.startswith("    ") for line in paragraph.splitlines()):
            continue
        for sentence in SENTENCE_END.split(" ".join(re.sub(r"\]\([^)]*\)", "]", paragraph).split())):
            words = sentence.split()
            if len(words) > SENTENCE_WORDS:
                yield f"a sentence of {len(words)} words, at most {SENTENCE_WORDS}: {' '.join(words[:8])} ..."


def broken_links(page, text):
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: no such heading"


def spellings(code):
    """a.{h,cu} is a.h and a.cu."""
    found = BRACES.search(code)
    if not found:
        return [code]
    ends = [code[: found.start()] + option + code[found.end() :] for option in found[1].split(",")]
    return [spelling for end in ends for spelling in spellings(end)]


class Tree:
    """Files that git tracks: their names, and the words in those that are no documents."""

    def __init__(self):
        self.files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        self.files = [name for name in self.files if (ROOT / name).is_file()]
        self.pages = [name for name in self.files if name.endswith(".md")]
        self.paths = {str(path) for name in self.files for path in (Path(name), *Path(name).parents)}
        self.names = {Path(name).name for name in self.files}
        self.words = set()
        for name in self.files:
            if name.startswith(("docs/", "bench/results/", "evidence/results/")) or name.endswith((".md", ".png")):
                continue
            self.words |= set(re.findall(r"\w+|--[a-z][a-z-]*", (ROOT / name).read_text(encoding="utf-8")))

    def has_path(self, path, folder):
        """Returns whether a path exists from the root, the page's folder, include or src."""
        spellings = (str(Path(base, path)) for base in ("", folder, "include", "src"))
        return any(fnmatch.filter(self.paths, spelling) for spelling in spellings)

    def complaint(self, code, folder):
        """Complaint about text in backticks on a page of a folder; None if it exists or names nothing."""
        for spelling in spellings(code):
            if re.fullmatch(r"[\w.-]+/[\w./*-]*", spelling) and self.has_path(spelling.split("/")[0], folder):
                if not self.has_path(spelling.rstrip("/"), folder):
                    return f"`{code}`: no such path"
            elif FILE_NAME.fullmatch(spelling):
                if spelling not in FOREIGN and not fnmatch.filter(self.names, spelling):
                    return f"`{code}`: no such file"
            elif IDENTIFIER.fullmatch(spelling) and not DATA.search(spelling):
                for word in re.findall(r"\w+", spelling):
                    if word not in self.words and word not in FOREIGN:
                        return f"`{code}`: {word} is nowhere in the sources"
            else:
                for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", spelling):
                    if option not in self.words:
                        return f"`{code}`: {option} is nowhere in the sources"
        return None


def folders_of_src(tree, text):
    """Every folder has a paragraph, and every paragraph a folder."""
    folders = {path.removeprefix("src/") for path in tree.paths if path.startswith("src/") and (ROOT / path).is_dir()}
    named = set(re.findall(r"\*\*`([^`]+)`\*\*", text)) - {"range_attention", "include/nsa"}
    yield from (f"no paragraph for **`{name}`**" for name in sorted(folders - named))
    yield from (f"**`{name}`** is no folder of src" for name in sorted(named - folders))


def main():
    tree, found = Tree(), 0
    words = {True: 0, False: 0}  # in docs/findings or not
    for name in tree.pages:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        complaints = list(broken_links(page, text))
        if name != "CHANGELOG.md" and not name.startswith("docs/findings/") and "Do not edit" not in text[:200]:
            codes = dict.fromkeys(CODE.findall(FENCE.sub("", text)))
            complaints += filter(None, (tree.complaint(code, Path(name).parent) for code in codes))
        if name == "src/README.md":
            complaints += folders_of_src(tree, text)
        if name == "README.md" and text.count("\n") > 120:
            complaints.append(f"{text.count(chr(10))} lines: at most 120")
        if fnmatch.fnmatch(name, "docs/findings/*/*.md") and text.count("\n") > FINDING_LINES:
            complaints.append(f"{text.count(chr(10))} lines: at most {FINDING_LINES}")
        is_finding = name.startswith("docs/findings/")
        if not is_finding:
            complaints += long_sentences(text)
        words[is_finding] += len(text.split())
        for complaint in complaints:
            print(f"{name}: {complaint}")
        found += len(complaints)
    for where, is_finding, limit in (("in", True, FINDINGS_WORDS), ("outside", False, DOCUMENTS_WORDS)):
        if words[is_finding] > limit:
            print(f"Markdown {where} docs/findings: {words[is_finding]} words, at most {limit}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
