# SPDX-License-Identifier: Apache-2.0
"""What a layout costs: the arithmetic of the published trillion, memory and traffic by hand, and published rankings."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from twinflow.parallel.costs import (
    Estimate,
    amplified,
    estimate,
    lacking_bytes,
    largest_numel,
    layer_time,
    link_of,
    ring_count,
    rough_seconds,
    seconds_of,
    stage_times,
    tied_bytes,
    tied_seconds,
    volume_of,
)
from twinflow.parallel.layout import Layout, check_layout, layers_of, rank_layers, stage_layers
from twinflow.parallel.memory import fullest_rank, kept_bytes, published_bytes, rank_bytes
from twinflow.parallel.shapes import Shape, shape_like, shape_of
from twinflow.parallel.simulate import Pipeline, step_seconds
from twinflow.parallel.topology import DATA, MODEL, PIPE
from twinflow.planner.machines import GB, GPUS, Host, Machine, gpu_named
from twinflow.planner.models import from_hf, gpt_cost
from twinflow.planner.scaling import Cluster, default_network, ring_bytes

# The article's trillion: 298 layers of width 17,408, sequences of 2,048; attention as it was then.
TRILLION = Shape(298, 17_408, 136, 2048, keeps_scores=True)
NUMEL = 12 * 298 * 17_408**2
BIG = Layout(num_pp=64, num_tp=8, num_dp=8, num_micro_batches=512)  # 4,096 GPUs
DGX = Machine(GPUS["a100-40"], Host(1024 * GB, 128, 300e9), 8)
A100S = Cluster(DGX, default_network(DGX))
DGX2 = Machine(GPUS["v100-32"], Host(1500 * GB, 48, 190e9), 16)
V100S = Cluster(DGX2, default_network(DGX2))
GIB = 2**30


def near(expected: float) -> object:
    """Within 1%, as the table of facts is to be met."""
    return pytest.approx(expected, rel=0.01)


def test_states_of_the_trillion() -> None:
    assert near(1.084e12) == NUMEL
    assert TRILLION.numel == near(NUMEL)
    for numel, plain, shared in ((1e12, 31.25e9, 10.7e9), (NUMEL, 33.9e9, 11.6e9)):
        assert published_bytes(numel / 512, 0, 8).gpu_bytes == near(plain)
        assert published_bytes(numel / 512, 1, 8).gpu_bytes == near(shared)


def test_activations_of_the_trillion() -> None:
    whole = replace(BIG, partitions=False)
    one = TRILLION.num_layers * kept_bytes(TRILLION, whole)  # of one micro-batch
    assert one == near(21.2e9)
    assert one == near(19.8 * GIB)
    assert TRILLION.num_layers * kept_bytes(TRILLION, BIG) == near(2.47 * GIB)
    alone = Layout(1, 1, 1, 1, checkpointing=False, published=True)
    assert TRILLION.num_layers * kept_bytes(TRILLION, alone) == near(1.21e12)
    # The first stage holds as many micro-batches as there are stages: one of the whole model.
    even = replace(TRILLION, num_layers=320)
    assert rank_bytes(even, BIG, 0).activations == pytest.approx(320 * kept_bytes(even, BIG))


def test_traffic_of_the_trillion() -> None:
    volume = volume_of(TRILLION, BIG)
    assert volume.tensor_bytes == near(1.78e12)
    assert volume_of(TRILLION, replace(BIG, checkpointing=False)).tensor_bytes == near(1.19e12)
    assert volume.pipe_bytes == near(4.56e9)
    assert volume_of(TRILLION, replace(BIG, partitions=False)).pipe_bytes == near(36.5e9)
    assert volume.data_bytes == near(7.4e9)
    assert volume_of(TRILLION, BIG, grad_bits=1.0).data_bytes == near(0.463e9)


def test_compute_of_the_trillion() -> None:
    """8 FLOPs a parameter and token with checkpointing, 4,096 sequences, half of an A100's peak: 114 s."""
    assert BIG.batch == 4096
    products, attention = TRILLION.layer_flops(BIG.batch * 2048)
    assert 4 * 298 * products / 4096 / 156e12 == near(114.0)
    assert attention / products == pytest.approx(2048 / (6 * 17_408), rel=0.01)
    time, talk_s = layer_time(TRILLION, BIG, A100S)
    alone = time.total_s - 3 * talk_s
    flops = 4 * sum(TRILLION.layer_flops(2048)) / 8
    assert alone == pytest.approx(flops / 240e12, rel=0.05)  # little memory traffic beside it


