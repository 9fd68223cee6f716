import json

import numpy as np
import pytest

from commands import InputError
from eval.comparison import compare
from eval.run_folder import read_run
from eval.run_metrics import Terms


def compared(*paths, baseline=0, **options):
    return compare([read_run(path) for path in paths], read_run(paths[baseline]), **options)


def by_label(comparison):
    return {group.label: group for group in comparison.groups}


def test_groups_are_family_head_and_options_over_seeds(make_run):
    paths = [make_run(head, seed) for head in ("linear", "cosine") for seed in (1, 2, 3)]
    paths += [make_run("minkowski", seed, options={"p": p, "exponent": "auto"}, name=f"m{p}s{seed}") for p in (1.5, 3.0) for seed in (1, 2)]
    comparison = compared(*paths)
    assert [(group.label, list(group.runs)) for group in comparison.groups] == [
        ("linear", [1, 2, 3]), ("cosine", [1, 2, 3]), ("minkowski (p 1.5)", [1, 2]), ("minkowski (p 3)", [1, 2]),
    ]  # fmt: skip
    assert [group.is_baseline for group in comparison.groups] == [True, False, False, False]


def test_labels_are_as_short_as_they_can_be(make_run):
    harmonic = {"link": "harmonic", "exponent": "auto", "exponent_spread": 0.5, "hidden_scale": 1.0}
    paths = [make_run("linear", 1), make_run("cosine", 1, options=harmonic, name="h")]
    paths += [make_run("cosine", 1, options={"link": "gibbs", "tau": tau, "hidden_scale": 1.0}, name=f"g{tau}") for tau in (0.1, 0.5)]
    labels = [group.label for group in compared(*paths).groups]
    assert labels == ["linear", "cosine (link harmonic)", "cosine (link gibbs, tau 0.1)", "cosine (link gibbs, tau 0.5)"]


def test_values_are_the_files_and_differences_are_paired(make_run):
    paths = [make_run("linear", seed) for seed in (1, 2, 3)] + [make_run("cosine", seed, level=-0.25, energy=2) for seed in (1, 2, 3)]
    cosine = by_label(compared(*paths))["cosine"]
    last = [
        json.loads(text) for text in (paths[3] / "metrics.jsonl").read_text().splitlines() if '"eval"' in text and '"kind": "eval"' in text
    ][-1]
    assert cosine.values["val_nll"][1] == last["val_nll"]
    assert cosine.values["effective_rank"][1] == 5
    assert cosine.values["gco2eq_per_1000_steps"][1] == pytest.approx(1.0)  # 2 x 0.05 g per 100 steps
    assert cosine.values["kwh_eval"][1] == pytest.approx(2e-5)
    difference = cosine.difference("val_nll")
    assert difference.mean == pytest.approx(-0.25, abs=1e-9) and difference.n == 3  # the same noise by seed cancels in pairs
    assert difference.std == pytest.approx(0, abs=1e-9)
    assert cosine.difference("gco2eq_per_1000_steps").mean == pytest.approx(0.5)
    assert cosine.summary("val_nll").std > 1e-3
    assert cosine.values["prototype_growth"][1] == pytest.approx(1.2)
    assert cosine.values["kwh_to_target"][1] < cosine.values["kwh_train"][1]  # it reaches the baseline's loss on the way


def test_gradient_stability_of_the_baseline_is_zero_and_excludes_the_warm_up(make_run):
    paths = [make_run("linear", 1), make_run("cosine", 1, noise=0.05)]
    groups = by_label(compared(*paths))
    assert groups["linear"].values["gradient_stability"][1] == 0
    assert groups["cosine"].values["gradient_stability"][1] == pytest.approx(0.75)
    norms = np.array(list(read_run(paths[0]).norms.values()))
    assert groups["linear"].values["gradient_variance"][1] == pytest.approx(norms[10:].var(), rel=1e-9)  # warm-up: 200 / 20 steps
    included = by_label(compared(*paths, terms=Terms(include_warmup=True)))
    assert included["linear"].values["gradient_variance"][1] == pytest.approx(norms.var(), rel=1e-9)


