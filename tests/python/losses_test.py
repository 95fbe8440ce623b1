"""assay.data and assay.losses give what `assay eval loss` gives.

Usage: losses_test.py BUILD, after package_test.py
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BUILD = pathlib.Path(sys.argv[1]).resolve()
PACKAGE = BUILD / "package"
sys.path.insert(0, str(PACKAGE))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import assay  # noqa: E402
from assay.data import Segment, Store  # noqa: E402


def program(*words):
    done = subprocess.run(
        [str(word) for word in (BUILD / "assay", *words)], capture_output=True, text=True
    )
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


class Llama(nn.Module):
    """The layout `llama` of `assay export`, as its safetensors file has it."""

    def __init__(self, folder):
        super().__init__()
        self.config = json.loads((folder / "config.json").read_text())
        data = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        self.w = {}
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__":
                continue
            assert entry["dtype"] == "F32"
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
            self.w[name] = values.view(entry["shape"])

    def norm(self, x, name):
        return nn.functional.rms_norm(
            x, x.shape[-1:], self.w[name], self.config["rms_norm_eps"]
        )

    def forward(self, ids):
        c = self.config
        heads, head_dim = c["num_attention_heads"], c["head_dim"]
        rope = c.get("rope_parameters", {}).get("rope_theta", c.get("rope_theta"))
        angle = torch.outer(
            torch.arange(ids.shape[1]), rope ** (-torch.arange(0, head_dim, 2) / head_dim)
        )
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def rotate(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        x = self.w["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            q, k, v = (
                (h @ self.w[f"{p}self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, head_dim))
                for n in "qkv"
            )
            k, v = (t.repeat_interleave(heads // t.shape[2], 2) for t in (k, v))
            q, k, v = (t.transpose(1, 2) for t in (rotate(q), rotate(k), v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2) @ self.w[p + "self_attn.o_proj.weight"].T
            h = self.norm(x, p + "post_attention_layernorm.weight")
            gate, up = (h @ self.w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + (nn.functional.silu(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight") @ head.T


class Losses(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        store = cls.folder / "store"
        program("data", "synth", "-o", store, "--documents", "60", "--held-out", "20")
        cls.store = Store(store)
        (cls.folder / "model.toml").write_text(
            """
