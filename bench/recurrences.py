"""Recurrent operators on the CPU or a GPU, compared with a loop over time in plain PyTorch, forward
and backward.

Usage: recurrences.py [--library build/libassay.so] [--device cpu] [--threads 1] [--batch 1] [--time
  2048] [--repeat 3] [--dtype float32] [--no-loop] [--peers] [--step] [--json] [OP …]

Run it with the project's Python (.venv/bin/python). Layers are those of d_model 768. Both sides are
timed in turn, in this call; prints the medians in milliseconds and their ratio. On the CPU it is
processor time, of one thread by default.

--peers times, as well, what `transformers` and flash-linear-attention (fla) have for the same in
plain PyTorch, where they are installed (`pip install transformers flash-linear-attention`): their
chunked forms, which run on a CPU too. They have none for gla, rwkv5, rwkv6 and Longhorn, beyond a
loop like ours.

--step times one decode step instead, after a state, and compares it with the state read and written
once at the rate of a large copy. The step runs over more layers than a cache holds; on CUDA as a
captured graph, so that launches cost nothing.
"""

import argparse
import functools
import inspect
import statistics
import time

import record
import torch
import torch.nn.functional as F


def scan(state, steps, step):
    outputs = []
    for t in range(steps):
        state, out = step(t, state)
        outputs.append(out)
    return torch.stack(outputs, 1), state


def read(state, q):
    return (q.unsqueeze(-2) @ state).squeeze(-2)


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def linear_loop(q, k, v, decay, state, scale=1.0):  # decay [B, T, H, K or 1]
    q, k, v, decay = q.unbind(1), k.unbind(1), v.unbind(1), decay.unsqueeze(-1).unbind(1)

    def step(t, S):
        S = decay[t] * S + outer(k[t], v[t])
        return S, scale * read(S, q[t])

    return scan(state, len(q), step)


def rwkv_loop(r, k, v, w, u, state):
    w = w.expand_as(k)
    r, k, v, decay = r.unbind(1), k.unbind(1), v.unbind(1), w.exp().unsqueeze(-1).unbind(1)

    def step(t, S):
        added = outer(k[t], v[t])
        return decay[t] * S + added, read(S + u.unsqueeze(-1) * added, r[t])

    return scan(state, len(r), step)


def delta_loop(q, k, v, g, beta, state, scale):
    q, k, v, beta = q.unbind(1), k.unbind(1), v.unbind(1), beta.unsqueeze(-1).unbind(1)
    decay = g.exp()[..., None, None].unbind(1)

    def step(t, S):
        S = decay[t] * S
        S = S + outer(k[t], beta[t] * (v[t] - read(S, k[t])))
        return S, scale * read(S, q[t])

    return scan(state, len(q), step)


def rwkv7_loop(r, w, k, v, a, b, state):
    r, k, v, a, b = (x.unbind(1) for x in (r, k, v, a, b))
    decay = w.exp().unsqueeze(-1).unbind(1)

    def step(t, S):
        S = decay[t] * S + outer(b[t], read(S, a[t])) + outer(k[t], v[t])
        return S, read(S, r[t])

    return scan(state, len(r), step)


def scan_loop(x, dt, A, B, C, state):
    dt = F.softplus(dt)
    decay, added = (dt.unsqueeze(-1) * A).exp().unbind(1), ((dt * x).unsqueeze(-1) * B).unbind(1)
    C = C.squeeze(2).unsqueeze(-1).unbind(1)

    def step(t, S):
        S = decay[t] * S + added[t]
        return S, (S @ C[t]).squeeze(-1)

    return scan(state, len(C), step)


