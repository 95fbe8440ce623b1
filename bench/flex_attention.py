"""torch's FlexAttention with a window, forward and backward: rows for `assay bench attention
--compare`.

Usage: flex_attention.py [--device cuda] [--lengths 1024,4096,16384] [--batch 1] [--heads 12]
[--head-dim 64] [--window 256] > flex.json assay bench attention --device cuda --compare flex.json
It needs torch alone and, on CUDA, Triton and a C compiler (torch.compile). bf16 on CUDA; on the CPU
fp32, not compiled and without its backward, to see that it works. Timed as the command times its
forms: medians over rounds, several calls in a row.
"""

import argparse
import json
import statistics
import time

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def window_mask(positions, window, device):
    """The mask in blocks of 128: those seen in part and those seen whole. No pair is looked at."""
    row = torch.arange(-(-positions // BLOCK), device=device)
    before = row[:, None] - row  # blocks between query and key
    whole = (before > 0) & ((before + 1) * BLOCK <= window)
    partly = (before >= 0) & ((before - 1) * BLOCK + 1 < window) & ~whole

    def listed(blocks):
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return [x.int()[None, None] for x in (blocks.sum(-1), order)]

    return BlockMask.from_kv_blocks(
        *listed(partly),
        *listed(whole),
        BLOCK_SIZE=BLOCK,
        seq_lengths=(positions, positions),
        mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window),
    )


def seconds(device, calls, work):
    def wait():
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - start) / calls


def timed(args, length, attention):
    cuda = args.device.startswith("cuda")
    options = {"device": args.device, "dtype": torch.bfloat16 if cuda else torch.float32}
    q, k, v, dout = (
        torch.randn(args.batch, length, args.heads, args.head_dim, **options) for _ in range(4)
    )
    leaves = [
        x.requires_grad_(cuda)
        for x in (q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v)
    ]
    mask = window_mask(length, args.window, args.device)
    made = []

    def forward():
        made[:] = [
            attention(
                *(x.transpose(1, 2) for x in leaves), block_mask=mask, scale=args.head_dim**0.5
            )
        ]

    def backward():
        if cuda:
            torch.autograd.grad(made[0].transpose(1, 2), leaves, dout, retain_graph=True)

    times, calls, start = [], 1, time.perf_counter()
    while len(times) < 4 or time.perf_counter() - start < args.seconds:
        times.append((seconds(args.device, calls, forward), seconds(args.device, calls, backward)))
        if len(times) == 1:  # compiles
            start = time.perf_counter()
            continue
        calls = max(1, min(20, int(0.02 / sum(times[-1]))))
    medians = [statistics.median(side) for side in zip(*times[1:])]
    return {"forward": medians[0], "backward": medians[1]}


def rows(args):
    attention = torch.compile(flex_attention) if args.device.startswith("cuda") else flex_attention
    for length in map(int, args.lengths.split(",")):
        try:
            times = timed(args, length, attention)
        except RuntimeError as error:
            times = {"failure": str(error).splitlines()[0]}
        yield {"time": length, "form": f"FlexAttention {args.window}", **times}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch._functorch.config.donated_buffer = (
        False  # backwards are timed several in a row, on one forward
    )
    print(json.dumps({"torch": torch.__version__, "rows": list(rows(args))}))


if __name__ == "__main__":
    main()
