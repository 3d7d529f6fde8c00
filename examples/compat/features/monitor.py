# SPDX-License-Identifier: Apache-2.0
"""csv_monitor and flops_profiler write to files, and the script writes a figure of its own."""

from pathlib import Path

import deepspeed
from small import BASE, build_model, get_args, report, shared_folder, train


def main():
    args = get_args()
    deepspeed.init_distributed()
    folder = Path(shared_folder(args.folder))
    config = {
        **BASE,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 2,
        "csv_monitor": {"enabled": True, "output_path": str(folder / "logs"), "job_name": "job"},
        "flops_profiler": {"enabled": True, "profile_step": 3, "output_file": str(folder / "profile.txt")},
        "wall_clock_breakdown": True,
    }
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses = train(engine, args.steps)
    written = []
    if engine.global_rank == 0:
        engine.monitor.write_events([("Own/figure", 2.5, 7)])
        names = {path.stem for path in (folder / "logs").rglob("*.csv")}
        written = sorted(name for name in names if name.endswith(("lr", "Own_figure")))
        assert (folder / "profile.txt").stat().st_size > 0
    report(losses, written=written)


if __name__ == "__main__":
    main()
