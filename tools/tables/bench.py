"""Results of `nsa bench`."""

from evidence.plans import RECIPE_BLOCKS

from tables.text import fill, read

PASSES = {"forward": "forward", "forward_backward": "with backward"}
DENSE = {"cudnn": "cuDNN", "flash2": "FlashAttention-2", "flash3": "FlashAttention-3"}
BLOCKS = {RECIPE_BLOCKS: "recipe", (16, 16, 32, 32): "stride 16", (32, 16, 64, 16): "paper"}
WITH_BACKWARD = "bench_recipe_stride_16.json"  # of a package of FlashAttention-3 that has its backward
RIVALS = {"dense": "the fastest dense attention", "plain": "causal attention on the library's own kernels"}


class Bench:
    """A result of `nsa bench`, by operation, variant and length."""

    def __init__(self, name):
        self.all = read(name)
        self.settings, self.machine = self.all["settings"], self.all["machine"]
        self.phi = self.settings["phi"]

    def setting(self):
        """recipe or paper, whose blocks these are, else kernel size, stride, block size and top-k."""
        sizes = tuple(self.settings[name] for name in ("kernel_size", "kernel_stride", "block_size", "topk"))
        return BLOCKS.get(sizes, ", ".join(map(str, sizes)))

    def results(self, op, variant, part_of=""):
        key = (op, variant, part_of)
        return {
            r["length"]: r
            for r in self.all["results"]
            if (r["op"], r["variant"], r.get("part_of", "")) == key and not r["extrapolated"]
        }

    def times(self, op, variant):
        """Milliseconds by length."""
        if self.borrows(op, variant):
            return Bench(WITH_BACKWARD).times(op, variant)
        return {length: 1e3 * r["seconds"] for length, r in self.results(op, variant).items()}

    def borrows(self, op="dense_forward_backward", variant="flash3"):
        """Whether the package of FlashAttention-3 had no backward: its times are those of another run."""
        borrowed = op == "dense_forward_backward" and variant == "flash3" and not self.results(op, variant)
        return borrowed and bool(self.results("dense_forward", "flash3"))

    def over_dense(self, pass_name, length, digits):
        """Ratio of the fastest dense attention to NSA."""
        here = filter(None, (self.times(f"dense_{pass_name}", form).get(length) for form in DENSE))
        ours = self.times(pass_name, self.phi).get(length)
        fastest = min(here, default=None)
        return f"{fastest / ours:.{digits}f}" if fastest and ours else ""

    def problem(self):
        s = self.settings
        dims = f"D={s['head_dim']}" if s["head_dim"] == s["v_head_dim"] else f"{s['head_dim']}/{s['v_head_dim']}"
        return f"B=1, H={s['num_heads']}, Hkv={s['num_kv_heads']}, {dims}, {s['dtype']}, {self.blocks()}"

    def blocks(self):
        """The pattern of the blocks that it attends to."""
        overlap = self.settings.get("neighbour_overlap")
        return f"{self.settings['selection']} blocks" + (f" (neighbour overlap {overlap})" if overlap else "")


def crossovers(bench, rivals=("dense",)):
    """Crossover lengths from which NSA is faster, a sentence for each rival."""
    sentences = []
    for rival in rivals:
        places = []
        for pass_name, title in PASSES.items():
            shortest = min(bench.times(pass_name, bench.phi))
            found = (bench.all["crossover"].get(pass_name) or {}).get(rival)
            if found is None:
                places.append(("at no measured length", title))
            elif found <= shortest:
                places.append(("at every measured length", title))
            else:
                over = ", over cuDNN" if pass_name == "forward_backward" and bench.borrows() else ""
                places.append((f"from about {round(found, -2):.0f} tokens on", title + over))
        if places[0][0] == places[-1][0]:
            where = places[0][0]
        else:
            where = " and ".join(f"{place} ({title})" for place, title in places)
        sentences.append(f"NSA is faster than {RIVALS[rival]} {where}.")
    return fill(" ".join(sentences))


def limits(rates):
    products, copies = rates["gflops"] / 1e3, rates["bytes_per_s"] / 1e12
    return f"{products:.0f} TFLOP/s (large GEMM), {copies:.2f} TB/s (copy)"
