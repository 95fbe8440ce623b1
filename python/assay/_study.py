"""assay.Study: a study from Python. The program runs it, in a process of its own."""

from __future__ import annotations

import difflib
import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile


class StudyError(Exception):
    """What the program said. `exit_code` is 2 where the caller can correct it."""

    def __init__(self, message, exit_code):
        super().__init__(message)
        self.exit_code = exit_code


class Figure:
    """A figure of the report. A notebook shows it; save() writes the SVG file."""

    def __init__(self, name: str, svg: str):
        self.name = name
        self.svg = svg

    def save(self, file) -> None:
        pathlib.Path(file).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self):
        return self.svg

    def __repr__(self):
        return f"<assay figure '{self.name}'>"


_PROGRESS = re.compile(r"\d+/\d+ done  |checking |comparing ")  # lines that the next one makes old


def _shower():
    """A function that shows a line. In a notebook, a line takes the place of old progress."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return lambda line: print(line, end="", file=sys.stderr, flush=True)
    from IPython.display import display

    lines, place = [], display({"text/plain": ""}, raw=True, display_id=True)

    def show(line):
        if lines and _PROGRESS.match(lines[-1]):
            lines.pop()
        lines.append(line)
        place.update({"text/plain": "".join(lines)}, raw=True)

    return show


def _command(*words, show=False):
    """The JSON document that a command of the program prints. Errors are StudyError."""
    document_file = tempfile.TemporaryFile("w+")  # a pipe would fill while progress is read
    process = subprocess.Popen(
        [sys.executable, "-m", "assay", *map(str, words), "--json"],
        stdout=document_file,
        # A terminal shows the progress itself; elsewhere it comes as lines
        stderr=None if show and sys.stderr.isatty() else subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that an interrupt reaches it once, from here
    )
    lines = []
    show_line = _shower() if show else lambda line: None

    def follow():
        for line in process.stderr or ():
            lines.append(line)
            show_line(line)
        process.wait()

    try:
        follow()
    except BaseException:
        process.send_signal(signal.SIGINT)  # the runs are saved
        follow()  # what it says about that
        raise
    document_file.seek(0)
    try:
        document = json.load(document_file)
    except json.JSONDecodeError:
        document = {"error": "".join(lines[-5:]).strip() or "the program printed nothing"}
    if process.returncode:
        raise StudyError(document.get("error", "the program failed"), process.returncode)
    return document


_FIRST = ("model", "verdict", "delta_end", "interval", "equal_tokens.value", "recall.value")


class Study:
    """A study: a plan and the folder of its runs and report.

    plan: a TOML file or a name of `assay list plans`. folder: by default, the name of the plan
    with "-study" in the current folder. A folder that has a study already is continued.
    """

    def __init__(self, plan, folder=None):
        self.plan = str(plan)
        self.folder = pathlib.Path(folder or pathlib.Path(plan).stem + "-study")
        self._verdicts = None

    def run(self, *options: str, data=None, show: bool = True) -> Study:
        """Runs what is not done yet, and writes the report. options: those of `assay run`."""
        store = () if data is None else ("--data", data)
        document = _command("run", self.plan, "-o", self.folder, *store, *options, show=show)
        self._verdicts = document.get("verdicts")
        return self

    def report(self) -> pathlib.Path:
        """Writes the report again and returns its page."""
        document = _command("report", self.folder)
        self._verdicts = document["verdicts"]
        return pathlib.Path(document["report"])

    def verdicts(self):
        """One record per model that is compared: a pandas.DataFrame, or a list without pandas."""
        if self._verdicts is None:
            self.report()
        try:
            import pandas
        except ImportError:
            return self._verdicts
        table = pandas.json_normalize(self._verdicts)
        first = [name for name in _FIRST if name in table]
        return table[first + [name for name in table if name not in first]]

    def figures(self) -> list[str]:
        """The names of the figures of the report."""
        if not (self.folder / "figures").exists():
            self.report()
        return sorted(file.stem for file in self.folder.glob("figures/*.svg"))

    def figure(self, name: str) -> Figure:
        names = self.figures()
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean '{near[0]}'?" if near else "."
            raise ValueError(f"there is no figure '{name}'{hint} There are: {', '.join(names)}.")
        text = (self.folder / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        return Figure(name, text)

    def __repr__(self):
        return f"assay.Study({self.plan!r}, {str(self.folder)!r})"
