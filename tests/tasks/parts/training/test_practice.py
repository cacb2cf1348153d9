"""Optimizers, schedules, averages, losses, cadence and memory of a training."""

import csv
import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.core.errors import ConfigError
from tasks.parts.data.dataset import read_manifest
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.foreign import ForeignNetwork
from tasks.parts.training.activations import save_activation_memory
from tasks.parts.training.config import (
    LossConfig,
    MemoryFormat,
    Optimizer,
    PixelLoss,
    Schedule,
    TrainerConfig,
    TrainingReport,
)
from tasks.parts.training.loop import train_network
from tasks.parts.training.losses import (
    LabelLoss,
    build_label_loss,
    channel_wise_loss,
    dice_loss,
    focal_loss,
    hardest_pixels_loss,
    segmentation_loss,
)
from tasks.parts.training.module import Batch, LabelObjective
from tasks.parts.training.optimization import (
    build_schedule,
    moving_average,
    parameter_groups,
    rest_frozen_layers,
)
from tasks.parts.training.split_dataset import SplitDataset
from tasks.parts.training.worker_count import measure_num_workers
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import PLAIN, STUDENT, TRAINER

LAYERS = (nn.Linear, nn.Conv2d)
EMA = replace(TRAINER, ema_decay=0.9)
PRACTICES: dict[str, TrainerConfig] = {
    "sgd, poly, accumulation": replace(
        TRAINER, optimizer=Optimizer.sgd, schedule=Schedule.poly, accumulate=2
    ),
    "sgd, cosine, clipping": replace(
        TRAINER, optimizer=Optimizer.sgd, schedule=Schedule.cosine, clip_norm=0.1
    ),
    "average, accumulation": replace(EMA, accumulate=2),
    "average, cosine, rates": replace(
        EMA, schedule=Schedule.cosine, layer_rates={"downsample": 0.0, "context": 0.1}
    ),
    "average, seldom validated": replace(EMA, validate_every_epochs=2, max_epochs=3),
    "focal, dice, max_steps": replace(
        TRAINER, loss=replace(PLAIN, pixel=PixelLoss.focal, dice_weight=1.0), max_epochs=3, max_steps=5
    ),
    "ohem, recomputed": replace(
        TRAINER, loss=replace(PLAIN, pixel=PixelLoss.ohem), activation_checkpoints=["*"]
    ),
}


class StopsAt(LabelObjective):
    """Ends the training at a step, as a killed process does."""

    def __init__(self, label_loss: LabelLoss, step: int) -> None:
        super().__init__(label_loss)
        self.steps_left = step

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        self.steps_left -= 1
        if self.steps_left == 0:
            raise InterruptedError
        return super().forward(network, batch)


def fit(
    workshop: Workshop, out: Path, config: TrainerConfig, *, stop_at: int = 0
) -> tuple[dict[str, Tensor], TrainingReport]:
    """Train the student, two steps of four images an epoch, and return its weights and the report."""
    torch.manual_seed(0)
    network = build_network(STUDENT, 3)
    out.mkdir(exist_ok=True)
    objective = StopsAt(build_label_loss(config, read_manifest(workshop.data)), stop_at)
    report = train_network(network, objective, data=workshop.data, config=config, out=out)
    return network.state_dict(), report


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", PRACTICES)
def test_ended_training_resumes_and_gives_the_same_weights(
    workshop: Workshop, tmp_path: Path, name: str
) -> None:
    config = PRACTICES[name]
    whole, report = fit(workshop, tmp_path / "whole", config)
    with pytest.raises(InterruptedError):
        fit(workshop, tmp_path / "parts", config, stop_at=2 * (config.max_epochs - 1) + 1)
    assert (tmp_path / "parts/resume/last.ckpt").exists()
    resumed, resumed_report = fit(workshop, tmp_path / "parts", config)
    assert resumed_report == report
    assert [key for key, value in whole.items() if not torch.equal(resumed[key], value)] == []


