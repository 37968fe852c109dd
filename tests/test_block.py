"""The Jumbo block against its equations, and the properties that the equations promise."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from jumbo_vit.block import JumboBlock, LowRankBypass, jumbo_mlp, split_tokens
from jumbo_vit.errors import UserError
from tests import oracle

FEW = settings(max_examples=25)


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter a value that matters: no zero bias, no unit norm, no zero head."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_block(dim: int = 8, heads: int = 2, jumbo: int = 3, ratio: float = 2.0, **options: Any) -> JumboBlock:
    """A block in float64 with random weights, given a shared FFN if it has none of its own."""
    block = JumboBlock(dim, heads, jumbo, jumbo_mlp_ratio=ratio, dtype=torch.float64, **options)
    randomise(block)
    if ratio and block.jumbo_mlp is None:
        shared = jumbo_mlp(dim, jumbo, ratio, dtype=torch.float64)
        randomise(shared, seed=7)
        block.use_jumbo_mlp(shared)
    return block.eval()


def with_shared(block: JumboBlock) -> dict[str, Tensor]:
    """The block's state dict, with the FFN that it does not own under `jumbo_mlp`."""
    state = dict(block.state_dict())
    for mlp in block._shared_mlp:
        state |= {f"jumbo_mlp.{name}": tensor for name, tensor in mlp.state_dict().items()}
    return state


