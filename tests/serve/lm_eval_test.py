"""lm-evaluation-harness with `assay serve`, and with the exported weights in transformers, gives
the items of `assay eval tasks`. The documents are sentences of the documentation, made into tasks.

Usage: lm_eval_test.py PROGRAM FOLDER    FOLDER/run: see small_model.sh
"""
import json
import pathlib
import random
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
ITEMS = 12
ROLLING = 'kind = "rolling"\ndocuments = "pages.jsonl"\ntext = "{{text}}"\n'

if not (ROOT / ".venv-clients" / "ready").exists():
    print("skipped: no lm-evaluation-harness; `make test-clients` installs it")
    sys.exit(77)


def sentences():
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
    return [line for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ,'-]{50,150}\.", line)]


def documents():
    """→ {file: its documents}, as the published data sets have them"""
    chance = random.Random(1)
    lines = sentences()
    halves = [(" ".join(line.split()[:5]), " ".join(line.split()[5:])) for line in lines]

    def choices(right, count):
        place = chance.randrange(count)
        wrong = [half[1] for half in chance.sample(halves, count - 1)]
        return wrong[:place] + [right] + wrong[place:], place

    def arc(begin, end):
        texts, place = choices(end, 4)
        return {"id": begin, "question": begin, "choices": {"text": texts, "label": list("ABCD")},
                "answerKey": "ABCD"[place]}

    def mmlu(subject, begin, end):
        texts, place = choices(end, 4)
        return {"question": begin, "subject": subject, "choices": texts, "answer": place}

    def hellaswag(begin, end):
        texts, place = choices(end, 4)
        return {"activity_label": "Serving [title] a model", "ctx_a": begin, "ctx_b": "the model",
                "endings": texts, "label": str(place)}

    def piqa(begin, end):
        (first, second), place = choices(end, 2)
        return {"goal": begin, "sol1": first, "sol2": second, "label": place}

    def winogrande(begin, end):
        return {"sentence": f"{begin} _ {end}", "option1": "tokens", "option2": "a model",
                "answer": chance.choice("12")}

    def some(make):
        return [make(*half) for half in chance.sample(halves, ITEMS)]

    subjects = ["anatomy", "machine_learning"]
    return {
        "piqa.validation.jsonl": some(piqa),
        "hellaswag.validation.jsonl": some(hellaswag),
        "winogrande.validation.jsonl": some(winogrande),
        "arc_easy.test.jsonl": some(arc),
        "arc_easy.train.jsonl": some(arc),
        "mmlu.test.jsonl": [mmlu(subjects[i % 2], *chance.choice(halves)) for i in range(ITEMS)],
        "mmlu.dev.jsonl": [mmlu(subjects[i % 2], *chance.choice(halves)) for i in range(10)],
        "lambada_openai.test.jsonl": some(lambda begin, end: {"text": f"{begin} {end}"[:-1]}),
        "nq_open.validation.jsonl": some(lambda begin, end: {"question": begin, "answer": [end]}),
        "squad_completion.validation.jsonl":
            some(lambda begin, end: {"text": begin + " ", "value": end.split()[0]}),
        "pages.jsonl": [{"text": " ".join(lines[9 * i:][:9])} for i in range(ITEMS)],
    }


class Comparison(unittest.TestCase):
    def compare(self, tasks, *options):
        """→ {task: [examples, items, equal items of the server, of transformers]}"""
        run = subprocess.run(
            [PYTHON, ROOT / "tools" / "compare-lm-eval", FOLDER / "run", "--assay", PROGRAM,
             "--data", FOLDER / "documents", "--tasks", ",".join(tasks), *options],
            capture_output=True, text=True)
        rows = [[cell.strip() for cell in line.split("|")[1:-1]]
                for line in run.stdout.splitlines() if line.startswith("| ")]
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr[-3000:])
        return {row[0]: [int(row[i]) for i in (1, 2, 4, 6)] for row in rows[1:]}

    def test_every_item_is_equal(self):
        data = FOLDER / "documents"
        data.mkdir(exist_ok=True)
        for name, rows in documents().items():
            (data / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (data / "pages.toml").write_text(ROLLING)
        names = ["piqa", "hellaswag", "winogrande", "arc_easy", "mmlu", "lambada_openai", "nq_open",
                 "squad_completion"]
        expected = {name: [5 if name == "mmlu" else 0, *[ITEMS] * 3] for name in names + ["pages"]}
        # Texts of the pages need several windows of 300 tokens, and prompts of mmlu are truncated.
        found = self.compare([*names, str(data / "pages.toml")], "--max-length", "300")
        self.assertEqual(found, expected)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
