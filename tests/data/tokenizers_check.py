"""Compares tokenizer.json, as the library `tokenizers` reads it, with ids and texts of Assay.

tokenizers_check.py FOLDER      reads tokenizer.json and cases.json: a list of {text, ids, decoded}
"""

import json
import pathlib
import sys

try:
    from tokenizers import Tokenizer
except ImportError:
    sys.exit(77)  # the test is skipped

folder = pathlib.Path(sys.argv[1])
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.encode_special_tokens = True  # tokenizer_config.json says so to transformers
cases = json.loads((folder / "cases.json").read_text())
for case in cases:
    ids = tokenizer.encode(case["text"]).ids
    if ids != case["ids"]:
        sys.exit(f"{case['text']!r}: expected {case['ids']}, found {ids}")
    text = tokenizer.decode(case["ids"], skip_special_tokens=False)
    if text != case["decoded"]:
        sys.exit(f"{case['ids']}: expected {case['decoded']!r}, found {text!r}")
print(f"{len(cases)} texts are equal")