def test_every_practice_gives_other_weights(workshop: Workshop, tmp_path: Path) -> None:
    """No option is without effect: each changes the classifier that the plain training gives."""
    changes: dict[str, dict[str, Any]] = {
        "plain": {},
        "sgd": {"optimizer": Optimizer.sgd},
        "momentum": {"optimizer": Optimizer.sgd, "momentum": 0.1},
        "cosine": {"schedule": Schedule.cosine},
        "poly": {"schedule": Schedule.poly},
        "warm-up": {"warm_up_share": 0.5},
        "clipping": {"clip_norm": 0.01, "optimizer": Optimizer.sgd},
        "accumulation": {"accumulate": 2},
        "average": {"ema_decay": 0.9},
        "rates": {"layer_rates": {"classifier": 0.1}},
        "steps": {"max_steps": 3},
        "ohem": {"loss": replace(PLAIN, pixel=PixelLoss.ohem)},
        "focal": {"loss": replace(PLAIN, pixel=PixelLoss.focal)},
        "dice": {"loss": replace(PLAIN, dice_weight=1.0)},
        "class weights": {"loss": replace(PLAIN, class_weights=[1.0, 2.0, 9.0])},
    }
    found = []
    for name, change in changes.items():
        fit(workshop, tmp_path / name, replace(TRAINER, **change))
        last = torch.load(tmp_path / name / "resume/last.ckpt", weights_only=True)
        found.append(last["state_dict"]["network.classifier.weight"])
    names = list(changes)
    for n, weight in enumerate(found):
        assert [names[m] for m in range(n) if torch.equal(found[m], weight)] == [], names[n]


def test_frozen_layers_keep_weights_and_statistics(workshop: Workshop, tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = build_network(STUDENT, 3).state_dict()
    after, _ = fit(workshop, tmp_path / "a", replace(TRAINER, layer_rates={"downsample": 0.0}))
    changed = {name.split(".")[0] for name, value in before.items() if not torch.equal(after[name], value)}
    assert "downsample" not in changed and {"context", "classifier"} <= changed


def test_rates_belong_to_the_longest_name() -> None:
    network, rates = build_network(STUDENT, 3), {"context": 0.1, "context.0": 0.0}
    groups = parameter_groups(network, nn.Identity(), replace(TRAINER, layer_rates=rates))
    full, tenth = ([group for group in groups if group["lr"] == rate * groups[0]["lr"]] for rate in (1, 0.1))
    assert [len(full), len(tenth), len(groups)] == [2, 2, 4]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    assert {names[id(p)].split(".")[0] for group in tenth for p in group["params"]} == {"context"}
    assert not any(names[id(p)].startswith("context.") for group in full for p in group["params"])
    assert not any(p.requires_grad for name, p in network.named_parameters() if name.startswith("context.0."))


def test_names_in_a_network_of_the_users_own_are_its_own() -> None:
    """And what stays in eval mode without its auxiliary layers stays so beside frozen ones."""
    inner = nn.Sequential(
        OrderedDict(stem=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4), head=nn.Conv2d(4, 3, 1))
    )
    network = ForeignNetwork(inner).train()
    inner.training = False
    rates = {"norm": 0.0, "head": 0.5}
    groups = parameter_groups(network, nn.Identity(), replace(TRAINER, layer_rates=rates))
    assert [len(group["params"]) for group in groups] == [1, 1, 1, 1]  # weight and bias of two layers
    rest_frozen_layers(network, rates)
    modes = {name: module.training for name, module in inner.named_modules()}
    assert modes == {"": False, "stem": True, "norm": False, "head": True}
    save_activation_memory(network, ["head"], [])
    assert "forward" in vars(inner.get_submodule("head"))


