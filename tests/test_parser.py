"""The command line's adapter, on a command made for these tests."""

import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jumbo_vit.cli import parser
from jumbo_vit.errors import UserError

SOURCE = Path(parser.__file__).resolve().parents[2]


@dataclass
class Config:
    """Train a model on pictures, 100 % of them.

    Args:
        model: The folder of the model.
        inputs: Pictures or folders.
        img_size: Side of the picture in
            pixels.
        lr: Learning rate.
        preset: Where to start.
        ema: Average the weights.
        layers: Layers to look at.
        names: Names of classes.
        size: Size, as 32 or 32x48.
        pair: Two numbers.
        workers: Processes, or auto.
        out: Folder of the run.
    """

    model: str = ""
    inputs: list[str] = field(default_factory=list)
    img_size: int = 224
    lr: float | None = None
    preset: Literal["scratch", "finetune"] = "scratch"
    ema: bool = False
    layers: list[int] = field(default_factory=lambda: [1, 2])
    names: list[str] | None = None
    size: str = ""
    pair: tuple[float, float] = (0.9, 0.95)
    workers: int | Literal["auto"] = "auto"
    out: str | None = None
    given: frozenset[str] = field(default=frozenset(), repr=False)


@dataclass
class Bare:
    needed: int
    resume: str | None = None


