"""A map of patches laid over the picture as people see it, exactly over the part that the model saw."""

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL.Image import Image
from timm.data.transforms import CenterCropOrPad
from torchvision.transforms import CenterCrop

Box = tuple[float, float, float, float]
_DPI = 100
_LEAST, _MOST = 400, 2000  # pixels of a shown picture's longer side
_TITLE = 18


def seen_box(transform: Any, picture: Image) -> Box:
    """The part of `picture` that `transform` hands on: left, right, top, bottom in its own pixels.

    Beyond the picture where the transform pads it. Found by following the picture through the transform's steps.
    """
    left, top, wide, high = 0.0, 0.0, float(picture.width), float(picture.height)
    for step in transform.transforms:
        after = step(picture)
        if not isinstance(after, Image):
            break
        if isinstance(step, CenterCrop | CenterCropOrPad):
            scale_x, scale_y = wide / picture.width, high / picture.height
            left += _offset(picture.width, after.width) * scale_x
            top += _offset(picture.height, after.height) * scale_y
            wide, high = after.width * scale_x, after.height * scale_y
        picture = after
    return left, left + wide, top, top + high


def _offset(side: int, cropped: int) -> int:
    """Where a centre crop begins, rounded as torchvision does; negative where it pads."""
    return round((side - cropped) / 2) if cropped <= side else -((cropped - side) // 2)


def draw(picture: Image, maps: npt.NDArray[np.float32], titles: list[str], box: Box) -> bytes:
    """A PNG with one panel for each map (gh, gw), each over its own range of values.

    A panel is as large as the picture, or a multiple of that for small ones and a part of it for large ones.
    """
    longer = max(picture.size)
    zoom = math.ceil(_LEAST / longer) if longer < _LEAST else min(1.0, _MOST / longer)
    wide, high = (max(1, round(side * zoom)) for side in picture.size)
    columns = math.ceil(math.sqrt(len(maps)))
    rows = math.ceil(len(maps) / columns)
    strip = _TITLE if any(titles) else 0
    total = (columns * wide, rows * (high + strip))
    figure = Figure(figsize=(total[0] / _DPI, total[1] / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    for index, (values, title) in enumerate(zip(maps, titles, strict=True)):
        x, y = index % columns * wide, total[1] - (index // columns + 1) * (high + strip)
        axes = figure.add_axes((x / total[0], y / total[1], wide / total[0], high / total[1]))
        axes.set_axis_off()
        whole = (0.0, float(picture.width), float(picture.height), 0.0)
        axes.imshow(np.asarray(picture), cmap="gray", vmin=0, vmax=255, extent=whole, aspect="auto")
        left, right, top, bottom = box
        axes.imshow(
            values, cmap="inferno", alpha=0.6, extent=(left, right, bottom, top), aspect="auto", interpolation="nearest"
        )
        axes.set_xlim(0, picture.width)
        axes.set_ylim(picture.height, 0)
        if title:
            axes.set_title(title, fontsize=9, pad=3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()
