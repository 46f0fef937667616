"""Every layout is legal, or one mistake that has the key, the arithmetic and the nearest legal values.

A layout is written as in `PP=2 TP=4`, with short names for the settings it is about.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.config.conftest import Load, Mistakes
from titan.config.rules import divisors, listed_near, nearest_multiples
from titan.models import spec

NAMES = {
    "REPLICATE": "parallelism.data_parallel_replicate_degree",
    "SHARD": "parallelism.data_parallel_shard_degree",
    "CP": "parallelism.context_parallel_degree",
    "TP": "parallelism.tensor_parallel_degree",
    "PP": "parallelism.pipeline_parallel_degree",
    "SP": "parallelism.enable_sequence_parallel",
    "BALANCER": "parallelism.context_parallel_load_balancer",
    "SCHEDULE": "parallelism.pipeline_parallel_schedule",
    "CSV": "parallelism.pipeline_parallel_schedule_csv",
    "SIZE": "parallelism.pipeline_parallel_microbatch_size",
    "LAYERS": "parallelism.pipeline_parallel_layers_per_stage",
    "FIRST": "parallelism.pipeline_parallel_first_stage_less_layers",
    "LAST": "parallelism.pipeline_parallel_last_stage_less_layers",
    "PARTS": "parallelism.module_fqns_per_model_part",
    "BATCH": "training.local_batch_size",
    "GLOBAL": "training.global_batch_size",
    "SEQ": "training.seq_len",
    "MODEL": "model.name",
    "FLAVOR": "model.flavor",
    "VOCAB": "model.vocab_size",
    "COMPILE": "compile.enable",
}
PARTS_OF_2 = '[["tok_embeddings","layers.0","layers.1"],["layers.2","layers.3","layers.4","layers.5","norm","output"]]'
SWAPPED = PARTS_OF_2.replace('"layers.0","layers.1"', '"layers.1","layers.0"')


def arguments(layout: str) -> list[str]:
    return [f"--{NAMES[name]}={value}" for name, _, value in (word.partition("=") for word in layout.split())]


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families that lack something, beside the real ones. debugmodel: 6 layers, 8 heads, 4 kv heads, ffn_dim 384."""
    llama = spec.model_families()["llama3"]
    own = {
        "plain": dataclasses.replace(llama, name="plain", stages=None, divisible_by_tp=lambda sizes: {}),
        "wide": dataclasses.replace(llama, name="wide", divisible_by_tp=lambda sizes: {"heads": 840}),
        "deep": dataclasses.replace(
            llama,
            name="deep",
            stages=lambda sizes: spec.Stages(("embed",), tuple(f"layers.{layer}" for layer in range(12)), ("head",)),
        ),
    }
    monkeypatch.setattr(spec, "_FAMILIES", {**spec.model_families(), **own})


