"""One decoding step of top-1 chunk attention, compared with torch's scaled dot product over the
whole cache.

Usage: top1_step.py [--library build/libassay.so] [--device cuda] [--time 50000] [--batch 64]
  [--threads 2] [--json]

Run it with the project's Python. H 12, D 64, chunk 128, scale 8; bf16 on CUDA, fp32 on the CPU.
Medians; the sides take turns, and so do the caches of two layers. On CUDA both steps are a captured
graph, so that no side waits for Python.
"""

import argparse
import statistics
import sys
import time

import record
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, HEAD_DIM, CHUNK, SCALE, LAYERS = 12, 64, 128, 8.0, 2


def layer(args, dtype):
    unit = lambda x: torch.nn.functional.normalize(x, dim=-1)
    shape = (args.batch, args.time, HEADS, HEAD_DIM)
    q = unit(torch.randn(args.batch, 1, HEADS, HEAD_DIM, device=args.device, dtype=dtype))
    k, v = (
        torch.randn(shape, device=args.device, dtype=dtype),
        torch.randn(shape, device=args.device, dtype=dtype),
    )
    k.div_(k.norm(dim=-1, keepdim=True))
    # A sequence of the batch at a time: the means are computed in fp32.
    summaries = torch.cat([torch.ops.assay.chunk_summaries(row, CHUNK) for row in k.split(1)])
    return q, k, v, summaries


def top1(selection):
    def call(q, k, v, summaries):
        return torch.ops.assay.top1_chunk(
            q,
            k,
            v,
            chunk_size=CHUNK,
            scale=SCALE,
            selection=selection,
            summaries=None if selection == "exact" else summaries,
        )[0]

    return call


def full(backend):
    def call(q, k, v, summaries):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=SCALE
            )

    return call


def captured(call, layers):
    """Both layers' calls, one after the other, as one graph."""
    call(*layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in layers:
            call(*inputs)
    return [graph.replay]


def seconds_cuda(runs):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(400_000)  # 0.2 ms, in which all that follows is sent to the GPU
    begin.record()
    for run in runs:
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / LAYERS


def seconds_cpu(runs):
    start = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - start) / LAYERS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", default="build/libassay.so")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--time", type=int, default=50000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.ops.load_library(args.library)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cuda = args.device.startswith("cuda")
    calls = {name: top1(name) for name in ("approx", "exact")}
    calls |= (
        {"cuDNN": full(SDPBackend.CUDNN_ATTENTION), "Flash-2": full(SDPBackend.FLASH_ATTENTION)}
        if cuda
        else {"torch": full(SDPBackend.FLASH_ATTENTION)}
    )
    with torch.no_grad():
        layers = [layer(args, torch.bfloat16 if cuda else torch.float32) for _ in range(LAYERS)]
        runs = {}
        for name, call in calls.items():
            try:
                runs[name] = (
                    captured(call, layers)
                    if cuda
                    else [lambda i=i, call=call: call(*i) for i in layers]
                )
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
        times = {name: [] for name in runs}
        for _ in range(args.repeats):
            for name, both in runs.items():
                times[name].append((seconds_cuda if cuda else seconds_cpu)(both))
    medians = {name: 1e3 * statistics.median(took) for name, took in times.items()}
    full_attention = medians.get("cuDNN" if cuda else "torch")
    rows = [
        {
            "attention": name,
            "ms per step and layer": took,
            "full attention's time / this time": full_attention and full_attention / took,
        }
        for name, took in medians.items()
    ]
    if args.json:
        facts = {"batch": args.batch, "time": args.time, "heads": HEADS, "head_dim": HEAD_DIM}
        record.print_json(rows, args.device, chunk=CHUNK, **facts)
    for row in [] if args.json else rows:
        record.print_row(row)


if __name__ == "__main__":
    main()
