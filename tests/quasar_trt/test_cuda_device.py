"""The calls to CUDA that the engine of plans makes, on a stand-in for torch's."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from quasar_trt.engines.cuda_device import CudaDevice


@pytest.fixture
def calls(monkeypatch) -> list:
    """What is asked of torch.cuda, on a machine with two GPUs."""
    made: list = []
    current = [0]

    class Graph:
        def capture_begin(self, capture_error_mode):
            made.append(("begin", capture_error_mode))

        def capture_end(self):
            made.append("end")

        def replay(self):
            made.append("replay")

    @contextmanager
    def stream(given):
        made.append(f"enter {given.cuda_stream}")
        yield
        made.append("leave")

    properties = SimpleNamespace(name="a GPU", uuid="u", major=9, minor=0, L2_cache_size=50)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda index: current.__setitem__(0, index),
        "current_device": lambda: current[0],
        "get_device_properties": lambda device: properties,
        "Stream": lambda device: SimpleNamespace(cuda_stream=11, synchronize=lambda: made.append("wait")),
        "stream": stream,
        "CUDAGraph": Graph,
        "mem_get_info": lambda device: (3, 4),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_a_device_is_described(calls):
    device = CudaDevice()
    assert (device.name, device.identity, device.sm, device.cache, device.stream) == ("a GPU", "u", 90, 50, 11)
    assert device.torch_device == torch.device("cuda", 0) and device.free_memory() == 3


def test_devices_are_taken_in_turn(calls):
    assert [CudaDevice(index).torch_device.index for index in (1, 2, 3)] == [1, 0, 1]


def test_work_goes_to_the_devices_own_stream(calls):
    device, target = CudaDevice(), torch.zeros(2)
    device.copy(target, torch.ones(2))
    assert target.tolist() == [1, 1]
    device.zero(target)
    device.wait()
    assert target.tolist() == [0, 0]
    with device.use():
        calls.append("by hand")
    assert calls == [*["enter 11", "leave"] * 2, "wait", "enter 11", "by hand", "leave"]


def test_a_capture_is_ended_whatever_happens(calls):
    device = CudaDevice()
    replay = device.capture(lambda: calls.append("work"))
    assert calls == ["enter 11", ("begin", "thread_local"), "work", "end", "leave"]
    calls.clear()
    replay()
    assert calls == ["enter 11", "replay", "leave"]
    calls.clear()
    with pytest.raises(RuntimeError, match="refused"):
        device.capture(lambda: (_ for _ in ()).throw(RuntimeError("refused")))
    assert calls[1:] == [("begin", "thread_local"), "end"]