def test_the_trillion_fits_on_4096() -> None:
    table = replace(BIG, published=True)
    found = estimate(TRILLION, table, A100S)
    assert found.fits
    assert 13e9 < found.fullest.gpu_bytes < 20e9  # 11.6 + 2.65, uneven stages, a layer at work
    assert found.crosses == (DATA, PIPE)
    plain = estimate(TRILLION, replace(table, zero=0), A100S, plays=False)
    assert plain.fits  # as the article has it, but narrowly: the fullest stage has 5 layers, not 4.66
    assert plain.fullest.state.gpu_bytes == pytest.approx(33.9e9 * 5 / (298 / 64), rel=0.02)
    assert not estimate(replace(TRILLION, num_layers=384), replace(table, zero=0), A100S, plays=False).fits


def test_the_trillion_as_our_engine_has_it() -> None:
    """Sums of gradients in fp32: with ZeRO-1 it fits 40 GB, without it does not."""
    fullest, layers = fullest_rank(TRILLION, BIG), 5 * TRILLION.layer_numel / 8
    assert fullest.state.gpu_bytes == pytest.approx((2 + 4 + 12 / 8) * layers)
    assert estimate(TRILLION, BIG, A100S, plays=False).fits
    assert not estimate(TRILLION, replace(BIG, zero=0), A100S, plays=False).fits


def test_data_groups_reduce_side_by_side() -> None:
    """64 stages: 64 times the bandwidth of one machine, in the article's words."""
    found = amplified(A100S, BIG)
    assert found.num_groups == 512
    assert found.times == pytest.approx(64.0)
    assert link_of(A100S, BIG, DATA).rate == pytest.approx(A100S.network_rate / 8)
    assert link_of(A100S, BIG, MODEL).rate == 240e9
    assert amplified(A100S, Layout(1, 1, 4096, 1)).times == pytest.approx(1.0)


def test_the_trillion_on_800_v100() -> None:
    """1.4 B parameters a GPU fit 32 GB; the article measured 47 TFLOPS. Heads must be 16 tensor ranks' to share."""
    shape, layout = replace(TRILLION, num_heads=128), Layout(50, 16, 1, 2048)
    assert near(1.354e9) == NUMEL / 800
    assert published_bytes(NUMEL / 800, 1, 1).gpu_bytes == near(21.7e9)
    assert 298 * kept_bytes(shape, layout) == near(1.33e9)
    found = estimate(shape, layout, V100S)
    assert found.fits
    assert found.tflops == pytest.approx(47.0, rel=0.1)


def test_model_and_throughput_grow_with_the_gpus() -> None:
    """Figure 3: layers and batch in proportion to the GPUs. As many parameters and TFLOPS on each of them."""
    for num_stages, tflops in ((12, 44.3), (25, 43.9), (50, 44.8)):
        shape = replace(TRILLION, num_heads=128, num_layers=round(298 * num_stages / 50))
        found = estimate(shape, Layout(num_stages, 16, 1, round(2048 * num_stages / 50)), V100S)
        assert found.fits
        assert shape.numel / 16 / num_stages == pytest.approx(1.36e9, rel=0.01)
        assert found.tflops == pytest.approx(tflops, rel=0.005)


