# SPDX-License-Identifier: Apache-2.0
"""Building a model module by module: ties, every initialiser, nothing left uninitialised, no second copy in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twinflow.models.gpt import GPT, INIT_STD, GPTConfig
from twinflow.offload import materialize as materialize_module
from twinflow.offload.materialize import build, materialize

CONFIG = GPTConfig(vocab_size=64, context=16, num_layers=3, hidden=32, num_heads=4)
CPU = torch.device("cpu")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    found, wanted = tensors(model), tensors(expected)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.requires_grad == wanted[name].requires_grad, name


def reset(module: nn.Module) -> None:
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if own is not None:
        own()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(5, 7),
        lambda: nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3, bias=False)),
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True),
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LSTM(8, 4)),
    ],
    ids=["linear", "sequential", "encoder-layer", "transformer", "batch-norm-and-lstm"],
)
def test_it_equals_the_same_model_reset_module_by_module(make: Callable[[], nn.Module]) -> None:
    expected = make()
    torch.manual_seed(3)
    expected.apply(reset)  # children first
    model = on_meta(make)
    torch.manual_seed(3)
    assert materialize(model, CPU) is model
    assert_equal(model, expected)


def test_a_constructor_and_a_build_agree() -> None:
    """A module whose constructor only makes its children draws the same numbers either way."""
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    torch.manual_seed(5)
    model = build(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), "cpu")
    assert_equal(model, expected)


def test_what_attention_does_to_its_child_is_kept() -> None:
    """nn.MultiheadAttention zeroes out_proj.bias, which out_proj itself would draw."""
    model = build(lambda: nn.TransformerEncoderLayer(16, 4, 32), CPU)
    attention = model.self_attn
    assert isinstance(attention, nn.MultiheadAttention)
    assert not attention.out_proj.bias.any()
    assert attention.out_proj.weight.any()


def test_the_built_model_trains() -> None:
    model = build(lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), CPU)
    model(torch.randn(2, 5, 16)).square().sum().backward()
    assert all(param.grad is not None and param.is_leaf for param in model.parameters())


def gpt_init(model: GPT) -> Callable[[nn.Module], None]:
    """GPT.init_weights, for one module."""
    residual = {m for block in model.blocks for m in (block.attention.out, block.mlp.down)}  # type: ignore[union-attr]

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
            return
        assert isinstance(module, (nn.Linear, nn.Embedding))
        std = INIT_STD / (2 * CONFIG.num_layers) ** 0.5 if module in residual else INIT_STD
        nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    return init


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_our_gpt(dtype: torch.dtype | None) -> None:
    expected = GPT(CONFIG)
    torch.manual_seed(7)
    expected.init_weights()
    model = on_meta(lambda: GPT(CONFIG))
    assert isinstance(model, GPT)
    torch.manual_seed(7)
    materialize(model, CPU, dtype, init=gpt_init(model))
    assert_equal(model, expected.to(dtype) if dtype else expected)  # initialised in fp32, rounded once
    assert model.head.weight is model.token_embedding.weight
    assert len(list(model.parameters())) == len(list(expected.parameters()))


class Tied(nn.Module):
    """Three owners of one weight; the last has a bias of its own, and there is a tied buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(4, 6)
        self.middle.weight = self.head.weight = self.embedding.weight
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
        self.norms[1].running_mean = self.norms[0].running_mean


def test_ties_stay_ties_and_are_initialised_once() -> None:
    torch.manual_seed(2)
    alone = nn.Embedding(6, 4)
    torch.manual_seed(2)
    model = build(Tied, CPU)
    assert isinstance(model, Tied)
    assert model.embedding.weight is model.middle.weight is model.head.weight
    assert model.norms[0].running_mean is model.norms[1].running_mean
    assert torch.equal(model.head.weight, alone.weight), "the first owner's values, though the last has a reset too"
    assert model.head.bias.abs().max() <= 0.5  # 1 / sqrt(4): its reset did run
    assert len(list(model.parameters())) == 6  # the weight, the bias, and two of each norm


def test_frozen_parameters_and_marks_stay() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight.requires_grad_(False)
        layer.weight.shard_dim = 1  # type: ignore[attr-defined]
        return layer

    layer = build(make, CPU, torch.bfloat16)
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    assert layer.weight.shard_dim == 1  # type: ignore[attr-defined]
    assert layer.bias.requires_grad  # type: ignore[union-attr]


