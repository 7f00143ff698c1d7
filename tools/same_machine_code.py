#!/usr/bin/env python3
"""Do two builds of libnsa have the same machine code? same_machine_code.py BEFORE AFTER

Moves, renames and splits of CUDA sources must not change a kernel. Each is compared instruction by instruction, by the
name of its function and the types it was made for, whatever file and namespace it lies in. Ends with 1 and names them
where kernels differ or only one build has them. Needs cuobjdump: the CUDA toolkit's or PyPI's nvidia-cuda-cuobjdump.
"""

import collections
import hashlib
import re
import subprocess
import sys


def kernels(library):
    """Name -> hashes of the code of the kernels of this name, sorted: namespaces may have alike ones."""
    found = collections.defaultdict(list)
    process = subprocess.Popen(["cuobjdump", "-sass", library], stdout=subprocess.PIPE, text=True)
    architecture = name = digest = None

    def end():
        if name:
            found[f"{architecture} {name}"].append(digest.hexdigest()[:12])

    for line in process.stdout:
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\w+)", line):
            end()
            name, digest = plain(match[1]), hashlib.sha256()
        elif name and (match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*/\*", line)):
            digest.update(match[1].encode())
    end()
    if process.wait() != 0:
        sys.exit(f"{library}: cuobjdump failed")
    return {key: sorted(codes) for key, codes in found.items()}


def plain(mangled):
    """The function's own name, its element type and its numbers, of a mangled name."""
    names, at = [], 0
    while match := re.search(r"(?<!\d)(\d+)(?=[A-Za-z_])", mangled[at:]):
        begin = at + match.end()
        end = begin + int(match[1])
        if end > len(mangled):
            at = begin
            continue
        names.append(mangled[begin:end])
        at = end
        if mangled[at : at + 1] == "I":
            break
    own = names[-1] if names else mangled
    element = re.search(r"__nv_bfloat16|__half|If", mangled)
    numbers = re.findall(r"L[ib](\d+)E", mangled)
    return " ".join([own, element[0] if element else "", *numbers])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = kernels(sys.argv[1]), kernels(sys.argv[2])
    different = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in different:
        print(f"{name}: {before.get(name, 'not there')} and {after.get(name, 'not there')}")
    print(f"{sum(map(len, before.values()))} kernels, {len(different)} names differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
