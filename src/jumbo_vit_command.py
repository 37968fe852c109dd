"""The `jumbo-vit` command.

This module lies beside the package, not in it, on purpose. Importing anything of `jumbo_vit` runs its `__init__`, which
registers the models in timm and so imports torch: seconds, before a word of help could be printed. `jumbo_vit` leaves
the registration out when it finds this module loaded; each command then imports what it needs when its work starts.
"""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` excludes the program's name; the result is the exit code."""
    from jumbo_vit.cli.parser import main as run

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
