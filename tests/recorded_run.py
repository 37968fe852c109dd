"""A run that writes what each process saw: `python -m tests.recorded_run OUT [pretrain] OPTIONS...`.

It is used by test_parallel and test_pretrain. `OUT/rankN.json` holds the loss of each update, a digest of the final
weights, and the parameters that never had a gradient.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jumbo_vit  # noqa: F401  (registers the models)
from jumbo_vit.cli.parser import Command
from jumbo_vit.tasks import loop
from jumbo_vit.tasks.defaults import with_defaults
from jumbo_vit.tasks.pretrain import PretrainRun
from jumbo_vit.tasks.pretrain_config import with_pretrain_defaults
from jumbo_vit.tasks.run import Run
from jumbo_vit.tasks.sharding import whole


def main(out: Path, words: list[str]) -> None:
    losses: list[float] = []
    learned: dict[str, bool] = {}
    step, count = loop.Loop._step, loop.Loop._count

    def recording_step(self: Any, finite: bool) -> bool:
        for name, parameter in self.parts.model.named_parameters():
            there = parameter.grad is not None and bool(whole(parameter.grad).abs().sum() > 0)
            learned[name] = learned.get(name, False) or there
        return step(self, finite)

    def recording_count(self: Any, loss: float, size: int) -> None:
        losses.append(loss)
        count(self, loss, size)

    loop.Loop._step, loop.Loop._count = recording_step, recording_count  # type: ignore[method-assign]
    if words[0] == "pretrain":
        run: Run = PretrainRun(with_pretrain_defaults(Command("pretrain").parse(words[1:])))
    else:
        run = Run(with_defaults(Command("train").parse(words)))
    run.train()
    weights = whole(run.model.state_dict())
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
    seen = {"losses": losses, "digest": digest, "idle": [name for name, there in learned.items() if not there]}
    (out / f"rank{run.fabric.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