# (ranks, layout, what the one mistake must contain)
ILLEGAL: list[tuple[int, str, list[str]]] = [
    # the mesh
    (
        1,
        "SHARD=2",
        ["data_parallel_shard_degree = 2: ", "1*2*1*1*1 = 2 but world size = 1", "shard_degree 1 (-1 takes"],
    ),
    (4, "REPLICATE=3", ["1, and 3 doesn't divide world size = 4", "data_parallel_replicate_degree 1, 2 or 4"]),
    (4, "REPLICATE=2 SHARD=3", ["= 2*3*1*1*1 = 6 but world size = 4", "legal: data_parallel_shard_degree 2 (-1 takes"]),
    (8, "SHARD=2 TP=2", ["= 1*2*1*2*1 = 4 but", "data_parallel_shard_degree 4 (-1", "or tensor_parallel_degree 4"]),
    (
        8,
        "CP=3 SEQ=2052",
        ["parallelism.context_parallel_degree = 3: dp_replicate*dp_shard*cp*tp*pp = 1*?*3*1*1, and 3 doesn't"],
    ),
    (8, "CP=4 TP=4", ["1*?*4*4*1, and 16 doesn't", "context_parallel_degree 1 or 2 or tensor_parallel_degree 1 or 2"]),
    (4, "PP=3", ["pipeline_parallel_degree = 3: ", "1*?*1*1*3", "legal: pipeline_parallel_degree 1, 2 or 4"]),
    (8, "PP=2 SHARD=8", ["1*8*1*1*2 = 16 but world size = 8", "shard_degree 4 (-1", "or pipeline_parallel_degree 1"]),
    (2, "SHARD=1", ["= 1*1*1*1*1 = 1 but world size = 2; legal: data_parallel_shard_degree 2 (-1 takes all"]),
    (7, "CP=2 PP=5", ["1*?*2*1*5, and 10 doesn't divide world size = 7; legal: each degree must divide it: 1 or 7"]),
    (5040, "REPLICATE=11", ["legal: data_parallel_replicate_degree 10 or 12 (nearest of 60)"]),
    # batches: ranks of tp, cp and pp read the same rows
    (4, "TP=2 GLOBAL=12", ["training.global_batch_size = 12", "8 * 2 batch ranks", "= 16; nearest legal: 16"]),
    (4, "CP=4 GLOBAL=12", ["8 * 1 batch ranks", "nearest legal: 8 or 16"]),
    (4, "PP=2 GLOBAL=24", ["8 * 2 batch ranks", "nearest legal: 16 or 32"]),
    (8, "REPLICATE=2 SHARD=2 TP=2 GLOBAL=40", ["8 * 4 batch ranks", "= 32; nearest legal: 32 or 64"]),
    # tensor parallelism
    (8, "TP=8", ["tensor_parallel_degree = 8", "llama3 debugmodel: n_kv_heads 4 / 8 = 0.5; legal: 1, 2 or 4"]),
    (3, "TP=3", ["n_heads 8 / 3 = 2.667, n_kv_heads 4 / 3 = 1.333; legal: 1, 2 or 4"]),
    (16, "TP=16 FLAVOR=8B", ["llama3 8B: n_kv_heads 8 / 16 = 0.5; legal: 1, 2, 4 or 8"]),
    (16, "TP=16 MODEL=llama2 FLAVOR=13B", ["n_heads 40 / 16 = 2.5, n_kv_heads 40 / 16 = 2.5; legal: 1, 2, 4 or 8"]),
    (11, "TP=11 MODEL=wide", ["heads 840 / 11 = 76.36; legal: 10 or 12 (nearest of 32)"]),
    (
        2,
        "TP=2 MODEL=plain",
        ["tensor_parallel_degree = 2: model family plain has no tensor parallelism; leave it at 1"],
    ),
    (
        42,
        "TP=42 MODEL=wide VOCAB=270 SEQ=2100",
        ["a vocabulary of 270 rows, in parts of ceil(270 / 42) = 7, is used up by 39 ranks", "model.vocab_size 288"],
    ),
    # sequences
    (4, "CP=4 SEQ=36", ["training.seq_len = 36", "context_parallel_degree 4 * 2 = 8", "nearest legal: 32 or 40"]),
    (4, "CP=4 SEQ=4", ["context_parallel_degree 4 * 2 = 8 (a head and a tail chunk per rank); nearest legal: 8"]),
    (4, "CP=2 TP=2 SEQ=18", ["2 * lcm(2, tensor_parallel_degree 2) = 4 (a head", "nearest legal: 16 or 20"]),
    (15, "CP=5 TP=3 SEQ=45 MODEL=wide", ["5 * lcm(2, tensor_parallel_degree 3) = 30", "nearest legal: 30 or 60"]),
    (4, "CP=2 TP=2 SEQ=18 BALANCER=none", ["2 * tensor_parallel_degree 2 = 4 (a chunk per rank, which", "16 or 20"]),
    (4, "CP=4 SEQ=30 BALANCER=none", ["not a multiple of context_parallel_degree 4 (a chunk per rank)", "28 or 32"]),
    (4, "TP=4 SEQ=30", ["not a multiple of tensor_parallel_degree 4, over which sequence parallelism splits it", "28"]),
    (
        4,
        "CP=2 TP=2 SP=false SEQ=15",
        ["context_parallel_degree 2 * 2 = 4 (a head and a tail", "nearest legal: 12 or 16"],
    ),
    (
        3,
        "CP=3 SEQ=8191",
        ["context_parallel_degree 3 * 2 = 6", "nearest legal: 8190"],
    ),  # 8196 is too long for the model
    # pipelines: the model
    (
        2,
        "PP=2 MODEL=plain",
        ["pipeline_parallel_degree = 2: model family plain can't be cut into stages; leave it at 1"],
    ),
    (2, "PP=2 FLAVOR=3.2-1B", ["the head of llama3 3.2-1B shares the embedding's weight", "leave it at 1"]),
    (8, "PP=8", ["pipeline_parallel_degree = 8: 8 ranks * 1 stages = 8", "debugmodel has 6; legal: at most 6"]),
    (4, "PP=4 SCHEDULE=Interleaved1F1B", ["4 ranks * 2 stages = 8, and each stage needs a layer", "at most 3"]),
    (4, "PP=4 SCHEDULE=DualPipeV", ["4 ranks * 2 stages = 8, and each stage needs a layer", "at most 3"]),
    # pipelines: layers per stage
    (
        2,
        "PP=2 LAYERS=1 SCHEDULE=LoopedBFS",
        [
            "6 layers + 2 that the ends count for = 8, in stages of 1, are 8 stages",
            "legal: 2 (4 stages) or 4 to 7 (2 st",
        ],
    ),
    (2, "PP=2 LAYERS=3 SCHEDULE=LoopedBFS", ["are 3 stages, but", '"LoopedBFS" needs a multiple of', "legal: 2 (4"]),
    (2, "PP=2 LAYERS=2", ["are 4 stages, but", '"1F1B" needs exactly 2, one per rank', "legal: 4 to 7 (2 stages)"]),
    (
        3,
        "PP=3 LAYERS=3 SCHEDULE=ZBVZeroBubble",
        ["are 3 stages", "needs exactly 6, 2 for each of 3 ranks", "legal: none"],
    ),
    (3, "PP=3 LAYERS=3 FIRST=0 LAST=0", ["6 layers + 0 that the ends count for = 6", "are 2 stages", "legal: 2 (3"]),
    # pipelines: modules per part
    (2, 'PP=2 PARTS=[["tok_embeddings"],["layers.5"]]', ["no part has layers.0, layers.1, layers.2 and 4 more"]),
    (2, f"PP=2 PARTS={PARTS_OF_2.replace('layers.1', 'layer.1')}", ['no module "layer.1"; did you mean layers.1?']),
    (
        2,
        f"PP=2 PARTS={PARTS_OF_2.replace('layers.1', 'layers.0')}",
        ['"layers.0" is there 2 times; each', "; no part has layers.1"],
    ),
    (
        2,
        f"PP=2 PARTS={PARTS_OF_2.replace(',', '],[', 1)}",
        ["it has 3 parts, but", '"1F1B" needs exactly 2, one per rank'],
    ),
    (4, f"PP=4 PARTS={PARTS_OF_2}", ["it has 2 parts, but", "needs exactly 4, one per rank"]),
    (2, f"PP=2 SCHEDULE=DualPipeV PARTS={PARTS_OF_2}", ["it has 2 parts, but", "exactly 4, 2 for each of 2 ranks"]),
    (
        4,
        f"PP=4 SCHEDULE=LoopedBFS PARTS={PARTS_OF_2}",
        ["2 parts, but", "needs a multiple of parallelism.pipeline_par"],
    ),
    (2, f"PP=2 PARTS={SWAPPED}", ['"layers.1" comes before "layers.0", which goes first in the forward pass']),
    (
        3,
        f"PP=3 PARTS={PARTS_OF_2[:-1]},[]]",
        ["part 2 is empty; each needs a module"],
    ),
    # pipelines: microbatches
    (
        2,
        "PP=2 SIZE=3",
        ["microbatch_size = 3: it doesn't divide training.local_batch_size 8 (8 / 3 = 2.667)", "6 or 9"],
    ),
    (2, "PP=2 SIZE=16", ["8 / 16 = 0.5); legal: 1, 2, 4 or 8, or training.local_batch_size 16"]),
    (
        4,
        "PP=4 SIZE=4",
        ["8 / 4 = 2 microbatches", '"1F1B" needs at least one per stage, 4', "size 1 or 2, or training.loca"],
    ),
    (4, "PP=4 BATCH=3", ["3 / 1 = 3 microbatches", "legal: training.local_batch_size 4"]),
    (
        2,
        "PP=2 SCHEDULE=ZBVZeroBubble COMPILE=true",
        ["compile.enable = true beside", "GPipe, 1F1B, Interleaved1F1B or"],
    ),
    (2, "PP=2 SCHEDULE=DualPipeV BATCH=3", ["3 / 1 = 3 microbatches", "at least one per stage, 4", "batch_size 4"]),
    (
        2,
        "PP=2 SCHEDULE=Interleaved1F1B BATCH=5",
        [
            "5 // 2 ranks = 2 rounds, and 5 isn't a multiple of 2",
            "microbatch_size 5, or training.local_batch_size 4 or 6",
        ],
    ),
    (3, "PP=3 SCHEDULE=InterleavedZeroBubble BATCH=14 SIZE=2", ["7 // 3 ranks = 2 rounds, and 7 isn't", "12 or 16"]),
]


