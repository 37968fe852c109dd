"""The built-in data: 1,797 handwritten digits of 8x8 pixels, from scikit-learn, without a download."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from PIL import Image

from jumbo_vit.data.images import read_image
from jumbo_vit.data.records import ImageSet, Sample, Splits

HELD_OUT = "a fifth of the digits, the same for every seed"


def _no_pixels() -> npt.NDArray[np.uint8]:
    return np.zeros((0, 8, 8), np.uint8)


@dataclass
class DigitSet(ImageSet):
    """Digits in memory; a sample's path, `digits/0001`, ends in its row of `pixels` (n, 8, 8)."""

    pixels: npt.NDArray[np.uint8] = field(default_factory=_no_pixels)

    def read(self, index: int, in_chans: int = 3, enough: int | None = None) -> Image.Image:
        return read_image(self.pixels[int(self.name(index).removeprefix("digits/"))], in_chans)

    def content(self, index: int) -> bytes:
        return bytes(self.pixels[int(self.name(index).removeprefix("digits/"))].tobytes())

    def name(self, index: int) -> str:
        return self.samples[index].path


def digits_splits() -> Splits:
    """Four fifths for training, a stratified fifth held out; fixed, so that results of different seeds compare."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    # Values are 0..16.
    pixels = np.rint(np.asarray(data.images) * 255 / 16).astype(np.uint8)
    target = [int(digit) for digit in data.target]
    samples = [Sample(f"digits/{index:04d}", (digit,)) for index, digit in enumerate(target)]
    whole = DigitSet([str(digit) for digit in range(10)], samples, pixels=pixels)
    train, val = train_test_split(np.arange(len(samples)), test_size=0.2, random_state=0, stratify=target)
    return Splits(whole.subset(sorted(train.tolist())), whole.subset(sorted(val.tolist())), HELD_OUT)
