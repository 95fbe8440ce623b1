#!/usr/bin/env python3
"""Times operators and layers next to those of flash-linear-attention (fla) on one GPU.

    pip install assay-*.whl 'flash-linear-attention[cuda]' mamba-ssm
    python3 bench/compare_fla.py --shapes 32x2048 1x102400

Both sides compute the same function in one process from the same bfloat16 inputs, with 768 channels
in heads of D for keys and values. Each time is the median of --calls calls after five, in
milliseconds, of the forward pass and of both passes through autograd. "difference" is the largest
relative difference of the output and of the gradients, as norms of whole tensors; layers have
weights of their own. Forgetting attention includes the sums of its gates, and KDA on the side of
Assay the products that make it RWKV-7's rule. fla's layer of Mamba-3 calls the kernels of
mamba-ssm, the package of its authors. Triton compiles for minutes before the first times.
"""

import argparse
import importlib.metadata
import statistics
import sys

import record
import torch

import assay.nn
import assay.ops

CHANNELS = 768


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["32x2048", "1x102400"], metavar="BxT")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], metavar="D")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def normal(*shape):
    return torch.randn(*shape, device="cuda").to(torch.bfloat16).requires_grad_()


def alike(theirs, ours, inputs):
    """Two calls with the tensors that get gradients, the same for both."""
    return (theirs, inputs), (ours, inputs)


def kda(batch, time, dim):
    from fla.ops.kda import chunk_kda

    heads = CHANNELS // dim
    q, k, v = (normal(batch, time, heads, dim) for _ in range(3))
    k = torch.nn.functional.normalize(k.detach(), dim=-1).requires_grad_()
    g = torch.empty(batch, time, heads, dim, device="cuda").uniform_(-0.6, -0.001).requires_grad_()
    beta = torch.rand(batch, time, heads, device="cuda").to(torch.bfloat16).requires_grad_()

    def theirs():
        return chunk_kda(q, k, v, g, beta, scale=dim**-0.5)[0]

    def ours():
        written = beta.unsqueeze(-1) * k
        removed = -g.exp().to(k.dtype) * k
        return assay.ops.rwkv7(q, g, written, v, removed, written, dim**-0.5)[0]

    return alike(theirs, ours, [q, k, v, g, beta])


def rwkv7(batch, time, dim):
    from fla.ops.rwkv7 import chunk_rwkv7

    heads = CHANNELS // dim
    r, k, v = (normal(batch, time, heads, dim) for _ in range(3))
    decay = torch.empty(batch, time, heads, dim, device="cuda").uniform_(-0.6, -0.001)
    w = decay.to(torch.bfloat16).requires_grad_()
    unit = torch.nn.functional.normalize(normal(batch, time, heads, dim).detach().float(), dim=-1)
    a = (-unit).to(torch.bfloat16).requires_grad_()
    b = (unit * torch.rand_like(unit)).to(torch.bfloat16).requires_grad_()

    def theirs():
        return chunk_rwkv7(r, w, k, v, a, b, scale=1.0)[0]

    def ours():
        return assay.ops.rwkv7(r, w, k, v, a, b, 1.0)[0]

    return alike(theirs, ours, [r, w, k, v, a, b])


def forgetting_attention(batch, time, dim):
    from fla.ops.forgetting_attn import parallel_forgetting_attn

    heads = CHANNELS // dim
    q, k, v = (normal(batch, time, heads, dim) for _ in range(3))
    gates = torch.nn.functional.logsigmoid(torch.randn(batch, time, heads, device="cuda") + 3)
    gates.requires_grad_()

    def theirs():
        return parallel_forgetting_attn(q, k, v, gates, scale=dim**-0.5)

    def ours():
        sums = gates.mT.cumsum(-1).mT  # torch.cumsum is slow along other dimensions than the last
        return assay.ops.window_attention(q, k, v, -1, dim**-0.5, decay_sums=sums)

    return alike(theirs, ours, [q, k, v, gates])