def test_norms_biases_positions_and_tokens_do_not_decay_c5() -> None:
    """Swin's table and tokens as timm names them; the others as our networks do."""
    names = ("deeplabv3plus", "dinov2")
    networks = [build_network(NetworkConfig(NetworkName(name), 0.17, 0.1, False), 3) for name in names]
    swin = nn.Module()
    swin.relative_position_bias_table = nn.Parameter(torch.ones(9, 2))
    swin.pos_embed = nn.Parameter(torch.ones(1, 4, 2))
    swin.cls_token = nn.Parameter(torch.ones(1, 1, 2))
    swin.patch_embed = nn.Linear(2, 2)
    swin.classifier = nn.Linear(2, 2)
    decayed, kept = [], []
    for network in (*networks, swin):
        layers = {f"{name}.weight" for name, layer in network.named_modules() if isinstance(layer, LAYERS)}
        found = {id(parameter): name for name, parameter in network.named_parameters()}
        for group in parameter_groups(network, nn.Identity(), replace(TRAINER, weight_decay=0.3)):
            (decayed if group["weight_decay"] == 0.3 else kept).extend(found[id(p)] for p in group["params"])
            assert group["weight_decay"] in (0.3, 0.0)
        assert layers == {name for name in found.values() if name in decayed}
    assert {"dinov2.embeddings.position_embeddings", "dinov2.embeddings.cls_token", "pos_embed"} < {*kept}
    assert {"relative_position_bias_table", "classifier.bias", "stem.0.norm.weight"} < {*kept}


class NoLoss(nn.Module):
    """Leaves weight decay alone to move parameters."""

    needs_labels = False

    def forward(self, network: nn.Module, _: Batch) -> Tensor:
        """Return 0."""
        return 0.0 * torch.cat([parameter.flatten() for parameter in network.parameters()]).sum()


@pytest.mark.parametrize("optimizer", Optimizer)
def test_decay_moves_weights_of_layers_alone_c5(
    workshop: Workshop, tmp_path: Path, optimizer: Optimizer
) -> None:
    network = build_network(STUDENT, 3)
    before = {name: value.detach().clone() for name, value in network.named_parameters()}
    config = replace(TRAINER, optimizer=optimizer, weight_decay=0.5, max_epochs=1)
    train_network(network, NoLoss(), data=workshop.data, config=config, out=tmp_path)
    moved = {name for name, value in network.named_parameters() if not torch.equal(before[name], value)}
    assert moved == {name for name, value in before.items() if value.ndim > 1}


def test_names_of_layers_that_do_not_exist_are_refused() -> None:
    network = build_network(STUDENT, 3)
    with pytest.raises(ConfigError, match=r"layer_rates names 'spine', .*Choose from: .*classifier"):
        parameter_groups(network, nn.Identity(), replace(TRAINER, layer_rates={"spine": 0.1}))
    with pytest.raises(ConfigError, match=r"layer_rates is 0 for the whole network"):
        children = {name: 0.0 for name, _ in network.named_children()}
        parameter_groups(network, nn.Identity(), replace(TRAINER, layer_rates=children))
    with pytest.raises(ConfigError, match=r"activation_checkpoints names 'spine\.\*', which fits no module"):
        save_activation_memory(network, ["spine.*"], [])


