"""Mixtures: the same windows in every layout, in the proportions asked for, exact after every resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.data.test_loader import BYTES, open_loader, whole_steps
from tests.data.test_shares import furthest
from tests.data.test_workers import allow_children
from tests.data.tiny_data import documents, json_lines, write
from tests.distributed.runs import TINY, train_here
from tests.distributed.world import Worlds
from titan.config.errors import UserError
from titan.config.job_config import SourceStage, TextSource, Training
from titan.data.loader import DataLoader, number_of_streams
from titan.data.mixture import Mixture
from titan.data.prepare import prepare
from titan.data.readers import BadRowPolicy
from titan.data.sources import open_source
from titan.data.token_files import TokenFiles
from titan.data.token_windows import windows_of
from titan.data.tokenizer import build_tokenizer

SEQ_LEN = 16
LETTERS = "abcd"  # each source's text is one of them, so that a window tells where it is from


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.json … d.json of 100, 200, 300, 400 documents, numbered; and token files of a and b."""
    place = tmp_path_factory.mktemp("sources")
    for number, letter in enumerate(LETTERS, start=1):
        texts = [f"{i:03}" + letter * (5 + i * 13 % 40) for i in range(100 * number)]
        write(place, {f"{letter}.json": json_lines(texts)})
    for letter in "ab":
        opened = documents("json", place / f"{letter}.json")
        for name, tokenizer in (("", BYTES), ("tiny-", build_tokenizer("tiny"))):
            output = place / f"{name}tokens-{letter}"
            prepare(opened, tokenizer, output, processes=1, shard_tokens=900, bad_rows=BadRowPolicy("stop"))
    return place


def source(folder: Path, name: str, weight: float, **settings: Any) -> TextSource:
    """`a`: its text; `tokens-a`: its token files."""
    if name.startswith("tokens"):
        return TextSource("tokens", weight, dataset_path=str(folder / name), **settings)
    return TextSource("json", weight, name=name, dataset_path=str(folder / f"{name}.json"), **settings)


def mixed(folder: Path, weights: dict[str, float], *ending: str) -> list[TextSource]:
    return [
        source(folder, name, weight, when_exhausted="end" if name in ending else "loop")
        for name, weight in weights.items()
    ]


def make_loader(
    sources: list[TextSource], local: int, batch: int, workers: int, stages: Sequence[SourceStage] = (), **settings: Any
) -> DataLoader:
    training = Training(
        sources=sources, source_stages=list(stages), seq_len=SEQ_LEN, local_batch_size=local, **settings
    )
    training.dataloader.num_workers = workers
    return open_loader(open_source(training, BYTES), training, batch)


def take(
    sources: list[TextSource],
    local: int,
    plan: list[tuple[int, int]],
    state: Any = None,
    batch: int = 8,
    **settings: Any,
) -> tuple[list[Any], Any]:
    """Steps, resumed before each (workers, number of steps); then the position."""
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        allow_children(patch)
        for workers, count in plan:
            loader = make_loader(sources, local, batch, workers, **settings)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            steps += whole_steps(loader, count)
            state = loader.state_dict()
            loader.close()
    return steps, state


def origins(steps: list[list[list[int]]]) -> list[int]:
    """The place in LETTERS of the text of each window."""
    found = []
    for row in (row for step in steps for row in step):
        letters = {chr(token) for token in row if token < 256} & set(LETTERS)
        assert len(letters) == 1, row
        found.append(LETTERS.index(letters.pop()))
    return found


