"""Pipeline, tensor and data parallelism: ranks and axes, schedules, and what a layout costs before there are GPUs."""
