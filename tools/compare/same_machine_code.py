#!/usr/bin/env python3
"""Do two builds of libnsa have the same machine code? same_machine_code.py BEFORE AFTER

Moves, renames and splits of CUDA sources must not change a kernel. Each is compared instruction by instruction, by the
name of its function and its template arguments, without their namespaces. A kernel whose name only one build has is
paired with one of the other build that has the same code: it was renamed, or its template arguments were. Ends with 1
and names the kernels that differ. Needs c++filt, cuobjdump and nvdisasm (the CUDA toolkit's, or PyPI's
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm).
"""

import collections
import hashlib
import re
import subprocess
import sys


def kernels(library):
    """Name -> hashes of the code of the kernels of this name: several namespaces may have one."""
    code = []  # (architecture, mangled name, hash)
    process = subprocess.Popen(["cuobjdump", "-sass", library], stdout=subprocess.PIPE, text=True)
    architecture = name = digest = None

    def end():
        if name:
            code.append((architecture, name, digest.hexdigest()[:12]))

    for line in process.stdout:
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\w+)", line):
            end()
            name, digest = match[1], hashlib.sha256()
        elif name and (match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*/\*", line)):
            digest.update(match[1].encode())
    end()
    if process.wait() != 0:
        sys.exit(f"{library}: cuobjdump failed")
    mangled = "\n".join(name for _, name, _ in code)
    names = subprocess.run(["c++filt"], input=mangled, check=True, capture_output=True, text=True).stdout.split("\n")
    found = collections.defaultdict(collections.Counter)
    for (architecture, _, hashed), name in zip(code, names, strict=False):
        found[f"{architecture} {plain(name)}"][hashed] += 1
    return found


def plain(name):
    """A demangled function without its parameters, its return type and all namespaces."""
    depth, end = 0, len(name)
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and not name.startswith("(anonymous", i):
            end = i
            break
    name = re.sub(r"\(anonymous namespace\)::|\w+::", "", name[:end])
    return name.removeprefix("void ")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = kernels(sys.argv[1]), kernels(sys.argv[2])
    compared = sum(sum(codes.values()) for codes in before.values())
    lost, new = collections.defaultdict(list), collections.defaultdict(list)  # hash -> names
    for name in before.keys() | after.keys():
        old, now = before.get(name, collections.Counter()), after.get(name, collections.Counter())
        for rest, names in ((old - now, lost), (now - old, new)):
            for hashed in rest.elements():
                names[hashed].append(name)
    renamed, different = [], []
    for hashed in lost.keys() | new.keys():
        old, now = sorted(lost[hashed]), sorted(new[hashed])
        pairs = min(len(old), len(now))
        renamed += [f"{a} -> {b}" for a, b in zip(old, now, strict=False)]
        different += [f"only before: {name}" for name in old[pairs:]] + [f"only after: {name}" for name in now[pairs:]]
    for line in sorted({re.sub(r"<.*?>(?= ->|$)", "", pair) for pair in renamed}):
        print(f"renamed: {line}")
    for line in sorted(different, key=lambda line: (line.split(": ")[1], line)):
        print(line)
    same = compared - len(renamed) - sum(line.startswith("only before") for line in different)
    print(
        f"{compared} kernels before, {sum(sum(codes.values()) for codes in after.values())} after: {same} with "
        f"the same name and code, {len(renamed)} renamed with the same code, {len(different)} differ"
    )
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
