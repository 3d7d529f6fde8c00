# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing changes no bit of a result, and what it says leaves the device has left it."""

from __future__ import annotations

import copy
import gc
import io
import logging
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from activations_support import INPUT_BYTES, LAYERS, SMALL, engine_of, gpt, gradients, same
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from twin_support import batch, quick_torch

from twinflow.activations import Handle, checkpoint_layers
from twinflow.activations.offload import BACK, STREAM, HostPool
from twinflow.config import load_config, notes
from twinflow.device import Device
from twinflow.models.gpt import GPT
from twinflow.optim.twin import Tuning, TwinOptimizer


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


@pytest.fixture
def wrap() -> Iterator[Any]:
    """Checkpointing that is removed in the end."""
    made: list[Handle] = []

    def put(model: nn.Module, layers: Any = ("Block",), **options: Any) -> Handle:
        made.append(checkpoint_layers(model, layers, **{"min_bytes": SMALL, **options}))
        return made[-1]

    yield put
    for handle in made:
        handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("offload", "delay_s"), [(False, 0.0), (True, 0.0), (True, 0.003)])
def test_losses_and_gradients_have_the_same_bits(wrap: Any, offload: bool, delay_s: float, dtype: torch.dtype) -> None:
    device = Device()
    device.delay(STREAM, delay_s)
    model = gpt().to(dtype)
    handle = wrap(model, offload=offload, device=device)
    assert handle.names == [f"blocks.{i}" for i in range(LAYERS)]
    assert same(gradients(model), gradients(gpt().to(dtype)))


def saved_bytes(model: GPT) -> int:
    """What autograd keeps on the device for one forward, each memory once, weights aside."""
    kept: dict[int, int] = {}
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*batch(0)).loss.backward()
    return sum(kept.values())


def test_what_autograd_keeps_on_the_device(wrap: Any) -> None:
    plain = saved_bytes(gpt())
    checkpointed, offloaded = gpt(), gpt()
    wrap(checkpointed)
    wrap(offloaded, offload=True)
    ends = saved_bytes(offloaded)  # embeddings, norm and loss
    assert saved_bytes(checkpointed) == ends + LAYERS * INPUT_BYTES
    assert plain > ends + 5 * LAYERS * INPUT_BYTES


