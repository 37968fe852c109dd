"""Other people's libraries take our models by name, as they take any of timm's."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import jumbo_vit  # noqa: F401  (registers the models)

NAMES = ("jumbo_vit_test_patch8_32", "vit_test_patch8_reg16_32")
every_name = pytest.mark.parametrize("name", NAMES)


def pictures(batch: int = 2, *size: int) -> Tensor:
    return torch.randn(batch, 3, *(size or (32, 32)), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["jumbo_vit_micro", "vit_micro_reg16"])  # it wants four blocks or more
@pytest.mark.parametrize("readout", ["ignore", "add", "cat"])
def test_dpt_of_segmentation_models_pytorch(name: str, readout: str) -> None:
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.DPT(
        f"tu-{name}",
        encoder_weights=None,
        decoder_readout=readout,
        decoder_intermediate_channels=(8, 8, 8, 8),
        decoder_fusion_channels=8,
        classes=5,
        img_size=(32, 64),
        patch_size=16,
    )
    masks = model(pictures(2, 32, 64))
    assert masks.shape == (2, 5, 32, 64)
    masks.square().mean().backward()
    assert model.encoder.model.patch_embed.proj.weight.grad.any()


@pytest.mark.parametrize(("name", "pool"), [(NAMES[0], "jumbo_avg"), (NAMES[1], "prefix_avg"), (NAMES[1], "token")])
def test_image_tower_of_open_clip(name: str, pool: str, tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    config = {
        "embed_dim": 24,
        "vision_cfg": {"timm_model_name": name, "timm_pool": pool, "timm_proj": "", "image_size": 32},
        "text_cfg": {"context_length": 8, "vocab_size": 50, "width": 16, "heads": 2, "layers": 1},
    }
    (tmp_path / "ours.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "ours.json")
    model = open_clip.create_model("ours")
    # A head of zeros, our start, gives every picture the same embedding.
    nn.init.trunc_normal_(model.visual.trunk.head.weight, std=0.02)
    images, texts, scale = model(pictures(), torch.randint(1, 50, (2, 8)))
    assert images.shape == texts.shape == (2, 24)
    assert not torch.allclose(images[0], images[1])
    open_clip.ClipLoss()(images, texts, scale).backward()
    assert model.visual.trunk.patch_embed.proj.weight.grad.any()
    assert model.visual.trunk.reg_token.grad.any()


@every_name
def test_masked_vit_of_lightly(name: str) -> None:
    modules = pytest.importorskip("lightly.models.modules")
    vit: Any = timm.create_model(name).eval()
    first = vit.num_prefix_tokens
    masked = modules.MaskedVisionTransformerTIMM(vit, weight_initialization="skip", pos_embed_initialization="skip")
    assert masked.sequence_length == first + 16
    torch.testing.assert_close(masked.encode(pictures()), vit.forward_features(pictures()))
    # Its own random mask protects only the first token, so the mask has to name all global tokens.
    kept = torch.tensor([1, 6, 11, 15])
    index = torch.cat([torch.arange(first), first + kept]).expand(2, -1)
    tokens = vit._pos_embed(vit.patch_embed(pictures()))
    expected = vit.norm(vit.blocks(tokens.gather(1, index[..., None].expand(-1, -1, 32))))
    torch.testing.assert_close(masked.encode(pictures(), idx_keep=index), expected)