def longhorn_loop(x, dt, k, q, state, exact):
    rate = torch.sigmoid(dt)
    rate = (rate / (1 + rate * k.square().sum(-1, keepdim=True))).unsqueeze(-1).unbind(1)
    x, k, q = x.unsqueeze(-1).unbind(1), k.unsqueeze(-2).unbind(1), q.unsqueeze(-1).unbind(1)

    def step(t, S):
        held = (S @ k[t].transpose(1, 2)) * k[t] if exact else S * k[t].square()
        S = S + rate[t] * (x[t] * k[t] - held)
        return S, (S @ q[t]).squeeze(-1)

    return scan(state, len(x), step)


def cases(B, T, device):
    """name → (operator, loop, tensors): the shapes of one layer of d_model 768."""
    ops, partial = torch.ops.assay, functools.partial

    def normal(*shape):
        return torch.randn(shape, device=device)

    def unit(*shape):
        return F.normalize(normal(*shape), dim=-1)

    def decay(*shape):
        return -0.2 * torch.rand(shape, device=device)

    def zeros(*shape):
        return torch.zeros(shape, device=device)

    qkv = [normal(B, T, 12, 64) for _ in range(3)]
    delta = [unit(B, T, 8, 96), unit(B, T, 8, 96), normal(B, T, 8, 96)]
    kappa = unit(B, T, 12, 64)
    state = zeros(B, 12, 64, 64)
    ssd = [
        normal(B, T, 24, 64),
        normal(B, T, 24) - 4,
        decay(24) * 20,
        normal(B, T, 1, 128),
        normal(B, T, 1, 128),
    ]

    def ssd_loop(x, dt, A, B_, C):
        step = F.softplus(dt)
        return linear_loop(
            C.expand(-1, -1, 24, -1),
            B_.expand(-1, -1, 24, -1),
            step.unsqueeze(-1) * x,
            (step * A).exp().unsqueeze(-1),
            zeros(B, 24, 128, 64),
        )

    def taylor_loop(q, k, v):
        def features(x):
            return torch.cat(
                [torch.ones_like(x[..., :1]), x, (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)],
                -1,
            )

        weights = torch.cat(
            [torch.ones(1), torch.full((16,), 0.25), torch.full((256,), 0.03125)]
        ).to(device)
        sums = linear_loop(
            features(q) * weights,
            features(k),
            torch.cat([v, torch.ones_like(v[..., :1])], -1),
            torch.ones(B, T, 12, 1, device=device),
            zeros(B, 12, 273, 65),
        )[0]
        return sums[..., :-1] / (sums[..., -1:] + 1e-6), None

    channels = [normal(B, T, 1536), normal(B, T, 1536) - 2, normal(B, T, 16), normal(B, T, 16)]
    steps = [
        *channels[:2],
        -torch.rand(1536, 16, device=device) - 0.1,
        *(x.unsqueeze(2) for x in channels[2:]),
    ]
    return {
        "selective_scan": (
            partial(ops.selective_scan, delta_softplus=True),
            lambda *x: scan_loop(*x, zeros(B, 1536, 16)),
            steps,
        ),
        "linear_attention": (
            partial(ops.linear_attention, scale=0.125),
            lambda *x: linear_loop(*x, torch.ones(B, T, 12, 1, device=device), state, 0.125),
            qkv,
        ),
        "simple_gla": (
            partial(ops.simple_gla, scale=0.125),
            lambda q, k, v, g: linear_loop(q, k, v, g.exp().unsqueeze(-1), state, 0.125),
            qkv + [decay(B, T, 12)],
        ),
        "ssd": (partial(ops.ssd, dt_softplus=True), ssd_loop, ssd),
        "gla": (
            partial(ops.gla, scale=0.125),
            lambda q, k, v, g: linear_loop(q, k, v, g.exp(), state, 0.125),
            qkv + [decay(B, T, 12, 64)],
        ),
        "rwkv6": (
            partial(ops.rwkv6, scale=1.0),
            lambda *x: rwkv_loop(*x, state),
            qkv + [decay(B, T, 12, 64), normal(12, 64)],
        ),
        "rwkv5": (
            partial(ops.rwkv5, scale=1.0),
            lambda *x: rwkv_loop(*x, state),
            qkv + [decay(12, 64), normal(12, 64)],
        ),
        "delta_rule": (
            partial(ops.delta_rule, scale=0.1),
            lambda q, k, v, b: delta_loop(
                q, k, v, torch.zeros_like(b), b, zeros(B, 8, 96, 96), 0.1
            ),
            delta + [torch.rand(B, T, 8, device=device)],
        ),
        "gated_delta_rule": (
            partial(ops.gated_delta_rule, scale=0.1),
            lambda *x: delta_loop(*x, zeros(B, 8, 96, 96), 0.1),
            delta + [decay(B, T, 8), torch.rand(B, T, 8, device=device)],
        ),
        "rwkv7": (
            partial(ops.rwkv7, scale=1.0),
            lambda *x: rwkv7_loop(*x, state),
            [qkv[0], decay(B, T, 12, 64), qkv[1], qkv[2], -kappa, kappa * torch.rand_like(kappa)],
        ),
        "longhorn": (
            ops.longhorn,
            lambda *x: longhorn_loop(*x, zeros(B, 1536, 16), False),
            channels,
        ),
        "longhorn_exact": (
            partial(ops.longhorn, exact=True),
            lambda *x: longhorn_loop(*x, zeros(B, 1536, 16), True),
            channels,
        ),
        "taylor_exp_attention": (
            partial(ops.taylor_exp_attention, scale=0.25, normalize=True, eps=1e-6),
            taylor_loop,
            [normal(B, T, 12, 16), normal(B, T, 12, 16), normal(B, T, 12, 64)],
        ),
    }