@pytest.mark.parametrize("schedule", Schedule)
def test_schedules_rise_to_the_peak_and_fall(schedule: Schedule) -> None:
    config = replace(TRAINER, schedule=schedule, warm_up_share=0.2, learning_rate=0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    steps = build_schedule(optimizer, config, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        steps.step()
    peak = max(range(100), key=rates.__getitem__)
    assert 18 <= peak <= 21 and rates[peak] == pytest.approx(0.5, rel=0.01)
    assert rates[:peak] == sorted(rates[:peak]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] < 0.05 and rates[-1] < 0.02
    if schedule is Schedule.poly:
        assert rates[60] == pytest.approx(0.5 * (1 - 40 / 80) ** 0.9)


def test_the_average_is_that_of_the_formula() -> None:
    average, mean = moving_average(0.5), torch.tensor(0.0)
    for step, value in enumerate((1.0, 2.0, 3.0), start=1):
        mean = average(mean, torch.tensor(value), step)
    decays = [2 / 11, 3 / 12, 4 / 13]
    expected = 0.0
    for decay, value in zip(decays, (1.0, 2.0, 3.0), strict=True):
        expected = decay * expected + (1 - decay) * value
    assert float(mean) == pytest.approx(expected)
    assert float(average(torch.tensor(0.0), torch.tensor(1.0), 10**6)) == pytest.approx(0.5)
    assert average(torch.tensor(3), torch.tensor(7), 1) == 7


def test_what_is_judged_is_the_average_that_is_kept(workshop: Workshop, tmp_path: Path) -> None:
    from tasks.parts.networks.model_card import ModelCard
    from tasks.parts.pruning.recovery import measure_val_score

    manifest = read_manifest(workshop.data)
    config = replace(EMA, max_epochs=4, learning_rate=0.01)
    torch.manual_seed(0)
    network = build_network(STUDENT, 3)
    objective = LabelObjective(build_label_loss(config, manifest))
    report = train_network(network, objective, data=workshop.data, config=config, out=tmp_path)
    card = ModelCard(STUDENT, manifest.classes, manifest.mean, manifest.std, manifest.height, manifest.width)
    assert measure_val_score(network, card, workshop.data, 4) == pytest.approx(report.val_score, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "epochs"),
    [
        ({"validate_every_epochs": 2, "max_epochs": 5}, ["2", "4", "5"]),
        ({"validate_every_epochs": 9, "max_epochs": 2}, ["2"]),
        ({"max_steps": 3, "max_epochs": 5}, ["1", "2"]),
        ({"max_steps": 4, "max_epochs": 5, "validate_every_epochs": 3}, ["2"]),
        ({"max_steps": 1, "accumulate": 2}, ["1"]),
    ],
)
def test_validated_epochs(
    workshop: Workshop, tmp_path: Path, changes: dict[str, Any], epochs: list[str]
) -> None:
    _, report = fit(workshop, tmp_path / "a", replace(TRAINER, **changes))
    assert [row["epoch"] for row in rows_of(tmp_path / "a")] == epochs
    assert report.num_epochs == int(epochs[-1])


def test_finished_training_of_so_many_steps_is_not_continued(workshop: Workshop, tmp_path: Path) -> None:
    config = replace(TRAINER, max_steps=3, max_epochs=5)
    first = fit(workshop, tmp_path / "a", config)
    second = fit(workshop, tmp_path / "a", config)
    assert second[1] == first[1]
    assert all(torch.equal(second[0][name], value) for name, value in first[0].items())


def masks_and_logits() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    masks_NHW = torch.randint(0, 3, (2, 8, 8))
    masks_NHW[0, :2] = 255
    return masks_NHW, torch.randn(2, 3, 8, 8, requires_grad=True)


def test_losses_of_pixels_agree_with_the_cross_entropy_at_their_limits() -> None:
    masks_NHW, logits_NCHW = masks_and_logits()
    weights_C = torch.tensor([1.0, 2.0, 0.5])
    plain = segmentation_loss(logits_NCHW, masks_NHW, weights_C)
    torch.testing.assert_close(hardest_pixels_loss(logits_NCHW, masks_NHW, weights_C, share=1.0), plain)
    torch.testing.assert_close(focal_loss(logits_NCHW, masks_NHW, weights_C, gamma=0.0), plain)


def test_focal_loss_is_that_of_the_formula() -> None:
    masks_NHW, logits_NCHW = masks_and_logits()
    is_labelled = masks_NHW != 255
    p = logits_NCHW.softmax(1).gather(1, masks_NHW.clamp(max=2).unsqueeze(1))[:, 0][is_labelled]
    torch.testing.assert_close(
        focal_loss(logits_NCHW, masks_NHW, gamma=2.0), (-((1 - p) ** 2) * p.log()).mean()
    )


def test_the_hardest_pixels_alone_have_gradients() -> None:
    masks_NHW, logits_NCHW = masks_and_logits()
    hardest_pixels_loss(logits_NCHW, masks_NHW, share=0.25).backward()
    losses_NHW = F.cross_entropy(logits_NCHW, masks_NHW, ignore_index=255, reduction="none")
    has_gradient_NHW = logits_NCHW.grad.abs().sum(1) > 0
    assert int(has_gradient_NHW.sum()) == int(0.25 * int((masks_NHW != 255).sum()))
    assert losses_NHW[has_gradient_NHW].min() >= losses_NHW[~has_gradient_NHW].max()


def test_dice_loss_is_that_of_the_formula_and_of_classes_that_are_there() -> None:
    masks_NHW, logits_NCHW = masks_and_logits()
    is_labelled = masks_NHW != 255
    p_CP = logits_NCHW.softmax(1).movedim(1, 0)[:, is_labelled]
    g_CP = F.one_hot(masks_NHW[is_labelled], 3).T.float()
    dice_C = 2 * (p_CP * g_CP).sum(1) / (p_CP.square().sum(1) + g_CP.square().sum(1))
    torch.testing.assert_close(dice_loss(logits_NCHW, masks_NHW), 1 - dice_C.mean())
    only_one = torch.where(is_labelled, torch.ones_like(masks_NHW), masks_NHW)
    p_P = p_CP[1]
    expected = 1 - 2 * p_P.sum() / (p_P.square().sum() + len(p_P))
    torch.testing.assert_close(dice_loss(logits_NCHW, only_one), expected)


@pytest.mark.parametrize("pixel", PixelLoss)
def test_a_batch_without_labels_costs_nothing(pixel: PixelLoss) -> None:
    logits_NCHW = torch.randn(2, 3, 4, 4, requires_grad=True)
    config = LossConfig(pixel, 0.25, 2.0, 1.0, 0.4, None)
    loss = LabelLoss(config, torch.ones(3))([logits_NCHW], torch.full((2, 4, 4), 255))
    loss.backward()
    assert loss.item() == 0 and torch.isfinite(logits_NCHW.grad).all()


def test_weights_for_other_classes_are_refused(workshop: Workshop) -> None:
    config = replace(TRAINER, loss=replace(PLAIN, class_weights=[1.0, 2.0]))
    with pytest.raises(ConfigError, match=r"has 2 weights, expected one for each of the 3 classes: "):
        build_label_loss(config, read_manifest(workshop.data))


def test_channel_wise_loss_of_bfloat16_is_computed_in_float32() -> None:
    torch.manual_seed(0)
    student, teacher = (torch.randn(2, 5, 64, 64).bfloat16() for _ in range(2))
    expected = channel_wise_loss(student.float(), teacher.float(), 4.0)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(channel_wise_loss(student, teacher, 4.0), expected)


def test_recomputed_activations_change_no_gradient_and_no_statistic() -> None:
    torch.manual_seed(0)
    plain = build_network(STUDENT, 3).train()
    frugal = build_network(STUDENT, 3).train()
    frugal.load_state_dict(plain.state_dict())
    save_activation_memory(frugal, ["context*", "downsample"], [])
    assert {name for name, module in frugal.named_modules() if "forward" in vars(module)} == {
        "context",
        "downsample",
    }
    images_NCHW = torch.randn(2, 3, 64, 64)
    for network in (plain, frugal):
        network(images_NCHW).square().mean().backward()
    for (name, one), two in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad), name
    for (name, one), two in zip(plain.named_buffers(), frugal.buffers(), strict=True):
        assert torch.equal(one, two), name


