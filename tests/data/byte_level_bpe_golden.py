#!/usr/bin/env python3
"""Writes byte_level_bpe.json: small tokenizers, and what the library `tokenizers` makes of texts.

    tests/data/byte_level_bpe_golden.py        needs tokenizers 0.23
"""
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import trainers

FILE = pathlib.Path(__file__).with_name("byte_level_bpe.json")
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{ENDINGS}|{WORDS}|\p{{N}}{{1,3}}|{REST}"
QWEN = rf"{ENDINGS}|{WORDS}|\p{{N}}|{REST}"

SENTENCES = [
    "The quick brown fox didn't jump over 12345 lazy dogs; it's 3.14159, isn't it?",
    "for (int i = 0; i < 1000; ++i) {\n\tsum += x[i] * y[i];\n}\n",
    "Größe, Fähigkeit, naïve café, cafe\u0301, Ångström, A\u030angstro\u0308m, ﬁn, ß, ſ, İstanbul",
    "Привет, мир! Как дела? Ελληνικά, עברית שלום, العربية ١٢٣٤٥",
    "漢字かな交じり文、第３章。한국어 문장입니다. हिन्दी में १२३ वाक्य",
    "👩‍👩‍👧‍👦 🎉🎉 e\u0301\u0323 x\u00a0y\u2003z\u3000w\u1680v\u180eu"
    "\u200bt\u2028s\u0085r\u000bq\u000cp",
    "  two  spaces   three    four \t tab\t\ttabs \n\n newlines \r\n\r\n end   ",
    "I'LL we'Ve they'RE 'S 'ſ 's''s don'T CAN'T o'clock",
    "1 12 123 1234 12345 ½ ² Ⅷ ٣٤ ௧ 1,000,000.00 0x1F 1e-5",
    "<|endoftext|> <think>why</think> <thinking> ĠĊ \u0000 \u0001 \u007f \u00ad "
    "\ufeff \uffff \U0010ffff",
    "", " ", "\n", "\t\n ", "a", " a", "a ", "'", "''", "\u0301", "a" * 33,
]


def random_texts(count):
    generator = random.Random(7)
    alphabet = "aAeé e\u0301'stS 019½٣ \n\r\t\u00a0\u3000.,;-_(){}<>漢字🎉ĠżЖß\u0323\u200b"
    return ["".join(generator.choice(alphabet) for _ in range(generator.randrange(1, 60)))
            for _ in range(count)]


def tokenizer(kind):
    made = Tokenizer(models.BPE(ignore_merges=kind == "llama3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pattern = {"llama3": LLAMA3, "qwen": QWEN}.get(kind)
    if pattern:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    elif kind == "digits":
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True),
             pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "gpt2_prefix")
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=["<|endoftext|>"])
    made.train_from_iterator(SENTENCES * 3, trainer)
    if kind == "qwen":
        made.add_tokens([AddedToken("<think>", normalized=False),
                         AddedToken("<thinking>", normalized=False),
                         AddedToken("é\n", normalized=True)])
    made.encode_special_tokens = True
    return made


def main():
    texts = SENTENCES + random_texts(30)
    out = {"texts": texts}
    for kind in ("gpt2", "gpt2_prefix", "llama3", "qwen", "digits"):
        made = tokenizer(kind)
        ids = [encoding.ids for encoding in made.encode_batch(texts, add_special_tokens=False)]
        out[kind] = {"tokenizer": json.loads(made.to_str()), "ids": ids,
                     "decoded": [made.decode(row) for row in ids],
                     "half_decoded": [made.decode(row[1::2]) for row in ids]}
    FILE.write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