def peers(B):
    """operator → {whose form: function of the same tensors}."""
    from fla.ops.based.naive import naive_chunk_based, naive_parallel_based
    from fla.ops.delta_rule.naive import delta_rule_chunkwise
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_chunkwise
    from fla.ops.linear_attn.naive import naive_chunk_linear_attn
    from fla.ops.simple_gla.naive import naive_chunk_simple_gla
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        torch_chunk_gated_delta_rule as dispatched,
    )

    torch_chunk_gated_delta_rule = inspect.unwrap(
        dispatched
    )  # with fla installed it would call Triton

    def heads_first(function, *sequences, **options):  # theirs are [B, H, T, …]
        out = function(*(x.transpose(1, 2) for x in sequences), **options)
        return (out if torch.is_tensor(out) else out[0]).transpose(1, 2), None

    def as_tuple(out):
        return (out, None) if torch.is_tensor(out) else (out[0], None)

    def ssd(x, dt, A, B_, C):
        step = F.softplus(dt)
        return as_tuple(
            naive_chunk_simple_gla(
                C.expand(-1, -1, 24, -1),
                B_.expand(-1, -1, 24, -1),
                step.unsqueeze(-1) * x,
                step * A,
                scale=1.0,
            )
        )

    return {
        "linear_attention": {
            "fla": lambda q, k, v: as_tuple(naive_chunk_linear_attn(q, k, v, scale=0.125))
        },
        "simple_gla": {"fla": lambda *x: as_tuple(naive_chunk_simple_gla(*x, scale=0.125))},
        "ssd": {"fla": ssd},
        "delta_rule": {"fla": lambda *x: heads_first(delta_rule_chunkwise, *x)},
        "gated_delta_rule": {
            "fla": lambda *x: as_tuple(naive_chunk_gated_delta_rule(*x, scale=0.1)),
            "transformers": lambda *x: as_tuple(torch_chunk_gated_delta_rule(*x)),
        },
        "rwkv7": {"fla": lambda r, w, k, v, a, b: heads_first(dplr_chunkwise, r, k, v, a, b, w)},
        "taylor_exp_attention": {
            "fla": lambda *x: heads_first(naive_chunk_based, *x),
            "fla, quadratic": lambda *x: heads_first(naive_parallel_based, *x),
        },
    }