@pytest.mark.parametrize(("ranks", "layout", "expected"), ILLEGAL, ids=[f"{n}: {text}" for n, text, _ in ILLEGAL])
def test_illegal(ranks: int, layout: str, expected: list[str], mistakes: Mistakes) -> None:
    found = mistakes("", *arguments(layout), world_size=ranks)
    assert len(found) == 1, found
    for text in expected:
        assert text in found[0], found[0]


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, ""),
        (16, "REPLICATE=2 SHARD=2 CP=2 TP=2"),
        (32, "PP=2 REPLICATE=2 SHARD=2 CP=2 TP=2"),
        (8, "PP=2 TP=4"),
        (2, "PP=2 GLOBAL=8"),  # the ranks of a pipeline read the same rows
        (4, "CP=4 SEQ=32"),
        (4, "CP=2 TP=2 SEQ=20"),
        (4, "CP=4 SEQ=28 BALANCER=none"),
        (4, "TP=4 SP=false SEQ=31"),
        (4, "TP=4 VOCAB=301"),
        (8, "TP=8 MODEL=llama3 FLAVOR=405B"),
        (6, "PP=6"),
        (2, "PP=2 SCHEDULE=Interleaved1F1B"),
        (2, "PP=2 SCHEDULE=Interleaved1F1B LAYERS=4"),  # torch takes one stage per rank, too
        (2, "PP=2 SCHEDULE=LoopedBFS LAYERS=2"),
        (3, "PP=3 SCHEDULE=DualPipeV"),
        (2, "PP=2 LAYERS=4"),
        (2, "PP=2 LAYERS=7"),
        (2, f"PP=2 PARTS={PARTS_OF_2}"),
        (4, "PP=4 BATCH=4"),
        (2, "PP=2 SCHEDULE=GPipe BATCH=1"),
        (2, "PP=2 SCHEDULE=ZBVZeroBubble BATCH=1"),
        (4, "PP=4 SCHEDULE=Interleaved1F1B BATCH=3 MODEL=deep"),  # one short round
        (4, "PP=4 SCHEDULE=Interleaved1F1B BATCH=10 MODEL=deep"),
        # what a technique of degree 1 would be asked
        (1, "SCHEDULE=DualPipeV SIZE=3 LAYERS=5 CSV=nowhere.csv"),
        (1, 'PARTS=[["nothing"]] FLAVOR=3.2-1B'),
        (1, "SEQ=31 BALANCER=headtail"),
    ],
)
def test_legal(ranks: int, layout: str, load: Load) -> None:
    load("", *arguments(layout), world_size=ranks)


