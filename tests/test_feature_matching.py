"""The student's two projections, the whitened targets, and what the score says of them."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jumbo_vit.data.pipeline import Preparation
from jumbo_vit.errors import UserError
from jumbo_vit.folder import make_model
from jumbo_vit.tasks.build import make_optimizer
from jumbo_vit.tasks.classify import Mixing
from jumbo_vit.tasks.config import TrainConfig
from jumbo_vit.tasks.feature_matching import (
    BETA,
    FeatureLearner,
    FeatureMatching,
    FeatureScore,
    aligned,
    collapse,
    encode,
    matching,
    whitened,
)
from jumbo_vit.tasks.learner import encoder_weights
from jumbo_vit.teachers import Features, Teacher
from tests.pictures import TEST_MODEL

PREPARATION = Preparation((3, 32, 32))


def learner(name: str = TEST_MODEL, **kwargs: Any) -> FeatureLearner:
    return FeatureLearner(make_model(name, num_classes=0, **kwargs), PREPARATION, 7, 5, 0)


def outputs_and_target(
    pictures: int = 3, grid: tuple[int, int] = (2, 3)
) -> tuple[tuple[Tensor, Tensor, Tensor], Features]:
    torch.manual_seed(1)
    outputs = (torch.randn(pictures, 7), torch.randn(pictures, 5, *grid), torch.randn(pictures, 11))
    return outputs, Features(3 * torch.randn(pictures, 7) + 2, torch.randn(pictures, 5, *grid))


# Targets and losses


def test_targets_have_mean_0_and_variance_1() -> None:
    features = 5 * torch.randn(4, 6, 64) + 3
    found = whitened(features)
    deviation = features - features.mean(-1, keepdim=True)
    expected = deviation / features.var(-1, keepdim=True, correction=0).sqrt()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert whitened(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_losses_are_those_of_the_equations() -> None:
    outputs, target = outputs_and_target()
    vector, patches, vector_cosine, patch_cosine = matching(outputs, target)

    def smooth(x: float) -> float:
        return x * x / (2 * BETA) if abs(x) < BETA else abs(x) - BETA / 2

    for b in range(3):
        goal = whitened(target.vector[b])
        expected = sum(smooth(float(d)) for d in outputs[0][b] - goal) / 7
        assert float(vector[b]) == pytest.approx(expected, abs=1e-5)
        cosine = torch.dot(outputs[0][b], goal) / outputs[0][b].norm() / goal.norm()
        assert float(vector_cosine[b]) == pytest.approx(float(cosine), abs=1e-5)
        each, cosines = 0.0, 0.0
        for r in range(2):
            for c in range(3):
                seen, goal = outputs[1][b, :, r, c], whitened(target.patches[b, :, r, c])
                each += sum(smooth(float(d)) for d in seen - goal)
                cosines += float(torch.dot(seen, goal) / seen.norm() / goal.norm())
        assert float(patches[b]) == pytest.approx(each / 30, abs=1e-5)
        assert float(patch_cosine[b]) == pytest.approx(cosines / 6, abs=1e-5)


def test_what_is_foretold_rightly_costs_nothing() -> None:
    _, target = outputs_and_target()
    right = whitened(target.patches.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    losses = matching((whitened(target.vector), right, torch.ones(3, 2)), target)
    for found, expected in zip(losses, (0, 0, 1, 1), strict=True):
        torch.testing.assert_close(found, torch.full((3,), float(expected)), atol=1e-5, rtol=0)


def test_a_teachers_grid_is_resampled_to_the_students() -> None:
    # Columns rise from left to right, so a swapped axis or a wrong order would show.
    ramp = torch.arange(8.0).expand(6, 8)
    patches = torch.stack([ramp, torch.zeros(6, 8), -ramp])[None]
    found = aligned(patches, (3, 4)).unflatten(1, (3, 4))
    assert found.shape == (1, 3, 4, 3)
    torch.testing.assert_close(found[:, 0], found[:, 2])  # rows are alike
    unwhitened = nn.functional.interpolate(patches, (3, 4), mode="bilinear", antialias=True)
    assert (unwhitened[0, 0, 0].diff() > 1).all()
    same = aligned(patches, (6, 8))
    torch.testing.assert_close(same, whitened(patches.permute(0, 2, 3, 1)).flatten(1, 2))


# The student


@pytest.mark.parametrize(
    ("name", "kwargs", "width"),
    [
        (TEST_MODEL, {}, None),
        (TEST_MODEL, {"reg_tokens": 2, "num_jumbo": 3}, 3),
        ("vit_test_patch8_cls_32", {}, 1),
        ("vit_test_patch8_reg16_32", {}, 17),
        (TEST_MODEL, {"global_pool": "map"}, 1),
        ("test_vit3", {"img_size": 32}, 1),
        ("test_efficientnet", {}, None),
    ],
)
def test_global_vector_and_patches_of_a_student(name: str, kwargs: dict[str, Any], width: int | None) -> None:
    model: Any = make_model(name, num_classes=0, **kwargs).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        vector, patches = encode(model, images)
        tokens = model.forward_features(images)
    if tokens.ndim == 4:
        torch.testing.assert_close(patches, tokens)
        torch.testing.assert_close(vector, tokens.mean((2, 3)))
        return
    prefix = model.num_prefix_tokens
    width = model.num_jumbo if width is None else width
    assert vector.shape == (2, width * model.embed_dim)
    if kwargs.get("global_pool") != "map" and name != "test_vit3":
        torch.testing.assert_close(vector, tokens[:, :width].flatten(1))
    rows, columns = patches.shape[2:]
    assert rows * columns == tokens.shape[1] - prefix
    for r, c in ((0, 0), (1, 0), (rows - 1, columns - 2)):
        torch.testing.assert_close(patches[:, :, r, c], tokens[:, prefix + r * columns + c])


def test_patches_of_a_picture_that_is_not_square_keep_their_places() -> None:
    model: Any = make_model(TEST_MODEL, num_classes=0, img_size=(16, 48)).eval()
    images = torch.randn(1, 3, 16, 48)
    with torch.no_grad():
        _, patches = encode(model, images)
        tokens = model.forward_features(images)[:, model.num_prefix_tokens :]
    assert patches.shape[2:] == (2, 6)
    torch.testing.assert_close(patches[0, :, 1, 2], tokens[0, 8])


def test_a_model_without_patches_is_refused() -> None:
    class Flat(nn.Module):
        def forward_features(self, images: Tensor) -> Tensor:
            return images.flatten(1)

    with pytest.raises(UserError, match="neither patch tokens nor a map"):
        encode(Flat(), torch.zeros(1, 3, 32, 32))


def test_the_seed_decides_the_projections_and_the_encoder_stays_as_it_was() -> None:
    model = make_model(TEST_MODEL, num_classes=0)
    before = copy.deepcopy(model.state_dict())
    first, again, other = (FeatureLearner(model, PREPARATION, 7, 5, seed) for seed in (0, 0, 1))
    assert torch.equal(first.to_vector.weight, again.to_vector.weight)
    assert not torch.equal(first.to_vector.weight, other.to_vector.weight)
    kept = encoder_weights(first.state_dict())
    assert kept.keys() == before.keys() and all(torch.equal(kept[name], before[name]) for name in kept)
    assert model.training


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("name", [TEST_MODEL, "vit_test_patch8_cls_32", "test_efficientnet"])
def test_decay_of_weights_and_layers_is_the_encoders_own(name: str, layer_decay: float) -> None:
    encoder = make_model(name, num_classes=0)
    config = TrainConfig(opt="sgd", lr=1.0, weight_decay=0.1, layer_decay=layer_decay)

    def settings(model: nn.Module) -> dict[str, tuple[float, float]]:
        names = {id(parameter): key for key, parameter in model.named_parameters()}
        groups = make_optimizer(model, config).param_groups
        return {names[id(p)]: (g["weight_decay"], g.get("lr_scale", 1.0)) for g in groups for p in g["params"]}

    alone = settings(encoder)
    found = settings(FeatureLearner(encoder, PREPARATION, 7, 5, 0))
    assert found["to_vector.weight"] == (0.1, 1.0) and found["to_patches.bias"] == (0.0, 1.0)
    for key, (decay, scale) in alone.items():
        # A head would be the top layer of the encoder; here the projections are above all that it has.
        assert found[f"encoder.{key}"] == (decay, pytest.approx(scale * layer_decay))


# The objective


def objective(patch_weight: float = 1.0, mixing: Mixing | None = None) -> FeatureMatching:
    torch.manual_seed(3)
    model = make_model("vit_test_patch8_cls_32", num_classes=0).eval().requires_grad_(False)
    teacher = Teacher("made here", model, PREPARATION, torch.device("cpu"))
    return FeatureMatching(teacher, PREPARATION, patch_weight, mixing or Mixing())


def test_the_teacher_sees_the_mixed_picture_of_the_student() -> None:
    method = objective(mixing=Mixing(mixup=1.0))
    model = method.learner(make_model(TEST_MODEL, num_classes=0), 0)
    seen: list[Tensor] = []

    class Watched(nn.Module):
        def forward(self, images: Tensor) -> Any:
            seen.append(images)
            return model(images)

    targets = method.targets
    method.targets = lambda images: targets(seen.append(images) or images)  # type: ignore[method-assign,func-returns-value]
    images = torch.randn(4, 3, 32, 32)
    losses = method.step(Watched(), (images, torch.zeros(4, 0)), 5)
    assert losses.shape == (4,)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], images)
    assert torch.equal(losses, method.step(model, (images, torch.zeros(4, 0)), 5))


def test_the_gradient_reaches_every_weight_of_the_student_and_none_of_the_teacher() -> None:
    method = objective()
    model = method.learner(make_model(TEST_MODEL, num_classes=0), 0)
    method.step(model, (torch.randn(4, 3, 32, 32), torch.zeros(4, 0)), 5).mean().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []
    assert all(p.grad is None for p in method.teacher.model.parameters())


# The score


def test_scores_of_parts_add_up_to_those_of_the_whole() -> None:
    outputs, target = outputs_and_target(pictures=5)
    whole = FeatureScore(11, 7, 5, 0.5)
    whole.update(outputs, target)
    parts = [FeatureScore(11, 7, 5, 0.5) for _ in range(2)]
    for score, chosen in zip(parts, (slice(0, 2), slice(2, 5)), strict=True):
        score.update(tuple(x[chosen] for x in outputs), Features(*(x[chosen] for x in target)))  # type: ignore[arg-type]
    other = parts[1]
    # In the order in which the processes ask each other.
    sums = iter([
        other.sums, other.vectors.sums, other.vectors.goals, other.patches.sums, other.patches.goals, other.own
    ])  # fmt: skip
    found = parts[0].result(lambda value: value + next(sums), lambda value: value)
    expected = whole.result(lambda value: value, lambda value: value)
    assert found == pytest.approx(expected, abs=1e-9)
    assert expected["n"] == 5
    assert expected["loss"] == pytest.approx(expected["global_loss"] + 0.5 * expected["patch_loss"])
    assert expected["negative_loss"] == -expected["loss"]
    unit = nn.functional.normalize(outputs[2].double(), dim=-1) * math.sqrt(11)
    deviation = unit.var(0, correction=0).mean().sqrt()
    assert expected["global_std"] == pytest.approx(float(deviation), abs=1e-6)


def test_what_is_explained_is_counted_from_the_mean_of_the_targets() -> None:
    torch.manual_seed(2)
    target = Features(torch.randn(6, 7) + 9, torch.randn(6, 5, 2, 3) + 9)
    goal, goals = whitened(target.vector), aligned(target.patches, (2, 3))

    def explained(vector: Tensor, patches: Tensor) -> tuple[float, float]:
        score = FeatureScore(4, 7, 5, 1.0)
        score.update((vector, patches.transpose(1, 2).unflatten(2, (2, 3)), torch.randn(6, 4)), target)
        numbers = score.result(lambda value: value, lambda value: value)
        return numbers["global_explained"], numbers["patch_explained"]

    mean, means = goal.mean(0).expand(6, -1), goals.mean((0, 1)).expand(6, 6, -1)
    assert explained(goal, goals) == pytest.approx((1, 1), abs=1e-6)
    assert explained(mean, means) == pytest.approx((0, 0), abs=1e-6)
    assert explained((goal + mean) / 2, (goals + means) / 2) == pytest.approx((0.75, 0.75), abs=1e-6)


def test_collapse_is_seen_and_said() -> None:
    outputs, target = outputs_and_target(pictures=8)

    def numbers(own: Tensor, teacher: Features = target) -> dict[str, Any]:
        score = FeatureScore(own.shape[1], 7, 5, 1.0)
        score.update((outputs[0], outputs[1], own), teacher)
        return score.result(lambda value: value, lambda value: value)

    assert collapse(numbers(outputs[2])) == ""
    alike = numbers(torch.ones(8, 4) + 1e-4 * torch.randn(8, 4))
    assert alike["global_std"] < 1e-3 and alike["teacher_std"] > 0.5
    assert "student's global vectors hardly differ" in collapse(alike)
    dull = Features(target.vector[:1].expand(8, -1), target.patches)
    assert "teacher's global vectors hardly differ" in collapse(numbers(outputs[2], dull))


def test_one_held_out_picture_tells_nothing_of_collapse() -> None:
    outputs, target = outputs_and_target(pictures=1)
    score = FeatureScore(11, 7, 5, 1.0)
    score.update(outputs, target)
    numbers = score.result(lambda value: value, lambda value: value)
    assert math.isnan(numbers["global_std"]) and collapse(numbers) == ""