def timed(function, tensors, device):
    """Milliseconds of the forward and of the backward."""
    leaves = [x.detach().requires_grad_() for x in tensors]

    def clock():
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    start = clock()
    out = function(*leaves)[0]
    middle = clock()
    (out * torch.linspace(-1, 1, out.shape[-1], device=device, dtype=out.dtype)).sum().backward()
    return 1e3 * (middle - start), 1e3 * (clock() - middle), out


def seconds_of(work, device, repeats, calls=1):
    """Median seconds of a call, of several in a row."""

    def clock():
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(repeats):
        start = clock()
        for _ in range(calls):
            work()
        times.append((clock() - start) / calls)
    return statistics.median(times)


def rate_of_copy(device):
    """Bytes read plus bytes written a second."""
    source = torch.ones(2**27 if device == "cpu" else 2**30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: copy.copy_(source), device, repeats=5, calls=10)


def captured(work, device):
    work()
    if device == "cpu":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def step_rows(args):
    rate = rate_of_copy(args.device)
    for name, (operator, _, tensors) in cases(args.batch, 1, args.device).items():
        if args.ops and name not in args.ops:
            continue
        tensors = [x.to(getattr(torch, args.dtype)) for x in tensors]
        with torch.no_grad():
            state = operator(*tensors)[1]
            layers = max(2, 2**28 // state.nbytes)
            states, after = [0.1 * torch.randn_like(state) for _ in range(layers)], []

            def work():
                after[:] = [operator(*tensors, initial_state=state) for state in states]

            seconds = seconds_of(captured(work, args.device), args.device, args.repeat) / layers
        floor = 2 * state.nbytes / rate
        yield {
            "operator": name,
            "µs per layer": 1e6 * seconds,
            "floor, µs": 1e6 * floor,
            "step / floor": seconds / floor,
            "copy, TB/s": rate / 1e12,
        }


def sequence_rows(args):
    theirs = peers(args.batch) if args.peers else {}
    for name, (operator, loop, tensors) in cases(args.batch, args.time, args.device).items():
        if args.ops and name not in args.ops:
            continue
        tensors = [x.to(getattr(torch, args.dtype)) for x in tensors]
        sides = {
            "operator": operator,
            **({} if args.no_loop else {"loop": loop}),
            **theirs.get(name, {}),
        }
        runs = {side: [] for side in sides}
        for _ in range(args.repeat):
            for side, function in sides.items():
                runs[side].append(timed(function, tensors, args.device))
        medians = {
            side: [statistics.median(run[i] for run in times) for i in (0, 1)]
            for side, times in runs.items()
        }
        ours, own = runs["operator"][0][2], medians.pop("operator")
        row = {"operator": name, "kernel, ms": text_of(own)}
        for side, median in medians.items():
            out = runs[side][0][2]
            factor = (out * ours).sum() / (out * out).sum()  # theirs may scale by another constant
            error = (ours - factor * out).norm() / ours.norm()
            row[f"{side}, ms"] = text_of(median)
            row[f"{side} / kernel"] = sum(median) / sum(own)
            row[f"difference of {side}"] = f"{error:.0e}"
        yield row


def text_of(times):
    """forward + backward"""
    return " + ".join(f"{t:.0f}" if t >= 10 else f"{t:.2f}" for t in times)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--library", default="build/libassay.so")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--time", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16, of all tensors")
    parser.add_argument("--no-loop", action="store_true", help="times the operator alone")
    parser.add_argument(
        "--peers", action="store_true", help="times plain PyTorch of transformers and fla too"
    )
    parser.add_argument("--step", action="store_true", help="times a decoding step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.ops.load_library(args.library)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    for row in step_rows(args) if args.step else sequence_rows(args):
        rows.append(row)
        if not args.json:
            record.print_row(row)
    if args.json:
        facts = ("batch", "time", "dtype", "threads", "repeat")
        record.print_json(rows, args.device, **{name: getattr(args, name) for name in facts})


if __name__ == "__main__":
    main()
