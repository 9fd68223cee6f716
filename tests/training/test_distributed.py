import pytest
import torch

from commands import InputError
from training.distributed import World, choose_device, connect

RANKS = """
import sys, torch
from commands import InputError, leave
from training.distributed import connect
with connect("cpu") as world:
    total = world.all_reduce(torch.tensor([world.rank + 1.0]))
    largest = world.largest(7 * world.rank)
    told = world.on_main(lambda: {"rank": world.rank})
    open(f"{sys.argv[1]}.{world.rank}", "w").write(f"{world.size} {total.item()} {largest} {told}")
    def refuse():
        raise InputError("refused once")
    if sys.argv[2] == "refuse":
        world.on_main(refuse)
leave(0)
"""


def test_alone_nothing_is_sent():
    with connect("cpu") as world:
        assert world == World(0, 0, 1, torch.device("cpu")) and world.is_main
        tensor = torch.tensor(3.0)
        assert world.all_reduce(tensor) is tensor and tensor == 3
        assert world.largest(4) == 4 and world.on_main(lambda: "told") == "told"


@pytest.mark.parametrize("ending", ["finish", "refuse"])
def test_two_processes_sum_compare_and_tell(execute, tmp_path, ending):
    (tmp_path / "ranks.py").write_text(RANKS)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "ranks.py", tmp_path / "said", ending)
    done = execute(*words, PYTHONPATH=".")
    assert (done.returncode != 0) == (ending == "refuse"), done.stderr
    assert {(tmp_path / f"said.{rank}").read_text() for rank in (0, 1)} == {"2 3.0 7 {'rank': 0}"}
    assert done.stderr.count("InputError: refused once") <= 1, "the main process alone says it"


def test_auto_takes_what_there_is():
    kind = choose_device("auto").type
    assert kind == ("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused_with_what_is():
    with pytest.raises(InputError, match=r'train.device = "cuda".*it has: .*cpu'):
        choose_device("cuda")


def test_more_processes_than_gpus_are_refused_with_both_counts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(InputError, match="4 processes.*2 GPU"):
        choose_device("cuda", local_rank=3)
