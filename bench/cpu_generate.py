"""CPU generation compared with `transformers`: a Transformer++ of 10M parameters with the same
weights, the same precision and threads.

Usage: cpu_generate.py [--assay build/assay] [--threads 2] [--precision fp32|bf16] [--prompt 128]
  [--tokens 256] [--repeats 3]

Run it with the project's Python (.venv/bin/python), so that both sides use the same torch; it
installs `transformers` there when it is missing. A rate is that of the tokens beyond the first few:
both sides generate twice, few tokens and many, and the times are subtracted, so that loading and
reading the prompt do not count. Both sides take the most likely token. Prints a table and whether
both sides generated the same tokens.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import cpu_training  # installs transformers
import record
import torch

FEW = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(folder, args):
    """A model of two training steps, as a run and in Hugging Face's layout."""
    plan = folder / "model.toml"
    plan.write_text(
        cpu_training.PLANS["transformer++"]
        + "[train]\nsteps = 2\nbatch_size = 2\nsequence_length = 512\n"
        "learning_rate = 1e-3\neval_tokens = 512\n"
    )
    commands = [
        ["data", "synth", "-o", folder / "store"],
        ["train", plan, "--data", folder / "store", "-o", folder / "run", "--device", "cpu"],
        ["export", folder / "run", "-o", folder / "hf"],
    ]
    for command in commands:
        subprocess.run([args.assay, *command], check=True, capture_output=True)


def our_tokens(folder, args, prompt, samples, count):
    command = [
        args.assay,
        "generate",
        "--model",
        folder / "run",
        "--device",
        "cpu",
        "--threads",
        str(args.threads),
        "--precision",
        args.precision,
        "--json",
        "--tokens",
        ",".join(map(str, prompt)),
        "--temperature",
        "0",
        "--samples",
        str(samples),
        "--max-tokens",
        str(count),
    ]
    start = time.perf_counter()
    out = subprocess.run(command, check=True, capture_output=True).stdout
    return time.perf_counter() - start, json.loads(out)["samples"][0]["tokens"]


def their_tokens(model, prompt, samples, count):
    start = time.perf_counter()
    ids = torch.tensor([prompt] * samples)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
    )
    return time.perf_counter() - start, out[0, len(prompt) :].tolist()


def rate(generate, samples, args):
    """Tokens per second of all samples together, and the tokens of the first."""
    times = {}
    for count in (FEW, args.tokens + FEW):
        results = [generate(count) for _ in range(args.repeats)]
        times[count] = statistics.median(seconds for seconds, _ in results)
    return samples * args.tokens / (times[args.tokens + FEW] - times[FEW]), results[0][1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assay", default="build/assay")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompt = torch.randint(
        2, 256, (args.prompt,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_model(folder, args)
        model = cpu_training.transformers.AutoModelForCausalLM.from_pretrained(
            folder / "hf", dtype=DTYPES[args.precision]
        ).eval()
        for samples in (1, 8):
            ours, our_text = rate(
                lambda count: our_tokens(folder, args, prompt, samples, count), samples, args
            )
            theirs, their_text = rate(
                lambda count: their_tokens(model, prompt, samples, count), samples, args
            )
            first = next(
                (i for i, both in enumerate(zip(our_text, their_text)) if both[0] != both[1]), None
            )
            rows.append(
                {
                    "precision": args.precision,
                    "sequences at the same time": samples,
                    "Assay, tokens/s": ours,
                    "transformers, tokens/s": theirs,
                    "ratio": ours / theirs,
                    "tokens": "the same" if first is None else f"the same up to token {first}",
                }
            )
            if not args.json:
                print(
                    f"B {samples:2}: Assay {ours:.0f} tokens/s, transformers {theirs:.0f}, "
                    f"ratio {ours / theirs:.2f}, tokens {rows[-1]['tokens']}",
                    flush=True,
                )
    if args.json:
        record.print_json(
            rows,
            transformers=cpu_training.transformers.__version__,
            threads=args.threads,
            prompt=args.prompt,
            timed_tokens=args.tokens,
        )


if __name__ == "__main__":
    main()