def test_another_data_order_is_refused(make_run):
    with pytest.raises(InputError, match="no seed in common.*seed: 2 / 1.*--force"):
        compared(make_run("linear", 1), make_run("cosine", 2))


@pytest.mark.parametrize(
    "changes, key",
    [
        ({"checksum": "other"}, "data: other / abc"),
        ({"max_steps": 400}, "train.max_steps: 400 / 200"),
        ({"batch_size": 16}, "sequences per step: 16 / 8"),
    ],
)
def test_what_differs_is_named(make_run, changes, key):
    paths = [make_run("linear", 1), make_run("cosine", 1, **changes)]
    with pytest.raises(InputError) as error:
        compared(*paths)
    assert key in str(error.value) and "\n" not in str(error.value)
    forced = compared(*paths, force=True)
    assert any(key in note for note in forced.notes)


@pytest.mark.parametrize(
    "old, new, key",
    [("n_layer = 2", "n_layer = 3", "model.n_layer: 3 / 2"), ("warmup_steps = 10", "warmup_steps = 20", "schedule.warmup_steps: 20 / 10"),
     ("min_lr = 1e-05", "min_lr = 0.0005", "schedule.min_lr / optimizer.learning_rate: 0.5 / 0.01"),
     ("tokens = 4096", "tokens = 99", "eval.tokens"),
     ("grad_clip = 1.0", "grad_clip = 0.5", "train.grad_clip"), ("weight_decay = 0.01", "weight_decay = 0.0", "optimizer.weight_decay")],
)  # fmt: skip
def test_backbone_schedule_and_tokens_must_agree(make_run, old, new, key):
    paths = [make_run("linear", 1), make_run("cosine", 1)]
    text = (paths[1] / "config.toml").read_text()
    assert old in text
    (paths[1] / "config.toml").write_text(text.replace(old, new))
    with pytest.raises(InputError) as error:
        compared(*paths)
    assert key in str(error.value)


def test_a_head_may_have_its_own_learning_rate_but_no_gradient_stability(make_run):
    paths = [make_run("linear", 1), make_run("cosine", 1, learning_rate=3e-3, name="fast"), make_run("cosine", 1)]
    comparison = compared(*paths)
    groups = by_label(comparison)
    assert groups["cosine (lr 0.003)"].values["gradient_stability"][1] is None
    assert groups["cosine (lr 0.001)"].values["gradient_stability"][1] is not None
    assert any("its own learning rate, 0.003" in note for note in comparison.notes)
    assert groups["cosine (lr 0.003)"].values["val_nll"][1] is not None


def test_untied_prototypes_are_another_group_of_the_same_backbone(make_run):
    groups = by_label(compared(make_run("linear", 1), make_run("manhattan", 1), make_run("manhattan", 1, tied=False, name="untied")))
    assert set(groups) == {"linear", "manhattan", "manhattan (untied)"}


def test_each_family_has_its_own_baseline(make_run):
    paths = [make_run(head, 1, family=family) for family in ("gpt2", "qwen2", "bert") for head in ("linear", "cosine")]
    comparison = compared(*paths)
    for family, groups in comparison.families.items():
        assert [group.label for group in groups] == ["linear", "cosine"] and groups[1].baseline is groups[0] and groups[0].family == family
    assert any("pseudo-perplexities" in note for note in comparison.notes)


def test_the_same_head_and_seed_twice_is_ambiguous(make_run):
    with pytest.raises(InputError, match="same head with the same seed"):
        compared(make_run("linear", 1), make_run("linear", 1, name="again"))


def test_a_seed_without_baseline_is_in_no_difference(make_run):
    paths = [make_run("linear", 1), make_run("linear", 2), *(make_run("cosine", seed) for seed in (1, 2, 3))]
    comparison = compared(*paths)
    assert by_label(comparison)["cosine"].difference("val_nll").n == 2
    assert any("seed 3 has no baseline run" in note for note in comparison.notes)