@pytest.mark.parametrize("delay_s", [0.0, 0.003])
def test_inputs_leave_the_device(wrap: Any, delay_s: float) -> None:
    device, model = Device(), gpt()
    device.delay(STREAM, delay_s)
    handle = wrap(model, offload=True, device=device)
    inputs: list[weakref.ref[Any]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    loss = model(*batch(0)).loss
    del inputs[LAYERS:]
    assert handle.offload is not None
    assert handle.offload.bytes_out == LAYERS * INPUT_BYTES == handle.offload.host_bytes
    device.stream(STREAM).synchronize()
    gc.collect()
    assert [ref() is not None for ref in inputs] == [False] * (LAYERS - 2) + [True] * 2
    loss.backward()
    assert handle.offload.bytes_back == (LAYERS - 2) * INPUT_BYTES  # the last two had not left


def test_two_layers_are_sent_for_ahead(wrap: Any) -> None:
    model = gpt()
    handle = wrap(model, offload=True)
    seen: list[int] = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: seen.append(handle.offload.bytes_back // INPUT_BYTES))
    model(*batch(0)).loss.backward()
    assert seen == [0] * LAYERS + [1, 2, 3, 4, 4, 4]


def test_host_memory_is_used_again(wrap: Any) -> None:
    model = gpt()
    handle = wrap(model, offload=True)
    gradients(model, 4)
    assert handle.offload.host_bytes == LAYERS * INPUT_BYTES
    assert handle.offload.bytes_out == 4 * LAYERS * INPUT_BYTES


def test_a_missing_wait_shows(wrap: Any) -> None:
    """Memory that nobody has written yet is NaN here."""
    truth = gradients(gpt())
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    try:
        for disabled in ((), (BACK,)):
            device, model = Device(), gpt()
            device.delay(STREAM, 0.2 if disabled else 0.005)  # longer than a backward on a busy machine
            device.disabled = frozenset(disabled)
            wrap(model, offload=True, device=device)
            assert same(gradients(model), truth) == (not disabled)
    finally:
        torch.use_deterministic_algorithms(False)


class Odd(nn.Module):
    """A layer with all kinds of inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, pair: tuple[Tensor, dict[str, Any]], twice: Tensor, *, scale: float, mask: Any = None) -> Any:
        x, more = pair
        assert more["flag"] is None
        y = self.inner(x) * more["gate"] * scale + twice
        return (y if mask is None else y.masked_fill(mask, 0.0)).tanh(), {"count": len(more)}


class Odds(nn.Module):
    def __init__(self, freeze: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(32, 32)
        self.first.requires_grad_(not freeze)
        self.odds = nn.ModuleList(Odd() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        gate, mask = torch.rand_like(x), x > 0.5  # neither needs a gradient
        for odd in self.odds:
            y, counts = odd((x, {"gate": gate, "flag": None}), x, scale=0.5, mask=mask)
            x = y.transpose(0, 1) + counts["count"]  # dense, in another order of dimensions
            gate, mask = gate.transpose(0, 1), mask.transpose(0, 1)
        return x.square().mean()


@pytest.mark.parametrize("freeze", [False, True])
def test_any_inputs_and_outputs(wrap: Any, freeze: bool) -> None:
    found = []
    for offload in (None, False, True):
        model = Odds(freeze)
        handle = wrap(model, ["Odd"], offload=offload) if offload is not None else None
        torch.manual_seed(1)
        x = torch.randn(16, 16, 32, requires_grad=True)
        model(x).backward()
        found.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
        if offload:
            assert handle is not None
            assert handle.offload.bytes_out > 4 * x.numel() * 4
    assert same(found[0], found[1])
    assert same(found[0], found[2])


class Masked(nn.Module):
    """Every layer is given the same large tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Bilinear(32, 32, 32) for _ in range(5))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, context)
        return x.square().mean()


def test_what_all_layers_are_given_stays(wrap: Any) -> None:
    found = []
    for is_on in (False, True):
        model = Masked()
        handle = wrap(model, ["Bilinear"], offload=True) if is_on else None
        torch.manual_seed(1)
        x, context = torch.randn(16, 32), torch.randn(16, 32, requires_grad=True)
        model(x, context).backward()
        found.append([context.grad, *(p.grad for p in model.parameters())])
    assert same(*found)
    assert handle is not None
    assert handle.offload.bytes_out == 6 * x.numel() * 4  # five inputs, and the context once
    assert handle.offload.bytes_back == 3 * x.numel() * 4


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).sin()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("num_layers", [1, 6])
def test_a_layer_that_writes_to_its_input_is_refused(wrap: Any, num_layers: int, offload: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), *(InPlace() for _ in range(num_layers)))
    wrap(model, ["InPlace"], offload=offload)
    with pytest.raises(RuntimeError, match=r"in-?place operation"):
        model(torch.randn(16, 32)).sum().backward()


class Sometimes(nn.Module):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("sometimes")
        return x.sin()


def test_after_an_exception_it_goes_on(wrap: Any) -> None:
    truth, model = gradients(gpt()), gpt()
    model.blocks[4].mlp.add_module("last", Sometimes())
    model.blocks[4].mlp.register_forward_hook(lambda module, _, out: (module.last(out), out)[1])
    handle = wrap(model, offload=True)
    last: Any = model.blocks[4].mlp.last
    for in_backward in (False, True):
        last.fails = not in_backward
        with pytest.raises(KeyError):  # noqa: PT012
            loss = model(*batch(9)).loss
            last.fails = True
            loss.backward()
        last.fails = False
    model.zero_grad()
    assert same(gradients(model), truth)
    assert handle.offload.host_bytes <= (LAYERS + 5) * INPUT_BYTES


