import os
import signal

import pytest
import torch

from training.distributed import World
from training.stop import stop_on_signal

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_second_an_interruption(number):
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        assert not stop.on_any_process(ALONE)
        os.kill(os.getpid(), number)
        assert stop.on_any_process(ALONE) and stop.name == signal.Signals(number).name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            signal.pause()
    assert signal.getsignal(number) is before


def test_a_signal_that_comes_while_the_processes_agree_is_not_forgotten():
    with stop_on_signal() as stop:

        class Interrupting(World):
            def largest(self, number):
                os.kill(os.getpid(), signal.SIGTERM)
                return number

        assert not stop.on_any_process(Interrupting(0, 0, 1, torch.device("cpu")))
        assert stop.on_any_process(ALONE)
