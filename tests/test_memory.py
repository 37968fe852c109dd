"""What keeping freed memory does: the system is asked for pages once, and no longer in every step."""

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from jumbo_vit.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    blocks = [torch.ones(10_000_000) for _ in range(3)]  # above 32 MiB glibc always gives back at once
    return sum(float(block[0]) for block in blocks)
for _ in range(3): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    assert step() == 3
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_pages_are_asked_for_once() -> None:
    given, kept = (
        int(subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("give", "keep")
    )
    assert kept < given / 10


def test_elsewhere_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from jumbo_vit.memory import keep_freed_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
