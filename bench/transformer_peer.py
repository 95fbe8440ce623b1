"""Plain PyTorch, to compare with `assay train` on one GPU: the same Transformer++ (110M with 32k
tokens), eager and torch.compile.

Usage: transformer_peer.py [--compile] [--batch 32] [--time 2048] [--steps 20]
       torchrun --nproc_per_node 2 transformer_peer.py --parallel ddp|fsdp …

Prints a JSON document with the median tokens per second. bf16 autocast,
scaled_dot_product_attention, fused AdamW, cross_entropy over whole logits: what a careful user
writes without custom kernels.
--parallel trains on several GPUs, with --batch sequences on each: ddp averages gradients
(DistributedDataParallel); fsdp shards parameters (fully_shard of each block), with bf16 in place of
autocast.
"""

import argparse
import os
import statistics
import time

import record
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x, cos, sin):
        batch, time_, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, time_, 3 * self.heads, -1)
            .transpose(1, 2)
            .chunk(3, dim=1)
        )
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time_, width))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.gelu(gate, approximate="tanh") * up)


class Model(nn.Module):
    def __init__(self, vocabulary, width, layers, heads, hidden, length):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        dim = width // heads
        angle = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", angle.cos().to(torch.bfloat16))
        self.register_buffer("sin", angle.sin().to(torch.bfloat16))

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1]).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def parallel_model(model, kind, compiled):
    """The model of this rank, ready for a step."""
    if kind == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return torch.compile(model) if compiled else model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--time", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--parallel", choices=["ddp", "fsdp"])
    args = parser.parse_args()
    ranks = 1
    if args.parallel:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = Model(32000, 768, 12, 12, 2048, args.time).cuda()
    step_model = parallel_model(model, args.parallel, args.compile)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rates = []
    for step in range(args.steps):
        tokens = torch.randint(32000, (args.batch, args.time + 1), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=args.parallel != "fsdp"):
            loss = step_model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= args.steps // 2:
            rates.append(ranks * args.batch * args.time / (time.perf_counter() - start))
    if ranks > 1:
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank > 0:
            return
    row = {
        "model": "torch.compile" if args.compile else "PyTorch eager",
        "tokens_per_second": statistics.median(rates),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }
    facts = {"batch": args.batch, "time": args.time, "steps": args.steps}
    record.print_json([row], "cuda", parallel=args.parallel, ranks=ranks, **facts)


if __name__ == "__main__":
    main()