class Fake:
    """Installs commands as modules that record their config or do what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[Any] = []
        self.action: Callable[[], None] = lambda: None
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(parser, "COMMANDS", {})
        groups = {"optimisation": ("lr", "ema")}
        self.add("fake", Config, POSITIONALS=("model", "inputs"), GROUPS=groups)
        self.add("flags", Config)
        self.add("bare", Bare)

    def add(self, name: str, config: type, **extra: object) -> None:
        module = types.ModuleType(f"fake_command_{name}")
        vars(module).update(Config=config, run=self.run, **extra)
        self.monkeypatch.setitem(sys.modules, module.__name__, module)
        parser.COMMANDS[name] = (module.__name__, f"the summary of {name}")

    def run(self, config: Any) -> None:
        self.configs.append(config)
        self.action()

    def __call__(self, *argv: str) -> Any:
        """The config that `argv` gives; the command must have run once."""
        self.configs.clear()
        assert parser.main(argv) == 0
        (config,) = self.configs
        return config


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


@pytest.fixture
def error(fake: Fake, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def of(*argv: str) -> str:
        assert parser.main(argv) == 2
        assert fake.configs == []
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("jumbo-vit: error: ")
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("jumbo-vit: error: ").rstrip("\n")

    return of


def test_defaults(fake: Fake) -> None:
    assert fake("flags") == Config()


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--img-size 32", "img_size", 32),
        ("--img_size 32", "img_size", 32),
        ("--img-size=32", "img_size", 32),
        ("--img-size 8 --img-size 32", "img_size", 32),
        ("--img-size -3", "img_size", -3),
        ("--lr 1e-3", "lr", 1e-3),
        ("--lr 1", "lr", 1.0),
        ("--lr null", "lr", None),
        ("--preset finetune", "preset", "finetune"),
        ("--ema", "ema", True),
        ("--no-ema", "ema", False),
        ("--no_ema", "ema", False),
        ("--ema true", "ema", True),
        ("--ema False", "ema", False),
        ("--ema=false", "ema", False),
        ("--ema --no-ema", "ema", False),
        ("--layers 3", "layers", [3]),
        ("--layers 3 4 5", "layers", [3, 4, 5]),
        ("--layers -1 -2", "layers", [-1, -2]),
        ("--layers=3", "layers", [3]),
        ("--layers 3 --layers 4", "layers", [4]),
        ("--names a 1 true", "names", ["a", "1", "true"]),
        ("--names null null", "names", ["null", "null"]),
        ("--size 32", "size", "32"),
        ("--size 1e3", "size", "1e3"),
        ("--size true", "size", "true"),
        ("--size null", "size", "null"),
        ("--size [x", "size", "[x"),
        ("--size {a:", "size", "{a:"),
        ("--size -", "size", "-"),
        ("--size=--odd", "size", "--odd"),
        ("--size=a=b", "size", "a=b"),
        ("--size=", "size", ""),
        ("--pair 0.8 1", "pair", (0.8, 1.0)),
        ("--workers 4", "workers", 4),
        ("--workers auto", "workers", "auto"),
        ("--out 007", "out", "007"),
    ],
)
def test_values(fake: Fake, argv: str, name: str, value: object) -> None:
    config = fake("flags", *argv.split())
    expected = Config(**{name: value})  # type: ignore[arg-type]
    assert {**vars(config), "given": None} == {**vars(expected), "given": None}
    assert type(getattr(config, name)) is type(value)
    assert config.given == {name}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_arrives_unchanged(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake = Fake(patch)
        assert fake("flags", f"--size={text}").size == text
        assert fake("fake", "m", "--", text).inputs == [text]


def test_positionals_may_stand_among_options(fake: Fake) -> None:
    for argv in (
        "model a b --lr 1 --ema",
        "--lr 1 --ema model a b",
        "model --lr 1 a --ema b",
        "--ema --lr 1 -- model a b",
    ):
        config = fake("fake", *argv.split())
        assert (config.model, config.inputs, config.lr, config.ema) == ("model", ["a", "b"], 1.0, True)
        assert config.given == {"model", "inputs", "lr", "ema"}


def test_words_after_two_dashes_are_no_options(fake: Fake) -> None:
    assert fake("fake", "model", "--", "--help", "-x").inputs == ["--help", "-x"]


def test_list_before_a_single_positional_leaves_the_last_word(fake: Fake) -> None:
    fake.add("reverse", Config, POSITIONALS=("inputs", "out"))
    assert fake("reverse", "a", "b", "c").inputs == ["a", "b"]
    assert fake("reverse", "a", "b", "c").out == "c"
    assert fake("reverse", "a").out is None


def test_positional_with_a_telling_default_may_be_left_out(fake: Fake) -> None:
    fake.add("sizes", Config, POSITIONALS=("preset",))
    assert fake("sizes").preset == "scratch"
    assert fake("sizes", "finetune").given == {"preset"}


def test_config_file_lies_under_the_command_line(fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("img-size: 32\nlr: 1e-3\nlayers: [3]\nsize: 48\nema: true\nnames: dog\nmodel: m\n")
    config = fake("fake", "--config", str(file), "--lr", "0.5", "--no-ema", "m2", "picture.png")
    assert config == Config(
        model="m2",
        inputs=["picture.png"],
        img_size=32,
        lr=0.5,
        ema=False,
        layers=[3],
        size="48",
        names=["dog"],
        given=frozenset({"model", "inputs", "img_size", "lr", "ema", "layers", "size", "names"}),
    )


def test_later_config_file_goes_before_an_earlier_one(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("img_size: 1\nlr: 1")
    (tmp_path / "b.yaml").write_text("img_size: 2")
    config = fake("flags", f"--config={tmp_path / 'a.yaml'}", "--config", str(tmp_path / "b.yaml"))
    assert (config.img_size, config.lr) == (2, 1.0)


def test_empty_config_file_changes_nothing(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert fake("flags", "--config", str(tmp_path / "a.yaml")) == Config()


@pytest.mark.parametrize("flag", ["--print-config", "--print_config"])
def test_printed_config_can_be_read_again(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    argv = ["--lr", "1e-5", "--names", "1", "a: b", "--pair", "1", "2", "--size", "48"]
    assert parser.main(["fake", *argv, flag]) == 0
    assert fake.configs == []
    text = capsys.readouterr().out
    assert set(yaml.safe_load(text)) == {f.name for f in fields(Config)} - {"given"}
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    first, second = fake("flags", *argv), fake("flags", "--config", str(file))
    assert {**vars(first), "given": 0} == {**vars(second), "given": 0}


def test_printed_config_leaves_out_nothing_that_must_be_given(
    fake: Fake, tmp_path: Path, error: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parser.main(["bare", "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert error("bare", "--config", str(file)).startswith("--needed is missing")
    assert fake("bare", "--config", str(file), "--needed", "1") == Bare(1)


def test_config_without_given(fake: Fake) -> None:
    assert fake("bare", "--needed", "3", "--resume", "x") == Bare(3, "x")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("trian", "unknown command trian; allowed: fake, flags, bare"),
        ("flag", "unknown command flag (did you mean flags?); allowed: fake, flags, bare"),
        ("--versoin", "unknown option --versoin (did you mean --version?); allowed: --help, --version"),
        ("flags --imgsize 3", "unknown option --imgsize (did you mean --img-size?); see jumbo-vit flags --help"),
        ("flags --imgsize=3", "unknown option --imgsize (did you mean --img-size?); see jumbo-vit flags --help"),
        ("flags --img 3", "unknown option --img (did you mean --img-size?); see jumbo-vit flags --help"),
        ("flags --no-emma", "unknown option --no-emma (did you mean --no-ema?); see jumbo-vit flags --help"),
        ("flags --no-lr", "unknown option --no-lr (did you mean --lr?); see jumbo-vit flags --help"),
        ("flags --given x", "unknown option --given; see jumbo-vit flags --help"),
        ("flags -q", "unknown option -q; see jumbo-vit flags --help"),
        ("flags --img-size abc", "--img-size takes an integer, not 'abc'"),
        ("flags --img-size 2.5", "--img-size takes an integer, not '2.5'"),
        ("flags --img-size", "--img-size needs a value: an integer"),
        ("flags --img-size --ema", "--img-size needs a value: an integer"),
        ("flags --layers --ema", "--layers needs a value: a list, each an integer"),
        ("flags --config", "--config needs a value: the path of a YAML file"),
        ("flags --lr fast", "--lr takes a number, not 'fast'"),
        ("flags --layers 1 x", "--layers takes a list, each an integer, not '1 x'"),
        ("flags --pair 1", "--pair takes 2 values, each a number, not '1'"),
        (
            "flags --preset finetun",
            "--preset takes one of scratch, finetune, not 'finetun' (did you mean finetune?)",
        ),
        ("flags --workers many", "--workers takes an integer or auto, not 'many'"),
        ("flags --ema=maybe", "--ema takes true or false, not 'maybe'"),
        ("flags --no-ema=true", "--no-ema takes no value, not 'true'"),
        ("flags --lr 1 --img-size x --ema", "--img-size takes an integer, not 'x'"),
        ("flags digits", "unexpected argument 'digits'; usage: jumbo-vit flags [options]"),
        ("fake", "MODEL is missing; usage: jumbo-vit fake MODEL INPUT... [options]"),
        ("fake m --ema", "INPUT is missing; usage: jumbo-vit fake MODEL INPUT... [options]"),
        ("bare", "--needed is missing; usage: jumbo-vit bare [options]"),
    ],
)
def test_mistakes_are_told_in_one_line(error: Callable[..., str], argv: str, message: str) -> None:
    assert error(*argv.split()) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imgsize: 3", "unknown key imgsize in FILE (did you mean img_size?)"),
        ("given: [lr]", "unknown key given in FILE"),
        ("1: 3", "unknown key 1 in FILE"),
        ("img_size: big", "img_size in FILE takes an integer, not 'big'"),
        ("img_size: [1]", "img_size in FILE takes an integer, not '1'"),
        ("preset: Scratch", "preset in FILE takes one of scratch, finetune, not 'Scratch' (did you mean scratch?)"),
        ("- a\n- b", "the config file FILE must hold lines of the form `option: value`"),
        ("just words", "the config file FILE must hold lines of the form `option: value`"),
    ],
)
def test_mistakes_in_a_config_file(error: Callable[..., str], tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert error("flags", "--config", str(file)) == message.replace("FILE", str(file))


def test_unreadable_config_files(error: Callable[..., str], tmp_path: Path) -> None:
    missing, broken, binary = tmp_path / "none.yaml", tmp_path / "broken.yaml", tmp_path / "binary.yaml"
    broken.write_text("a: [1\nb: }")
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert error("flags", "--config", str(missing)) == f"no such config file: {missing}"
    for path in (broken, binary, tmp_path):
        assert error("flags", "--config", str(path)).startswith(f"cannot read the config file {path}: ")


def test_wrong_value_of_the_file_is_harmless_where_the_command_line_overrides_it(fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("img_size: big")
    assert fake("flags", "--config", str(tmp_path / "a.yaml"), "--img-size", "3").img_size == 3


def test_user_error_of_the_command(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        raise UserError("no such folder: x\n   try  y\n")

    fake.action = action
    assert parser.main(["flags"]) == 2
    assert capsys.readouterr().err == "jumbo-vit: error: no such folder: x try  y\n"


def test_user_error_of_the_config_itself(fake: Fake, error: Callable[..., str]) -> None:
    @dataclass
    class Checked:
        size: int = 1

        def __post_init__(self) -> None:
            if self.size < 1:
                raise UserError(f"--size must be positive, not {self.size}")

    fake.add("checked", Checked)
    assert error("checked", "--size", "-1") == "--size must be positive, not -1"


def test_interrupt(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        raise KeyboardInterrupt

    fake.action = action
    assert parser.main(["flags"]) == 130
    assert capsys.readouterr().err == "jumbo-vit: interrupted\n"


@pytest.mark.parametrize("kind", [ZeroDivisionError, BrokenPipeError])
def test_our_own_fault_shows_a_traceback(fake: Fake, capsys: pytest.CaptureFixture[str], kind: type[Exception]) -> None:
    def action() -> None:
        raise kind("inner text")

    fake.action = action
    assert parser.main(["flags"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert "inner text" in lines[-2]
    assert "please report" in lines[-1]


def test_command_whose_module_is_absent_is_our_fault(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    parser.COMMANDS["gone"] = ("jumbo_vit.cli.no_such_module", "")
    assert parser.main(["gone"]) == 1
    assert "ModuleNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_overview(fake: Fake, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    parser.COMMANDS["gone"] = ("jumbo_vit.cli.no_such_module", "is not imported for this")
    assert parser.main(argv) == 0
    out = capsys.readouterr().out
    for name, (_, summary) in parser.COMMANDS.items():
        assert any(line.split() == [name, *summary.split()] for line in out.splitlines())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from jumbo_vit.version import __version__

    assert parser.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jumbo-vit {__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_of_a_command(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert parser.main(["fake", "--lr", "oops", flag]) == 0
    assert fake.configs == []
    out = capsys.readouterr().out
    squeezed = " ".join(out.split())
    assert out.startswith("usage: jumbo-vit fake MODEL INPUT... [options]\n")
    for part in (
        "Train a model on pictures, 100 % of them.",
        "arguments: MODEL The folder of the model. INPUT Pictures or folders.",
        "optimisation: --lr NUMBER Learning rate. --ema, --no-ema Average the weights. (default: false)",
        "--img-size INT Side of the picture in pixels. (default: 224)",
        "--preset {scratch,finetune} Where to start. (default: scratch)",
        "--layers INT [INT ...] Layers to look at. (default: 1 2)",
        "--pair NUMBER NUMBER Two numbers. (default: 0.9 0.95)",
        "--names TEXT [TEXT ...] Names of classes.",
        "--workers INT|{auto} Processes, or auto. (default: auto)",
        "--config FILE",
        "--print-config",
    ):
        assert part in squeezed
    assert "_" not in out
    assert "given" not in out


def test_help_without_a_docstring_falls_back_on_the_summary(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert parser.main(["bare", "--help"]) == 0
    out = capsys.readouterr().out
    assert "the summary of bare" in out
    assert "Bare(" not in out


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Another process, with the package's source first on its path."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, text=True, capture_output=True, timeout=60, check=False
    )


COMMAND_FILE = """
    import sys, types
    from dataclasses import dataclass
    import jumbo_vit_command
    from jumbo_vit.cli import parser
    @dataclass
    class Config:
        epochs: int = 3
    def run(config):
        for line in range(100000):
            print(line)
    module = types.ModuleType("quick")
    module.Config, module.run = Config, run
    sys.modules["quick"] = module
    parser.COMMANDS["quick"] = ("quick", "")
