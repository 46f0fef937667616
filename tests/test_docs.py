"""The README, docs/ and train_configs/ say what is so: commands and examples run, tables are compared with the code.

How a page is written, so that it can be checked:
- A ```bash block holds commands. Each is run, or checked against what it names, by the rule in `RULES` for its program.
  A command without a rule is a failure.
- ```text exact after it: each line is in the output, in this order; … stands for anything.
- ```text shape after it: the same, with numbers and white space left out of the comparison.
- ```text matrix: rows of the table of deviations; each is a layout that the matrix has, within its bounds.
- A block with a file's name, as in ```python my_gpt.py, is that file for the commands below it. Other python blocks are
  scripts. ```text tree is compared with the folders.
- Runs are shortened to two steps, but for those that are short already: the tutorial's.

A page runs from top to bottom in a folder of its own that looks like titan's. A script runs in a process of its own,
forked from one that has imported torch already: most of its time would go into that.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from scripts import benchmark, download_tokenizer, draw_schedule, report, verify_checkpoint
from tests.distributed.runs import train_and_log
from tests.distributed.test_matrix import ALONE, COMPOSED, PAIRS
from tests.distributed.world import Worlds
from tests.forked import run_forked
from titan.config.errors import UserError
from titan.config.fields import all_settings
from titan.config.job_config import LRScheduler
from titan.config.legacy import RENAMES, find_rename
from titan.config.loader import LoadedConfig, load_and_check, load_config
from titan.config.not_built import NOT_BUILT, NOT_BUILT_CHOICES
from titan.estimation.hardware import find_hardware
from titan.estimation.memory import BlockShape, saved_bytes
from titan.estimation.pipeline_timeline import timeline
from titan.models.spec import model_families
from titan.observability.metric_writers import WindowMetrics
from titan.parallelisms.schedules import SCHEDULES
from titan.training.lr_schedule import lr_factor
from train import check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
IN_WORLDS = [TUTORIAL, ROOT / "docs" / "launching.md", ROOT / "CONTRIBUTING.md"]
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))

_SMALL = 20_000_000  # parameters of a model that a test may train
_SHORT = 6_000  # tokens of a run that a test may train as it is
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Block(NamedTuple):
    line: int
    language: str
    name: str  # what follows the language: a file's name, or how the block is compared
    text: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found, lines = [], page.read_text().splitlines()
    numbers = iter(range(len(lines)))
    for start in numbers:
        if not lines[start].startswith("```"):
            continue
        language, _, name = lines[start][3:].partition(" ")
        end = next(number for number in numbers if lines[number] == "```")
        found.append(Block(start + 1, language, name, "\n".join(lines[start + 1 : end]) + "\n"))
    return found


# --- commands


class Session:
    """A folder in which a page's commands run, and the output of the last one.

    Args:
        worlds: short runs of several processes start in these rather than by torchrun.
    """

    def __init__(self, folder: Path, worlds: Worlds | None = None) -> None:
        self.folder = folder
        self.worlds = worlds
        self.output = ""
        for name in ("train.py", "estimation.py", "train_configs", "scripts", "docs", "Makefile"):
            (folder / name).symlink_to(ROOT / name)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def variables(self) -> dict[str, str]:
        """What a command finds in its environment."""
        own = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        return own | {"PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}"}

    def run(self, command: list[str]) -> None:
        """Any program."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self.output = done.stdout
        assert done.returncode == 0, f"{shlex.join(command)} gave {done.returncode}:\n{done.stdout[-3000:]}"

    def script(self, arguments: list[str], variables: dict[str, str] | None = None, status: int = 0) -> None:
        """`python ARGUMENTS`, in a fork of a process that has imported torch; FILE … or -c TEXT."""
        done = run_forked(arguments, self.folder, self.variables() | (variables or {}))
        self.output = done.stdout + done.stderr
        assert done.returncode == status, f"{shlex.join(arguments)} gave {done.returncode}:\n{self.output[-3000:]}"

    def check(self, arguments: list[str], world_size: int) -> None:
        """`train.py --job.check_only`, in this process: most of its time would go into importing torch."""
        loaded = self.load(arguments, world_size)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as output:
            for name in _LAUNCHER:
                patch.delenv(name, raising=False)
            patch.setenv("WORLD_SIZE", str(world_size))
            check(loaded)
        self.output = output.getvalue()

    def load(self, arguments: list[str], world_size: int) -> LoadedConfig:
        """The config of a command line, as it would be read here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.syspath_prepend(self.folder)
            return load_and_check(arguments, world_size)


def python(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`python FILE …` and `python -m pytest FILE`: by the rule for the file."""
    match words[1:]:
        case ["train.py", *arguments]:
            train(session, variables, arguments, asked)
        case ["scripts/draw_schedule.py", *arguments]:
            with redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
                patch.chdir(session.folder)
                draw_schedule.main(arguments)
            session.output = output.getvalue()
        case ["estimation.py", *_]:
            session.script(words[1:])
        case ["scripts/evaluate.py", *arguments]:
            session.script(["scripts/evaluate.py", *arguments])
        case ["scripts/convert_checkpoint.py" | "scripts/generate.py", *_]:
            session.script(words[1:])
        case ["scripts/report.py", *arguments]:
            with redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
                patch.chdir(session.folder)
                report.main(arguments)
            session.output = output.getvalue()
        case ["scripts/verify_checkpoint.py", *arguments]:
            with redirect_stdout(io.StringIO()) as output, pytest.MonkeyPatch.context() as patch:
                patch.chdir(session.folder)
                assert verify_checkpoint.main(arguments) == 0
            session.output = output.getvalue()
        case ["scripts/benchmark.py", *arguments]:
            measure(session, arguments)
        case ["scripts/prepare_data.py" | "scripts/train_tokenizer.py", *_]:
            session.script(words[1:])
        case ["scripts/download_tokenizer.py", *arguments]:  # tests/scripts/test_download_tokenizer.py has a hub for it
            download_tokenizer.parser().parse_args(arguments)
        case [file, *_] if (session.folder / file).is_file() and "/" not in file:  # that the page has written
            session.script(words[1:])
        case ["-m", "pytest", path] if (session.folder / path).is_file():  # that the page has written
            for name, test in runpy.run_path(str(session.folder / path)).items():
                if name.startswith("test_"):
                    test(worlds=session.worlds, tmp_path=session.folder / "outputs")
        case ["-m", "pytest", path]:  # the tests run by themselves
            assert (ROOT / path).is_file()
        case _:
            pytest.fail(f"no rule says how to check {shlex.join(words)}")


