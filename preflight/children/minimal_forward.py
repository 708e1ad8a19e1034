"""128 tokens through two decoder layers of a given shape with random weights: real latency and peak memory here.

Runs alone in the interpreter under test: standard library and torch only, Python 3.8 syntax.
argv: results file, JSON object with device, dtype (or null), tokens, layers, hidden, heads, kv_heads, head_dim,
intermediate, vocabulary. Weights: q, k, v, o, gate, up, down, two norms a layer, embedding and head.
"""

import json
import os
import sys
import time

RESULTS, SPEC = sys.argv[1], json.loads(sys.argv[2])
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]


def write(line):
    with open(RESULTS, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def peak_rss_bytes():
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main():
    write({"begin": "import torch"})
    import torch
    import torch.nn.functional as functional

    device = SPEC["device"]
    cuda = device.startswith("cuda")
    name = SPEC.get("dtype")
    if not name:
        native = cuda and torch.cuda.get_device_capability(device)[0] >= 8
        name = "bfloat16" if native else ("float16" if cuda else "float32")
    dtype = getattr(torch, name)
    write({"step": "import torch", "dtype": name})
    write({"begin": "build"})
    before = peak_rss_bytes()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    hidden, heads, kv, dim = SPEC["hidden"], SPEC["heads"], SPEC["kv_heads"], SPEC["head_dim"]
    if heads % kv:  # no grouping that the layers below could repeat
        kv = heads
    generator = torch.Generator(device="cpu").manual_seed(1)

    def weight(rows, columns):
        made = torch.empty(rows, columns, dtype=dtype).normal_(0.0, 0.02, generator=generator)
        return made.to(device)

    layers = [
        {
            "q": weight(heads * dim, hidden),
            "k": weight(kv * dim, hidden),
            "v": weight(kv * dim, hidden),
            "o": weight(hidden, heads * dim),
            "gate": weight(SPEC["intermediate"], hidden),
            "up": weight(SPEC["intermediate"], hidden),
            "down": weight(hidden, SPEC["intermediate"]),
        }
        for _ in range(SPEC["layers"])
    ]
    embedding = weight(SPEC["vocabulary"], hidden)
    count = embedding.numel() + sum(one.numel() for layer in layers for one in layer.values())
    tokens = torch.randint(0, SPEC["vocabulary"], (1, SPEC["tokens"]), generator=generator).to(device)

    def norm(x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)

    def split(x, parts):
        return x.view(1, -1, parts, dim).transpose(1, 2)

    def forward():
        x = functional.embedding(tokens, embedding)
        for w in layers:
            y = norm(x)
            q, k, v = split(y @ w["q"].T, heads), split(y @ w["k"].T, kv), split(y @ w["v"].T, kv)
            k, v = (one.repeat_interleave(heads // kv, dim=1) for one in (k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(1, -1, heads * dim) @ w["o"].T
            y = norm(x)
            x = x + (functional.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
        return norm(x) @ embedding.T

    def settle():
        if cuda:
            torch.cuda.synchronize(device)
        elif device.startswith("mps"):
            torch.mps.synchronize()

    write({"step": "build", "parameters": count, "weight_bytes": count * embedding.element_size()})
    write({"begin": "forward"})
    seconds = []
    with torch.no_grad():
        for _ in range(8):
            settle()
            began = time.perf_counter()
            logits = forward()
            settle()
            seconds.append(time.perf_counter() - began)
    finite = bool(torch.isfinite(logits).all().item())
    peak = torch.cuda.max_memory_allocated(device) if cuda else peak_rss_bytes()
    write(
        {
            "step": "forward",
            "first_s": seconds[0],
            "median_s": sorted(seconds[2:])[len(seconds[2:]) // 2],
            "finite": finite,
            "peak_bytes": peak,
            "peak_is": "device memory allocated by torch" if cuda else "resident memory of the process, torch included",
            "before_bytes": None if cuda else before,
            "logits": list(logits.shape),
        }
    )


main()
