"""Fails when a file of src/ includes a header of a layer above its own, or torch where its layer may not use it.

Usage: layering.py LAYERS, a file with a line a layer: its name, then what it may use (CMakeLists.txt writes it).
"""
import pathlib
import re
import sys

SOURCE = pathlib.Path(__file__).parent.parent / "src"
TORCH = re.compile(r"(ATen|torch|c10)/")


def allowed_layers(listing):
    lines = [line.split() for line in pathlib.Path(listing).read_text().splitlines()]
    allowed = {name: {name, *uses} for name, *uses in lines}
    allowed["cli"] = {"cli", "torch", *allowed}
    return allowed


def violations(file, allowed):
    layer = file.relative_to(SOURCE).parts[0]
    is_kernel = file.name.startswith("cpu") or file.name == "kernel.h" or file.suffix in (".cu", ".cuh")
    for number, line in enumerate(file.read_text().splitlines(), 1):
        include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line)
        if not include:
            continue
        quote, header = include.groups()
        target = "torch" if TORCH.match(header) else header.split("/")[0] if quote == '"' else None
        if target and target not in allowed[layer] or target == "torch" and is_kernel:
            yield f"{file}:{number}: layer '{layer}' must not include {header}"


def main():
    allowed = allowed_layers(sys.argv[1])
    files = [f for f in sorted(SOURCE.rglob("*")) if f.suffix in (".h", ".cc", ".cu", ".cuh")]
    found = [v for f in files for v in violations(f, allowed)]
    print("\n".join(found) or f"{len(files)} files keep to the layers")
    return bool(found) or not files


if __name__ == "__main__":
    sys.exit(main())
