import json

from benchmarks.heads import main


def test_a_small_run(tmp_path, capsys):
    path = tmp_path / "heads.json"
    main(["--heads", "linear,minkowski:p=3", "--tokens", "8", "--vocab-size", "4096", "--n-embd", "16", "--rounds", "2", "--threads", "1",
          "--dtype", "bfloat16", "--json", str(path)])
    linear, minkowski = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row, name in ((linear, "linear"), (minkowski, "minkowski:p=3")):
        assert row["head"] == name and row["head_ms"]["median"] > 0 and row["head_ms"]["n"] == row["own_float32_ms"]["n"] == 2
        assert row["ratio"]["own_float32"] > 0 and row["ratio"]["linear_cross_entropy_eager"] > 0
        assert row["ratio"]["bare_products"] > 0.5  # no exact method is faster than its products
        assert 0 <= row["peak_memory_mb"] < 100
    assert "torch_cdist" in minkowski["ratio"] and "torch_cdist" not in linear["ratio"]
    assert "minkowski:p=3" in capsys.readouterr().out


def test_in_float32_there_is_nothing_to_compare_float32_with(tmp_path):
    path = tmp_path / "heads.json"
    main(["--heads", "linear", "--tokens", "8", "--vocab-size", "64", "--n-embd", "16", "--rounds", "2", "--threads", "1", "--no-memory",
          "--json", str(path)])
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert "own_float32" not in row["ratio"] and "peak_memory_mb" not in row
