from data import progress as room
from data.progress import Progress


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    with Progress("encoding x", total=8_000_000) as progress:
        for _ in range(8):
            now[0] += 6
            progress.add(1_000_000)
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"encoding x: {done}.0 of 8.0 MB" for done in (2, 4, 6, 8)]
    assert err == ""


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(room.sys.stdout, "isatty", lambda: True, raising=False)
    with Progress("encoding x", total=2_000_000) as progress:
        progress.add(2_000_000)
    out, err = capsys.readouterr()
    assert out == "" and "100%" in err and "encoding x" in err