def test_dtype_is_for_floating_parameters_only() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.index = nn.Parameter(torch.empty(3, dtype=torch.int32), requires_grad=False)
            self.register_buffer("mask", torch.empty((), dtype=torch.bool))
            self.register_buffer("table", torch.empty(2))

        def reset_parameters(self) -> None:
            assert self.weight.dtype == torch.float32
            nn.init.normal_(self.weight)
            self.index.zero_()
            self.mask.fill_(True)  # type: ignore[operator]
            self.table.fill_(float("-inf"))  # type: ignore[operator]

    model = build(Counting, CPU, torch.float16)
    dtypes = {name: tensor.dtype for name, tensor in tensors(model).items()}
    assert dtypes == {"weight": torch.float16, "index": torch.int32, "mask": torch.bool, "table": torch.float32}


def test_what_is_real_already_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(4, 2), nn.Linear(3, 3))
    attention = model[1]
    assert isinstance(attention, nn.MultiheadAttention)
    nn.init.constant_(attention.out_proj.bias, 4.0)
    nn.init.constant_(model[0].weight, 5.0)  # type: ignore[arg-type]
    attention.in_proj_weight = nn.Parameter(attention.in_proj_weight.to("meta"))
    model[0].bias = nn.Parameter(torch.empty(3, device="meta"))
    real = {name: (tensor, tensor.clone()) for name, tensor in tensors(model).items() if not tensor.is_meta}
    materialize(model, CPU, torch.bfloat16)
    assert len(real) == 6
    for name, (tensor, value) in real.items():
        assert tensors(model)[name] is tensor
        assert torch.equal(tensor, value), name
    assert model[0].bias.dtype == attention.in_proj_weight.dtype == torch.bfloat16
    assert not model[0].bias.isnan().any()  # type: ignore[operator]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(4) / 4), persistent=False)


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal", torch.ones(4, 4, dtype=torch.bool).tril())


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.arange(4))


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (
            Scale,
            r"blocks.0 \(Scale\): parameter 'scale' .* no reset_parameters\(\). "
            r"Pass a function that fills the parameter as init=",
        ),
        (Rotary, r"blocks.0 \(Rotary\): buffer 'inv_freq' .* no reset_parameters\(\)"),
        (Mask, r"blocks.0 \(Mask\): buffer 'causal'"),
        (Positions, r"blocks.0 \(Positions\): buffer 'ids'"),
    ],
)
@pytest.mark.parametrize("with_init", [False, True])
def test_nothing_stays_uninitialised(inner: type[nn.Module], message: str, with_init: bool) -> None:
    def nothing(module: nn.Module) -> None:
        pass

    model = on_meta(lambda: nn.ModuleDict({"blocks": nn.ModuleList([inner()])}))
    message = message.split(" .* ")[0] + ".*initialiser does not fill this" if with_init else message
    with pytest.raises(ValueError, match=message):
        materialize(model, CPU, init=nothing if with_init else None)


def test_a_value_left_half_done_is_found() -> None:
    def init(module: nn.Module) -> None:
        module.scale[:3] = 1.0  # type: ignore[index, operator]

    with pytest.raises(ValueError, match="parameter 'scale'"):
        build(Scale, CPU, init=init)


def test_a_plain_attribute_on_meta_is_refused() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = torch.zeros(3)

    with pytest.raises(ValueError, match=r"the model \(Cached\): attribute 'table'.*Register the tensor as a buffer"):
        build(Cached, CPU)


def test_what_init_leaves_out_the_module_itself_fills() -> None:
    """As `model.apply(init)` after a constructor: defaults first, then what init has to say."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.ones_(module.bias)

    model = build(lambda: nn.Sequential(nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2)), CPU, init=init)
    norm, attention = model[0], model[1]  # type: ignore[index]
    assert norm.num_batches_tracked == 0
    assert norm.running_var.eq(1).all()
    assert attention.out_proj.bias.eq(1).all(), "the default of the module around it does not come after init"
    assert attention.in_proj_weight.isfinite().all()


def test_init_may_put_a_new_parameter_in_place() -> None:
    def init(module: nn.Module) -> None:
        module.scale = nn.Parameter(torch.full((4,), 3.0))

    def make() -> nn.Module:
        model = nn.ModuleList([Scale(), Scale()])
        model[1].scale = model[0].scale
        return model

    model = build(make, CPU, torch.bfloat16, init=init)
    assert model[0].scale is model[1].scale  # type: ignore[index]
    assert model[0].scale.dtype == torch.bfloat16  # type: ignore[index]


class Pretrained(nn.Module):
    """The way Hugging Face's models initialise: a method of the top, called on every module, children first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.empty(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(1.0)
            module.bias.data.fill_(0.0)
        elif isinstance(module, nn.ModuleDict):
            module["down"].weight.data.fill_(0.5)  # type: ignore[operator, union-attr]
        elif module is self:
            nn.init.ones_(self.scale)


