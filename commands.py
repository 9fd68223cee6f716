"""What every command shares: its arguments, two kinds of failure, and how each ends the process."""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable

DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class InputError(ValueError):
    """Bad input, found before anything is written: one line that says what, where and what to do. Exit status 2."""


class RunFailed(RuntimeError):
    """A run that had to stop: a non-finite loss, a full disk, a lost process. One line. Exit status 1."""


class Interrupted(Exception):
    """The run was asked to stop by a signal and holds nothing unsaved. Exit status 128 + the signal's number."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.signal_number = signal_number


class Parser(argparse.ArgumentParser):
    """Arguments that fail as one line, like everything else that is wrong with the input."""

    def error(self, message: str) -> None:
        raise InputError(f"{message} (see {self.prog} --help)")


def command(main: Callable[[list[str]], int | None]) -> None:
    """Runs `main(argv)` and exits with its status; failures become one line on stderr, a traceback only with `--debug`."""
    for name in ("stdout", "stderr"):  # None where the caller closed it
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    argv = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if len(argv) < len(sys.argv) - 1:
        sys.exit(main(argv))
    if not one_of_several():  # torchrun's processes end at once: one that waits for the others would not see the exception
        signal.signal(signal.SIGTERM, terminate)
    try:
        status = main(argv)
    except InputError as error:
        status = fail(error, 2)
    except RunFailed as error:
        status = fail(error, 1)
    except Interrupted as stop:
        status = fail(stop, 128 + stop.signal_number)
    except KeyboardInterrupt:
        status = fail("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone (`... | head`): nothing to say, and nobody to say it to
        status = 141
    except OSError as error:
        status = fail(error, 1 if error.errno in DISK_ERRORS else 2)
    except Exception as error:
        status = fail(f"unexpected {type(error).__name__}: {error} (run again with --debug for the traceback)", 1)
    leave(status)


def terminate(number: int, frame: object) -> None:
    raise Interrupted(number, "terminated")


def one_of_several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def leave(status: int | None) -> None:
    """Ends the process with `status` (None: 0).

    One of several processes ends without the interpreter's shut-down: a Gloo thread that is late in letting go of a tensor
    would ask for the interpreter's lock then, and abort a run that has finished.
    """
    if one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
    sys.exit(status)


def fail(reason: object, status: int) -> int:
    """Prints one line on stderr and returns `status`."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if first or not isinstance(reason, InputError):  # under torchrun every process finds the same fault in the same input
        print("error: " + " ".join(str(reason).split()), file=sys.stderr, flush=True)
    return status