def test_modules_of_a_list_are_recomputed_one_by_one() -> None:
    network = build_network(NetworkConfig(NetworkName.mobile_unet, 0.5, 1.0, depthwise=False), 3).train()
    save_activation_memory(network, ["*"], [])
    recomputed = {name for name, module in network.named_modules() if "forward" in vars(module)}
    assert {"stem", "encoder.0", "encoder.4", "decoder.0", "decoder.3", "classifier"} <= recomputed
    assert not {"encoder", "decoder", "encoder.1.0"} & recomputed


def test_memory_format_changes_rounding_only(workshop: Workshop, tmp_path: Path) -> None:
    one_epoch = replace(TRAINER, max_epochs=1, learning_rate=1e-4)
    found = [
        fit(workshop, tmp_path / name, replace(one_epoch, memory_format=name))[0] for name in MemoryFormat
    ]
    for name, value in found[0].items():
        torch.testing.assert_close(found[2][name], value, rtol=0.02, atol=1e-3, msg=name)
        assert torch.equal(found[1][name], value)  # auto is channels_last for our own networks


def test_num_workers_follows_loading_and_step(workshop: Workshop) -> None:
    images = SplitDataset(workshop.data, "train", read_manifest(workshop.data))
    waits = {"fast": 0.0, "slow": 0.2}
    found = {
        name: measure_num_workers(images, batch_size=4, num_ranks=1, run_forward=partial(time.sleep, wait))
        for name, wait in waits.items()
    }
    assert found["slow"] == 0  # loading takes nothing of such a step
    assert found["fast"] >= 1  # a step that takes no time always waits; this machine has two cores at least