def test_hugging_faces_way() -> None:
    model = build(lambda: nn.Sequential(Pretrained(), nn.Linear(4, 4)), CPU)
    inner = model[0]  # type: ignore[index]
    for block in inner.blocks:
        assert block["up"].weight.eq(1).all()
        assert block["down"].weight.eq(0.5).all(), "a container's turn comes after its children's"
    assert inner.norm.running_var.eq(1).all(), "what _init_weights leaves out, the module fills"
    assert inner.scale.eq(1).all()
    assert not model[1].weight.eq(1).any(), "outside of that model its method does not count"  # type: ignore[index]


def test_init_comes_before_hugging_faces_way() -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 2.0)

    model = build(Pretrained, CPU, init=init)
    assert all(param.eq(2).all() for param in model.parameters())


@pytest.mark.parametrize("make", [lambda: GPT(CONFIG), lambda: nn.Sequential(Pretrained(), Pretrained(), Pretrained())])
def test_blocks_move_to_their_home_one_after_the_other(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set takes the place of the second device, which this machine does not have."""
    model = on_meta(make)
    blocks = model.blocks if isinstance(model, GPT) else model
    block = max(sum(p.numel() for p in block.parameters()) for block in blocks)  # type: ignore[union-attr, operator]
    outside = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in blocks.parameters())  # type: ignore[union-attr]
    at_home: set[nn.Parameter] = set()
    on_device: list[int] = []
    monkeypatch.setattr(
        materialize_module._Builder, "bring_home", lambda _, module: at_home.update(module.parameters())
    )

    def init(module: nn.Module) -> None:
        made = [p for p in model.parameters() if not p.is_meta and p not in at_home]
        on_device.append(sum(p.numel() for p in made))
        for param in module.parameters(recurse=False):
            nn.init.ones_(param)

    materialize(model, CPU, torch.bfloat16, init, home=CPU)
    assert block // 2 < max(on_device) <= outside + block
    assert at_home == set(model.parameters())


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most memory that was allocated at once while `run` ran, counted from the allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del kept
    return peak


def test_beyond_the_model_only_one_modules_fp32_values_exist() -> None:
    hidden, num_layers = 256, 12

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(num_layers)))

    layer_numel = hidden * hidden
    assert peak_bytes(make) >= num_layers * layer_numel * 4, "the measure sees allocations"
    peak = peak_bytes(lambda: build(make, CPU, torch.bfloat16))
    assert num_layers * layer_numel * 2 <= peak
    assert peak <= num_layers * layer_numel * 2 + layer_numel * 4 + 4096
    peak = peak_bytes(lambda: build(make, CPU))
    assert peak <= num_layers * layer_numel * 4 + 4096


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="device is 'meta'"):
        materialize(nn.Linear(2, 2), torch.device("meta"))
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        materialize(nn.Linear(2, 2), CPU, torch.int8)
    with pytest.raises(ValueError, match=r"The result of the function model\(\) is 3, but must be an nn.Module"):
        build(lambda: 3, CPU)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="shape of 'weight' is not known"):
        build(lambda: nn.LazyLinear(3), CPU)


def test_a_model_with_memory_is_returned_as_it_is() -> None:
    model = nn.Linear(3, 3)
    weight, value = model.weight, model.weight.clone()
    assert build(model, CPU, torch.bfloat16) is model
    assert model.weight is weight
    assert torch.equal(weight, value)


def test_hugging_face_itself() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")  # before, its buffers could not be rebuilt
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=32, num_key_value_heads=2, tie_word_embeddings=True)
    model = build(lambda: transformers.LlamaForCausalLM(config), CPU)
    plain = transformers.LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), tensor), name
    model.load_state_dict(plain.state_dict())
    tokens = torch.arange(10)[None]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