def test_only_training_is_checkpointed(wrap: Any) -> None:
    model = gpt()
    handle = wrap(model, offload=True)
    with torch.no_grad():
        model(*batch(0))
    with torch.inference_mode():
        model(*batch(0))
    model.eval()
    model(*batch(0)).loss.backward()
    assert handle.offload.bytes_out == 0
    model.train()
    model(*batch(0)).loss.backward()
    assert handle.offload.bytes_out > 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_several_forwards_before_their_backwards(wrap: Any, order: tuple[int, ...]) -> None:
    found = []
    for is_on in (False, True):
        model = gpt(dropout=0.0)
        if is_on:
            wrap(model, offload=True)
        losses = [model(*batch(step)).loss for step in range(3)]
        for index in order:
            losses[index].backward()
        found.append([p.grad for p in model.parameters()])
    assert same(*found)


def test_a_graph_that_is_kept(wrap: Any) -> None:
    found = []
    for is_on in (False, True):
        model = gpt()
        handle = wrap(model, offload=True) if is_on else None
        torch.manual_seed(0)
        loss = model(*batch(0)).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert same(*found)
    assert handle.offload.bytes_back == 2 * (LAYERS - 2) * INPUT_BYTES
    del loss
    gradients(model, 1)
    assert handle.offload.host_bytes == LAYERS * INPUT_BYTES