[model]
d_model = 32
num_layers = 2
pattern = ["attention"]
channel_mixer = "swiglu"
[model.attention]
num_heads = 4
num_kv_heads = 2
[train]
steps = 30
batch_size = 4
sequence_length = 64
learning_rate = 1e-2
warmup_steps = 4
"""
        )
        run = cls.folder / "run"
        program("train", cls.folder / "model.toml", "--data", store, "-o", run)
        program("export", run, "-o", cls.folder / "llama")
        cls.model = Llama(cls.folder / "llama")

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def evaluated(self, *words):
        out = program(
            *("eval", "loss", self.folder / "run", "--data", self.store.folder, "--json"),
            *("--length", "64", *words),
        )
        return json.loads(out)["evaluation"]

    def test_losses_equal_those_of_the_program(self):
        expected = self.evaluated()
        output = self.folder / "losses.jsonl"
        lines = assay.losses(
            self.model, None, self.store, output, name="mine", seed=3, tokens=7680,
            sequence_length=64,
        )
        self.assertEqual([json.loads(line) for line in output.read_text().splitlines()], lines)
        run, documents = lines[0]["run"], lines[1:]
        self.assertEqual((run["model"], run["seed"], run["tokens"]), ("mine", 3, 7680))
        roles = {(d["role"], d["domain"]) for d in documents}
        held_out = {("held_out", "known_a"), ("held_out", "known_b")}
        fresh = {("out_of_domain", f"fresh_{x}") for x in "abc"}
        self.assertEqual(roles, held_out | fresh)
        for role, domain in roles:
            name = f"{domain}.{'valid' if role == 'held_out' else 'test'}"
            own = [d for d in documents if d["domain"] == domain]
            tokens, recall = (sum(d[k] for d in own) for k in ("tokens", "recall_tokens"))
            slices = expected[name]["slices"]["repeated_bigram"]
            self.assertEqual(tokens, expected[name]["tokens"])
            self.assertEqual(recall, slices["tokens"])
            self.assertAlmostEqual(
                sum(d["nats"] for d in own) / tokens, expected[name]["loss"], delta=1e-5
            )
            self.assertAlmostEqual(
                sum(d["recall_nats"] for d in own) / recall, slices["loss"], delta=1e-5
            )
            nats, size = (sum(d[k] for d in own) for k in ("nats", "bytes"))
            self.assertAlmostEqual(
                nats / np.log(2) / size, expected[name]["bits_per_byte"], delta=1e-5
            )

    def test_limited_evaluation_takes_the_segments_of_the_program(self):
        for limit in (300, 1500, 4000):
            expected = self.evaluated("--tokens", limit)
            lines = assay.losses(
                self.model, None, self.store, sequence_length=64, max_tokens=limit
            )
            for domain in ("fresh_a", "fresh_b"):
                own = [d for d in lines[1:] if d["domain"] == domain]
                found = expected[f"{domain}.test"]
                self.assertEqual(sum(d["tokens"] for d in own), found["tokens"])
                self.assertEqual(len(own), found["documents"])
                loss = sum(d["nats"] for d in own) / found["tokens"]
                self.assertAlmostEqual(loss, found["loss"], delta=1e-5)

    def test_store_has_the_counts_of_the_program(self):
        info = json.loads(program("data", "info", self.store.folder, "--json"))
        self.assertEqual(len(info["parts"]), len(self.store.sets))
        for part in info["parts"]:
            documents = self.store.documents(f"{part['domain']}.{part['split']}")
            self.assertEqual(len(documents), part["documents"])
            self.assertEqual(len(documents.tokens), part["tokens"])
            self.assertEqual(documents[-1][-1], self.store.separator)
            self.assertEqual(documents.read(Segment(1, 0, 5))[0], self.store.separator)

    def test_text_of_a_store_is_what_was_prepared(self):
        store, text = self.text_store()
        documents = store.documents("words.train")
        found = {store.decode(documents[i][:-1]) for i in range(len(documents))}
        self.assertEqual(found, {file.read_text() for file in text.iterdir()})

    def text_store(self):
        """A store of texts, and the folder with the texts."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        text = pathlib.Path(folder.name, "text")
        text.mkdir()
        words = "the quick brown fox jumps over the lazy dog".split()
        for i in range(30):
            body = " ".join(words[(i * k + k) % 9] for k in range(200))
            (text / f"{i}.txt").write_text(f"  é {i}\n\n{body}\t€ 漢\n")
        tokenizer = text.parent / "tokenizer.model"
        program("tokenizer", "train", *sorted(text.iterdir()), "--vocab", "300", "-o", tokenizer)
        store = text.parent / "store"
        program(
            *("data", "prepare", "--tokenizer", tokenizer, "-o", store),
            *("--domain", "words=*", "--valid-fraction", "0", text),
        )
        return Store(store), text

    def test_another_tokenizer_reads_the_same_text(self):
        class Bytes:
            """A tokenizer as in transformers: one token per byte."""

            name_or_path, bos_token_id, eos_token_id = "bytes", 256, 256

            def __call__(self, text, add_special_tokens):
                return {"input_ids": list(text.encode())}

        class Uniform(nn.Module):
            def forward(self, ids):
                return torch.zeros(*ids.shape, 257)

        store, _ = self.text_store()
        lines = assay.losses(Uniform(), Bytes(), store, held_out=["words.train"], out_of_domain=[])
        for line in lines[1:]:
            self.assertEqual(line["tokens"], line["bytes"])
            self.assertAlmostEqual(line["nats"] / line["bytes"], np.log(257), places=5)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