def train(session: Session, variables: dict[str, str], arguments: list[str], asked: str) -> None:
    """`python train.py …`: run as it is when it trains nothing or has mistakes, else with small steps."""
    if "--help" in arguments:
        session.script(["train.py", "--help"])
        return
    world_size = int(variables.get("WORLD_SIZE", "1"))
    try:
        job = session.load(arguments, world_size).config.job
    except UserError:
        assert asked == "text exact", f"{shlex.join(arguments)} has mistakes, and the page doesn't show them"
        session.script(["train.py", *arguments], variables, status=2)
        return
    if job.check_only:
        session.check(arguments, world_size)
    elif job.print_config:
        session.script(["train.py", *arguments], variables)
    else:
        if (small := small_run(session, arguments, 1)) is not None:
            session.script(["train.py", *small], variables)


def measure(session: Session, arguments: list[str]) -> None:
    """`python scripts/benchmark.py …`: there are rows, and each is a program that is there with a config that loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(session.folder)
        options, rows, _ = benchmark.plan(arguments)
    for row in rows:
        script = row.command.index("train.py" if row.of_titan else next(w for w in row.command if w.endswith(".py")))
        assert (ROOT / row.command[script]).is_file()
        if row.of_titan:
            session.load(list(row.command[script + 1 :]), options.processes)


def gpu_check(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`scripts/gpu_check.sh`: tests/scripts/test_gpu_check.py rehearses it."""
    assert len(words) == 1 and os.access(ROOT / words[0], os.X_OK)


