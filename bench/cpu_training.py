"""CPU training compared with `transformers`: a Transformer++ and a Mamba-1 of about 10M parameters,
T 512, same threads. With --precision bf16 both sides multiply in bf16 and keep fp32 weights
(`transformers` under torch.autocast).

Usage: cpu_training.py [--assay build/assay] [--threads 2] [--batch 4] [--steps 12]
                       [--precision fp32] [--models transformer++ mamba1] [--json]

Run it with the project's Python (.venv/bin/python), so that both sides use the same torch; it
installs `transformers` there when it is missing. Prints a table: tokens per second of each side,
and the ratio. The peer's Mamba takes its path in plain PyTorch, as it does wherever its own kernels
are not installed: about 20 s a sequence and step, whatever the batch, so it gets one.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import transformers
except ImportError:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "transformers"], check=True)
    import transformers
import record
import torch

WIDTH, VOCABULARY, TIME = 320, 8192, 512
PLANS = {
    "transformer++": f"""
[model]
vocab_size = {VOCABULARY}
d_model = {WIDTH}
num_layers = 6
channel_mixer = "swiglu"
[model.attention]
num_heads = 5
[model.swiglu]
d_ff = 896
""",
    "mamba1": f"""
[model]
vocab_size = {VOCABULARY}
d_model = {WIDTH}
num_layers = 12
pattern = ["mamba1"]
channel_mixer = "none"
""",
}


def peer_model(name):
    if name == "mamba1":
        config = transformers.MambaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=12, state_size=16
        )
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=6,
            num_attention_heads=5,
            intermediate_size=896,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    return transformers.AutoModelForCausalLM.from_config(config)


def peer_rate(name, args):
    torch.manual_seed(0)
    model = peer_model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rates = []
    batch, steps = (1, 3) if name == "mamba1" else (args.batch, args.steps)
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (batch, TIME))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(batch * TIME / (time.perf_counter() - start))
    return statistics.median(rates[1:]), sum(p.numel() for p in model.parameters())


def our_rate(name, args, folder):
    plan = folder / f"{name}.toml"
    plan.write_text(
        PLANS[name]
        + f"[train]\nsteps = {args.steps}\nbatch_size = {args.batch}\nsequence_length = {TIME}\n"
        f"learning_rate = 1e-3\nlog_every = 1\neval_every = {args.steps}\neval_tokens = 512\n"
        f'checkpoint_every = {args.steps}\nprecision = "{args.precision}"\n'
    )
    run = folder / f"run-{name}"
    subprocess.run(
        [
            args.assay,
            "train",
            plan,
            "--data",
            folder / "store",
            "-o",
            run,
            "--threads",
            str(args.threads),
            "--device",
            "cpu",
        ],
        check=True,
        capture_output=True,
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    parameters = json.loads((run / "run.json").read_text())["parameters"]
    return statistics.median(
        [line["tokens_per_second"] for line in lines if "loss" in line][1:]
    ), parameters


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assay", default="build/assay")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--models", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run(
            [args.assay, "data", "synth", "-o", folder / "store"], check=True, capture_output=True
        )
        for model in args.models:
            ours, parameters = our_rate(model, args, folder)
            theirs, their_parameters = peer_rate(model, args)
            rows.append(
                {
                    "model": model,
                    "precision": args.precision,
                    "Assay, tokens/s": ours,
                    "transformers, tokens/s": theirs,
                    "ratio": ours / theirs,
                    "parameters": parameters,
                    "parameters of transformers": their_parameters,
                }
            )
            if not args.json:
                print(
                    f"{model:14} {args.precision}: Assay {ours:.0f} tokens/s, "
                    f"transformers {theirs:.0f}, ratio {ours / theirs:.2f}",
                    flush=True,
                )
    if args.json:
        record.print_json(
            rows,
            transformers=transformers.__version__,
            threads=args.threads,
            batch=args.batch,
            time=TIME,
            steps=args.steps,
        )


if __name__ == "__main__":
    main()
