import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from commands import InputError, RunFailed
from training.checkpoint import Checkpoints, load_model, unshared_state, write_text


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3))
        self.head = nn.Module()
        self.head.weight = self.backbone[0].weight
        self.head.register_buffer("exponent", torch.tensor(2.5))


def state(step, best=None):
    return {"step": step, "best_step": best, "best_val_nll": None, "sequences_per_step": 4}


def save(checkpoints, model, step, best=None):
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints.save(model, {"optimizer": optimizer.state_dict()}, state(step, best))


def test_what_is_saved_is_what_is_opened(tmp_path):
    model, checkpoints = Tied(), Checkpoints(tmp_path)
    save(checkpoints, model, 5)
    folder, stored = checkpoints.open(5)
    other = Tied()
    load_model(other, folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert other.head.weight is other.backbone[0].weight
    assert stored["step"] == 5
    assert torch.load(folder / "optimizer.pt", weights_only=True)["optimizer"]["param_groups"]
    assert "head.weight" not in load_file(folder / "model.safetensors"), "a tied tensor is stored once"


def test_the_newest_are_kept_and_the_best_beside_them(tmp_path):
    model, checkpoints = Tied(), Checkpoints(tmp_path, keep_last=2)
    for step in range(1, 7):
        save(checkpoints, model, step, best=min(step, 2))
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best() == 2


def test_a_damaged_newer_one_never_costs_the_one_just_written(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, Tied(), 100, best=100)
    save(checkpoints, Tied(), 200, best=100)
    (tmp_path / "checkpoints" / "step_00000200" / "optimizer.pt").write_bytes(b"damaged")
    save(checkpoints, Tied(), 150, best=100)
    assert checkpoints.steps() == [100, 150]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, capsys, name, damage):
    model, checkpoints = Tied(), Checkpoints(tmp_path)
    save(checkpoints, model, 1)
    save(checkpoints, model, 2)
    victim = tmp_path / "checkpoints" / "step_00000002" / name
    content = bytearray(victim.read_bytes())
    if damage == "gone":
        victim.unlink()
    else:
        content[len(content) // 2] ^= 255
        victim.write_bytes(content[:-9] if damage == "cut" else content)
    folder, stored = checkpoints.newest_valid()
    assert stored["step"] == 1 and "step_00000002" in capsys.readouterr().err
    with pytest.raises(InputError, match="step_00000002 is damaged"):
        checkpoints.open(2)


def test_no_whole_checkpoint_is_an_error_and_no_checkpoint_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_valid() is None and checkpoints.best() is None
    save(checkpoints, Tied(), 1)
    (tmp_path / "checkpoints" / "step_00000001" / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="none of the 1 checkpoints is whole"):
        checkpoints.newest_valid()
    with pytest.raises(InputError, match="no checkpoint of step 9; there are: 1"):
        checkpoints.open(9)


def test_an_unfinished_folder_counts_for_nothing_and_is_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    leftover = tmp_path / "checkpoints" / ".step_00000003.writing"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert checkpoints.newest_valid() is None
    save(checkpoints, Tied(), 4)
    assert not leftover.exists()


FILL = """
import resource, sys, torch
from torch import nn
from commands import command
from training.checkpoint import Checkpoints
def main(argv):
    model = nn.Sequential(nn.Linear(300, 300))
    checkpoints = Checkpoints(argv[0])
    state = {"best_step": None, "best_val_nll": None}
    checkpoints.save(model, {"optimizer": {}}, {"step": 1, **state})
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(argv[1]), int(argv[1])))
    checkpoints.save(model, {"optimizer": {"moments": torch.zeros(90_000)}}, {"step": 2, **state})
command(main)
"""


@pytest.mark.parametrize("limit", [100_000, 361_000])  # bytes: the weights (360,000) do not fit; they fit and the optimizer does not
def test_a_full_disk_ends_in_one_line_and_leaves_the_last_good_checkpoint(tmp_path, limit):
    process = subprocess.run([sys.executable, "-c", FILL, str(tmp_path), str(limit)], capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1
    assert "cannot write the checkpoint of step 2" in process.stderr and "step_00000001" in process.stderr
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest_valid()[1]["step"] == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_come_off_in_any_order(tmp_path, prefix):
    model = Tied()
    save_file({prefix + name: tensor for name, tensor in unshared_state(model).items()}, tmp_path / "m.safetensors")
    other = Tied()
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other.head.weight, model.head.weight)


def test_a_name_with_module_inside_is_left_alone(tmp_path):
    model = nn.ModuleDict({"my": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    load_model(nn.ModuleDict({"my": nn.ModuleDict({"module": nn.Linear(2, 2)})}), tmp_path / "m.safetensors")


def test_loading_is_strict_and_names_the_tensor(tmp_path):
    path = tmp_path / "m.safetensors"
    whole = unshared_state(Tied())
    for change, complaint in (
        (lambda s: s.pop("backbone.1.bias"), "lacks: backbone.1.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "holds unknown: extra"),
        (lambda s: s.update({"backbone.1.bias": torch.zeros(4)}), "has another shape of: backbone.1.bias"),
        (lambda s: s["backbone.1.bias"].fill_(torch.nan), "holds numbers that are not finite in: backbone.1.bias"),
    ):
        tensors = {name: tensor.clone() for name, tensor in whole.items()}
        change(tensors)
        save_file(tensors, path)
        with pytest.raises(InputError, match=complaint):
            load_model(Tied(), path)


def test_the_state_file_is_plain_json(tmp_path):
    save(Checkpoints(tmp_path), Tied(), 3)
    stored = json.loads(Path(tmp_path / "checkpoints/step_00000003/state.json").read_text(encoding="utf-8"))
    assert set(stored) == {*state(3), "sha256"}


def test_saving_twice_the_same_step_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, Tied(), 3)
    model = Tied()
    save(checkpoints, model, 3)
    loaded = Tied()
    load_model(loaded, checkpoints.open(3)[0] / "model.safetensors")
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_an_unwritable_place_is_a_failed_run(tmp_path):
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    with pytest.raises(RunFailed, match="cannot write the checkpoint of step 1 .* there is none yet"):
        save(Checkpoints(tmp_path), Tied(), 1)


@pytest.mark.parametrize("text", ["[]", "5", "null", "{}", '{"sha256": {}, "step": 2, "best_step": null}', "garbage"])
def test_a_damaged_state_is_passed_over(tmp_path, text):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, Tied(), 1)
    save(checkpoints, Tied(), 2)
    (tmp_path / "checkpoints" / "step_00000002" / "state.json").write_text(text)
    assert checkpoints.newest_valid()[1]["step"] == 1


def test_a_state_of_another_step_is_damaged(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, Tied(), 2)
    path = tmp_path / "checkpoints" / "step_00000002" / "state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 1'))
    with pytest.raises(InputError, match="not that of step 2"):
        checkpoints.open(2)


def test_a_best_file_that_names_no_step_is_an_input_error(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").write_text("garbage")
    with pytest.raises(InputError, match="names no step"):
        Checkpoints(tmp_path).best()


def test_a_small_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(RunFailed, match="cannot write .*taken"):
        write_text(tmp_path / "taken", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
