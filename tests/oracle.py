"""The Jumbo equations once more, loop by loop in float64 NumPy, sharing no code with the package.

Slow and plain on purpose: one picture, one head, one token at a time. A state dict says the values, the keyword
arguments say the architecture; nothing is guessed from the names that a state dict happens to hold.

Letters: B batch, J Jumbo tokens, R extra registers, N patches, D width of a token, L = J + R + N.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
State = Mapping[str, Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def value(state: State, name: str) -> Array:
    """One tensor of a state dict as float64."""
    return np.asarray(state[name].detach().cpu().double().numpy(), dtype=np.float64)


def layer_norm(state: State, name: str, vector: Array, eps: float) -> Array:
    """(vector - mean) / sqrt(biased variance + eps) * weight + bias, over one vector."""
    centred = vector - vector.sum() / vector.size
    variance = (centred**2).sum() / vector.size
    return centred / math.sqrt(variance + eps) * value(state, f"{name}.weight") + value(state, f"{name}.bias")


def linear(state: State, name: str, vector: Array, bias: bool = True) -> Array:
    out = value(state, f"{name}.weight") @ vector
    return out + value(state, f"{name}.bias") if bias else out


def feed_forward(state: State, name: str, vector: Array) -> Array:
    """Linear, GELU (with the error function, not tanh), Linear."""
    hidden = linear(state, f"{name}.fc1", vector)
    hidden = 0.5 * hidden * (1.0 + _erf(hidden / math.sqrt(2.0)))
    return linear(state, f"{name}.fc2", hidden)


def attention(state: State, name: str, tokens: Array, num_heads: int, keys: NDArray[np.bool_] | None) -> Array:
    """Multi-head self-attention of one sequence (L, D); `keys` (L) is False where nobody may look."""
    length, dim = tokens.shape
    size = dim // num_heads
    out = np.zeros((length, dim))
    qkv = [linear(state, f"{name}.qkv", token) for token in tokens]
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        queries = [row[:dim][part] for row in qkv]
        lookups = [row[dim : 2 * dim][part] for row in qkv]
        values = [row[2 * dim :][part] for row in qkv]
        for i in range(length):
            weights = np.zeros(length)
            for j in range(length):
                if keys is None or keys[j]:
                    weights[j] = math.exp(float(queries[i] @ lookups[j]) / math.sqrt(size))
            weights /= weights.sum()
            out[i, part] = sum(weights[j] * values[j] for j in range(length))
    return np.stack([linear(state, f"{name}.proj", row) for row in out])


def block(
    state: State,
    tokens: Array,
    *,
    num_heads: int,
    num_jumbo: int,
    prefix: str = "",
    shared: str | None = "jumbo_mlp",
    jumbo_mlp_ratio: float = 4.0,
    lora_rank: int = 0,
    layer_scale: bool = False,
    keys: NDArray[np.bool_] | None = None,
    eps: float = 1e-5,
) -> Array:
    """One block on one sequence (L, D); `shared` names the Jumbo FFN's place, None the block's own."""

    def scaled(name: str, branch: Array) -> Array:
        return branch * value(state, f"{prefix}{name}.gamma") if layer_scale else branch

    normed = np.stack([layer_norm(state, f"{prefix}norm1", token, eps) for token in tokens])
    mixed = attention(state, f"{prefix}attn", normed, num_heads, keys)
    tokens = np.stack([token + scaled("ls1", branch) for token, branch in zip(tokens, mixed, strict=True)])

    rows = [token.copy() for token in tokens]
    if jumbo_mlp_ratio:
        wide = np.concatenate(rows[:num_jumbo])
        normed_wide = layer_norm(state, f"{prefix}norm3", wide, eps)
        branch = feed_forward(state, f"{prefix}jumbo_mlp" if shared is None else shared, normed_wide)
        if lora_rank:
            down = linear(state, f"{prefix}lora.down", normed_wide, bias=False)
            assert down.shape == (lora_rank,)
            branch = branch + linear(state, f"{prefix}lora.up", down, bias=False)
        wide = wide + scaled("ls3", branch)
        rows[:num_jumbo] = np.split(wide, num_jumbo)
    for i in range(num_jumbo, len(rows)):
        normed_token = layer_norm(state, f"{prefix}norm2", rows[i], eps)
        rows[i] = rows[i] + scaled("ls2", feed_forward(state, f"{prefix}mlp", normed_token))
    return np.stack(rows)


def embed(state: State, picture: Array, patch_size: tuple[int, int]) -> Array:
    """Jumbo tokens, registers and patches with positions, for one picture (C, H, W): (L, D)."""
    high, wide = patch_size
    kernel, bias = value(state, "patch_embed.proj.weight"), value(state, "patch_embed.proj.bias")
    positions = value(state, "pos_embed")[0]
    rows = list(value(state, "reg_token")[0])
    columns = picture.shape[2] // wide
    for y in range(picture.shape[1] // high):
        for x in range(columns):
            pixels = picture[:, y * high : (y + 1) * high, x * wide : (x + 1) * wide]
            patch = np.array([(kernel[d] * pixels).sum() + bias[d] for d in range(len(bias))])
            rows.append(patch + positions[y * columns + x])
    return np.stack(rows)


def vit(
    state: State,
    pictures: Array,
    *,
    patch_size: tuple[int, int],
    depth: int,
    num_heads: int,
    num_jumbo: int,
    pool: str = "jumbo_avg",
    share_jumbo_mlp: bool = True,
    jumbo_mlp_ratio: float = 4.0,
    lora_rank: int = 0,
    reg_tokens: int = 0,
    keys: NDArray[np.bool_] | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Array]:
    """Tokens after the final norm (B, L, D) and logits (B, classes); `keys` (B, L) masks keys in every block."""
    all_tokens, all_logits = [], []
    for b, picture in enumerate(pictures):
        tokens = embed(state, picture, patch_size)
        for i in range(depth):
            tokens = block(
                state,
                tokens,
                num_heads=num_heads,
                num_jumbo=num_jumbo,
                prefix=f"blocks.{i}.",
                shared="jumbo_mlp" if share_jumbo_mlp else None,
                jumbo_mlp_ratio=jumbo_mlp_ratio,
                lora_rank=lora_rank,
                keys=None if keys is None else keys[b],
                eps=eps,
            )
        tokens = np.stack([layer_norm(state, "norm", token, eps) for token in tokens])
        wide = np.concatenate(list(tokens[:num_jumbo]))
        patches = tokens[num_jumbo + reg_tokens :]
        mean = sum(patches) / len(patches)
        features = {"jumbo_avg": np.concatenate([wide, mean]), "jumbo": wide, "avg": mean}[pool]
        all_tokens.append(tokens)
        all_logits.append(linear(state, "head", features))
    return np.stack(all_tokens), np.stack(all_logits)
