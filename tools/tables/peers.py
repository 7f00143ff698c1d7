"""Other implementations: bench/peers/peers.py."""

from tables.text import fill, gpu_of, noted, pair, read, source, table

NAMES = {"nsa": "this", "xunhaolai": "XunhaoLai", "flash_nsa": "flash_nsa"}
DENSE = ("cudnn", "flash3", "flash4")
NAMES |= {"cudnn": "dense: cuDNN"} | {f"flash{version}": f"dense: FlashAttention-{version}" for version in (2, 3, 4)}


def peers_about(result):
    commits = ", ".join(f"{NAMES.get(name, name)} {commit}" for name, commit in result["commits"].items())
    versions = f"torch {result['torch']}, triton {result['triton']}, {commits}"
    unit = f"Forward / backward in ms, medians of alternating calls ({versions})."
    about = {"date": result["date"], "commit": result["commits"]["nsa"], "command": result["command"]}
    return source(gpu_of(result), about, result["problem"], unit)


def peers_table(result, wanted):
    """A row per length and stage whose name `wanted` accepts; model-like blocks stand for clustered ones."""
    stages = [(length, name, found) for length, of in result["lengths"].items() for name, found in of["stages"].items()]
    names = {name for _, name, _ in stages}
    stages = [
        (length, name, found)
        for length, name, found in stages
        if wanted(length, name) and name.replace("clustered", "model-like") not in names - {name}
    ]
    shown = [name for name in NAMES if any(name in found for _, _, found in stages)]
    rows = [["length", "stage", *(NAMES[name] for name in shown)]]
    rows += [[length, name, *(pair(found.get(one)) for one in shown)] for length, name, found in stages]
    return table(rows)


def whole_or_dense(_, name):
    return name.startswith(("end to end", "dense"))


def peers():
    result = read("peers.json")
    yield "## Other implementations of NSA"
    yield peers_about(result)
    yield table_with_dense(result)
    yield fill("Each stage as a call of its own. End to end, this library joins some.")
    yield peers_table(result, lambda length, name: length == "65536" and not whole_or_dense(length, name))
    wide = read("peers_192.json")
    yield "Head dims 192/128:"
    yield peers_about(wide)
    yield table_with_dense(wide)


def table_with_dense(result):
    return peers_table(result, whole_or_dense)


def dense_backward():
    result = read("dense_backward.json")
    yield "## Dense attention with its backward"
    title = {name: NAMES[name].removeprefix("dense: ") for name in DENSE}
    packages = ", ".join(f"{title[name]} of {package}" for name, package in result["packages"].items())
    unit = f"Forward / backward in ms, torch {result['torch']}, {packages}. All agree with float32 to 3e-3."
    yield source(gpu_of(result), result, result["problem"], unit)
    rows = [["head dims", "length", *title.values()]]
    for dims, lengths in result["ms"].items():
        rows += [[dims, length, *(pair(found.get(name)) for name in DENSE)] for length, found in lengths.items()]
    yield table(rows)
    yield from noted(result)
