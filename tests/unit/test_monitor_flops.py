# SPDX-License-Identifier: Apache-2.0
"""FLOPs of each module against arithmetic, and a profile that leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinflow.monitor.flops import FlopsReport, FlopsRow, profile, si

ROWS, SIZE = 6, 8
LINEAR = 2 * ROWS * SIZE * SIZE  # one product of a [6, 8] and an [8, 8]


@dataclass
class Output:
    hidden: Tensor
    name: str


class Branch(nn.Module):
    """Called with keyword arguments, gives back something that is no tensor, and has a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, *, x: Tensor) -> Output:
        return Output(self.inner(x @ self.weight), "branch")


class Model(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute  # None: no checkpointing; else whether it is the reentrant kind
        self.first = nn.Linear(SIZE, SIZE)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(2)])
        self.branch = Branch()
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x))
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        x = self.branch(x=x).hidden
        return (self.last(x) @ torch.ones(SIZE, SIZE)).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()


def rows_of(report: FlopsReport) -> dict[str, FlopsRow]:
    return {row.name: row for row in report.rows}


def test_every_module_gets_its_own_flops() -> None:
    model = Model()
    with profile(model) as p:
        model(torch.randn(ROWS, SIZE)).backward()
    rows = rows_of(p.report)
    found = {name: (row.forward_flops / LINEAR, row.backward_flops / LINEAR) for name, row in rows.items()}
    assert found == {
        "": (7, 12),  # the product at the end has no weight to learn
        "first": (1, 1),  # its input needs no gradient
        "layers": (2, 4),
        "layers.0": (1, 2),
        "layers.0.0": (1, 2),
        "layers.0.1": (0, 0),
        "layers.1": (1, 2),
        "layers.1.0": (1, 2),
        "layers.1.1": (0, 0),
        "branch": (2, 4),
        "branch.inner": (1, 2),
        "dropout": (0, 0),
        "last": (1, 2),
    }
    assert rows[""].share == 1.0
    assert rows["layers"].share == pytest.approx(6 / 19)
    assert [rows[name].depth for name in ("", "branch", "layers.0.1")] == [0, 1, 3]
    assert rows["layers.0.0"].num_params == SIZE * SIZE + SIZE
    assert rows["branch.inner"].kind == "Linear"
    assert rows[""].num_params == sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_backward_runs_again_is_counted_where_it_runs(reentrant: bool) -> None:
    model = Model(recompute=reentrant)
    with profile(model) as p:
        model(torch.randn(ROWS, SIZE)).backward()
    rows = rows_of(p.report)
    for name in ("layers.0.0", "layers.1.0"):
        assert (rows[name].forward_flops, rows[name].backward_flops) == (LINEAR, 3 * LINEAR), name
    assert rows["first"].backward_flops == LINEAR
    assert rows[""].forward_flops == 7 * LINEAR


def test_attention_on_the_cpu_is_counted() -> None:
    model = Attention()
    with profile(model) as p:
        model(torch.randn(3, 5, 16)).backward()
    row, projection = p.report.rows
    product = 2 * 3 * 2 * 5 * 5 * 8
    assert row.forward_flops - projection.forward_flops == 2 * product
    assert row.backward_flops - projection.backward_flops == 5 * product


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


