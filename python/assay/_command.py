"""The command `assay`: Python is the host of the program, so plans may name PyTorch modules."""

import ctypes
import importlib
import os
import signal
import sys
import sysconfig

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def _script():
    """A file that runs this command again. The runs of a study are such processes."""
    from . import _library

    places = [
        sys.argv[0],
        os.path.join(sysconfig.get_path("scripts"), "assay"),
        _library.FOLDER.parent / "bin" / "assay",  # of pip install --target
    ]
    for place in places:
        place = os.path.abspath(place)
        if os.path.basename(place) == "assay" and os.access(place, os.X_OK):
            return place
    return sys.exit("assay: the script `assay` of the package is not installed. Install it with pip.")


def _python_command(name):
    """The main function of a command that is not in the program. Ctrl-C ends it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return importlib.import_module(f"._{name}", __package__).main(sys.argv[2:])


def main():
    # As in build/assay: waiting threads sleep, the C++ handlers get the signals, and a reader that
    # closes the pipe ends the program.
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1:2] == ["track"]:  # without torch
        return _python_command("track")
    try:
        from . import _library

        library = _library.load()
    except ImportError as error:
        sys.exit(f"assay: {error}")
    if sys.argv[1:2] == ["check"]:
        return _python_command("check")
    from . import _mixers

    _mixers.register()
    sys.stdout = sys.stderr  # for modules that print; the program writes its results there itself
    arguments = [os.fsencode(word) for word in ["assay", *sys.argv[1:]]]
    return library.assay_hosted_main(
        os.fsencode(_script()),
        len(arguments),
        (ctypes.c_char_p * (len(arguments) + 1))(*arguments, None),
    )