@FEW
@given(data=st.data())
def test_block_equals_its_equations(data: st.DataObject) -> None:
    batch, jumbo, others = (data.draw(st.integers(low, high)) for low, high in ((1, 3), (1, 4), (0, 5)))
    heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    share = data.draw(st.booleans())
    ratio = data.draw(st.sampled_from([0, 0.5, 1.0, 4.0]))
    rank = data.draw(st.integers(0, 3)) if ratio else 0
    layer_scale = data.draw(st.booleans())
    block = make_block(
        heads * head_dim,
        heads,
        jumbo,
        ratio,
        share_jumbo_mlp=share,
        lora_rank=rank,
        init_values=0.1 if layer_scale else None,
    )
    x = tokens(batch, jumbo + others, heads * head_dim, seed=data.draw(st.integers(0, 99)))
    keys: list[Any] = [None] * batch
    mask = None
    if data.draw(st.booleans()):
        row = st.lists(st.booleans(), min_size=x.shape[1], max_size=x.shape[1]).filter(any)
        keys = [np.array(data.draw(row)) for _ in range(batch)]
        mask = torch.tensor(np.stack(keys))[:, None, None, :]
    expected = [
        oracle.block(
            with_shared(block),
            x[b].numpy(),
            num_heads=heads,
            num_jumbo=jumbo,
            shared="jumbo_mlp" if share else None,
            jumbo_mlp_ratio=ratio,
            lora_rank=rank,
            layer_scale=layer_scale,
            keys=keys[b],
        )
        for b in range(batch)
    ]
    with torch.no_grad():
        got = block(x, attn_mask=mask).numpy()
    np.testing.assert_allclose(got, np.stack(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize("share", [True, False])
def test_padding_behind_a_mask_changes_nothing(share: bool) -> None:
    block = make_block(share_jumbo_mlp=share)
    x, garbage = tokens(2, 3 + 5, 8), 1e3 * tokens(2, 4, 8, seed=2)
    mask = torch.tensor([True] * 8 + [False] * 4)[None, None, None, :]
    padded = torch.cat([x, garbage], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(block(padded, attn_mask=mask)[:, :8], block(x), rtol=0, atol=1e-12)
        assert not torch.allclose(block(padded)[:, :8], block(x), atol=1e-3)  # without the mask it does change


def test_causal_attention_looks_only_back() -> None:
    block = make_block()
    x = tokens(1, 8, 8)
    changed = x.clone()
    changed[:, -1] += 1.0
    with torch.no_grad():
        before, after = block(x, is_causal=True), block(changed, is_causal=True)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_shared_ffn_moves_jumbo_tokens_only_and_all_of_them() -> None:
    block = make_block()
    x = tokens(2, 9, 8)
    with torch.no_grad():
        before = block(x)
        block._shared_mlp[0].fc2.bias += 1.0
        moved = (block(x) - before).abs()
    assert torch.equal(moved[:, 3:], torch.zeros_like(moved[:, 3:]))
    torch.testing.assert_close(moved[:, :3], torch.ones_like(moved[:, :3]))


def test_patch_ffn_moves_patches_only_and_all_of_them() -> None:
    block = make_block()
    x = tokens(2, 9, 8)
    with torch.no_grad():
        before = block(x)
        block.mlp.fc2.bias += 1.0
        moved = (block(x) - before).abs()
    assert torch.equal(moved[:, :3], torch.zeros_like(moved[:, :3]))
    torch.testing.assert_close(moved[:, 3:], torch.ones_like(moved[:, 3:]))


def test_without_jumbo_ffn_the_jumbo_tokens_take_only_attention() -> None:
    block = make_block(ratio=0)
    x = tokens(2, 9, 8)
    with torch.no_grad():
        attended = x + block.attn(block.norm1(x))
        out = block(x)
    assert torch.equal(out[:, :3], attended[:, :3])
    assert not torch.allclose(out[:, 3:], attended[:, 3:])
    assert not any("norm3" in name or "jumbo" in name for name in block.state_dict())


def test_jumbo_tokens_are_mixed_by_their_ffn() -> None:
    wide = tokens(1, 24)
    wide.requires_grad_(True)
    make_block().jumbo_path(wide)[0, 0].backward()
    assert wide.grad is not None
    assert (wide.grad.view(3, 8).abs().sum(1) > 0).all()  # the first token's output depends on every Jumbo token


def test_a_fresh_bypass_changes_nothing() -> None:
    plain = JumboBlock(8, 2, 3, share_jumbo_mlp=False, dtype=torch.float64)
    randomise(plain)
    bypassed = JumboBlock(8, 2, 3, share_jumbo_mlp=False, lora_rank=2, dtype=torch.float64)
    missing = bypassed.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["lora.down.weight", "lora.up.weight"]
    x = tokens(2, 7, 8)
    assert torch.equal(bypassed(x), plain(x))
    nn.init.ones_(bypassed.lora.up.weight)
    assert not torch.equal(bypassed(x), plain(x))
    bypassed.lora.zero_output()
    assert torch.equal(bypassed(x), plain(x))


def test_a_given_ffn_is_not_registered() -> None:
    block = JumboBlock(8, 2, 3)
    names = set(block.state_dict())
    block.use_jumbo_mlp(jumbo_mlp(8, 3))
    assert set(block.state_dict()) == names
    assert not any(name.startswith("jumbo_mlp") for name in names)


@pytest.mark.parametrize("jumbo", [1, 3, 6])
def test_split_tokens_takes_the_front(jumbo: int) -> None:
    x = torch.arange(8.0).view(1, 8, 1)
    front, rest = split_tokens(x, jumbo)
    assert front.flatten().tolist() == list(range(jumbo))
    assert rest.flatten().tolist() == list(range(jumbo, 8))


def test_widths_of_the_parts() -> None:
    block = JumboBlock(8, 2, 3, lora_rank=2, init_values=0.1)
    mlp = jumbo_mlp(8, 3)
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    assert shapes["norm1.weight"] == shapes["norm2.weight"] == (8,)
    assert shapes["norm3.weight"] == shapes["ls3.gamma"] == (24,)
    assert shapes["lora.down.weight"] == (2, 24)
    assert shapes["mlp.fc1.weight"] == (32, 8)
    assert (mlp.fc1.weight.shape, mlp.fc2.weight.shape) == ((96, 24), (24, 96))
    assert {norm.eps for norm in (block.norm1, block.norm2, block.norm3)} == {1e-5}
    assert sum(p.numel() for p in LowRankBypass(24, 2).parameters()) == 2 * 24 * 2


@pytest.mark.parametrize("num_jumbo", [0, -2])
def test_refuses_no_jumbo_token(num_jumbo: int) -> None:
    with pytest.raises(UserError, match=rf"^num_jumbo is {num_jumbo}, but a Jumbo block needs at least 1$"):
        JumboBlock(8, 2, num_jumbo)


def test_refuses_a_bypass_around_nothing() -> None:
    text = r"^lora_rank=4 goes around the Jumbo FFN, but jumbo_mlp_ratio=0 leaves it out$"
    with pytest.raises(UserError, match=text):
        JumboBlock(8, 2, 3, jumbo_mlp_ratio=0, lora_rank=4)