"""


@pytest.mark.parametrize("argv", [["--help"], ["quick", "--help"], ["quick", "--print-config"], ["quick", "--x"]])
def test_torch_is_not_imported_before_work_starts(argv: list[str]) -> None:
    code = f"{COMMAND_FILE}\n    jumbo_vit_command.main({argv})\n    print('torch' in sys.modules, file=sys.stderr)"
    result = run_python(code)
    assert result.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", sorted(parser.COMMANDS))
def test_every_command_answers_help_without_torch(name: str) -> None:
    code = f"""
        import sys, jumbo_vit_command
        code = jumbo_vit_command.main(["{name}", "--help"])
        print(code, 'torch' in sys.modules, file=sys.stderr)
    """
    assert run_python(code).stderr == "0 False\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes end otherwise on Windows")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_reader_that_leaves_ends_the_command_quietly(unbuffered: str) -> None:
    code = textwrap.dedent(COMMAND_FILE) + "\nsys.exit(jumbo_vit_command.main(['quick']))"
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


def test_main_takes_the_words_of_the_process(monkeypatch: pytest.MonkeyPatch, fake: Fake) -> None:
    import jumbo_vit_command

    monkeypatch.setattr(sys, "argv", ["jumbo-vit", "flags", "--img-size", "7"])
    assert jumbo_vit_command.main() == 0
    assert fake.configs[0].img_size == 7


def test_a_locked_folder_is_the_users_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def locked(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", locked)
    assert parser.main(["evaluate", "/locked/model", "--data", "digits"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no permission for /locked/model: change its rights" in error
