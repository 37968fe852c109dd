"""The checkpoints of `fuzz.py`: sound ones of every kind that a user has, and what can be wrong with them."""

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from fuzz_pictures import DAMAGES, EXTREMES, Case
from safetensors.torch import save as to_safetensors
from torch import Tensor

from jumbo_vit.sizes import SIZES, model_name

MARKER = "marker-of-a-payload"
"""The file that a pickle makes, in the current folder, if its code is run."""

NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3.5, 10**4, 10**9, 10**12, -(10**9), 10**400, 1e308, float("nan"), float("inf")),
    *("", "x", "\n", "3", "x" * 100_000, [], [3], ["a", 1], [[]], {}, {"a": None}, [10**9] * 3, [0, 0, 0]),
)


class Payload:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, call: Any = os.system, *words: Any) -> None:
        self.call, self.words = call, words or (f"echo > {MARKER}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.words


def torch_bytes(content: Any, **options: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def official_state(size: str = "pico") -> dict[str, Tensor]:
    """Names and shapes as the authors publish them; in half precision, to be a small file."""
    assert SIZES[size].official_top1
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in timm.create_model(model_name(size)).state_dict().items()}
    state = {name: torch.full(shape, 0.01, dtype=torch.float16) for name, shape in shapes.items()}
    state["jumbo_token"] = state.pop("reg_token")
    state["cls_token"] = state["jumbo_token"][:, :1]
    return state


def edited(draw: random.Random, node: Any, depth: int = 0) -> Any:
    """A copy in which one item somewhere is removed, renamed, or replaced by what does not belong there."""
    inside = isinstance(node, dict | list) and len(node) > 0
    if not inside or (depth and draw.random() < 0.15):
        if isinstance(node, Tensor):
            return _other_tensor(draw, node)
        return draw.choice(NASTY)
    if isinstance(node, list):
        place = draw.randrange(len(node))
        return [*node[:place], edited(draw, node[place], depth + 1), *node[place + 1 :]]
    key = draw.choice(list(node))
    way = draw.random()
    changed = type(node)((k, v) for k, v in node.items() if k != key or way > 0.1)
    if 0.1 < way < 0.2:
        changed[draw.choice((f"{key}x", "", "module.x", "img_size", "depth", "\n", 3))] = changed.pop(key)
    elif way >= 0.2:
        changed[key] = edited(draw, node[key], depth + 1)
    return changed


def _other_tensor(draw: random.Random, value: Tensor) -> Any:
    ways: list[Callable[[], Any]] = [
        lambda: torch.full_like(value, float("nan")) if value.is_floating_point() else value,
        lambda: torch.full_like(value, float("inf")) if value.is_floating_point() else value,
        lambda: value.to(draw.choice((torch.int8, torch.int64, torch.bool, torch.complex64))),
        lambda: value.to(draw.choice((torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2))),
        lambda: value.reshape(-1),
        lambda: value[None],
        value.sum,
        lambda: value.reshape(-1)[:0],
        lambda: torch.zeros(1).expand(10**6, 10**6),
        lambda: torch.empty(value.shape, device="meta"),
        lambda: value.reshape(value.shape[0] if value.ndim else 1, -1).to_sparse(),
        lambda: value.transpose(0, -1) if value.ndim else value,
    ]
    return draw.choice(ways)()


def _safetensors_with(header: bytes, declared: int | None = None, body: bytes = b"") -> bytes:
    return struct.pack("<Q", (len(header) if declared is None else declared) % 2**64) + header + body


def _edited_safetensors(draw: random.Random, data: bytes) -> bytes:
    size = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    way = draw.randrange(5)
    if way == 0:
        return _safetensors_with(data[8 : 8 + size], draw.choice((*EXTREMES, size - 1, size + 1)), body)
    if way == 1:
        return _safetensors_with(b'{"a":' * 10**5 + b"1" + b"}" * 10**5, None, body)
    entry = header[draw.choice([name for name in header if name != "__metadata__"])]
    if way == 2:
        entry["dtype"] = draw.choice(("F16", "BF16", "I32", "F64", "F8_E4M3", "F4", "C64", "BOOL", "U8", "X", ""))
    elif way == 3:
        entry["shape"] = draw.choice(([], [0], [10**6, 10**6], [2**63, 2], [-1], ["a"], entry["shape"][::-1], [1e3]))
    else:
        header = edited(draw, header)
    return _safetensors_with(json.dumps(header).encode(), None, body)


def json_bombs() -> list[bytes]:
    """Configurations that are small, and large or deep once read."""
    deep = 200_000
    return [
        b"[" * deep + b"]" * deep,
        b'{"pretrained_cfg":' * deep + b"1" + b"}" * deep,
        b'{"num_classes": ' + b"9" * 10**5 + b"}",
        b'{"a": "' + b"\\u0000" * 10**5 + b'"}',
        b'{"architecture": "a", ' * 1000,
        b"\xff\xfe{\x00}\x00",
        b"\x00" * 1000,
        b"null",
        b"NaN",
        b'"x"',
    ]


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry that does not say when it was made."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def zip_bombs(size: int) -> list[bytes]:
    """Archives in torch's form whose entries unpack to much more than they hold, or say so."""
    made = []
    state = torch_bytes({"head.bias": torch.zeros(4)})
    with zipfile.ZipFile(io.BytesIO(state)) as sound:
        names, contents = sound.namelist(), [sound.read(name) for name in sound.namelist()]
    for bomb in ("data.pkl", "data/0", "extra"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in zip(names, contents, strict=True):
                archive.writestr(_entry(name), content + bytes(size) if name.endswith(bomb) else content)
            if bomb == "extra":
                for number in range(30):
                    archive.writestr(_entry(f"archive/data/{number + 1}"), bytes(size // 8))
        made.append(buffer.getvalue())
    place = state.rfind(b"PK\x01\x02")
    for sizes in ((2**31 - 1, 2**31 - 1), (2**32 - 1, 2**32 - 1), (4, 2**32 - 2)):
        made.append(state[: place + 20] + struct.pack("<II", *sizes) + state[place + 28 :])
    return [*made, b"PK\x05\x06" + bytes(18), b"PK\x03\x04" + bytes(100), state + state, b"PK"]


def payloads() -> list[bytes]:
    """Pickles that run code, or ask for memory, when they are opened without care."""
    hidden = {"state_dict": {"head.bias": torch.zeros(3), "a.b": Payload()}}
    calls = [Payload(), Payload(eval, f"open('{MARKER}', 'w')"), Payload(exec, f"open('{MARKER}', 'w')")]
    made = [pickle.dumps({"a": call}, protocol) for protocol in (0, 1, 2, 3, 4, 5) for call in calls]
    made += [torch_bytes(call) for call in calls] + [torch_bytes(hidden), torch_bytes({"jumbo_vit_run": Payload()})]
    made += [torch_bytes(hidden, _use_new_zipfile_serialization=False)]
    made += [f"cos\nsystem\n(S'echo > {MARKER}'\ntR.".encode(), f"(S'echo > {MARKER}'\nios\nsystem\n.".encode()]
    made += [pickle.dumps(Payload(bytearray, 10**11), 2), pickle.dumps(Path("a"), 2), b"\x80\x02" + b"(" * 10**5]
    made += [b"\x80\x04\x8d" + struct.pack("<Q", size) + b"x" for size in (2**40, 2**62, 2**64 - 1)]
    deep: Any = []
    for _ in range(400):
        deep = [deep]
    return [*made, pickle.dumps(deep), b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."]


@dataclass(frozen=True)
class Sound:
    """A trained folder's and run's files, by which the damaged ones are made."""

    weights: bytes
    config: bytes
    state: bytes

    @classmethod
    def of(cls, run: Path) -> "Sound":
        model = run / "model"
        files = (model / "model.safetensors", model / "config.json", run / "last.ckpt")
        return cls(*(path.read_bytes() for path in files))


def _sources(sound: Sound, bomb: int) -> dict[str, tuple[str, list[bytes], Callable[[random.Random], bytes] | None]]:
    """Kind to the suffix, the files to begin with, and a way to change what they hold instead of their bytes."""
    config, run = json.loads(sound.config), torch.load(io.BytesIO(sound.state), weights_only=True)
    flat, official = dict(run["model"]), official_state()
    nested = {"epoch": 3, "state_dict": OrderedDict((f"module.{name}", value) for name, value in flat.items())}
    legacy = {"_use_new_zipfile_serialization": False}
    return {
        "model.safetensors": (".safetensors", [sound.weights], lambda d: _edited_safetensors(d, sound.weights)),
        "tensors.safetensors": (".safetensors", [sound.weights], lambda d: _resaved(edited(d, flat))),
        "config.json": (".json", [sound.config], lambda d: json.dumps(edited(d, config)).encode()),
        "last.ckpt": (".ckpt", [sound.state], lambda d: torch_bytes(edited(d, run))),
        "flat.pth": (".pth", [torch_bytes(flat)], lambda d: torch_bytes(edited(d, flat))),
        "nested.pth": (".pth", [torch_bytes(nested)], lambda d: torch_bytes(edited(d, nested))),
        "legacy.pth": (".pth", [torch_bytes(flat, **legacy)], lambda d: torch_bytes(edited(d, flat), **legacy)),
        "official.pth": (".pth", [torch_bytes(official)], lambda d: torch_bytes(edited(d, official))),
        "payload": (".pth", payloads(), None),
        "payload.ckpt": (".ckpt", payloads(), None),
        "zip bomb": (".pth", zip_bombs(bomb), None),
        "json bomb": (".json", json_bombs(), None),
    }


def _resaved(state: Any) -> bytes:
    good = isinstance(state, dict) and all(isinstance(v, Tensor) and not v.is_sparse for v in state.values())
    kept = (
        {str(k): v.contiguous() for k, v in state.items() if v.numel() < 10**7 and v.device.type == "cpu"}
        if good
        else {}
    )
    return to_safetensors(kept or {"a": torch.zeros(1)})


def checkpoints(seed: int, count: int, sound: Sound, bomb: int = 2**29) -> Iterator[Case]:
    """Each kind in turn: as it is, then with changed content or bytes; `bomb` bytes are what small zips hide."""
    sources = _sources(sound, bomb)
    kinds = list(sources)
    used = dict.fromkeys(kinds, 0)
    for number in range(count):
        draw = random.Random(f"{seed} checkpoint {number}")
        kind = kinds[number % len(kinds)]
        suffix, begin, change = sources[kind]
        turn, used[kind] = used[kind], used[kind] + 1
        damage, data = "none", begin[turn % len(begin)]
        if turn >= len(begin):
            damage = draw.choice([*DAMAGES, *(["content changed"] * 9 if change else [])])
            others = list(sources.values())[draw.randrange(len(sources))][1]
            data = change(draw) if damage == "content changed" and change else DAMAGES[damage](draw, data, others[0])
        yield Case(number, kind, damage, data, suffix)
