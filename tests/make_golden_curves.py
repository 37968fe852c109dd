"""Write the golden loss curves anew, `python -m tests.make_golden_curves`: only when training is meant to change."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests.test_loop import CURVES, GOLDEN, golden_run

if __name__ == "__main__":
    torch.set_num_threads(1)
    curves = {}
    for name in CURVES:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            curves[name] = [round(loss, 5) for loss in golden_run(Path(folder) / "run", patch, name)]
    GOLDEN.write_text(json.dumps(curves) + "\n")
