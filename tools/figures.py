#!/usr/bin/env python3
"""Draws docs/figures/layers.svg from the layers of CMakeLists.txt, and docs/figures/batch.svg.

tools/figures.py            writes the figures
tools/figures.py --check    fails if a figure differs from what would be written
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
STYLE = """<style>
.box{fill:#fff;stroke:#333}.torch{fill:#e3edf8;stroke:#1f5f99}.files{fill:#fff5dd;stroke:#8a6100}
.edge{fill:none;stroke:#666}.head{fill:#666}text{fill:#1d1d1d}.soft{fill:#555}
@media(prefers-color-scheme:dark){.box{fill:#202327;stroke:#ccc}.torch{fill:#17344f;stroke:#6cb0e8}
.files{fill:#3d3214;stroke:#d9ab3c}.edge{stroke:#a8a8a8}.head{fill:#a8a8a8}text{fill:#e8e8e8}\
.soft{fill:#b0b4b8}}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" \
orient="auto">
<path class="head" d="M0 0L8 4L0 8Z"/></marker></defs>
"""


def box(x, y, width, lines, style="box", height=None):
    """A rectangle around (x, y) with centred lines, the first one bold."""
    height = height or 16 + 16 * len(lines)
    out = (
        f'<rect class="{style}" x="{x - width / 2:g}" y="{y - height / 2:g}" '
        f'width="{width}" height="{height}" rx="6"/>\n'
    )
    for i, line in enumerate(lines):
        weight = ' font-weight="bold"' if i == 0 else ' class="soft" font-size="12"'
        top = y + 5 + 16 * (i - (len(lines) - 1) / 2)
        out += f'<text x="{x:g}" y="{top:g}" text-anchor="middle"{weight}>{line}</text>\n'
    return out


def arrow(path, label="", at=(0, 0), dashed=False):
    dashes = " stroke-dasharray='5 4'" if dashed else ""
    out = f'<path class="edge" d="{path}" marker-end="url(#head)"{dashes}/>\n'
    return out + (
        f'<text class="soft" font-size="12" x="{at[0]}" y="{at[1]}">{label}</text>\n'
        if label
        else ""
    )


def svg(width, height, title, body):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}" font-family="Helvetica, Arial, sans-serif" font-size="14">\n'
        f"<title>{title}</title>\n{STYLE}{body}</svg>\n"
    )


def layers():
    """{layer: the layers that it may use} and the layers with torch, from CMakeLists.txt."""
    uses, torch = {}, set()
    for name, words in re.findall(
        r"^assay_layer\((\w+)\s+MAY_USE ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text(), re.M
    ):
        allowed = words.split("KERNELS_MAY_USE")[0].split()
        uses[name] = [word for word in allowed if word in uses]
        if "torch" in allowed:
            torch.add(name)
    return uses, torch


def direct(uses):
    """The edges (used, user) that do not follow from others."""

    def reaches(user, used, skip):
        return any(step == used or reaches(step, used, None) for step in uses[user] if step != skip)

    return [(used, user) for user in uses for used in uses[user] if not reaches(user, used, used)]


PLACES = {
    "base": (60, 215),
    "ops": (190, 85),
    "data": (190, 175),
    "run": (190, 255),
    "stats": (190, 335),
    "nn": (320, 85),
    "eval": (450, 85),
    "train": (580, 85),
    "study": (450, 300),
    "report": (710, 335),
    "tasks": (710, 205),
    "serve": (710, 85),
    "exchange": (450, 150),
    "bench": (710, 270),
}
CURVES = {
    ("nn", "serve"): "M320 67C360 18 670 18 710 67",
    ("data", "serve"): "M235 165C380 120 560 150 665 95",
    ("study", "tasks"): "M495 290L665 218",
    ("run", "nn"): "M225 237L300 103",
    ("train", "tasks"): "M620 103L685 187",
    ("train", "bench"): "M605 103C625 180 640 225 664 262",
    ("nn", "exchange"): "M340 103L404 143",
}


def layers_figure():
    uses, torch = layers()
    assert set(uses) == set(PLACES), (
        f"give every layer a place in tools/figures.py: {set(uses) ^ set(PLACES)}"
    )
    out = ""
    for used, user in direct(uses):
        (x1, y1), (x2, y2) = PLACES[used], PLACES[user]
        out += f"<!-- {used} -> {user} -->\n" + arrow(
            CURVES.get((used, user), f"M{x1 + 45} {y1}L{x2 - 46} {y2}")
        )
    for name in ("tasks", "serve", "report", "exchange", "bench"):
        x, y = PLACES[name]
        out += arrow(f"M{x + 45} {y}L813 {205 + (y - 205) / 12:g}")
    out += arrow("M580 103L580 170", "writes", (588, 142), dashed=True)
    out += arrow("M548 207L485 281", "reads", (530, 252), dashed=True)
    for name, (x, y) in PLACES.items():
        out += box(x, y, 90, [name], "torch" if name in torch else "box", 36)
    out += box(850, 205, 72, ["cli"], "torch", 36)
    out += box(580, 190, 104, ["run folder"], "files", 36)
    out += (
        '<text class="soft" font-size="12" x="15" y="385">An arrow leads from a layer to a layer '
        "that uses it; arrows that follow from others are left out. Blue: with torch. "
        "Dashed: through files.</text>\n"
    )
    return svg(900, 400, "Layers of Assay: a fork that the run folder joins", out)


def batch_figure():
    out = ""
    top = [
        (80, ["token store", "memory-mapped", "token ids"], "files"),
        (245, ["sampler", "(seed, step) →", "B × (T + 1) ids"], "box"),
        (410, ["embedding", "[B, T, d_model]", "fp32 or bf16"], "torch"),
    ]
    for x, lines, style in top:
        out += box(x, 75, 135, lines, style, 70)
    for x in (148, 313):
        out += arrow(f"M{x} 75L{x + 29} 75")
    out += (
        '<rect class="edge" x="500" y="20" width="385" height="185" rx="8" '
        'stroke-dasharray="5 4"/>\n'
        '<text class="soft" font-size="12" x="512" y="38">num_layers times, mixers as in '
        "`pattern`</text>\n"
    )
    out += box(590, 75, 140, ["mixer", "x + mixer(norm x)"], "torch", 50) + box(
        785, 75, 170, ["channel mixer", "x + channel_mixer(norm x)"], "torch", 50
    )
    out += arrow("M478 75L519 75") + arrow("M660 75L699 75")
    out += box(
        690,
        160,
        340,
        ["operator", "CPU kernel, CUDA kernel or composition (assay doctor)"],
        "box",
        50,
    )
    out += arrow("M590 100L590 134") + arrow("M785 100L785 134")
    bottom = [
        (785, ["head + cross-entropy", "a few rows of logits", "at a time"], "torch"),
        (590, ["backward", "gradients in fp32,", "summed over micro-batches"], "torch"),
        (395, ["AdamW", "clip in the gradient scale;", "non-finite: nothing changes"], "torch"),
        (160, ["run folder", "metrics.jsonl, evaluations,", "checkpoints, end.json"], "files"),
    ]
    for x, lines, style in bottom:
        out += box(x, 275, 175, lines, style, 70)
    out += (
        arrow("M870 100L878 110C890 150 890 190 850 240")
        + arrow("M697 275L679 275")
        + arrow("M502 275L484 275")
        + arrow("M307 275L249 275")
    )
    out += arrow("M395 240L395 150L410 112", "next step: new weights", (262, 190))
    out += (
        '<text class="soft" font-size="12" x="15" y="345">The same model with a state reads '
        "prompts in pieces and decodes token by token; training passes an empty state and one "
        "piece.</text>\n"
    )
    return svg(900, 360, "Path of a batch through a training step", out)


def main():
    figures = {"layers.svg": layers_figure(), "batch.svg": batch_figure()}
    for name, text in figures.items():
        path = ROOT / "docs" / "figures" / name
        if sys.argv[1:] == ["--check"]:
            if not path.exists() or path.read_text() != text:
                sys.exit(f"{path} is out of date; run tools/figures.py")
        else:
            path.write_text(text)


if __name__ == "__main__":
    main()
