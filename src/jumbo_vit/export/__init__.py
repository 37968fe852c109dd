"""Models as files of other runtimes: written, run again from the file alone, and compared with the PyTorch model."""
