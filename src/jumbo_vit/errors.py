"""Mistakes a user can make, as exceptions that carry one clear line."""

import difflib
from collections.abc import Iterable

_LONGEST = 1000  # characters of a message


class UserError(ValueError):
    """A user's mistake: the message is one line that says what came, what is allowed, what to change.

    The command line prints it without a traceback and ends with exit code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(_without_traceback(message)))


def _one_line(message: str) -> str:
    """The message without line ends, and of a bearable length whatever names a damaged file gave it."""
    line = " ".join(part.strip() for part in message.splitlines() if part.strip())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 300]} ... {line[-295:]}"


def _without_traceback(message: str) -> str:
    """PyTorch hands a loader process's exception on by making it anew from the text of its traceback."""
    if not message.startswith("Caught ") or "Traceback (most recent call last)" not in message:
        return message
    return message.strip().rpartition("\n")[2].partition(": ")[2]


class UnreadableImage(UserError):
    """A file that cannot be used as a picture; `path` names it and `reason` says why, without the path."""

    def __init__(self, path: object, reason: str | None = None) -> None:
        # Without a reason, `path` is the whole message (see _without_traceback).
        super().__init__(str(path) if reason is None else f"cannot read the picture {path}: {reason}")
        self.path = str(path)
        self.reason = str(self) if reason is None else reason

    def __reduce__(self) -> tuple[type["UnreadableImage"], tuple[str, str]]:
        # Worker processes send exceptions by pickle, which would call __init__ with the message alone.
        return type(self), (self.path, self.reason)


def nearest(name: str, known: Iterable[str]) -> str:
    """`" (did you mean X?)"` for the closest of `known`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""