def test_a_pipeline_that_mostly_waits_is_a_warning(load: Load) -> None:
    warnings = load("", *arguments("PP=2 SCHEDULE=GPipe BATCH=1"), world_size=2).warnings
    assert any("pipeline_parallel_degree = 2: only 1 microbatch(es)" in warning for warning in warnings)


def test_mistakes_of_all_techniques_at_once(mistakes: Mistakes) -> None:
    found = mistakes("", *arguments("PP=7 TP=3 CP=4 SEQ=30 SIZE=3"), world_size=8)
    subjects = (
        "parallelism.context_parallel_degree = 4, parallelism.tensor_parallel_degree = 3, parallelism.pipeline_",
        "parallelism.tensor_parallel_degree = 3: it must divide",
        "parallelism.pipeline_parallel_degree = 7: 7 ranks",
        "parallelism.pipeline_parallel_microbatch_size = 3",
    )
    assert len(found) == 4 and all(text.startswith(start) for text, start in zip(found, subjects, strict=True)), found


class TestScheduleFile:
    GPIPE = "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n"

    @pytest.mark.parametrize(
        ("text", "layout", "expected"),
        [
            (None, "", ['schedule_csv = "s.csv": No such file']),
            ("0F0,0X0\n", "", ['row 1, cell 2: "0X0" is no action; write stage, F, B, I or W, and microbatch']),
            ("0F0,SEND\n", "", ['"SEND" is no action']),
            ("0F0,0SEND_F0\n", "", ['"0SEND_F0" is communication, which torch adds by itself']),
            ("0F0,0UNSHARD\n", "", ['"0UNSHARD" is communication']),
            ("0F0,0F0F\n", "", ['"0F0F" is no action']),
            (GPIPE + "\n", "", ["it has 3 rows, one per rank, but parallelism.pipeline_parallel_degree = 2"]),
            (GPIPE.replace("1F1,", ""), "", ["stage 1 has B of microbatch 1; each needs F and B, or F, I and W"]),
            (GPIPE.replace("1B1,", "1I1"), "", ["stage 1 has F and I of microbatch 1"]),
            (GPIPE.replace("0B1", "0B1,0B1"), "", ["0B1 is there 2 times"]),
            (GPIPE.replace("1F0", "1B0").replace("1F1,1B0", "1F1,1F0"), "", ["row 1 waits forever at 0B0 for 1B0"]),
            (
                GPIPE,
                "BATCH=8",
                ["it has 2 microbatches, but", "8 / parallelism", "size 1 = 8; legal: training.local_bat"],
            ),
            (GPIPE, "LAYERS=2 SCHEDULE=LoopedBFS", ["it has 2 stages, but", "layers_per_stage makes 4; legal: 4"]),
            ("1F0,1B0\n0F0,0B0\n", "BATCH=1", ["row 1 has stages 1, but rank 0 holds 0, as"]),
            (
                "0F0,0I0,0W0\n1F0,1B0\n",
                "BATCH=1 COMPILE=true",
                ['beside parallelism.pipeline_parallel_schedule_csv = "s'],
            ),
            (
                "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n",
                "BATCH=1",
                ["rank 0 holds 0 and 2", '"ZBVZeroBubble" lays them out in'],
            ),
        ],
    )
    def test_wrong(self, text: str | None, layout: str, expected: list[str], mistakes: Mistakes) -> None:
        if text is not None:
            Path("s.csv").write_text(text)
        found = mistakes("", *arguments(f"PP=2 CSV=s.csv BATCH=2 {layout}"), world_size=2)
        assert len(found) == 1, found
        for part in expected:
            assert part in found[0], found[0]

    @pytest.mark.parametrize(
        ("text", "layout"),
        [
            (GPIPE, "BATCH=2"),
            (GPIPE, "BATCH=4 SIZE=2"),
            ("0F0, 0B0\n1F0,1B0\n", "BATCH=1"),  # too few for 1F1B, which isn't what runs
            ("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", "BATCH=1"),  # four stages, since the file has four
            ("0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2B0,1B0\n", "BATCH=1 SCHEDULE=DualPipeV"),
            ("0F0,2F0,0F1,(2F1;2B0)OVERLAP_F_B,0B0,2B1,0B1\n1F0,3F0,1F1,3B0,3F1,1B0,3B1,1B1\n", "BATCH=2"),
        ],
    )
    def test_right(self, text: str, layout: str, load: Load) -> None:
        Path("s.csv").write_text(text)
        load("", *arguments(f"PP=2 CSV=s.csv {layout}"), world_size=2)


def test_numbers_that_are_listed() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1] and divisors(49) == [1, 7, 49]
    assert listed_near([4, 1, 2], 3) == "1, 2 or 4"
    assert listed_near(range(1, 40, 3), 11) == "10 or 13 (nearest of 13)"
    assert listed_near(range(1, 40, 3), 99) == "37 (nearest of 13)"
    assert nearest_multiples(10, 4) == [8, 12] and nearest_multiples(3, 4) == [4]
    assert nearest_multiples(10, 4, most=11) == [8] and nearest_multiples(3, 4, most=3) == []
