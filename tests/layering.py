"""Fails if a file of src/ includes what it must not see:

- a header of a layer above its own, or torch where its layer may not use it;
- a header of another operator that is not its public one, ops/FAMILY/NAME/NAME.h, or a header
  that another family of operators shares;
- a header of the CUDA library (ops/cuda) outside CUDA files.

It also fails if a file outside of src/run spells the name of a file of the run folder, and if the
table of layers in docs/design.md is not what CMakeLists.txt says.

Usage: layering.py LAYERS, a file with one line per layer: its name, then what it may use
(CMakeLists.txt writes it).
"""

import pathlib
import re
import sys

SOURCE = pathlib.Path(__file__).parent.parent / "src"
TORCH = re.compile(r"(ATen|torch|c10)/")
RUN_FOLDER = re.compile(
    r'"(config\.toml|run\.json|metrics\.jsonl|checkpoints|step-[^"]*|optimizer\.safetensors|'
    r'state\.json|end\.json|probes\.json|done\.json|tasks\.json|tasks\.sqlite|log\.txt)"'
)


def allowed_layers(listing):
    lines = [line.split() for line in pathlib.Path(listing).read_text().splitlines()]
    allowed = {name: {name, *uses} for name, *uses in lines}
    allowed["cli"] = {"cli", "torch", *allowed}
    return allowed


def private_header(file, header):
    """Why a file of src/ops must not include this header of another folder, or None.

    The folders are core, cpu, cuda, and families of operators: ops/FAMILY/NAME/NAME.h.
    """
    own, parts = file.relative_to(SOURCE).parts[1:-1], header.split("/")
    if file.relative_to(SOURCE).parts[0] != "ops" or parts[0] != "ops" or len(parts) < 3:
        return None
    family, name = parts[1], parts[2]
    if family == "core":
        return None
    if own[0] == "core":
        return f"ops/core is below ops/{family}"
    if family == "cuda":
        return (
            None if file.suffix in (".cu", ".cuh") else "only CUDA files include the CUDA library"
        )
    if family == "cpu":
        return f"ops/{own[0]} does not use ops/cpu" if own[0] == "cuda" else None
    if own[0] in ("cpu", "cuda"):
        return f"ops/{own[0]} is below ops/{family}"
    shared = len(parts) == 3 or name == "passes"
    if own[0] == family and (shared or own[1:2] == (name,)):
        return None
    if parts[3:] == [f"{name}.h"]:
        return None
    return f"it is private to ops/{family}" + ("" if len(parts) == 3 else f"/{name}")


def violations(file, allowed):
    layer = file.relative_to(SOURCE).parts[0]
    is_kernel = (
        file.name.startswith("cpu") or file.name == "kernel.h" or file.suffix in (".cu", ".cuh")
    )
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if layer != "run" and (name := RUN_FOLDER.search(line)):
            yield f"{file}:{number}: only src/run names files of the run folder: {name.group()}"
        include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line)
        if not include:
            continue
        quote, header = include.groups()
        target = "torch" if TORCH.match(header) else header.split("/")[0] if quote == '"' else None
        if target and target not in allowed[layer] or target == "torch" and is_kernel:
            yield f"{file}:{number}: layer '{layer}' must not include {header}"
        elif why := private_header(file, header) if quote == '"' else None:
            yield f"{file}:{number}: {header} must not be included here: {why}"


def wrong_rows(page, allowed):
    """Layers whose row in the table, | layer | content | uses | torch |, differs from `allowed`."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \| (yes|no) \|$", page, re.M)
    told = {
        name: {name, *re.findall("`(\\w+)`", uses)} | ({"torch"} if torch == "yes" else set())
        for name, uses, torch in rows
        if name != "cli"
    }
    layers = set(allowed) - {"cli"}
    for name in sorted(layers | set(told)):
        uses = allowed.get(name, set()) & (layers | {"torch"})
        if told.get(name) != uses:
            yield f"docs/design.md: the row of '{name}' must name {sorted(uses - {name})}"


def main():
    allowed = allowed_layers(sys.argv[1])
    files = [f for f in sorted(SOURCE.rglob("*")) if f.suffix in (".h", ".cc", ".cu", ".cuh")]
    found = [v for f in files for v in violations(f, allowed)]
    found += wrong_rows((SOURCE.parent / "docs/design.md").read_text(), allowed)
    print("\n".join(found) or f"{len(files)} files keep to the layers")
    return bool(found) or not files


if __name__ == "__main__":
    sys.exit(main())
