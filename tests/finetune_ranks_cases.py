# SPDX-License-Identifier: Apache-2.0
"""`twinflow finetune` on several ranks, forked from a process that has imported TRL."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_ranks_cases import dying, finish, start

Job = tuple[int, dict[str, Any]]  # number of processes, and the arguments of `tune`


def serve(_rank: int, _world: int, waves: Sequence[Mapping[str, Job]], root: str) -> dict[str, Any]:
    """The results of all jobs by name: one for each rank. The jobs of a wave run at the same time."""
    import logging

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torchao.quantization  # noqa: F401
    import transformers

    import twinflow.cli.main
    import twinflow.integrations.finetune  # noqa: F401

    transformers.Qwen3ForCausalLM  # noqa: B018
    found: dict[str, Any] = {}
    for wave in waves:
        started = {name: start(world, tune, {**given, "root": root}) for name, (world, given) in wave.items()}
        found |= {name: finish(*one) for name, one in started.items()}
    return found


def tune(root: str, arguments: Sequence[str], dies_at: int | None = None, signal_at: int | None = None) -> Any:
    """Runs the command. Returns its exit code. What it prints is in `stderr` of the result."""
    from twinflow.cli.main import main
    from twinflow.integrations import finetune

    torch.backends.mkldnn.enabled = False  # for tiny tensors it prepares longer than it computes
    if dies_at is not None or signal_at is not None:
        make = finetune.make_trainer

        def make_trainer(*args: Any, **kwargs: Any) -> Any:
            trainer = make(*args, **kwargs)
            trainer.add_callback(dying(dies_at) if dies_at is not None else signalled(signal_at))
            return trainer

        finetune.make_trainer = make_trainer  # type: ignore[assignment]
    rank = os.environ.get("RANK", "0")
    sys.argv = ["twinflow", "finetune", *(one.format(rank=rank) for one in arguments), "--threads", "1"]
    try:
        main()
    except SystemExit as error:
        return {"code": error.code}
    return {"code": 0}


def signalled(step: int | None) -> Any:
    """The last rank alone gets a SIGTERM."""
    import transformers

    class Signalled(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step and args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    return Signalled()


def losses(out: Path) -> list[tuple[str, int, float]]:
    """Kind, step and loss of each record."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"], line["loss"]) for line in lines]