def test_180_billion_on_800_the_middle_is_best() -> None:
    """Figure 4 without its numbers, which only its picture has: 2D is slow or does not fit, balanced 3D is best."""
    shape = Shape(100, 12_288, 96, 2048, keeps_scores=True)

    def played(pp: int, tp: int, dp: int) -> Estimate:
        return estimate(shape, Layout(pp, tp, dp, 2000 // dp), V100S, plays=False)

    over = [played(50, 16, 1), played(100, 8, 1)]  # pipeline and tensor alone
    middle = [played(10, 16, 5), played(20, 8, 5), played(10, 8, 10)]
    assert min(e.tflops for e in middle) > 1.08 * max(e.tflops for e in over)
    assert max(e.tflops for e in middle) == pytest.approx(49.0, rel=0.12)
    assert not played(25, 1, 32).fits  # pipeline and data alone, as far as data ranks fill the machines
    assert all(e.fits for e in (*over, *middle))
    assert played(100, 4, 2).tflops < min(e.tflops for e in middle)  # and too deep a pipeline is slow again


def test_a_slow_network_prefers_stages_across_machines() -> None:
    """Figure 5: GPT-2 1.5 B on four machines of four, 50 Gb/s inside and 4 between them."""
    gpu = replace(GPUS["v100-16"], link_rate=50e9 / 8)
    cluster = Cluster(Machine(gpu, Host(200 * GB, 48, 190e9), 4), 4e9 / 8)
    shape = Shape(48, 1600, 25, 1024)
    gains: dict[tuple[str, int], tuple[float, float]] = {}
    for batch, (schedule, chunks) in itertools.product((16, 64, 256), (("1f1b", 1), ("zbv", 2))):
        data = estimate(shape, Layout(1, 1, 16, batch // 16), cluster)
        layouts = [Layout(pp, 1, dp, batch // dp, schedule=schedule, num_chunks=chunks) for pp, dp in ((16, 1), (4, 4))]
        pipe, hybrid = (estimate(shape, layout, cluster) for layout in layouts)
        assert pipe.fits
        assert hybrid.fits
        gains[schedule, batch] = (pipe.tflops / data.tflops, hybrid.tflops / data.tflops)
        even = replace(shape, num_heads=32)  # 25 heads cannot be divided over the four GPUs of a machine
        tensor = [estimate(even, Layout(pp, 4, dp, batch // dp), cluster) for pp, dp in ((1, 4), (4, 1))]
        assert max(one.tflops for one in tensor) < 0.6 * pipe.tflops  # "model parallelism is not advantageous"
    assert min(gains["1f1b", 16] + gains["zbv", 16]) > 7
    assert min(gains["1f1b", 64] + gains["zbv", 64] + gains["zbv", 256]) > 2  # "over twice at larger batch sizes"
    assert min(gains["1f1b", 256]) > 1.9  # its stages wait for the slow network in turns
    for schedule in ("1f1b", "zbv"):
        assert gains[schedule, 16] > gains[schedule, 64] > gains[schedule, 256]
    sent = [volume_of(shape, Layout(pp, 1, dp, 16 // dp)) for pp, dp in ((1, 16), (16, 1))]
    assert sent[0].data_bytes == pytest.approx(5.8e9, rel=0.02)
    assert sent[1].pipe_bytes == pytest.approx(16 * 3.28e6, rel=0.01)


def test_rings_of_a_step() -> None:
    """A pipeline sums micro-batches where they are made; without one, ZeRO-2 reduces each of them."""
    layouts = [Layout(2, 1, 4, 8, zero=stage) for stage in range(4)]
    assert [ring_count(layout) for layout in layouts] == [2, 2, 2, 24]
    assert [ring_count(replace(layout, num_pp=1)) for layout in layouts] == [2, 2, 9, 24]
    assert ring_count(Layout(2, 1, 1, 8)) == 0


def test_a_tied_embedding_costs_an_all_reduce_between_two_stages() -> None:
    shape, layout = Shape(8, 2048, 16, 1024), Layout(4, 2, 2, 8)
    numel = shape.vocab_size * shape.hidden / 2  # a tensor rank's
    share = 2 * numel / 2  # of a replica, in bf16
    assert volume_of(shape, layout).tied_bytes == share  # half of it there and half of the sum back
    found = seconds_of(shape, layout, A100S)
    near = link_of(A100S, layout, DATA).seconds(ring_bytes(2 * numel, 2))  # replicas sum first
    assert found.tied_s == pytest.approx(near + link_of(A100S, layout, PIPE).seconds(share))
    assert found.step_s == pytest.approx(found.pipeline_s + found.tied_s + found.data_s + found.update_s)
    for other in (Layout(1, 8, 2, 8), replace(layout, schedule="zbv", num_chunks=2)):  # both on one rank
        assert volume_of(shape, other).tied_bytes == 0.0
        assert seconds_of(shape, other, A100S).tied_s == 0.0
    stages = [layers * shape.layer_numel for layers in stage_layers(shape, layout)]
    stages[0] += shape.end_numel
    stages[-1] += shape.end_numel
    assert largest_numel(shape, layout) == max(stages) / 2


def test_stages_are_as_equal_as_the_engine_makes_them() -> None:
    assert layers_of(8, 4) == (2, 2, 2, 2)
    assert sorted(layers_of(9, 4)) == [2, 2, 2, 3]
    assert layers_of(12, 4, end=2.5) == (2, 4, 4, 2)
    assert layers_of(3, 1) == (3,)
    assert layers_of(4, 4, end=9.0) == (0, 2, 2, 0)  # an embedding that is larger than all layers
    assert layers_of(4, 4, end=9.0, joins_last=True) == (0, 1, 2, 1)
    assert layers_of(12, 4, end=2.5, joins_last=True) == (2, 4, 4, 2)
    for layers, stages, end in ((298, 64, 0.2), (48, 16, 2.7), (7, 7, 3.0)):
        assert sum(layers_of(layers, stages, end)) == layers
        assert sum(layers_of(layers, stages, end, joins_last=True)) == layers
    shape = Shape(16, 8192, 64, 2048)
    layout = Layout(4, 1, 1, 8, schedule="zbv", num_chunks=2)
    assert stage_layers(shape, layout) == (2,) * 8
    assert rank_layers(shape, layout) == (4,) * 4


def test_the_fullest_rank_is_the_fullest() -> None:
    shape = shape_like(30e9)
    for layout in (
        Layout(8, 2, 2, 32),
        Layout(8, 2, 2, 32, checkpointing=False),
        Layout(8, 1, 1, 4, schedule="gpipe"),
        Layout(4, 2, 2, 32, schedule="interleaved", num_chunks=2, checkpointing=False),
        Layout(8, 2, 2, 32, schedule="zbv", num_chunks=2),
        Layout(8, 1, 4, 32, schedule="zbv", num_chunks=2, zero=3),
        Layout(8, 2, 2, 32, offload=True),
        Layout(8, 2, 2, 32, published=True),
        Layout(1, 4, 2, 4, zero=2),
    ):
        ranks = [rank_bytes(shape, layout, rank).gpu_bytes for rank in range(layout.num_pp)]
        assert fullest_rank(shape, layout).gpu_bytes == max(ranks)


def test_a_step_by_hand_on_one_machine() -> None:
    """No pipeline, no tensor ranks: micro-batches one after the other, then what backward and forward do not hide."""
    shape, layout = Shape(8, 2048, 16, 1024), Layout(1, 1, 8, 4, micro_batch=2, checkpointing=False)
    times = stage_times(shape, layout, A100S)
    found = seconds_of(shape, layout, A100S)
    assert found.pipeline_s == pytest.approx(4 * times[0].total_s)
    assert found.bubble == pytest.approx(0.0, abs=1e-12)
    assert found.tensor_s == 0.0
    slow = replace(A100S, machine=replace(DGX, gpu=replace(DGX.gpu, link_rate=1e9)))
    ring = 2 * shape.numel * 7 / 8 / 1e9 + 1e-5
    forward, backward = times[0].forward_s, times[0].input_s + times[0].weight_s
    expected = max(0.0, ring - backward) + max(0.0, ring - forward)
    assert seconds_of(shape, layout, slow).data_s == pytest.approx(expected)
    again = seconds_of(shape, replace(layout, checkpointing=True), A100S)
    assert again.work_s == pytest.approx(4 * (times[0].total_s + 8 * layer_time(shape, layout, A100S)[0].forward_s))


def test_stage_3_over_a_slow_network_waits_in_every_micro_batch() -> None:
    shape, slow = Shape(8, 2048, 16, 1024), replace(A100S, network_rate=1e9)
    one, three = (seconds_of(shape, Layout(1, 1, 16, 4, zero=zero), slow) for zero in (1, 3))
    ring = 2 * 8 * shape.layer_numel * 15 / 16 / 1e9
    assert three.pipeline_s == pytest.approx(4 * 3 * ring, rel=0.01)
    assert one.data_s == pytest.approx(2 * ring * shape.numel / (8 * shape.layer_numel), rel=0.05)


def test_an_update_on_the_host_takes_ram_and_its_time() -> None:
    shape, layout = shape_like(70e9), Layout(4, 8, 1, 16, offload=True)
    slow = Cluster(replace(DGX, host=Host(100 * GB, 8, 10e9)), A100S.network_rate)
    found, fast = estimate(shape, layout, slow), estimate(shape, layout, A100S)
    assert found.host_bytes == pytest.approx(12 * 70e9 / 4, rel=0.1)
    assert not found.fits
    assert lacking_bytes(shape, layout, slow) == pytest.approx(found.host_bytes - found.host_limit)
    assert lacking_bytes(shape, layout, A100S) == 0.0
    assert found.seconds.update_s > 10 * fast.seconds.update_s
    assert estimate(shape, replace(layout, offload=False), A100S).fullest.gpu_bytes > 2 * fast.fullest.gpu_bytes


def test_the_formula_that_chooses_is_close_to_the_simulation() -> None:
    shape = shape_like(175e9)
    for layout in (
        Layout(8, 8, 8, 64),
        Layout(16, 8, 4, 64, checkpointing=False),
        Layout(8, 8, 8, 64, schedule="interleaved", num_chunks=2),
        Layout(8, 8, 8, 64, schedule="zbv", num_chunks=2),
    ):
        times = stage_times(shape, layout, A100S)
        pipe = Pipeline(layout.schedule, layout.num_pp, 64, layout.num_chunks, times, 1e-4)
        assert rough_seconds(pipe) == pytest.approx(step_seconds(pipe), rel=0.05)


def test_days_tokens_and_flops() -> None:
    found = estimate(shape_like(13e9), Layout(1, 8, 4, 4), A100S)
    assert found.step_tokens == 16 * 2048
    assert found.days(found.step_tokens * 1000) == pytest.approx(1000 * found.seconds.step_s / 86400)
    flops = 6 * found.shape.numel * found.step_tokens
    assert found.tflops == pytest.approx(flops / found.seconds.step_s / 32 / 1e12, rel=0.1)


def test_shapes() -> None:
    for numel in (1.5e9, 7e9, 13e9, 70e9, 175e9, 530e9, 1e12, 3e12):
        assert shape_like(numel).numel == pytest.approx(numel, rel=0.06)
    trillion = shape_like(1e12)
    assert (trillion.num_layers, trillion.hidden, trillion.num_heads) == (128, 25_600, 160)
    cost = gpt_cost("gpt", 50_304, 1024, 50, 4096, 32)
    shape = shape_of(cost, 2048)
    assert shape.numel == pytest.approx(cost.numel, rel=1e-3)
    assert (shape.num_heads, shape.sequence, shape.name) == (32, 2048, "gpt")
    with pytest.raises(ValueError, match="hidden is 0"):
        Shape(1, 0, 1, 1)


def test_an_untied_head_counts() -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama3 = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8, **sizes}
    untied = shape_of(from_hf(llama3), 2048)
    tied = shape_of(from_hf({**llama3, "tie_word_embeddings": True}), 2048)
    assert untied.numel == pytest.approx(8.03e9, rel=1e-3)
    assert tied.numel == pytest.approx(7.50e9, rel=1e-3)
    end = untied.end_numel
    alone = Layout(1, 1, 8, 4)
    assert largest_numel(untied, alone) - largest_numel(tied, alone) == end
    for layout in (alone, Layout(4, 1, 2, 4, schedule="zbv", num_chunks=2)):  # the first rank has both ends
        more = rank_bytes(untied, layout, 0).state.weights - rank_bytes(tied, layout, 0).state.weights
        assert more == 2 * end
    split = Layout(4, 1, 2, 4)
    assert largest_numel(untied, split) == largest_numel(tied, split)
    for rank in range(4):
        assert rank_bytes(untied, split, rank).state == rank_bytes(tied, split, rank).state
    assert tied_bytes(tied, split) > tied_bytes(untied, split) == tied_seconds(untied, split, A100S) == 0


def test_cards_go_by_their_size_too() -> None:
    assert gpu_named("h100-80") is GPUS["h100"]
    assert gpu_named("H200-141") is GPUS["h200"]
    for name in ("v100-16", "v100-32", "a100-40", "a100-80", "h100-80", "h200-141"):
        assert gpu_named(name).link_rate > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pp": 0}, "num_pp is 0"),
        ({"zero": 4}, "zero is 4"),
        ({"num_tp": 3}, "a divisor of 32, the number of attention heads"),
        ({"num_tp": 16}, "a divisor of 8, the number of heads of keys and values"),
        ({"num_tp": 8}, "a divisor of 50257, the size of the vocabulary"),
        ({"num_pp": 17}, "at most 16, the number of layers. Use fewer stages or chunks"),
        ({"schedule": "zbv"}, "num_chunks is 1, but must be 2 with the schedule 'zbv'"),
        ({"num_chunks": 2}, "num_chunks is 2, but must be 1 with the schedule '1f1b'"),
        ({"schedule": "dfs"}, "schedule is 'dfs'"),
        ({"schedule": "interleaved", "num_chunks": 2, "num_micro_batches": 9}, "into 2 equal rounds"),
    ],
)
def test_layouts_that_cannot_be(changes: dict[str, object], words: str) -> None:
    layout = replace(Layout(4, 1, 1, 8), **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r" is .*, but must be ") as raised:
        check_layout(layout, Shape(16, 4096, 32, 2048, vocab_size=50_257, num_kv_heads=8))
    assert words in str(raised.value)
