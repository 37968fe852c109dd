"""Timing that can be trusted: side by side in one process, alternating, after a warm-up, with the device waited for."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over all rounds.

    Args:
        median: The middle one.
        p95: The one that 95 % do not exceed.
        spread: Upper minus lower quartile, as a share of the median.
        seconds: All of them, in the order in which they were measured.
    """

    median: float
    p95: float
    spread: float
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        """Summarise at least two values."""
        median = statistics.median(seconds)
        cuts = statistics.quantiles(seconds, n=20, method="inclusive")
        return cls(median, cuts[18], (cuts[14] - cuts[4]) / median, tuple(seconds))


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done what it was given; nothing on a CPU, which returns when it is done."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def alternate(
    steps: Mapping[str, Step], repeats: int, device: torch.device | None = None, warm_up: int = 2
) -> dict[str, Timing]:
    """Time each step `repeats` times, one after the other in rounds, each round beginning with another one.

    Whatever disturbs the machine for a while disturbs all alike. The device is waited for before and after each step;
    moving pictures to it is no part of a step unless the step does it.
    """
    wait = synchronizer(device or torch.device("cpu"))
    for _ in range(warm_up):
        for step in steps.values():
            step()
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeats):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            wait()
            start = time.perf_counter()
            steps[name]()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing.of(values) for name, values in seconds.items()}