@pytest.mark.parametrize("make", [Model, Attention, lambda: Model(False)], ids=["model", "attention", "checkpoint"])
def test_nothing_changes_and_no_hook_stays(make: Any) -> None:
    model = make()
    x = torch.randn(3, 5, 16) if isinstance(model, Attention) else torch.randn(ROWS, SIZE)
    before = results(model, x)
    with profile(model):
        during = results(model, x)
    after = results(model, x)
    for a, b, c in zip(before, during, after, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert_no_hooks(model)


def assert_no_hooks(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called"):
            assert not getattr(module, name), name
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    model = Model()
    with pytest.raises(RuntimeError), profile(model):
        model(torch.randn(ROWS, SIZE + 1))
    assert_no_hooks(model)
    with profile(model) as p:  # the failed try does not count, nor does it disturb the next one
        with pytest.raises(RuntimeError):
            model(torch.randn(ROWS, SIZE + 1))
        model(torch.randn(ROWS, SIZE)).backward()
    assert p.report.forward_flops == 7 * LINEAR


def test_several_micro_batches_add_up() -> None:
    model = Model()
    p = profile(model)
    p.__enter__()
    for _ in range(3):
        model(torch.randn(ROWS, SIZE)).backward()
    p.__exit__()
    assert p.report.forward_flops == 3 * 7 * LINEAR
    assert p.report.backward_flops == 3 * 12 * LINEAR


def test_a_backward_that_was_not_run_is_estimated() -> None:
    model = Model()
    with profile(model, recompute_fwd_factor=1.0) as p, torch.no_grad():
        model(torch.randn(ROWS, SIZE))
    assert p.report.rows[0].backward_flops == 0
    assert p.report.backward_flops == 3 * p.report.forward_flops
    assert "not run; estimated" in p.report.text()


def test_times_are_those_of_the_modules() -> None:
    model = Model()
    with profile(model) as p:
        model(torch.randn(ROWS, SIZE)).backward()
    rows = rows_of(p.report)
    assert rows["layers"].forward_s == 0.0  # a list is never called
    for name, row in rows.items():
        assert row.forward_s <= rows[""].forward_s < p.report.seconds
        assert row.forward_s > 0.0 or name == "layers"
    assert p.report.flops_per_second == pytest.approx(19 * LINEAR / p.report.seconds)


def a_report() -> FlopsReport:
    return FlopsReport(
        (
            FlopsRow(0, "", "Net", 2_500_000, 3 * 10**9, 6 * 10**9, 0.030, 1.0),
            FlopsRow(1, "a", "Linear", 1000, 10**9, 2 * 10**9, 0.010, 1 / 3),
            FlopsRow(1, "b", "Block", 2000, 2 * 10**9, 4 * 10**9, 0.020, 2 / 3),
            FlopsRow(2, "b.c", "Linear", 2000, 2 * 10**9, 4 * 10**9, 0.015, 2 / 3),
        ),
        seconds=0.1,
    )


def test_the_text_of_a_report() -> None:
    assert a_report().text() == (
        "model     Net, 2.50 M parameters\n"
        "forward   3.00 GFLOP in 30.00 ms\n"
        "backward  6.00 GFLOP (counted)\n"
        "total     9.00 GFLOP\n"
        "achieved  90.00 GFLOPS over 100.00 ms, counting included\n"
        "\n"
        "classes with the most FLOPs at each depth\n"
        "  0: Net 9.00 GFLOP 100.0%\n"
        "  1: Block 6.00 GFLOP 66.7%\n"
        "  2: Linear 6.00 GFLOP 66.7%\n"
        "\n"
        "module   class   params  forward FLOP  backward FLOP  forward ms   share\n"
        "(model)  Net     2.50 M        3.00 G         6.00 G       30.00  100.0%\n"
        "  a      Linear  1.00 k        1.00 G         2.00 G       10.00   33.3%\n"
        "  b      Block   2.00 k        2.00 G         4.00 G       20.00   66.7%\n"
        "    c    Linear  2.00 k        2.00 G         4.00 G       15.00   66.7%\n"
    )


def test_the_options_of_the_text() -> None:
    report = a_report()
    assert "Block 6.00 GFLOP 66.7%, Linear 3.00 GFLOP 33.3%" in report.text(top_modules=2)
    assert "  2:" not in report.text(module_depth=1)
    assert "    c " not in report.text(module_depth=1)
    assert "(model)" not in report.text(detailed=False)


def test_a_report_goes_to_a_file_or_to_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_report().write(tmp_path / "flops.txt", module_depth=1)
    assert (tmp_path / "flops.txt").read_text() == a_report().text(module_depth=1)
    a_report().write()
    assert capsys.readouterr().out == a_report().text()


def test_a_model_that_was_not_run_has_a_report() -> None:
    with profile(nn.Linear(2, 2)) as p:
        pass
    assert p.report.flops_per_second == 0.0
    assert "0 FLOP" in p.report.text()


def test_prefixes() -> None:
    assert [si(value) for value in (0, 999, 1000, 12_345_678, 5e12)] == ["0 ", "999 ", "1.00 k", "12.35 M", "5.00 T"]
