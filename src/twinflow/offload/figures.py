"""What a runtime can tell of its work."""

from __future__ import annotations

from twinflow.offload.runtime import Runtime


def figures(runtime: Runtime) -> dict[str, float]:
    """Of the last step: clipping and what the gate did; of all so far: seconds and bytes."""
    job, mover, parking = runtime.last, runtime.mover, runtime.parking
    counts = job.gate.counts if job is not None else {}
    decision = job.gate.decision if job is not None else None
    return {
        "clip_factor": decision.factor * job.gate.scale if decision is not None and job is not None else 1.0,
        **{f"gate_{name}": count for name, count in counts.items()},
        "host_busy_s": runtime.worker.busy_s,
        "waited_s": runtime.waited_s,
        "bytes_out": mover.bytes_out,
        "bytes_back": mover.bytes_back + (parking.fetcher.fetched_bytes if parking is not None else 0),
        "shadow_bytes": runtime.board.shadows.num_bytes,
    }
