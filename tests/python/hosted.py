"""Commands of the package in processes that are copies of this one.

The parent has imported torch, so a command starts in milliseconds instead of seconds. The parent
must not start threads: computations belong into the copies.
"""

import importlib
import os
import pathlib
import sys
import tempfile

PACKAGE = pathlib.Path(sys.argv[1]).resolve() / "package"
# For this process, before libgomp reads it, and for the ranks, which are processes of their own
os.environ.update(PYTHONPATH=str(PACKAGE), OMP_NUM_THREADS="1")
sys.path.insert(0, str(PACKAGE))

_command = importlib.import_module("assay._command")
importlib.import_module("assay._library").load()
for _name in ("assay.ops", "torch.utils.flop_counter", "torch._dynamo.config"):
    importlib.import_module(_name)


def _run(folder, words, output, environment):
    os.chdir(folder)
    os.environ.update(environment)
    for number, file in zip((1, 2), output):
        os.dup2(file.fileno(), number)
    sys.argv = [str(PACKAGE / "bin/assay"), *words]
    try:
        code = _command.main()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    os._exit(code)


def assay(folder, *words, code=0, **environment):
    """What the command prints, and its errors where a code other than 0 is expected."""
    words = [str(word) for word in words]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            _run(folder, words, (out, errors), environment)
        found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        said, complaints = out.read(), errors.read()
    if found != code:
        raise AssertionError(f"{words}: exit code {found}, not {code}\n{said}\n{complaints}")
    return said + (complaints if code else "")
