"""Results of `nsa bench`."""

from tables.text import fill, read

PASSES = {"forward": "forward", "forward_backward": "forward and backward"}
DENSE = {"cudnn": "cuDNN", "flash2": "FlashAttention-2"}
RIVALS = {"dense": "torch's dense attention", "plain": "causal attention on our own kernels"}


class Bench:
    """A result of `nsa bench`, by operation, variant and length."""

    def __init__(self, name):
        self.all = read(name)
        self.settings, self.machine = self.all["settings"], self.all["machine"]
        self.phi = self.settings["phi"]

    def results(self, op, variant, part_of=""):
        key = (op, variant, part_of)
        return {
            r["length"]: r
            for r in self.all["results"]
            if (r["op"], r["variant"], r.get("part_of", "")) == key and not r["extrapolated"]
        }

    def times(self, op, variant):
        """Milliseconds by length."""
        return {length: 1e3 * r["seconds"] for length, r in self.results(op, variant).items()}

    def problem(self):
        s = self.settings
        dims = f"D = {s['head_dim']}" if s["head_dim"] == s["v_head_dim"] else f"{s['head_dim']}/{s['v_head_dim']}"
        return f"B = 1, H = {s['num_heads']}, Hkv = {s['num_kv_heads']}, {dims}, {s['dtype']}"


def crossovers(bench, rivals=("dense",)):
    sentences = []
    for rival in rivals:
        for pass_name, title in PASSES.items():
            lengths = sorted(bench.times(pass_name, bench.phi))
            found = (bench.all["crossover"].get(pass_name) or {}).get(rival)
            if found is None:
                where = "at no measured length"
            elif found <= lengths[0]:
                where = f"at every measured length, from {lengths[0]} tokens on"
            else:
                where = f"from {round(found, -2):.0f} tokens on (interpolated)"
            sentences.append(f"{title.capitalize()}, NSA is faster than {RIVALS[rival]} {where}.")
    return fill(" ".join(sentences))


def limits(rates):
    products, copies = rates["gflops"] / 1e3, rates["bytes_per_s"] / 1e12
    return f"{products:.0f} TFLOP/s (product of large matrices), {copies:.2f} TB/s (copy)"
