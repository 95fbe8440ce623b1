#!/usr/bin/env python3
"""`assay data prepare` compared with a Python loop of zstandard + json + sentencepiece over the
same files, one process.

    .venv/bin/python bench/data_prepare.py --tokenizer MODEL FILE.jsonl.zst...

The loop decompresses, parses, encodes, appends the separator and writes u16 ids to one file: less
than a token store holds. Both run in turn `--repeats` times; the best time of each counts. The
token counts must be equal. What the loop needs from PyPI (sentencepiece, zstandard, numpy) is
installed into the running environment. Goal on 2 cores: a ratio of 1.8 or more.
"""

import argparse
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def need(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        print("installing", *missing, file=sys.stderr)
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *missing], check=True)


def python_loop(files, tokenizer, folder):
    import numpy
    import sentencepiece
    import zstandard

    start, tokens, size = time.perf_counter(), 0, 0
    model = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    with open(folder / "tokens.bin", "wb") as out:
        for file in files:
            with open(file, "rb") as raw:
                stream = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
                    raw, read_across_frames=True
                )
                for line in io.TextIOWrapper(stream, encoding="utf-8"):
                    text = json.loads(line)["text"]
                    ids = model.encode(text) + [model.eos_id()]
                    numpy.array(ids, dtype=numpy.uint16).tofile(out)
                    tokens, size = tokens + len(ids), size + len(text.encode())
    return time.perf_counter() - start, tokens, size


def assay(program, files, tokenizer, folder):
    start = time.perf_counter()
    command = [
        program,
        "data",
        "prepare",
        "--json",
        "--overwrite",
        "--tokenizer",
        tokenizer,
        "-o",
        folder / "store",
        *files,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    return seconds, sum(part["tokens"] for part in json.loads(done.stdout)["parts"])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE.jsonl.zst", help="with SlimPajama's set names"
    )
    parser.add_argument("--tokenizer", required=True, help="SentencePiece model")
    parser.add_argument("--program", default=ROOT / "build" / "assay")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    need("sentencepiece", "zstandard", "numpy")
    best = {"loop": float("inf"), "assay": float("inf")}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for _ in range(options.repeats):
            loop_seconds, loop_tokens, size = python_loop(options.files, options.tokenizer, folder)
            assay_seconds, assay_tokens = assay(
                options.program, options.files, options.tokenizer, folder
            )
            if loop_tokens != assay_tokens:
                sys.exit(f"different numbers of tokens: loop {loop_tokens}, assay {assay_tokens}")
            best = {
                "loop": min(best["loop"], loop_seconds),
                "assay": min(best["assay"], assay_seconds),
            }
            print(f"loop {loop_seconds:6.2f} s   assay {assay_seconds:6.2f} s", file=sys.stderr)
    rate = {name: size / 1e6 / seconds for name, seconds in best.items()}
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "text_mb": round(size / 1e6, 1),
        "tokens": loop_tokens,
        "loop_mb_per_s": round(rate["loop"], 2),
        "assay_mb_per_s": round(rate["assay"], 2),
        "ratio": round(best["loop"] / best["assay"], 2),
        "goal": 1.8,
    }
    print(json.dumps(result))
    sys.exit(0 if result["ratio"] >= result["goal"] else 1)


if __name__ == "__main__":
    main()
