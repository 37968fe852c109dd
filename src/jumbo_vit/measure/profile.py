"""Where the time of a forward pass goes, by kind of work: what a speed that falls short is explained with."""

from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from jumbo_vit.measure.timing import Step

KINDS = ("single-row products", "other products", "attention", "norms", "convolutions", "values", "starting")
"""single-row products: weights times one row a picture, as of the Jumbo FFN and the head, which wait for the weights.
values: activations, sums, copies. starting: all of the pass that is no kernel, so Python, dispatch and memory."""

PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "_linear_pointwise", "mkldnn_linear", "_weight_int8pack_mm", "addmv", "mv")
ATTENTION = tuple(
    f"_scaled_dot_product_{name}"
    for name in ("flash_attention_for_cpu", "flash_attention_for_cpu_backward", "fused_attention_overrideable")
)
VIEWS = (
    *("as_strided", "empty", "view", "t", "transpose", "permute", "reshape", "expand", "select", "slice", "linear"),
    *("_unsafe_view", "_reshape_alias", "unbind", "empty_strided", "resize_", "empty_like", "unsqueeze", "squeeze"),
    *("flatten", "contiguous", "layer_norm", "scaled_dot_product_attention", "to", "_to_copy", "detach"),
)


def kind_of(name: str, shapes: list[Any], batch: int) -> str:
    """The kind of an operation that PyTorch's profiler names, with the shapes of its inputs."""
    bare = name.rpartition("::")[2]
    if bare in PRODUCTS:
        matrices = [shape for shape in shapes if len(shape) == 2]
        return KINDS[0] if matrices and matrices[0][0] == batch else KINDS[1]
    if bare in ATTENTION:
        return "attention"
    if "layer_norm" in bare and bare != "layer_norm":
        return "norms"
    if "convolution" in bare and bare not in ("convolution", "_convolution"):
        return "convolutions"
    return "starting" if bare in VIEWS or "::" not in name or "conv" in bare else "values"


def shares(step: Step, batch: int, repeats: int = 10) -> dict[str, float]:
    """The parts of a forward pass by kind (`KINDS`), as the CPU profiler, which slows what is short, sees them.

    Args:
        step: The pass.
        batch: Its pictures, by which products of a single row each are known.
        repeats: Passes that are averaged, after two that are not counted.
    """
    for _ in range(2):
        step()
    # One event around all passes takes what belongs to no operation, so Python's own time.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen, record_function("passes"):
        for _ in range(repeats):
            step()
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in seen.key_averages(group_by_input_shape=True):
        kind = kind_of(event.key, event.input_shapes or [], batch)
        seconds[kind] += event.self_cpu_time_total
    total = sum(seconds.values())
    return {kind: value / total for kind, value in seconds.items()}
