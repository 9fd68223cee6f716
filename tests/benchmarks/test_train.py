import json


def test_every_head_is_measured_against_the_plain_loop(config_file, execute, tmp_path):
    done = execute(
        "-m", "benchmarks.train", config_file, "--heads=linear,cosine", "--tokens=128", "--vocab-size=300", "--updates=2",
        f"--json={tmp_path / 'rows.json'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["head"] for row in rows] == ["plain", "linear", "cosine"]
    assert rows[0]["x_plain"] == 1
    assert all(row["median_ms"] > 0 and row["peak_mb"] > 50 and row["n"] == 2 for row in rows)
    assert all(row["head"] in done.stdout for row in rows)
