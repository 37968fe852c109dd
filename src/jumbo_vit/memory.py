"""Keep freed memory instead of giving it back to the system after every step.

glibc returns large freed blocks to the system at once, and each step of a model asks for the same blocks again: the
system then hands out and clears fresh pages, thousands a step, which costs a CPU a noticeable part of the step. A
process that runs one model over and over has no use for that.
"""

import ctypes
import ctypes.util
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names and numbers of mallopt(3)
_NEVER = 2**31 - 1
_TOP_PAD_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Tell this process's allocator to keep what is freed, for good; the numbers that are computed stay the same.

    The process then holds as much memory as it ever needed. Source: mallopt(3) of the GNU C library.

    Returns:
        Whether there is such an allocator: False on other systems, where nothing is changed.
    """
    if sys.platform != "linux":
        return False
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    if mallopt is None:  # musl has none
        return False
    settings = ((_MMAP_THRESHOLD, 2**30), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _TOP_PAD_BYTES))
    return all(mallopt(option, value) == 1 for option, value in settings)