def layer(kind, their_name, sizes):
    def form(batch, time, dim):
        import fla.layers

        heads = CHANNELS // dim
        x = normal(batch, time, CHANNELS)
        their_layer = getattr(fla.layers, their_name)(CHANNELS, num_heads=heads, **sizes(dim))
        their_layer = their_layer.to("cuda", torch.bfloat16)
        own_layer = assay.nn.Mixer(kind, CHANNELS, num_heads=heads, device="cuda")
        theirs = (lambda: their_layer(x)[0], [x, *their_layer.parameters()])
        return theirs, (lambda: own_layer(x)[0], [x, *own_layer.parameters()])

    return form


def mamba3_layer(batch, time, dim):
    import fla.layers

    x = normal(batch, time, CHANNELS)
    their_layer = fla.layers.Mamba3(CHANNELS, head_dim=dim).to("cuda")
    for part in ("in_proj", "out_proj", "B_norm", "C_norm"):  # the kernels take the rest in float32
        getattr(their_layer, part).to(torch.bfloat16)
    own_layer = assay.nn.Mixer("mamba3", CHANNELS, head_dim=dim, decay="softplus", device="cuda")
    theirs = (lambda: their_layer(x)[0], [x, *their_layer.parameters()])
    return theirs, (lambda: own_layer(x)[0], [x, *own_layer.parameters()])


FORMS = {
    "kda": kda,
    "rwkv7": rwkv7,
    "forgetting attention": forgetting_attention,
    "layer of kda": layer("kda", "KimiDeltaAttention", lambda dim: {"head_dim": dim}),
    "layer of forgetting attention": layer(
        "forgetting_attention", "ForgettingAttention", lambda dim: {}
    ),
    "layer of mamba3": mamba3_layer,
}


def median(call, calls):
    times = []
    for i in range(calls + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def measure(form, inputs, calls):
    out = form()
    dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    dout = dout.to(out.dtype)
    with torch.no_grad():
        forward = median(form, calls)
    both = median(lambda: torch.autograd.grad(form(), inputs, dout), calls)
    return forward, both, [out.detach(), *torch.autograd.grad(form(), inputs, dout)]


def difference(x, y):
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(x, y))


def row(name, batch, time, dim, calls):
    found = {"operator": name, "B": batch, "T": time, "D": dim}
    theirs, ours = FORMS[name](batch, time, dim)
    found["assay forward"], found["assay both"], own = measure(*ours, calls)
    try:
        found["fla forward"], found["fla both"], other = measure(*theirs, calls)
        found["fla / assay"] = found["fla both"] / found["assay both"]
        if theirs[1] is ours[1]:  # not a layer, whose weights are its own
            found["difference"] = difference(own, other)
    except Exception as error:  # a refusal is a result, too
        found["fla both"] = f"{type(error).__name__}: {error}".split("\n")[0][:120]
    return found


def main():
    options = arguments()
    if not torch.cuda.is_available():
        sys.exit("compare_fla.py: no CUDA device found")
    rows = []
    for name in options.forms:
        for shape in options.shapes:
            batch, time = map(int, shape.split("x"))
            for dim in options.head_dims:
                torch.manual_seed(0)
                rows.append(row(name, batch, time, dim, options.calls))
                print(rows[-1], file=sys.stderr, flush=True)
                torch.cuda.empty_cache()
    if options.json:
        record.print_json(rows, "cuda", fla=importlib.metadata.version("flash-linear-attention"))
        return
    columns = ["operator", "B", "T", "D", "assay forward", "fla forward", "assay both", "fla both"]
    columns += ["fla / assay", "difference"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for found in rows:
        cells = [found.get(column, "–") for column in columns]
        print(f"| {' | '.join(f'{x:.3g}' if isinstance(x, float) else str(x) for x in cells)} |")


if __name__ == "__main__":
    main()
