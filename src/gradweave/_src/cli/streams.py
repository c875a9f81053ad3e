"""Where answers go: terminals and files of any encoding, or nowhere."""

import io
import os
import sys

STREAMS = {"stdin": 0, "stdout": 1, "stderr": 2}


def make_writable() -> None:
    """Escape characters that an output's encoding lacks, and open a closed stream to nowhere.

    The number of a closed stream would be given to the next file that is opened, and answers would
    be written into that.
    """
    for number in STREAMS.values():
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 as it is called
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(STREAMS[name], "w"))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Flush both streams; what cannot be written is dropped, or Python would try again at exit.

    Raise OSError where output that was wanted is lost, as on a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
        except (AttributeError, ValueError):  # a script has closed or replaced it
            pass