def test_blanks_not_crashes(make_run):
    """A run without evaluations, one that ended early, one with NaN, one without emissions, one without a metrics file."""
    paths = {name: make_run(name, 1) for name in ("linear", "cosine", "euclidean", "manhattan", "canberra")}
    lines = [json.loads(text) for text in (paths["cosine"] / "metrics.jsonl").read_text().splitlines()]
    rewrite(paths["cosine"], [line for line in lines if line["kind"] != "eval"])
    nan = [line | {"val_nll": "nan", "val_perplexity": "nan"} if line["kind"] == "eval" and line["step"] > 0 else line for line in lines]
    rewrite(paths["euclidean"], [line | {"grad_norm": "nan"} if line.get("step") == 150 else line for line in nan])
    rewrite(paths["manhattan"], [line for line in lines if line["kind"] != "emissions" and line["step"] <= 120])
    (paths["canberra"] / "metrics.jsonl").unlink()
    (paths["canberra"] / "run.json").write_text("{broken")
    (paths["canberra"] / "config.toml").write_text(
        (paths["linear"] / "config.toml").read_text().replace('name = "linear"', 'name = "canberra"')
    )
    (paths["canberra"] / "run.json").write_text((paths["linear"] / "run.json").read_text())
    comparison = compared(*paths.values())
    groups = by_label(comparison)
    assert groups["cosine"].values["val_nll"][1] is None and groups["cosine"].values["gradient_stability"][1] == 0
    assert np.isnan(groups["euclidean"].values["val_nll"][1]) and groups["euclidean"].difference("val_nll").n == 0
    assert groups["euclidean"].values["best_val_nll"][1] == 5.5
    assert groups["manhattan"].values["val_nll"][1] is None and groups["manhattan"].values["best_val_nll"][1] < 3
    assert groups["manhattan"].values["gco2eq_per_1000_steps"][1] is None
    assert all(value is None for metric in groups["canberra"].values.values() for value in metric.values())
    assert any("ended at step 120 of 200" in note for note in comparison.notes)
    assert any("no evaluation" in note for note in comparison.notes)


def test_unequal_numbers_of_vectors_are_not_subtracted(make_run):
    paths = [make_run("linear", 1), make_run("cosine", 1)]
    rewrite(paths[1], [json.loads(text) | {"n_pca": 64} for text in (paths[1] / "metrics.jsonl").read_text().splitlines()])
    cosine = by_label(compared(*paths))["cosine"]
    assert cosine.difference("pca5").n == 0 and cosine.difference("val_nll").n == 1


def test_different_machines_are_said_so(make_run):
    paths = [make_run("linear", 1), make_run("cosine", 1)]
    about = json.loads((paths[1] / "run.json").read_text())
    (paths[1] / "run.json").write_text(json.dumps(about | {"hardware": {"cpu": "another", "gpus": []}}))
    assert any("different machines" in note for note in compared(*paths).notes)


def rewrite(path, lines):
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_final_figures_are_of_one_kind(make_run):
    """On all of val where every run has that, else what training evaluated: never one for the NLL and another for its bits per byte."""
    paths = [make_run("linear", 1), make_run("cosine", 1)]
    own = [read_run(path).final["val_nll"] for path in paths]
    for number, path in enumerate(paths):
        whole = read_run(path).final | {"val_nll": 1.5 + number, "bits_per_byte": 2.5}
        (path / "eval.json").write_text(json.dumps(whole))
        runs = [read_run(path) for path in paths]
        comparison = compare(runs, runs[0])
        nll, bits = ([group.values[key][1] for group in comparison.groups] for key in ("val_nll", "bits_per_byte"))
        if number == 0:
            assert nll == own and bits == [None, None] and "first eval.tokens of val" in comparison.notes[0]
        else:
            assert nll == [1.5, 2.5] and bits == [2.5, 2.5] and "eval.tokens" not in "".join(comparison.notes)
