"""How often a shortlist holds Exact's choice, on the queries and keys of a trained Top-1 Chunk
model.

Usage: shortlist_agreement.py RUN TOKENS.bin [--library build/libassay.so] [--time 8192] [--offset
  0] [--stride 8]

Run it with the project's Python. RUN is a run of `assay train` whose layers are all top1_chunk with
unit queries and keys, and geglu; TOKENS.bin one of the files of a token store (16-bit). Prints, for
each rank and length of the shortlist, the share of queries (every `stride`-th behind the first
chunk, all heads, all layers) whose exact choice is among those that the cheap score ranks first.
"""

import argparse
import json
import math
import pathlib
import struct
import tomllib

import torch

F = torch.nn.functional
LENGTHS, RANKS = (1, 2, 4, 8, 12, 16, 24, 32), (0, 1, 3, 7)


def read_weights(file):
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    return {
        name: torch.frombuffer(
            bytearray(data[end + x["data_offsets"][0] : end + x["data_offsets"][1]]),
            dtype=torch.float32,
        ).view(x["shape"])
        for name, x in header.items()
    }


def rotary(x, base):
    time, size = x.shape[:2][0], x.shape[-1]
    angle = torch.outer(
        torch.arange(time, dtype=torch.double),
        base ** (-torch.arange(0, size, 2, dtype=torch.double) / size),
    )[:, None]
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def queries_and_keys(weights, model, tokens):
    """[T, H, D] of each layer, and the loss, which shows whether the model is the trained one."""
    mixer = model["top1_chunk"]
    heads, unit = mixer["num_heads"], lambda x: x * torch.rsqrt(x.square().sum(-1, True) + 1e-6)
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], weights[name], model["norm_eps"])
    x, found = weights["embedding"][tokens], []
    for i in range(model["num_layers"]):
        part = f"layers_{i}."
        projected = F.linear(
            norm(x, part + "mixer_norm.weight"), weights[part + "mixer.qkv.weight"]
        )
        q, k, v = projected.unflatten(-1, (3 * heads, -1)).split(heads, 1)
        q = rotary(unit(q) * weights[part + "mixer.scale"][:, None], mixer["rope_base"])
        k = rotary(unit(k), mixer["rope_base"])
        out = torch.ops.assay.top1_chunk(
            q[None],
            k[None],
            v[None].contiguous(),
            chunk_size=mixer["chunk_size"],
            scale=1.0,
            selection="exact",
        )[0][0]
        x = x + F.linear(out.flatten(1), weights[part + "mixer.out_proj.weight"])
        gate, up = F.linear(
            norm(x, part + "channel_norm.weight"), weights[part + "channel_mixer.in_proj.weight"]
        ).chunk(2, -1)
        x = x + F.linear(
            F.gelu(gate, approximate="tanh") * up, weights[part + "channel_mixer.out_proj.weight"]
        )
        found.append((q, k))
    logits = F.linear(norm(x, "norm.weight"), weights.get("head.weight", weights["embedding"]))
    return found, F.cross_entropy(logits[:-1], tokens[1:]).item()


def shares_of_layer(q, k, chunk_size, stride):
    """{(kind, length): shares by head}"""
    time, heads, _ = q.shape
    chunks = time // chunk_size
    t = torch.arange(chunk_size, chunks * chunk_size, stride)
    queries, keys = q[t].transpose(0, 1), k[: chunks * chunk_size].transpose(0, 1)
    none = torch.arange(chunks) >= (t // chunk_size)[:, None]
    exact = (
        (queries @ keys.mT)
        .unflatten(2, (chunks, chunk_size))
        .logsumexp(-1)
        .masked_fill(none, -math.inf)
    )
    best = exact.argmax(-1, True)
    shares = {}
    for rank in RANKS:
        summaries = torch.ops.assay.chunk_summaries(k[None], chunk_size, rank)[0].transpose(
            0, 1
        )  # [H, chunks, ., D]
        cheap = queries @ summaries[:, :, 0].mT
        for axis in range(rank):
            cheap += 0.5 * (queries @ summaries[:, :, 1 + axis].mT).square()
        cheap = cheap.masked_fill(none, -math.inf)
        place = (cheap > cheap.gather(-1, best)).sum(-1)
        for length in LENGTHS:
            shares[f"rank {rank}", length] = (place < length).double().mean(1)
    return shares


def print_table(columns, layers):
    """Means over layers and heads: one line per kind, one number per column."""
    print(f"{'':22}" + "".join(f"{column:8}" for column in columns))
    for kind in dict.fromkeys(kind for kind, _ in layers[0]):
        means = [torch.cat([x[kind, column] for x in layers]).mean() for column in columns]
        print(f"{kind:22}" + "".join(f"{100 * mean:8.2f}" for mean in means))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("tokens", type=pathlib.Path)
    parser.add_argument("--library", default="build/libassay.so")
    parser.add_argument("--time", type=int, default=8192)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--stride", type=int, default=8)
    parser.add_argument(
        "--chunk-size", type=int, default=0, help="of the comparison; 0: that of the model"
    )
    args = parser.parse_args()
    torch.ops.load_library(args.library)
    model = tomllib.loads((args.run / "config.toml").read_text())["model"]
    steps = sorted((args.run / "checkpoints").glob("step-*"), key=lambda x: int(x.name[5:]))
    weights = read_weights(steps[-1] / "model.safetensors")
    data = args.tokens.read_bytes()[2 * args.offset : 2 * (args.offset + args.time)]
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint16).long()
    with torch.no_grad():
        layers, loss = queries_and_keys(weights, model, tokens)
        chunk_size = args.chunk_size or model["top1_chunk"]["chunk_size"]
        found = [shares_of_layer(q, k, chunk_size, args.stride) for q, k in layers]
    print(f"{steps[-1]}: loss {loss:.4f} on {args.time} tokens; % of queries, all layers and heads")
    print_table(LENGTHS, found)


if __name__ == "__main__":
    main()
