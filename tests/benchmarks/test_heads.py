import json

from benchmarks.heads import main


def test_a_small_run(tmp_path, capsys):
    path = tmp_path / "heads.json"
    main(["--heads", "linear,cosine,minkowski:p=3", "--tokens", "8", "--vocab-size", "4096", "--n-embd", "16", "--rounds", "2",
          "--threads", "1", "--json", str(path)])
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [row["head"] for row in report["rows"]] == ["linear", "cosine", "minkowski:p=3"]
    for row in report["rows"]:
        assert row["head_ms"]["median"] > 0 and row["head_ms"]["n"] == 2
        assert row["ratio"]["bare_products"] > 0.5  # no exact method is faster than its products
        assert 0 <= row["peak_memory_mb"] < 100
    assert "torch_cdist" in report["rows"][2]["ratio"] and "torch_cdist" not in report["rows"][0]["ratio"]
    assert "cosine" in capsys.readouterr().out


def test_autocast_is_measured_against_the_same_head_in_float32(capsys, tmp_path):
    path = tmp_path / "heads.json"
    main(["--heads", "linear", "--tokens", "8", "--vocab-size", "512", "--n-embd", "16", "--rounds", "2", "--threads", "1", "--no-memory",
          "--dtype", "bfloat16", "--json", str(path)])
    row = json.loads(path.read_text(encoding="utf-8"))["rows"][0]
    assert row["own_float32_ms"]["n"] == 2 and row["ratio"]["own_float32"] > 0
    assert "x own fp32" in capsys.readouterr().out
