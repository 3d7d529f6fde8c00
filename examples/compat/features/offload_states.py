# SPDX-License-Identifier: Apache-2.0
"""offload_states and reload_states: the engine's state leaves the device between two phases of a program."""

import deepspeed
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from small import BASE, build_model, get_args, report, train

CONFIG = {**BASE, "zero_optimization": {"stage": 3}}


def main():
    args = get_args()
    model = build_model()
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]
    losses = train(engine, 2)
    engine.offload_states()
    engine.reload_states()
    losses += train(engine, 2, start=2)
    engine.offload_states(
        include=[OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params],
        device=OffloadDeviceEnum.cpu,
        pin_memory=False,
        non_blocking=False,
    )
    engine.reload_states(non_blocking=False)
    engine.empty_partition_cache()
    losses += train(engine, args.steps - 4, start=4)
    report(losses)


if __name__ == "__main__":
    main()
