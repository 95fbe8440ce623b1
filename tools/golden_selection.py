#!/usr/bin/env python3
"""Copies a selection of the golden data to tests/golden.

    tools/golden_selection.py FULL              writes tests/golden
    tools/golden_selection.py FULL --check      fails if tests/golden differs from the selection

FULL is the folder of all golden data. The selection has one case of each operator and mixer. A
large file is cut to its first sequence, its first head or its first layer. Numbers are never
changed. A gradient that sums over what was cut is left out, and so are the gradients of a model's
matrices.
"""
import argparse
import filecmp
import json
import pathlib
import shutil
import struct
import sys
import tempfile

import numpy

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
LARGEST = 3_000_000  # bytes of all files
DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}
NAMES = {numpy.dtype(numpy_name): name for name, numpy_name in DTYPES.items()}

STEPS = 16           # time steps of a case without gradients

COPIED = ["mqar_L64_kv4.safetensors", "ruler_niah_single_noise_512.jsonl", "bpe2000.model",
          "bpe2000.cases.json", "selective_scan_T65_groups.safetensors",
          "kda_layer_T65_bounded.safetensors", "gated_delta_product_layer_T65_n3.safetensors",
          "mamba3_layer_T65_outnorm.safetensors"]

# Files whose tensors are [batch, time, head, ...]: the first sequence and the first head.
FIRST_HEAD = ["delta_rule_T65", "gated_delta_rule_T65", "gla_T65", "simple_gla_T65",
              "linear_attn_T65_norm", "based_T65", "rwkv6_T65", "dplr_T65_rwkv7", "ssd_T65",
              "top1_chunk_exact_T65_C16_unnorm", "top1_chunk_short_T13_C16", "top1_element_T65"]
HEAD_FIRST = {"state", "final_state_own", "lse", "remote", "index"}  # [batch, head, ...]
PER_HEAD = {"u", "A", "D", "dt_bias", "gamma"}                       # [head, ...]

# Files whose tensors are [batch, ...], apart from SHARED ones: the first sequence.
FIRST_SEQUENCE = ["longhorn_exact_T65", "longhorn_block_T65", "base_conv_T64_expand4",
                  "zoology_base_conv_T65", "based_linear_attention_T65", "kda_layer_T65",
                  "gdn2_layer_T65", "comba_layer_T65", "lfm2_conv_layer_T65", "mamba3_layer_T65",
                  "forgetting_attn_layer_T65_gated", "indexer_minimax_m3_T65_C8_k4",
                  "attention_sinks_T65"]
SHARED = PER_HEAD | {"delta_bias", "sinks"}  # one tensor for all sequences

MODELS = ["hf_llama_mha", "hf_mamba", "hf_mamba2", "hf_qwen3_next_hybrid", "hf_lfm2",
          "hf_olmo_hybrid_published", "hf_granite_hybrid_rope"]
RWKV = ["rwkv5_model_T65", "rwkv7_model_T65"]


def read(file):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        values = numpy.frombuffer(content[begin:end], DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors, metadata


def write(file, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape,
                        "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(numpy.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def first(tensor, axis):
    return tensor[(slice(None),) * axis + (slice(0, 1),)]


def base_of(name):
    return name.split(".", 1)[1]


def first_head(tensors):
    kept = {}
    for name, tensor in tensors.items():
        base = base_of(name)
        if base == "chunk_score" or (name.startswith("grad") and base in PER_HEAD):
            continue
        if base in PER_HEAD:
            kept[name] = first(tensor, 0)
        else:
            kept[name] = first(first(tensor, 0), 1 if base in HEAD_FIRST else 2)
    return kept


def first_sequence(tensors):
    kept = {}
    for name, tensor in tensors.items():
        shared = base_of(name) in SHARED or "param." in name
        if not (shared and name.startswith("grad")):
            kept[name] = tensor if shared else first(tensor, 0)
    return kept


def moba(tensors):
    """Sequences are concatenated: the first one, and its first head."""
    end = int(tensors["in.cu_seqlens"][1])
    kept = {"in.cu_seqlens": tensors["in.cu_seqlens"][:2]}
    for name, tensor in tensors.items():
        if name == "out.remote":
            kept[name] = tensor[:1, :end]
        elif name != "in.cu_seqlens":
            kept[name] = tensor[:end, :1]
    return kept


def retention(tensors):
    """The first steps, without gradients: gradients depend on all steps."""
    return {name: tensor if name == "out.gamma" else tensor[:, :STEPS]
            for name, tensor in first_head(tensors).items()
            if name.startswith(("in.", "out.")) and name != "out.final_state_own"}


def taylor_features(tensors):
    return {name: tensor[:, :1, :8] for name, tensor in tensors.items()}


def reference_of_model(tensors):
    """Losses, the gradients of vectors, and the losses of ten steps of training."""
    def is_kept(name, tensor):
        return not name.startswith("grad.") or tensor.squeeze().ndim <= 1

    return {name: tensor for name, tensor in tensors.items()
            if name != "out.logits" and is_kept(name, tensor)}


def first_layer(tensors, metadata):
    """The weights of the first layer, and its results for the beginning of the first sequence."""
    kept = {}
    for name, tensor in tensors.items():
        if name.startswith("act.blocks.0."):
            kept[name] = tensor[:1, :STEPS]
        elif name.startswith("param.") and (".blocks." not in name or ".blocks.0." in name):
            kept[name] = tensor
    return kept, metadata | {"n_layer": "1"}


def select(full, folder):
    for name in COPIED:
        shutil.copyfile(full / name, folder / name)
    for names, cut in ((FIRST_HEAD, first_head), (FIRST_SEQUENCE, first_sequence),
                       (["moba_T65x2_C16_k3"], moba), (["taylor_exp_d16"], taylor_features),
                       (["retention_T65"], retention)):
        for name in names:
            tensors, metadata = read(full / f"{name}.safetensors")
            write(folder / f"{name}.safetensors", cut(tensors), metadata)
    for name in RWKV:
        write(folder / f"{name}.safetensors", *first_layer(*read(full / f"{name}.safetensors")))
    for name in MODELS:
        (folder / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(full / name / file, folder / name / file)
        tensors, metadata = read(full / name / "reference.safetensors")
        write(folder / name / "reference.safetensors", reference_of_model(tensors), metadata)


def files_of(folder):
    return {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}


def differences(folder, expected):
    """Files that only one folder has, or whose contents differ. README.md is written by hand."""
    ours, theirs = files_of(folder) - {pathlib.Path("README.md")}, files_of(expected)
    different = {file for file in ours & theirs
                 if not filecmp.cmp(folder / file, expected / file, shallow=False)}
    return sorted((ours ^ theirs) | different)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("full", type=pathlib.Path, help="the folder of all golden data")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        made = pathlib.Path(temporary)
        select(arguments.full, made)
        if not arguments.check:
            for file in files_of(FOLDER) - files_of(made) - {pathlib.Path("README.md")}:
                (FOLDER / file).unlink()
            shutil.copytree(made, FOLDER, dirs_exist_ok=True)
        if different := differences(FOLDER, made):
            sys.exit(f"{FOLDER} differs from the selection: {', '.join(map(str, different))}")
    size = sum((FOLDER / file).stat().st_size for file in files_of(FOLDER))
    print(f"{FOLDER}: {len(files_of(FOLDER))} files, {size} bytes")
    if size > LARGEST:
        sys.exit(f"more than {LARGEST} bytes")


if __name__ == "__main__":
    main()
