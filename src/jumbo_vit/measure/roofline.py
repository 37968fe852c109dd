"""How near a model is to what the machine could do: its products, the machine's measured ceilings, and their quotient.

A product of (rows, inputs) with (inputs, outputs) can be no faster than its operations at the machine's best rate, nor
than its weights can be read from where weights of that size lie. The roofline time of a model is the sum of the larger
of both over its products. Norms, softmax, activations and the cost of starting an operation are not in it, so that no
model reaches 100 %.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jumbo_vit.measure.timing import alternate


@dataclass(frozen=True)
class Product:
    """`batch` products of (rows, inputs) with (inputs, outputs).

    `weights` says whether the second factor is a layer's weights, and not computed.
    """

    rows: int
    inputs: int
    outputs: int
    batch: int = 1
    weights: bool = True

    @property
    def macs(self) -> int:
        """Multiply-accumulates."""
        return self.batch * self.rows * self.inputs * self.outputs

    @property
    def stored(self) -> int:
        """Weights that have to be read; activations may never leave the caches."""
        return self.batch * self.inputs * self.outputs if self.weights else 0


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches in a type of `width` bytes: multiply-accumulates and bytes of weights, each a second."""

    macs: float
    bytes: float
    width: int

    def seconds(self, products: list[Product]) -> float:
        """The roofline time of products that run one after the other."""
        return sum(max(p.macs / self.macs, p.stored * self.width / self.bytes) for p in products)


def products(model: nn.Module, images: Tensor) -> list[Product]:
    """All products of a forward pass: Linear and convolution layers as they are called, and attention's own two.

    Attention is seen where it goes through `scaled_dot_product_attention`, as all of timm's does.
    """
    found: list[Product] = []

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            rows = math.prod(inputs[0].shape[:-1])
            found.append(Product(rows, module.in_features, module.out_features))
        elif isinstance(module, nn.modules.conv._ConvNd):
            taken = module.weight.shape[1] * math.prod(module.kernel_size)
            rows = output.shape[0] * math.prod(output.shape[2:])
            found.append(Product(rows, taken, module.out_channels // module.groups, module.groups))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        with torch.no_grad(), _attention(found):
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found


@contextmanager
def _attention(found: list[Product]) -> Iterator[None]:
    """Note the products inside attention while this lasts."""
    original = nn.functional.scaled_dot_product_attention

    def noting(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch, length = math.prod(query.shape[:-2]), query.shape[-2]
        found.append(Product(length, query.shape[-1], key.shape[-2], batch, weights=False))
        found.append(Product(length, key.shape[-2], value.shape[-1], batch, weights=False))
        out: Tensor = original(query, key, value, *args, **kwargs)
        return out

    nn.functional.scaled_dot_product_attention = noting
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def gmacs(of: list[Product]) -> float:
    """Giga multiply-accumulates of the layers with weights, the convention of the paper's table."""
    return sum(product.macs for product in of if product.weights) / 1e9


def measure_ceilings(shapes: list[Product], dtype: torch.dtype, device: torch.device, repeats: int = 7) -> Ceilings:
    """The best rate over the largest of the models' own products and a square one, and the rate of reading weights.

    Weights are read as a product with a single row reads them, in a matrix as large as the largest layer's.
    """
    chosen = sorted({(p.rows, p.inputs, p.outputs) for p in shapes if p.weights}, key=math.prod)[-4:]
    rate = 0.0
    for rows, inputs, outputs in [*chosen, (1024, 1024, 1024)]:
        rate = max(rate, rows * inputs * outputs / _fastest(rows, inputs, outputs, dtype, device, repeats))
    width = torch.empty((), dtype=dtype).element_size()
    largest = max((product.stored for product in shapes), default=0) * width
    # Read as fp32 whatever the type: memory does not know it, and this kernel is the one that waits for nothing else.
    outputs = max(largest // (4 * 1024), 1024)
    reading = _fastest(1, 1024, outputs, torch.float32, device, repeats)
    return Ceilings(rate, 1024 * outputs * 4 / reading, width)


def _fastest(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Seconds of one product at its best."""
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)

    def product() -> object:
        with torch.inference_mode():
            return nn.functional.linear(x, weight)

    return min(alternate({"product": product}, repeats, device)["product"].seconds)
