"""The version, in a file that needs no import of anything else."""

__version__ = "0.1.0"