MIXTURES = {
    "tokens": {"tokens-a": 0.7, "tokens-b": 0.3},
    "text": {"a": 5.0, "b": 3.0, "c": 2.0},
    "both": {"tokens-a": 1.0, "b": 1.0, "c": 2.0},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_same_rows_in_every_layout_and_after_resumes(worlds: Worlds, folder: Path, kind: str) -> None:
    """On 1, 2, 4 ranks, with accumulation, with 0 and 2 workers, over stages, after two resumes on other ranks."""
    weights = MIXTURES[kind]
    sources = mixed(folder, weights)
    stages = {"stages": [SourceStage({name: 1.0 for name in list(weights)[:2]}, after_step=14)]}
    straight, end = worlds(1).run(take, sources, 8, [(0, 20)], **stages)[0]
    assert len({str(step) for step in straight}) == 20
    found = origins(straight)
    assert furthest(found[: 14 * 8], list(weights.values())) < 2
    assert furthest(found[14 * 8 :], [1.0, 1.0]) < 2
    for ranks, local, workers in ((1, 2, 2), (2, 4, 0), (4, 1, 2)):
        assert worlds(ranks).run(take, sources, local, [(workers, 20)], **stages)[0] == (straight, end)
    first, state = worlds(4).run(take, sources, 2, [(0, 6)], **stages)[0]
    second, state = worlds(2).run(take, sources, 1, [(2, 1), (0, 9)], state, **stages)[0]
    third, state = worlds(1).run(take, sources, 4, [(2, 4)], state, **stages)[0]
    assert first + second + third == straight
    assert state == end


def test_an_epoch_of_token_files_has_each_window_once(worlds: Worlds, folder: Path) -> None:
    steps, state = worlds(2).run(take, mixed(folder, MIXTURES["tokens"]), 4, [(0, 170)])[0]
    for number, letter in enumerate("ab"):
        rows = [row for step in steps for row in step if origins([[row]]) == [number]]
        name = f"tokens-{letter}"
        assert state["streams"][0]["sources"][name] == {"window": len(rows)}
        files = TokenFiles(folder / name)
        windows = [files.read(start * SEQ_LEN, SEQ_LEN + 1).tolist() for start in range(windows_of(files, SEQ_LEN))]
        assert rows[: len(windows)] != windows
        assert sorted(rows[: len(windows)]) == sorted(windows)


def test_after_tokens_and_another_global_batch(worlds: Worlds, folder: Path) -> None:
    """Tokens of all stages before: rounded up to whole steps, and counted as they were read."""
    sources = mixed(folder, MIXTURES["text"])
    stage = {"stages": [SourceStage({"c": 1.0}, after_tokens=8 * SEQ_LEN * 3 + 1)]}
    steps, _ = worlds(1).run(take, sources, 8, [(0, 6)], **stage)[0]
    assert [set(origins([step])) == {2} for step in steps] == [False] * 4 + [True] * 2
    first, state = worlds(1).run(take, sources, 8, [(0, 2)], **stage)[0]
    second, _ = worlds(1).run(take, sources, 16, [(0, 3)], state, batch=16, **stage)[0]
    assert first == steps[:2]
    assert [set(origins([step])) == {2} for step in second] == [False, True, True]
    assert furthest(origins([*first, second[0]]), [5.0, 3.0, 2.0]) < 2


def test_a_resume_with_other_weights_counts_from_there(worlds: Worlds, folder: Path) -> None:
    before, after = (mixed(folder, {"a": x, "b": 1.0, "tokens-b": 0.0}) for x in (7.0, 1.0))
    first, state = worlds(1).run(take, before, 8, [(0, 5)])[0]
    second, end = worlds(2).run(take, after, 4, [(0, 3), (0, 4)], state)[0]
    assert furthest(origins(first), [7.0, 1.0]) < 2
    assert furthest(origins(second), [1.0, 1.0]) < 2
    schedule = end["streams"][0]["schedule"]
    assert schedule["step"] == 12 and sum(schedule["counts"].values()) == 7 * 8
    unchanged, _ = worlds(1).run(take, before, 8, [(0, 12)])[0]
    assert first == unchanged[:5]


def lines_of(sources: list[TextSource], count: int, **settings: Any) -> tuple[list[Any], list[str]]:
    """Steps, and what was logged meanwhile."""
    from titan.observability.logging import logger

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "info", said.append)
        return take(sources, 8 // dist.get_world_size(), [(0, count)], **settings)[0], said


@pytest.mark.parametrize("names", [("tokens-a", "tokens-b"), ("a", "tokens-b"), ("a", "b")])
def test_a_source_that_ends_leaves_its_share_to_the_others(
    worlds: Worlds, folder: Path, names: tuple[str, str]
) -> None:
    """Every window of it is read once, the last one too, in every layout; then the other one, until that ends."""
    one, two = names
    sources = mixed(folder, {one: 3.0, two: 1.0}, one, two)
    straight, said = worlds(1).run(lines_of, sources, 10**4)[0]
    for ranks in (2, 4):
        assert worlds(ranks).run(lines_of, sources, 10**4)[0][0] == straight
    found = origins(straight)
    last = max(place for place, number in enumerate(found) if number == 0)
    tokens = [sum(len(text.encode()) + 2 for text in texts_of(folder, letter)) for letter in "ab"]
    counts = [(count - 1) // SEQ_LEN for count in tokens]
    assert found.count(0) == counts[0]
    assert furthest(found[: last + 1], [3.0, 1.0]) < 2
    assert set(found[last + 1 :]) == {1} and len(found) == sum(counts) // 8 * 8
    ended = [line for line in said if "has ended" in line]
    assert ended[0] == f"source {one} has ended, in step {(last + 1) // 8 + 1}; from there on: {two} 100.0 %"
    assert ended[1].startswith(f"source {two} has ended") and ended[1].endswith("no other has a weight")
    state: Any = None
    again = []
    for count, ranks in ((last // 8 - 1, 2), (3, 4), (10**4, 1)):  # resumes just before and behind its end
        part, state = worlds(ranks).run(take, sources, 8 // ranks, [(0, count)], state)[0]
        again += part
    assert again == straight


def texts_of(folder: Path, letter: str) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / f"{letter}.json").read_text().splitlines()]


def test_one_ends_and_another_begins_again(worlds: Worlds, folder: Path) -> None:
    """Text that ends makes one stream of all; token files that end don't."""
    sources = mixed(folder, {"tokens-a": 1.0, "d": 1.0}, "tokens-a")
    straight, end = worlds(1).run(take, sources, 8, [(0, 60)])[0]
    assert len(end["streams"]) == 8 and end["streams"][3]["schedule"]["ended"] == ["tokens-a"]
    assert worlds(4).run(take, sources, 1, [(0, 30), (2, 30)])[0] == (straight, end)
    assert furthest(origins(straight[:20]), [1.0, 0, 0, 1.0]) < 2
    _, other = worlds(1).run(take, mixed(folder, {"a": 1.0, "d": 1.0}, "a"), 8, [(0, 1)])[0]
    assert len(other["streams"]) == 1


def test_the_text_that_can_feed_the_fewest_streams_decides(folder: Path) -> None:
    def streams(weights: dict[str, float], *ending: str) -> int:
        mixture = open_source(Training(sources=mixed(folder, weights, *ending)), BYTES)
        return number_of_streams(mixture, 48, infinite=True)

    assert streams({"a": 1.0, "b": 1.0, "tokens-b": 1.0}) == 12  # of 100 documents, eight for each
    assert streams({"c": 1.0, "d": 1.0, "tokens-b": 1.0}, "tokens-b") == 24
    assert streams({"c": 1.0, "d": 1.0}, "d") == streams({"tokens-a": 1.0, "tokens-b": 1.0}) == 1


def test_what_is_logged(worlds: Worlds, folder: Path) -> None:
    stages = [SourceStage({"tokens-a": 1.0}, after_step=40)]
    _, said = worlds(1).run(lines_of, mixed(folder, {"tokens-a": 3.0, "d": 1.0}), 100, stages=stages)[0]
    assert "a mixture of 2 sources: tokens-a 75.0 %, d 25.0 %" in said
    assert "from step 41 on: tokens-a 100.0 %" in said
    assert any(line.startswith("dataset json: 400 documents from ") for line in said)
    assert "dataset tokens-a begins epoch 1" in said
    _, said = worlds(1).run(lines_of, mixed(folder, {"a": 3.0, "b": 1.0}), 100)[0]
    assert "dataset a, data stream 0 of 8, begins epoch 1" in said


def refused(sources: list[TextSource], state: Any) -> str:
    loader = make_loader(sources, 8, 8, 0)
    try:
        loader.load_state_dict(state)
    except UserError as error:
        return str(error)
    return ""


def test_other_sources_than_the_position_s_are_refused_by_name(worlds: Worlds, folder: Path) -> None:
    two = {"a": 1.0, "tokens-b": 2.0}
    _, state = worlds(1).run(take, mixed(folder, two), 8, [(0, 1)])[0]

    def error(sources: list[TextSource]) -> str:
        return worlds(1).run(refused, sources, state)[0]

    assert error(mixed(folder, two)) == error(mixed(folder, {"tokens-b": 9.0, "a": 1.0})) == ""
    assert "sources.c.dataset: None then, 'json' now" in error(mixed(folder, {**two, "c": 1.0}))
    assert "sources.a.dataset: 'json' then, None now" in error(mixed(folder, {"tokens-b": 1.0}))
    assert "sources.a.when_exhausted: 'loop' then, 'end' now" in error(mixed(folder, two, "a"))
    other = [source(folder, "a", 1.0), dataclasses.replace(source(folder, "tokens-a", 1.0), name="tokens-b")]
    assert "sources.tokens-b.documents" in error(other) and "sources.a" not in error(other)


def test_a_source_that_cant_be_read_is_named(folder: Path) -> None:
    sources = [source(folder, "a", 1.0), TextSource("json", 1.0, name="mine", dataset_path=str(folder / "no.json"))]
    with pytest.raises(UserError, match=r'training.sources "mine": .*no.json'):
        open_source(Training(sources=sources), BYTES)


def test_fields_of_a_source_that_are_unset_are_those_of_training(tmp_path: Path) -> None:
    write(tmp_path, {"x.json": '{"body": "one"}\n', "y.json": '{"other": "two"}\n', "z.txt": "three\nfour"})
    training = Training(text_field="body", text_unit="line")
    for name, own in {"x.json": {}, "y.json": {"text_field": "other"}, "z.txt": {"dataset": "text"}}.items():
        training.sources.append(
            TextSource(**{"dataset": "json", "weight": 1.0, **own}, dataset_path=f"{tmp_path}/{name}")
        )
    mixture = open_source(training, BYTES)
    assert isinstance(mixture, Mixture)
    assert [each.name for each in mixture.sources] == ["x.json", "y.json", "z.txt"]
    assert [[each.source[i] for i in range(len(each.source))] for each in mixture.sources] == [  # type: ignore[index]
        ["one"],
        ["two"],
        ["three", "four"],
    ]


# --- whole runs


def train(arguments: Sequence[str]) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        allow_children(patch)
        return train_here([*TINY, *arguments])


@pytest.mark.slow
def test_runs_have_the_same_batches_in_every_layout_and_after_resumes(
    worlds: Worlds, folder: Path, tmp_path: Path
) -> None:
    config = tmp_path / "mixture.toml"
    config.write_text(
        f"""
        [metrics]
        fingerprint = true
        [training]
        global_batch_size = 8
        seq_len = 16
        [[training.sources]]
        dataset = "tokens"
        dataset_path = "{folder}/tiny-tokens-a"
        name = "numbers"
        weight = 0.75
        [[training.sources]]
        dataset = "json"
        dataset_path = "{folder}/b.json"
        weight = 0.25
        [[training.source_stages]]
        after_step = 4
        weights = {{ numbers = 0.5, "b.json" = 0.5 }}
        """
    )

    def run(name: str, ranks: int, local: int, steps: int, *more: str) -> list[str]:
        own = [f"--job.config_file={config}", f"--job.dump_folder={tmp_path / name}", f"--training.steps={steps}"]
        rows = worlds(ranks).run(train, [*own, f"--training.local_batch_size={local}", *more])[0]
        return [row["fingerprint"] for row in rows]

    expected = run("alone", 1, 8, 6)
    assert len(set(expected)) == 6
    assert run("dp2", 2, 2, 6, "--training.dataloader.num_workers=2") == expected
    assert run("dp4", 4, 2, 6) == expected
    assert run("tp2", 2, 8, 6, "--parallelism.tensor_parallel_degree=2") == expected
    for ranks, steps in ((4, 2), (1, 5), (2, 6)):
        resumed = ("--checkpoint.enable", "--lr_scheduler.total_steps=6")
        assert run("resumed", ranks, 2, steps, *resumed) == expected[:steps]
