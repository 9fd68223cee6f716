"""The energy a machine has used, as CodeCarbon sees it; nothing of CodeCarbon is imported before `CodeCarbon` is made.

Three of its habits are put right here: the country is never looked up (without a network it would silently become Canada),
its console stays quiet, and its sampling threads end when they are told to.
"""

import difflib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from commands import InputError

WORLD = "world average"
SAMPLING_SECONDS = 15  # between CodeCarbon's own energy readings (it samples power every second in between)


class Energy(NamedTuple):
    """kWh by component since the tracker began."""

    total: float
    cpu: float
    gpu: float
    ram: float


@dataclass(frozen=True)
class Node:
    """One machine of a run, seen from one of its processes."""

    index: int = 0
    leads: bool = True  # the one process that measures for the whole machine
    gpu_ids: tuple[str, ...] = ()


def this_node(device: str) -> Node:
    """The node this process is on, from torchrun's environment (without torchrun: the only one).

    device: type of the device trained on. On "cuda" the GPUs of all this node's processes are counted, and no neighbour's:
    the first LOCAL_WORLD_SIZE of CUDA_VISIBLE_DEVICES.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("ROCR_VISIBLE_DEVICES")
    gpus = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(processes)]
    return Node(
        index=int(os.environ.get("GROUP_RANK", 0)),
        leads=int(os.environ.get("LOCAL_RANK", 0)) == 0,
        gpu_ids=tuple(gpus[:processes]) if device == "cuda" else (),
    )


class CodeCarbon:
    """A running CodeCarbon tracker of this whole machine (its other users included), offline."""

    def __init__(self, country: str | None, gpu_ids: tuple[str, ...] = ()):
        """country: three letters; None: the world average. Raises InputError for a country CodeCarbon has no data of."""
        import codecarbon
        from codecarbon.output_methods.base_output import BaseOutput

        self.g_per_kwh = grid_intensity(country)
        self.country = country or WORLD
        self.gpu_ids = gpu_ids
        self.version = codecarbon.__version__
        self.received = received = []

        class Receiver(BaseOutput):
            def out(self, total, delta):
                received.append(total)

        # importing has just set the logger to INFO; `log_level` comes too late for what the constructor has to say
        logging.getLogger("codecarbon").setLevel(logging.CRITICAL)
        self.tracker = codecarbon.OfflineEmissionsTracker(
            country_iso_code=country,
            force_carbon_intensity_g_co2e_kwh=self.g_per_kwh,
            electricitymaps_api_token=None,
            gpu_ids=list(gpu_ids),
            measure_power_secs=SAMPLING_SECONDS,
            output_methods=[],
            output_handlers=[Receiver()],
            api_call_interval=-1,
            tracking_mode="machine",
            allow_multiple_runs=True,
            log_level="critical",
        )
        self.tracker.start()

    def read(self) -> Energy:
        """Raises RuntimeError where CodeCarbon, which swallows its own errors, gives no reading."""
        self.received.clear()
        self.tracker.flush()
        if not self.received:
            raise RuntimeError("CodeCarbon gave no reading")
        total = self.received[-1]
        return Energy(total.energy_consumed, total.cpu_energy, total.gpu_energy, total.ram_energy)

    def stop(self) -> None:
        """Ends the tracker, and waits for its threads (one that was just firing re-arms itself behind CodeCarbon's back)."""
        self.tracker.stop()
        deadline = time.monotonic() + 5
        while (timers := self.timers()) and time.monotonic() < deadline:
            for timer in timers:
                timer.function.__self__.stop()
                timer.cancel()
                timer.join(timeout=0.1)

    def timers(self) -> list[threading.Timer]:
        """The live threads that call this tracker."""
        schedulers = [(thread, getattr(getattr(thread, "function", None), "__self__", None)) for thread in threading.enumerate()]
        return [thread for thread, scheduler in schedulers if getattr(getattr(scheduler, "function", None), "__self__", None) is self.tracker]

    @property
    def method(self) -> str:
        """How each component is known, such as "cpu: estimate (cpu load), gpu: measured, ram: estimate"."""
        parts = []
        for item in getattr(self.tracker, "_hardware", []):
            kind = type(item).__name__.lower()
            if kind == "cpu":
                mode = getattr(item, "_mode", "unknown").replace("_", " ")
                parts.append(f"cpu: estimate ({mode})" if mode in ("cpu load", "constant") else f"cpu: measured ({mode})")
            elif kind == "ram":
                parts.append("ram: estimate")
            elif kind == "gpu":
                parts += ["gpu: measured"] if self.gpu_ids else []
            else:
                parts.append(f"{kind} {getattr(item, 'chip_part', '')}: measured")
        return ", ".join(sorted(parts))

    def describe(self) -> dict:
        """For run.json: who measures what, how, and on whose electricity."""
        hardware = self.tracker.get_detected_hardware()
        return {
            "tracker": f"CodeCarbon {self.version}, offline, whole machine",
            "country": self.country,
            "g_per_kwh": self.g_per_kwh,
            "method": self.method,
            "estimated": "estimate" in self.method.replace("ram: estimate", ""),
            "gpu_ids": list(self.gpu_ids),
            "hardware": {key: hardware.get(key) for key in ("cpu_model", "cpu_count", "gpu_model", "ram_total_size")},
        }


def check_country(settings: Any) -> None:
    """Raises InputError if the [emissions] section names a country that CodeCarbon has no data of."""
    if settings.enabled and settings.country_iso_code is not None:
        grid_intensity(settings.country_iso_code)


def grid_intensity(country: str | None) -> float:
    """gCO2eq per kWh of a country's electricity (None: of the world's), by CodeCarbon's tables.

    Raises: InputError if it has no entry for the country.
    """
    from codecarbon.core.emissions import Emissions
    from codecarbon.core.units import Energy as CodeCarbonEnergy
    from codecarbon.external.geography import GeoMetadata
    from codecarbon.input import DataSource

    source = DataSource()
    if country is None:
        return float(source.get_carbon_intensity_per_source_data()["world_average"])
    countries = source.get_global_energy_mix_data()
    if country not in countries:
        near = difflib.get_close_matches(country, countries, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out for the world average"
        raise InputError(f"emissions.country_iso_code = {country!r}: CodeCarbon has no data for it; {hint}")
    place = GeoMetadata(country_iso_code=country, country_name=countries[country]["country_name"])
    return 1000 * Emissions(source).get_country_emissions(CodeCarbonEnergy.from_energy(kWh=1.0), place)
