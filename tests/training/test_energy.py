"""The wrapper of CodeCarbon: whose GPUs, whose electricity, and threads that end."""

import json
import threading
from importlib import resources

import pytest

from commands import InputError
from training.energy import CodeCarbon, Node, grid_intensity, this_node

TORCHRUN = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("device", "environment", "node"),
    [
        ("cpu", {}, Node(0, True, ())),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "0,1"}, Node(0, True, ())),
        ("cuda", {}, Node(0, True, ("0",))),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "5"}, Node(0, True, ("5",))),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4, 6,7", "LOCAL_WORLD_SIZE": "2"}, Node(0, True, ("4", "6"))),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a1,GPU-b2", "LOCAL_WORLD_SIZE": "2"}, Node(0, True, ("GPU-a1", "GPU-b2"))),
        ("cuda", {"LOCAL_RANK": "3", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Node(1, False, ("0", "1", "2", "3"))),
        ("cuda", {"LOCAL_RANK": "0", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Node(1, True, ("0", "1", "2", "3"))),
    ],
)
def test_one_process_measures_for_its_node_and_only_the_jobs_gpus(monkeypatch, device, environment, node):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert this_node(device) == node


def table(name):
    return json.loads((resources.files("codecarbon") / "data" / "private_infra" / name).read_text(encoding="utf-8"))


def test_the_grid_is_the_one_asked_for_and_never_a_silent_default():
    world = table("carbon_intensity_per_source.json")["world_average"]
    countries = table("global_energy_mix.json")
    assert grid_intensity(None) == world
    assert len(countries) > 150
    for country in ("FRA", "USA", "CAN", "IND"):
        assert grid_intensity(country) == pytest.approx(countries[country]["carbon_intensity"], rel=1e-12)
        assert grid_intensity(country) != world
    with pytest.raises(InputError, match="emissions.country_iso_code = 'XYZ'"):
        grid_intensity("XYZ")


@pytest.fixture
def running():
    source = CodeCarbon(None)
    yield source
    source.stop()


def test_readings_grow_and_say_how_they_are_made(running):
    first, second = running.read(), running.read()
    assert 0 <= first.total <= second.total
    assert second.total == pytest.approx(second.cpu + second.gpu + second.ram, rel=1e-6, abs=1e-15)
    assert "cpu: " in running.method and "ram: estimate" in running.method and "gpu" not in running.method
    description = running.describe()
    assert description["estimated"] is ("cpu: estimate" in running.method)
    assert (description["country"], description["gpu_ids"]) == ("world average", [])


def test_a_reading_that_codecarbon_swallows_is_an_error(running, monkeypatch):
    monkeypatch.setattr(running.tracker, "_do_measurements", lambda: 1 / 0)
    monkeypatch.setattr(running.tracker, "_last_measured_time", 0.0)
    with pytest.raises(RuntimeError, match="no reading"):
        running.read()


def test_stop_ends_the_threads_even_one_that_was_just_firing():
    source = CodeCarbon(None)
    assert source.timers()
    scheduler = source.timers()[0].function.__self__
    stop = source.tracker.stop

    def stop_and_rearm():
        stop()
        scheduler.start(from_run=True)  # what a timer does that fires at this moment

    source.tracker.stop = stop_and_rearm
    source.stop()
    assert source.timers() == [] and not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
