"""The command line: one module a command, each a dataclass `Config` and a `run`; `parser` makes options of them."""
