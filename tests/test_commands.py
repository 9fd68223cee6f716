import errno
import signal
import subprocess
import sys

import pytest

from commands import InputError, Interrupted, Parser, RunFailed, command

ENDINGS = [
    (InputError("no\nsuch file"), 2, "error: no such file\n"),
    (RunFailed("step 3: the loss is nan"), 1, "error: step 3: the loss is nan\n"),
    (Interrupted(15, "stopped"), 143, "error: stopped\n"),
    (KeyboardInterrupt(), 130, "error: interrupted\n"),
    (OSError(errno.ENOSPC, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.bin"), 2, "error: [Errno 2] No such file or directory: 'x.bin'\n"),
    (ZeroDivisionError("oops"), 1, "error: unexpected ZeroDivisionError: oops (run again with --debug for the traceback)\n"),
]


@pytest.fixture(autouse=True)
def own_handlers():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def end_with(outcome):
    def main(argv):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return main


@pytest.mark.parametrize("failure, status, line", ENDINGS, ids=lambda value: type(value).__name__)
def test_failures_are_one_line_and_a_status(failure, status, line, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as ended:
        command(end_with(failure))
    assert ended.value.code == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("result, status", [(None, None), (0, 0), (2, 2)])
def test_the_result_is_the_exit_status(result, status, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit) as ended:
        command(end_with(result))
    assert ended.value.code == status


def test_debug_shows_the_traceback_and_is_not_handed_on(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "a", "--debug", "b"])
    with pytest.raises(InputError):
        command(end_with(InputError("shown whole")))
    seen = []
    with pytest.raises(SystemExit):
        command(seen.extend)
    assert seen == ["a", "b"]


def test_sigterm_cleans_up_and_says_so(tmp_path):
    program = """if True:
        import pathlib, sys, time
        from commands import command
        def main(argv):
            half = pathlib.Path(argv[0])
            try:
                half.write_text("half")
                print("begun", flush=True)
                time.sleep(60)
            finally:
                half.unlink()
        command(main)"""
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "half")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.terminate()
    assert process.communicate(timeout=30) == ("", "error: terminated\n")
    assert process.returncode == 143 and not list(tmp_path.iterdir())


def test_a_reader_that_goes_away_is_no_error():
    program = "import sys\nfrom commands import command\ncommand(lambda argv: [print('line') for _ in range(10**6)] and None)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""


def test_argument_errors_are_input_errors():
    parser = Parser(prog="python -m data.x")
    parser.add_argument("--n", type=int)
    with pytest.raises(InputError, match="invalid int value: 'a' .see python -m data.x --help."):
        parser.parse_args(["--n", "a"])
