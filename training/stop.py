"""SIGINT and SIGTERM: the first asks the run to stop after its step, with a checkpoint; the second stops it at once."""

import contextlib
import signal
from collections.abc import Iterator

from training.distributed import World


class StopRequest:
    """Whether a signal asked this run to stop, and which (0: none)."""

    number = 0

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    def receive(self, number: int, frame: object) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def on_any_process(self, world: World) -> bool:
        """Asked once per step by all processes together, so that they stop after the same step."""
        number = world.largest(self.number)
        if number:  # never back to 0: a signal may have come in the meantime
            self.number = number
        return number > 0


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Inside, SIGINT and SIGTERM go to the StopRequest; outside, the handlers are what they were."""
    stop = StopRequest()
    before = {number: signal.signal(number, stop.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
