# SPDX-License-Identifier: Apache-2.0
"""`twinflow import`: every stage and number of ranks gives back what was saved, and nothing pickled is run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files_support import BETAS, DECAY, EPS, LR, Net, groups_of, import_damaged, tokens, train, trained, write
from twin_support import quick_torch
from typer.testing import CliRunner

import twinflow
from twinflow.checkpoint import importing, open_checkpoint
from twinflow.checkpoint.deepspeed_files import Values
from twinflow.checkpoint.importing import import_deepspeed
from twinflow.cli.main import app
from twinflow.engine import Engine

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "ranks": 1},
    "stage 0, bf16": {"stage": 0, "ranks": 1, "dtype": torch.bfloat16},
    "stage 1": {"stage": 1, "ranks": 2},
    "stage 2, one rank": {"stage": 2, "ranks": 1},
    "stage 2": {"stage": 2, "ranks": 3, "dtype": torch.bfloat16, "prefix": "bf16_"},
    "more ranks than values": {"stage": 2, "ranks": 40, "split": True},
    "groups, shuffled, aligned": {"stage": 2, "ranks": 2, "split": True, "shuffled": True, "align": 3},
    "elastic": {"stage": 1, "ranks": 2, "elastic": True},
    "stage 3, one rank": {"stage": 3, "ranks": 1},
    "stage 3": {"stage": 3, "ranks": 4, "dtype": torch.bfloat16, "prefix": "bf16_"},
    "stage 3, groups": {"stage": 3, "ranks": 3, "split": True},
}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick_torch():
        yield


def build(split: bool, **changes: Any) -> Engine:
    torch.manual_seed(1)  # other weights than those that were saved
    model = Net()
    params = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **changes,
    }
    return twinflow.initialize(model=model, model_parameters=groups_of(model, split), config=config)[0]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on(case: str, tmp_path: Path) -> None:
    how = dict(CASES[case])
    split = how.pop("split", False)
    model, optimizer = trained(split=split)
    done = import_deepspeed(write(tmp_path / "ds", model, optimizer, **how), tmp_path / "out")
    assert (done.stage, done.rule, done.num_params, done.global_steps) == (how["stage"], "adamw", 7, 3)
    engine = build(split)
    path, client = engine.load_checkpoint(tmp_path / "out")
    assert path is not None
    assert client == {"epoch": 1, "best": float("inf")}
    assert (engine.global_steps, engine.global_samples) == (3, 6 * how["ranks"])
    saved = engine.optimizer.state_dict()
    wanted = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert set(saved["state"]) == set(wanted)
    for name, param in wanted.items():
        entry = saved["state"][name]
        assert torch.equal(entry["master"], param), name
        assert entry["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[key], optimizer.state[param][key]), (name, key)
    own = engine.module.state_dict()
    assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    losses = []
    for step in range(3, 7):
        loss = engine(tokens(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == pytest.approx(train(model, optimizer, range(3, 7)), rel=1e-5)
    engine.destroy()


def test_into_bf16_the_masters_keep_their_precision(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = write(tmp_path / "ds", model, optimizer, 3, 2, dtype=torch.bfloat16)
    import_deepspeed(source, tmp_path / "out")
    engine = build(False, bf16={"enabled": True})
    engine.load_checkpoint(tmp_path / "out")
    entry = engine.optimizer.state_dict()["state"]["a.weight"]
    assert torch.equal(entry["master"], model.a.weight)
    assert torch.equal(engine.module.state_dict()["a.weight"], model.a.weight.bfloat16())
    engine.destroy()


def test_loss_scale_and_scheduler(tmp_path: Path) -> None:
    model, optimizer = trained()
    scale = {
        "cur_scale": 1024.0,
        "dynamic": True,
        "cur_iter": 9,
        "last_overflow_iter": 4,
        "scale_factor": 2.0,
        "scale_window": 100,
        "min_scale": 1.0,
        "delayed_shift": 3,
        "cur_hysteresis": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": False,
        "dtype": torch.float16,
    }
    source = write(tmp_path / "ds", model, optimizer, 2, 2, scaler="DynamicLossScaler", scale=scale)
    import_deepspeed(source, tmp_path / "out")
    engine = build(
        False,
        fp16={"enabled": True},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 10}},
    )
    engine.load_checkpoint(tmp_path / "out")
    assert engine.loss_scale() == 1024.0
    assert engine.lr_scheduler.last_batch_iteration == 2
    saved = engine.optimizer.state_dict()["loss_scale"]
    assert (saved["window"], saved["hysteresis"], saved["hysteresis_left"], saved["iteration"]) == (100, 3, 2, 9)
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_more_than_one_parameter_is_read_at_a_time(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    source = write(tmp_path / "ds", model, optimizer, stage, 2)
    read: list[int] = []
    real = Values.read

    def load(self: Values) -> torch.Tensor:
        # All else is mapped, and not read before it is used (test_import_pickles.py).
        read.append(sum(part.numel() for part in self.parts))
        return real(self)

    monkeypatch.setattr(Values, "read", load)
    import_deepspeed(source, tmp_path / "out")
    assert max(read) <= max(param.numel() for param in model.parameters())


def test_client_state_is_kept_as_far_as_it_is_plain(tmp_path: Path) -> None:
    client = {"seen": torch.arange(3.0), "names": ("a", [1, 2.5]), "kinds": {1, 2}, "where": {"dtype": torch.float16}}
    source = write(tmp_path / "ds", *trained(), 1, 1, client=client)
    done = import_deepspeed(source, tmp_path / "out")
    assert [note.split(":")[0] for note in done.notes] == [
        "client state 'kinds' is not imported",
        "client state 'where' is not imported",
    ]
    engine = build(False)
    _, back = engine.load_checkpoint(tmp_path / "out")
    assert torch.equal(back.pop("seen"), client["seen"])
    assert back == {"names": ("a", [1, 2.5])}
    engine.destroy()


def test_the_command(tmp_path: Path) -> None:
    source = write(tmp_path / "ds", *trained(), 2, 2)
    run = CliRunner().invoke
    out = str(tmp_path / "out")
    result = run(app, ["import", str(source), out])
    assert result.exit_code == 0, result.output
    assert "stage 2, 2 rank(s), step 3, 7 parameters with adamw state" in result.output
    assert "exists" in run(app, ["import", str(source), out]).output
    assert run(app, ["import", str(source / "global_step3"), out, "--force", "--weights-only"]).exit_code == 0
    found = open_checkpoint(tmp_path / "out")
    assert found is not None
    assert "optimizer" not in found.meta
    result = run(app, ["import", str(source), str(tmp_path / "b"), "--rule", "lion"])
    assert result.exit_code == 1
    assert "exp_avg_sq" in result.output
    output = run(app, ["import", str(source), str(tmp_path / "b"), "--tag", "x"]).output
    assert "must be 'global_step3'. Pass one of these as tag, or no tag for the latest." in output


def damage(root: Path, glob: str, change: Callable[[bytes], bytes] | None) -> None:
    victim = sorted((root / "global_step3").glob(glob))[0]
    if change is None:
        victim.unlink()
    else:
        victim.write_bytes(change(victim.read_bytes()))


@pytest.mark.parametrize(
    ("glob", "change", "words"),
    [
        ("*rank_0*optim*", None, "missing for rank 0"),
        ("*rank_1*optim*", None, "saved by 2 ranks, but there are 1"),
        ("mp_rank*", None, "no DeepSpeed checkpoint"),
        ("mp_rank*", lambda raw: raw[:-9], "mp_rank_00_model_states.pt is not a file of torch.save, or is cut off"),
        ("*rank_1*optim*", lambda raw: b"", "rank_1.*not a file of torch.save"),
        ("*rank_1*optim*", lambda raw: raw.replace(b"single_partition_of", b"double_partition_of"), "rank_1.*list of"),
    ],
)
def test_missing_and_damaged_files_are_named(glob: str, change: Any, words: str, tmp_path: Path) -> None:
    source = write(tmp_path / "ds", *trained(), 2, 2)
    damage(source, glob, change)
    with pytest.raises(ValueError, match=words):
        import_deepspeed(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    other = write(tmp_path / "shapes", model, optimizer, 3, 2, changes={"fp32_flat_groups": [torch.zeros(9)]})
    words = r"emb\.weight ends at value 18, but the files have only 9 values\. The files are damaged or belong"
    with pytest.raises(ValueError, match=words):
        import_deepspeed(other, tmp_path / "out")
    for name, words in (("zero", "universal"), ("mp_rank_01_model_states.pt", "tensor parallel")):
        source = write(tmp_path / name, model, optimizer, 2, 1)
        (source / "global_step3" / name).write_bytes(b"")
        with pytest.raises(ValueError, match=words):
            import_deepspeed(source, tmp_path / "out")
    split = write(tmp_path / "split", *trained(split=True), 0, 1)
    with pytest.raises(ValueError, match="--weights-only"):
        import_deepspeed(split, tmp_path / "out")
    assert import_deepspeed(split, tmp_path / "out", weights_only=True).rule is None
    with pytest.raises(ValueError, match="an existing folder"):
        import_deepspeed(tmp_path / "nowhere", tmp_path / "out")


def test_stage_0_with_one_flat_master(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    values = {name: torch.randn(8) for name in ("exp_avg", "exp_avg_sq")}
    flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    group = {"lr": 0.5, "betas": (0.9, 0.99), "step": 6, "params": [0]}
    optimizer = {"state": {0: values}, "param_groups": [group]}
    scale = {"dynamic_loss_scale": True, "cur_scale": 2.0**12, "cur_iter": 8, "last_overflow_iter": 5}
    head = {
        "module": model.half().state_dict(),
        "buffer_names": [],
        "optimizer": {"optimizer_state_dict": optimizer, "fp32_groups_flat": [flat], **scale},
        "global_steps": 8,
        "skipped_steps": 2,
    }
    folder = tmp_path / "ds" / "last"
    folder.mkdir(parents=True)
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    assert import_deepspeed(folder, tmp_path / "out").rule == "adamw"
    found = open_checkpoint(tmp_path / "out", "last")
    assert found is not None
    assert torch.equal(found.tensor("optimizer", "weight/master").view(-1), flat[:6])
    assert torch.equal(found.tensor("optimizer", "bias/exp_avg_sq"), values["exp_avg_sq"][6:])
    assert found.meta["optimizer_state"]["bias"]["step"] == 6
    assert found.meta["optimizer"]["loss_scale"]["scale"] == 4096
    assert found.meta["optimizer"]["num_skipped"] == 2


def test_steps_of_fused_adam(tmp_path: Path) -> None:
    """DeepSpeed's FusedAdam counts only the steps of the last parameter of a group, whose key "step" stays 0."""
    model, optimizer = trained()
    source = write(tmp_path / "ds", model, optimizer, 0, 1)
    path = source / "global_step3" / "mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=True)
    saved["optimizer"]["param_groups"][0]["step"] = 0
    for at, entry in saved["optimizer"]["state"].items():
        entry["step"] = 3 if at == max(saved["optimizer"]["state"]) else 0
    torch.save(saved, path)
    import_deepspeed(source, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert found is not None
    assert {entry["step"] for entry in found.meta["optimizer_state"].values()} == {3}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_damage_ends_in_anything_but_a_named_error(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "save", lambda root, *_, **__: root)  # writing is not what can go wrong here
    source = write(tmp_path / "ds", *trained(), stage, 2)
    generator = random.Random(stage)
    for path in sorted((source / "global_step3").iterdir())[:2]:
        import_damaged(source, path, 120, generator, tmp_path / "out")


def test_it_agrees_with_deepspeeds_own_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    script = pytest.importorskip("deepspeed.utils.zero_to_fp32", exc_type=ImportError)
    for at, how in enumerate(case for case in CASES.values() if case["stage"] and case["ranks"] < 40):
        how = dict(how)
        source = write(tmp_path / f"ds{at}", *trained(split=how.pop("split", False)), **how)
        import_deepspeed(source, tmp_path / f"out{at}")
        found = open_checkpoint(tmp_path / f"out{at}")
        assert found is not None
        for name, value in script.get_fp32_state_dict_from_zero_checkpoint(str(source)).items():
            own = found.tensor("model", found.meta["aliases"].get(name, name))
            assert torch.equal(own.float(), value.contiguous().float()), name