def sbatch(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`sbatch --nodes=N SCRIPT …`: there is such a script, and the config that it trains loads for its processes."""
    assert words[1].startswith("--nodes=") and (ROOT / words[2]).is_file()
    session.load(words[3:], int(words[1].removeprefix("--nodes=")) * 8)


def submit(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`kubectl apply -f FILE` and `sky jobs launch FILE …`: tests/scripts/test_launching.py rehearses them."""
    assert any((ROOT / word).is_file() for word in words)


def ssh(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`ssh HOST 'cd titan && COMMAND' &`: by the rule for the command."""
    folder, command = words[2].split(" && ")
    assert folder == "cd titan" and words[3:] == ["&"]
    launch(session, variables, shlex.split(command), asked)


def launch(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`torchrun … train.py …`: run when it is small; else its config is checked for as many ranks as it starts."""
    assert not variables
    script = words.index("train.py")
    options = {}
    for word in words[1:script]:
        name, _, value = word.removeprefix("--").partition("=")
        options[name.replace("-", "_")] = value
    assert options.keys() <= {
        "nproc_per_node",
        "nnodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "standalone",
        "max_restarts",
        "rdzv_conf",
    }
    nodes, processes = int(options.get("nnodes", 1)), int(options["nproc_per_node"])
    if nodes > 1:
        assert options["rdzv_backend"] == "c10d" and options["rdzv_endpoint"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words[1 : script + 1]]
    if (small := small_run(session, words[script + 1 :], nodes * processes)) is None:
        return
    if session.worlds is not None and processes <= 8:
        session.output = session.worlds(processes).run(train_and_log, session.folder, small)[0]
    elif session.worlds is None:
        session.run([*launcher, *small])


def small_run(session: Session, arguments: list[str], world_size: int) -> list[str] | None:
    """Arguments for two steps of short windows; None when model, data or world aren't small."""
    config = session.load(arguments, world_size).config
    streamed = config.training.dataset == "c4" or "/" in config.training.dataset
    if count_parameters(config.model.name, config.model.flavor) > _SMALL or streamed:
        return None
    training = config.training
    if 0 < training.global_batch_size * training.seq_len * training.steps <= _SHORT:
        return arguments
    if world_size > 2:
        return None
    steps = [] if config.training.steps < 5 else ["--training.steps=2"]
    return [*arguments, *steps, "--training.seq_len=64", "--metrics.log_freq=1"]


@cache
def count_parameters(name: str, flavor: str) -> int:
    family = model_families()[name]
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in family.build(family.flavors[flavor]).parameters())


def make(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`make TARGET`: there is such a target; that which trains does so when the page shows what one sees."""
    command = ["make", "-n", "NPROC=2", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if "torchrun" in line:
            launched = ["torchrun", *shlex.split(line)[1:]]
            if asked:
                launch(session, {}, launched, asked)
            else:
                session.load(launched[launched.index("train.py") + 1 :], 2)


def install(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`pip install -e '.[extra]'`: the extra is one."""
    assert words[:3] == ["pip", "install", "-e"] and len(words) == 4
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", words[3])
    assert extra is not None
    assert extra[1] is None or extra[1] in project()["optional-dependencies"]


def tensorboard(session: Session, variables: dict[str, str], words: list[str], asked: str) -> None:
    """`tensorboard --logdir FOLDER`: a dependency, and a command above wrote events there."""
    assert words[1] == "--logdir" and len(words) == 3
    assert any(requirement.startswith("tensorboard") for requirement in project()["dependencies"])
    assert list((session.folder / words[2]).glob("events.*"))


Rule = Callable[[Session, dict[str, str], list[str], str], None]
RULES: dict[str, Rule] = {
    "python": python,
    "python3": python,
    "torchrun": launch,
    "make": make,
    "pip": install,
    "tensorboard": tensorboard,
    "sbatch": sbatch,
    "kubectl": submit,
    "sky": submit,
    "ssh": ssh,
    "scripts/gpu_check.sh": gpu_check,
}


def project() -> dict[str, Any]:
    metadata: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return metadata


def run_commands(session: Session, block: Block, asked: str) -> None:
    """Run or check each line of a block; `asked` is how the block after it is compared."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        variables = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words:
            assert words[0] in RULES, f"line {block.line}: no rule says how to check: {line}"
            RULES[words[0]](session, variables, words, asked)


def assert_shown(text: str, output: str, normal: Callable[[str], str]) -> None:
    """Each line of `text` is one of the output's, in the same order; … stands for anything."""
    lines = iter([normal(line) for line in output.splitlines()])
    for line in text.splitlines():
        pattern = re.escape(normal(line)).replace("…", ".*")
        if line.strip() and line.strip() != "…":
            assert any(re.fullmatch(pattern, found) for found in lines), f"not in the output:\n{line}\n---\n{output}"


def shape(line: str) -> str:
    """A log line without its clock, its numbers, and its alignment."""
    line = re.sub(r"^\d\d:\d\d:\d\d ", "", line)
    return " ".join(re.sub(r"\d[\d.,:]*(e[+-]\d+)?[kM]?", "#", line).replace("( ", "(").split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page: Path, tmp_path: Path, worlds: Worlds) -> None:
    run_page(page, Session(tmp_path, worlds if page in IN_WORLDS else None))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tutorial_as_it_is_typed(tmp_path: Path) -> None:
    """With torchrun, and the run of sixteen processes too."""
    session = Session(tmp_path)
    run_page(TUTORIAL, session)
    session.script(["compare.py", "outputs/one", "outputs/sixteen"])


def run_page(page: Path, session: Session) -> None:
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        after = blocks[number + 1] if number + 1 < len(blocks) else None
        match block.language, block.name:
            case "bash", "":
                shown = after is not None and after.language == "text" and after.name in ("exact", "shape")
                run_commands(session, block, f"text {after.name}" if shown and after else "")
            case "text", "exact":
                assert_shown(block.text, session.output, str.rstrip)
            case "text", "shape":
                assert_shown(block.text, session.output, shape)
            case "text", "tree":
                check_tree(block.text)
            case "text", "matrix":
                check_matrix(block.text)
            case "text", "":
                pass
            case "python", "":
                session.script(["-c", block.text])
            case "python" | "json" | "csv", _:
                session.write(block.name, block.text)
            case "toml", "hardware.toml":
                session.write(block.name, block.text)
                find_hardware(str(session.folder / block.name))
            case "toml", "tutorial.toml":  # checked by its commands: eight ranks of dp alone are too many for its batch
                session.write(block.name, block.text)
            case "toml", name:
                session.write(name or "block.toml", block.text)
                session.load([f"--job.config_file={name or 'block.toml'}"], 8)
            case language, name:
                pytest.fail(f"line {block.line}: no rule says how to check a block of {language} {name}")


def check_matrix(text: str) -> None:
    """Rows as tests/distributed/conftest.py prints them; … for those left out."""
    layouts = {str(layout): layout.ranks for layout in [*ALONE, *PAIRS, *COMPOSED]}
    head, *rows = [line.split() for line in text.splitlines() if line.strip() != "…"]
    assert head == ["layout", "ranks", "loss", "norm", "weights"]
    for name, ranks, *numbers in rows:
        assert layouts.get(name) == int(ranks), name
        assert all(float(number) < bound for number, bound in zip(numbers, (1e-5, 1e-5, 1e-6), strict=True)), name


# --- the house


def tree_entries(text: str) -> Iterator[str]:
    """The paths of an indented list; a folder ends in a slash."""
    parents: list[str] = []
    for line in text.splitlines():
        indent, name = re.fullmatch(r"( *)(\S+)( .*)?", line).groups()[:2]  # type: ignore[union-attr]
        del parents[len(indent) // 2 :]
        path = "".join(parents) + name
        yield path
        if name.endswith("/"):
            parents.append(name)


def check_tree(text: str) -> None:
    """All that is listed is there; of titan/, each folder that is opened is listed whole."""
    entries = list(tree_entries(text))
    for entry in entries:
        assert (ROOT / entry).is_dir() if entry.endswith("/") else (ROOT / entry).is_file(), f"{entry} isn't there"
    folders = {f"{Path(entry).parent}/" for entry in entries if entry.startswith("titan/") and entry != "titan/"}
    for folder in folders:
        for path in (ROOT / folder).iterdir():
            name = f"{folder}{path.name}{'/' if path.is_dir() else ''}"
            assert path.name in ("__init__.py", "__pycache__") or name in entries, f"{name} isn't in the README's tree"
    assert {path.name for path in ROOT.glob("*.py")} <= set(entries)


# --- links, tests and settings that pages name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        assert not re.match(r"\w+:", path), f"{target}: an external link can't be checked"
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings], target


def test_readme_links_every_page() -> None:
    text = README.read_text()
    assert [page.name for page in PAGES[1:] if f"({page.relative_to(ROOT)})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_exist(page: Path) -> None:
    for path, function in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert re.search(rf"^def {function}\(" if function else "", (ROOT / path).read_text(), re.MULTILINE), function


def test_every_feature_links_to_the_test_that_shows_it() -> None:
    for feature, _, shown in rows_of(README, "Feature"):
        links = re.findall(r"\[`(tests/[\w/]+\.py)(?:::\w+)?`\]\(([^)]+)\)", shown)
        assert links and all(path == target for path, target in links), feature
        assert len(links) == len(quoted(shown)), f"{feature}: a test without a link"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {*all_settings(), *NOT_BUILT, *(row.old for row in RENAMES)}
    sections = {key.partition(".")[0] for key in known}
    for key in re.findall(r"`(?:--)?([a-z_0-9]+\.[a-z_0-9.-]+)", page.read_text()):
        key = key.replace("-", "_")
        if key.partition(".")[0] in sections and not key.endswith((".py", ".jsonl", ".toml", ".")):
            assert key in known or re.sub(r"\.no_", ".", key) in known, key


@pytest.mark.parametrize("page", [*PAGES, *CONFIGS], ids=lambda page: page.name)
def test_no_figure_is_missing(page: Path) -> None:
    assert re.findall(r"<FIGURE[^>]*>|\| @\w+", page.read_text()) == []


# --- tables that repeat what the code says


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table whose head line begins with `heading`."""
    lines = page.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_what_is_refused_is_listed_and_refused() -> None:
    """A feature that lands has to leave the README's list, a new refusal has to enter it."""
    listed = {key for row in rows_of(README, "Not built yet") for key in quoted(row[1])}
    assert listed == {key for key, missing in NOT_BUILT.items() if missing.harmless} | {
        key for key, _ in NOT_BUILT_CHOICES
    }


def test_model_table() -> None:
    rows = rows_of(ROOT / "docs" / "models.md", "`model.name`")
    shown = set()
    for names, flavor, parameters, context in rows:
        for name in names.split(", "):
            sizes = model_families()[name].flavors[flavor]
            count = count_parameters(name, flavor)
            assert (f"{count:,}", f"{sizes.max_seq_len:,}") == (parameters, context), (name, flavor)
            shown.add((name, flavor))
    assert shown == {(name, flavor) for name in ("llama2", "llama3") for flavor in model_families()[name].flavors}


def test_older_names_table() -> None:
    for old, new in rows_of(ROOT / "docs" / "config.md", "Older"):
        row = find_rename(quoted(old)[0])
        assert row is not None and row.new == quoted(new)[0]


def test_metrics_table() -> None:
    keys = [quoted(row[1])[0] for row in rows_of(ROOT / "docs" / "metrics.md", "In the line") if quoted(row[1])]
    assert sorted(keys) == sorted(["step", *(field.name for field in dataclasses.fields(WindowMetrics))])


def test_learning_rate_table() -> None:
    rows = rows_of(ROOT / "docs" / "numerics.md", "warmup_steps")
    assert len(rows) == 5
    for warmup, ratio, kind, least, factors in rows:
        settings = LRScheduler(
            warmup_steps=int(warmup),
            decay_ratio=None if ratio == "unset" else float(ratio),
            decay_type=kind,  # type: ignore[arg-type]
            min_lr_factor=float(least),
        )
        expected = [float(factor) for factor in factors.split()]
        assert [lr_factor(settings, step, 10) for step in range(1, 11)] == pytest.approx(expected, abs=1e-6)


def test_defaults_that_are_named() -> None:
    for key, default, _ in rows_of(ROOT / "docs" / "checkpoints.md", "Setting"):
        value = all_settings()[quoted(key)[0]].default
        assert default == (str(value).lower() if isinstance(value, bool) else str(value)), key


def formula(text: str, **values: int) -> Fraction:
    """The value of a formula as pages write it."""
    code = quoted(text)[0].replace("−", "-").replace("·", "*")
    assert re.fullmatch(r"[-+*/() \dpmvr]+", code), code
    code = re.sub(r"\d+", r"Fraction(\g<0>)", code)
    return Fraction(eval(code, {"Fraction": Fraction, **{name: Fraction(value) for name, value in values.items()}}))


def test_schedule_table() -> None:
    """Every schedule, with what torch asks of a layout, and with the bubble and the activations of its timeline."""
    rows = rows_of(ROOT / "docs" / "parallelisms.md", "Schedule")
    assert [quoted(row[0])[0] for row in rows] == list(SCHEDULES)
    p, m = 4, 16
    for name, stages, microbatches, bubble, kept, _ in rows:
        kind = SCHEDULES[quoted(name)[0]]
        assert stages == (f"any; {kind.stages_per_rank} by default" if kind.looped else str(kind.stages_per_rank))
        least = p * kind.stages_per_rank if kind.fills else 1
        wanted = {"any": (False, 1), "`p` or more": (False, p), "`2·p` or more": (False, 2 * p)}
        wanted |= {"a multiple of `max(1, m // p)`": (True, 1)}
        assert wanted[microbatches] == (kind.rounds, least), name
        v = kind.stages_per_rank
        found = timeline(quoted(name)[0], p, m, v)
        assert found.bubble == formula(bubble, p=p, m=m, v=v), name
        assert found.peak_in_flight == [formula(kept, p=p, m=m, v=v, r=rank) for rank in range(p)], name


def test_memory_table() -> None:
    """Bytes by the closed form of Llama 3 8B; products by its sizes."""
    sizes = model_families()["llama3"].flavors["8B"]
    heads, kv_heads = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
    shape = BlockShape(1024, sizes.dim, sizes.n_heads, sizes.n_kv_heads, sizes.head_dim, sizes.ffn_dim)
    none, full, op = (saved_bytes(mode, shape) / 1024**2 for mode in ("none", "full", "op"))
    kept = [none, saved_bytes("none", shape, compiled=True) / 1024**2, (none + full) / 2, op, full]
    products = 2 * heads + 2 * kv_heads + 3 * sizes.ffn_dim
    again = ["nothing", "nothing", "50%", f"{(kv_heads + heads + sizes.ffn_dim) / products:.0%}", "100%"]
    rows = rows_of(ROOT / "docs" / "memory.md", "Mode")
    assert [row[2:] for row in rows] == [
        [f"{kib:.1f}", f"{kib * 8192 * sizes.n_layers / 1024**2:.1f}", share]
        for kib, share in zip(kept, again, strict=True)
    ]
    assert f"for {1 - sizes.ffn_dim / products:.0%} in place of 100%" in (ROOT / "docs" / "memory.md").read_text()


# --- train_configs/


@pytest.mark.parametrize("world_size", [1, 2, 8, 64])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_files_fit_any_number_of_ranks(path: Path, world_size: int) -> None:
    batch = ["--training.global_batch_size=-1"] if path.name == "debug.toml" else []  # it has 16 windows a step
    warnings = load_and_check([f"--job.config_file={path}", *batch], world_size).warnings
    # Tokenizers can't be shipped: a file's comment says which one to set, and so does the only warning.
    assert all("set model.tokenizer_path" in warning for warning in warnings)
    assert len(warnings) == (0 if path.name == "debug.toml" else 1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_files_give_each_setting_that_comments_name(path: Path) -> None:
    """A setting that is commented out is one, in its section: without its # the file still loads."""
    text = re.sub(r"^# (\w+ = )", r"\1", path.read_text(), flags=re.MULTILINE)
    for section, values in tomllib.loads(text).items():
        for name in values:
            assert f"{section}.{name}" in all_settings(), name
    assert load_config([f"--job.config_file={path}"]).config.model.name in model_families()


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.name.startswith("llama")], ids=lambda path: path.name
)
def test_config_files_say_how_large_a_checkpoint_is(path: Path) -> None:
    model = load_config([f"--job.config_file={path}"]).config.model
    size = 12 * count_parameters(model.name, model.flavor)
    shown = f"{size / 1e12:.1f} TB" if size > 1e12 else f"{size / 1e9:.0f} GB"
    assert f"12 bytes per parameter: {shown} each" in path.read_text()