def test_a_copy_of_the_model_is_plain(wrap: Any) -> None:
    model = gpt()
    handle = wrap(model, offload=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for param in other.parameters():
                param.add_(1)
        plain = gpt()
        plain.load_state_dict(other.state_dict())
        assert same(gradients(other), gradients(plain))
    assert handle.offload.bytes_out == 0
    assert same(gradients(model), gradients(gpt()))
    assert handle.offload.bytes_out > 0


def test_remove_leaves_nothing_behind() -> None:
    threads, model = set(threading.enumerate()), gpt()
    handle = checkpoint_layers(model, ["Block"], offload=True, min_bytes=SMALL)
    wrapped = model.blocks[0].forward
    loss = model(*batch(0)).loss
    handle.remove()
    handle.remove()
    assert set(threading.enumerate()) == threads
    assert all("forward" not in vars(module) for module in model.modules())
    with pytest.raises(RuntimeError, match=r"input of blocks\.\d, because checkpointing was removed"):
        loss.backward()
    wrapped(torch.randn(2, 16, 32))  # somebody may have kept it
    model.zero_grad()
    assert same(gradients(model), gradients(gpt()))
    mine = model.blocks[0].forward = lambda x: x  # type: ignore[method-assign]
    checkpoint_layers(model, ["Block"]).remove()
    assert model.blocks[0].forward is mine


def test_without_references_it_is_freed() -> None:
    model = gpt()
    handle = checkpoint_layers(model, ["Block"], offload=True, min_bytes=SMALL)
    gradients(model, 1)
    handle.remove()
    alive = weakref.ref(model.blocks[0])
    del model, handle
    assert alive() is None


def test_layers_that_are_refused(wrap: Any, caplog: Any) -> None:
    model = gpt()
    with pytest.raises(ValueError, match=r"layers is 'Blok'.*Did you mean 'Block'"):
        wrap(model, ["Blok"])
    for wrong in ([], "Block", [nn.Linear(1, 1)]):
        with pytest.raises(ValueError, match="layers is"):
            wrap(model, wrong)
    with caplog.at_level(logging.INFO, "twinflow"):
        assert wrap(model, ["MLP", "Block"]).names == [f"blocks.{i}" for i in range(LAYERS)]
    assert "MLP inside other checkpointed layers" in caplog.text
    with pytest.raises(ValueError, match="not checkpointed yet"):
        wrap(model, [model.blocks[2]])


@pytest.mark.parametrize("offload", [False, True])
def test_selective_checkpoints_repeat_no_matrix_product(wrap: Any, offload: bool) -> None:
    """Nor attention. No bit changes, and a full checkpoint repeats all of them."""

    def backward(**options: Any) -> tuple[list[Tensor], int]:
        model = gpt()
        if options:
            wrap(model, **options)
        torch.manual_seed(5)
        loss = model(*batch(0)).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return [param.grad for param in model.parameters() if param.grad is not None], counter.get_total_flops()

    plain, plain_flops = backward()
    selective, selective_flops = backward(selective=True, offload=offload)
    full, full_flops = backward(offload=offload)
    torch.testing.assert_close(selective, plain, rtol=0, atol=0)
    torch.testing.assert_close(full, plain, rtol=0, atol=0)
    assert selective_flops == plain_flops < full_flops


def test_a_model_that_checkpoints_itself_is_left_alone(wrap: Any, caplog: Any) -> None:
    model = gpt(recompute="full")
    with caplog.at_level(logging.INFO, "twinflow"):
        assert wrap(model, offload=True).names == []
    assert "GPT.config.recompute" in caplog.text
    assert "nothing is offloaded" in caplog.text
    assert all("forward" not in vars(module) for module in model.modules())


def test_host_buffers_are_bounded_when_lengths_change() -> None:
    device = Device()
    pool = HostPool(device, device.stream(STREAM))
    for length in (100, 300, 200, 300, 50, 120):
        buffers = [pool.take(length) for _ in range(3)]
        assert all(buffer.numel() >= length for buffer in buffers)
        assert len({buffer.data_ptr() for buffer in buffers}) == 3
        for buffer in buffers:
            pool.give(buffer)
    assert pool.num_bytes == 3 * 300
    device.close()


def twin_weights(wrap: Any, is_on: bool, delay: str = "", **options: Any) -> list[Tensor]:
    model = gpt()
    optimizer = TwinOptimizer(
        model, lr=1e-2, max_grad_norm=0.5, tuning=Tuning(bucket_numel=4096, shadow_bytes=1 << 24), **options
    )
    if is_on:
        device = Device()
        device.delay(STREAM, 0.001 if delay == STREAM else 0.0)
        wrap(model, offload=True, device=device)
    if delay and delay != STREAM:
        optimizer.runtime.device.delay(delay, 0.001)
    for step in range(3):
        for part in range(2):
            torch.manual_seed(2 * step + part)
            (model(*batch(2 * step + part)).loss * 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    found = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.parametrize("early", [False, True])
def test_with_the_overlapped_optimizer(wrap: Any, early: bool) -> None:
    options: dict[str, Any] = {"early": True, "accumulation_steps": 2} if early else {}
    truth = twin_weights(wrap, False, **options)
    for delay in ("", STREAM, "in", "out"):
        assert same(truth, twin_weights(wrap, True, delay, **options)), delay


@pytest.mark.parametrize(
    ("section", "is_on"),
    [
        ({}, False),
        ({"cpu_checkpointing": False, "profile": False, "number_checkpoints": 4, "layers": None}, False),
        ({"cpu_checkpointing": True}, True),
        ({"partition_activations": True}, True),
        ({"synchronize_checkpoint_boundary": True}, True),
        ({"layers": ["Block"]}, True),
    ],
    ids=str,
)
def test_when_the_config_turns_it_on(section: dict[str, Any], is_on: bool) -> None:
    assert load_config({"activation_checkpointing": section}).activation_checkpointing.is_asked_for == is_on


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ({"cpu_checkpointing": True}, [f"blocks.{i}" for i in range(LAYERS)]),
        ({"partition_activations": True, "number_checkpoints": 3}, [f"blocks.{i}" for i in range(LAYERS)]),
        ({"layers": ["MLP"], "cpu_checkpointing": True}, [f"blocks.{i}.mlp" for i in range(LAYERS)]),
    ],
    ids=str,
)
def test_the_engine_does_what_its_config_says(
    section: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinflow.build.checkpoint_layers", partial(checkpoint_layers, min_bytes=SMALL))
    found = []
    for options in ({}, section):
        model = gpt()
        engine = engine_of(model, options)
        for step in range(4):
            torch.manual_seed(step)
            engine.backward(engine(*batch(step)).loss)
            engine.step()
        engine.optimizer.wait()
        assert (engine.activations.names if engine.activations else []) == (names if options else [])
        found.append([p.detach().clone() for p in model.parameters()])
        engine.destroy()
        assert engine.activations is None
        assert all("forward" not in vars(module) for module in model.modules())
    assert same(*found)


def test_a_config_that_does_not_fit_the_model(caplog: Any) -> None:
    model = gpt()
    with pytest.raises(ValueError, match=r"activation_checkpointing\.layers is 'Blocks'.*Did you mean 'Block'"):
        engine_of(model, {"layers": ["Blocks"]})
    with pytest.raises(ValueError, match=r"activation_checkpointing\.layers is None"):
        engine_of(nn.Linear(2, 2), {"cpu_checkpointing": True})
    with caplog.at_level(logging.INFO, "twinflow"):
        engine_of(model, {"partition_activations": True, "number_checkpoints": 2}).destroy()  # no optimizer was left
    assert caplog.text.count("partition_activations") == 1
    noted = notes(load_config({"activation_checkpointing": {"profile": True}}))
    assert any("turns checkpointing on" in line for line in noted)


def test_under_autocast_and_with_gradients_of_gradients(wrap: Any) -> None:
    found = []
    for is_on in (False, True):
        model = Masked()
        if is_on:
            wrap(model, ["Bilinear"], offload=True)
        torch.manual_seed(1)
        x, context = torch.randn(16, 32), torch.randn(16, 32, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, context).float()
        (grad,) = torch.autograd.grad(loss, context, create_graph=True)
        grad.square().sum().backward()
        found.append([context.grad, *(p.grad for p in model.parameters())])
    assert same(*found)


def test_the_copies_are_in_the_timeline_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinflow.build.checkpoint_layers", partial(checkpoint_layers, min_bytes=SMALL))
    engine = engine_of(gpt(), {"cpu_checkpointing": True})
    engine.optimizer.trace.start()
    engine.backward(engine(*batch(0)).loss)
    engine.activations.offload.device.stream(STREAM).synchronize()
    engine.optimizer.trace.stop()
    names = [span.name for span in engine.optimizer.trace.spans() if span.track == STREAM]
    engine.destroy()
    assert names.count("activation out") == LAYERS
    assert names.count("activation back") == LAYERS - 2


class Cache:
    """As far as a layer sees one of Hugging Face's."""

    def __init__(self, length: int) -> None:
        self.length = length

    def get_seq_length(self) -> int:
        return self.length


class Caching(nn.Module):
    def forward(self, x: Tensor, cache: Any, past_key_values: Any = None, use_cache: bool = False) -> Tensor:
        assert not self.training or (cache is None and past_key_values is None and not use_cache)
        return x.sin()


def test_a_cache_is_not_written_twice(wrap: Any) -> None:
    model, x = nn.Sequential(Caching()), torch.randn(4, 4, requires_grad=True)
    wrap(model, ["Caching"])
    model[0](x, Cache(0), past_key_values=Cache(0), use_cache=True).sum().backward()
    with pytest.raises(ValueError, match="past_key_values of the checkpointed layer 0 is a cache with entries"):
        model[0](x, Cache(3))
    model.eval()
    model[0](x, Cache(3), use_cache=True)


def test_a_layer_that_begins_to_checkpoint_itself(wrap: Any) -> None:
    """Hugging Face's switch may be turned after ours."""
    model = gpt()
    handle = wrap(model, offload=True)
    for block in model.blocks:
        block.gradient_checkpointing = True
    assert same(gradients(model), gradients(gpt()))
    assert handle.offload.bytes_out == 0


HF_SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
HF: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**HF_SHAPE, "intermediate_size": 64}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", {**HF_SHAPE, "intermediate_size": 64}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 4, "num_heads": 2}
        | {"decoder_start_token_id": 0},
    ),
}


@pytest.mark.parametrize("name", HF)
def test_hugging_face_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("twinflow.build.checkpoint_layers", partial(checkpoint_layers, min_bytes=SMALL))
    kind, config, options = HF[name]
    found = []
    for section in ({}, {"layers": None, "profile": True}, {"cpu_checkpointing": True}):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**options)).train()
        engine = engine_of(model, section)
        losses = []
        for step in range(2):
            tokens = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert section == {} or len(engine.activations.names) == (8 if name == "t5" else 4)
        assert "cpu_checkpointing" not in section or engine.activations.offload.bytes_back > 0
        engine.optimizer.wait()
        found.append([*losses, *(p.detach().clone() for p in model.parameters())])
        engine.destroy()
    assert same(found[0], found[1])
    assert same(found[0], found[2])
