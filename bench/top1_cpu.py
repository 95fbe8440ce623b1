"""Top-1 chunk and element attention on the CPU, compared with torch's causal scaled dot product,
forward and backward, fp32.

Usage: top1_cpu.py [--library build/libassay.so] [--time 16384] [--threads 2] [--repeats 3]
  [--element] [--json]

Run it with the project's Python. Unit-length queries and keys, H 8, D 64, chunk 128, scale 8. The
sides take turns; each line has the fastest of the repeats. Exits with 1 below 10 × (approx) or 1.5
× (exact) at a time of 16384 or more.
"""

import argparse
import sys
import time

import record
import torch

HEADS, HEAD_DIM, CHUNK, SCALE = 8, 64, 128, 8.0
FLOOR = {"approx": 10.0, "exact": 1.5}


def sides(element):
    top1_chunk = torch.ops.assay.top1_chunk
    made = {
        name: lambda q, k, v, name=name: top1_chunk(
            q, k, v, chunk_size=CHUNK, scale=SCALE, selection=name
        )[0]
        for name in FLOOR
    }
    if element:
        made["element"] = lambda q, k, v: torch.ops.assay.top1_element(q, k, v, scale=SCALE)[0]
    made["torch"] = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=SCALE
    ).transpose(1, 2)
    return made


def seconds(call, inputs, weights):
    start = time.perf_counter()
    out = call(*inputs)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, weights)
    return middle - start, time.perf_counter() - middle


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/libassay.so")
    parser.add_argument("--time", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--element", action="store_true", help="time top1_element too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.ops.load_library(args.library)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    q, k, v, weights = (torch.randn(1, args.time, HEADS, HEAD_DIM) for _ in range(4))
    inputs = [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]
    inputs = [x.requires_grad_() for x in inputs]

    calls, best = sides(args.element), {}
    for _ in range(args.repeats):
        for name, call in calls.items():
            took = seconds(call, inputs, weights)
            best[name] = min(best.get(name, took), took, key=sum)
    rows = [
        {
            "attention": name,
            "T": args.time,
            "forward, ms": 1e3 * forward,
            "backward, ms": 1e3 * backward,
            "torch's time / this time": sum(best["torch"]) / (forward + backward),
        }
        for name, (forward, backward) in best.items()
    ]
    if args.json:
        record.print_json(rows, threads=args.threads, heads=HEADS, head_dim=HEAD_DIM, chunk=CHUNK)
    for row in [] if args.json else rows:
        record.print_row(row)
    ratios = {row["attention"]: row["torch's time / this time"] for row in rows}
    return int(args.time >= 16384 and any(ratios[name] < FLOOR[name] for name in FLOOR))


if __name__ == "__main__":
    sys.exit(main())
