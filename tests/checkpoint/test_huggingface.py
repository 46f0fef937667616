"""Hugging Face folders: what titan writes transformers reads, what is written comes back, in every layout."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.runs import SmallRun
from tests.distributed.tiny_models import SPEC
from tests.distributed.world import Worlds
from tests.models.test_llama import SCALING, TINY, build
from titan.checkpoint import safetensors_files
from titan.checkpoint.collective import Alone, Ranks
from titan.checkpoint.huggingface_load import load_weights
from titan.checkpoint.huggingface_save import copy_tokenizer, save_weights
from titan.checkpoint.sources import open_source
from titan.checkpoint.state import training_tensors
from titan.checkpoint.weights import LiveWeights
from titan.config.errors import UserError
from titan.models.llama.huggingface import HUGGING_FACE
from titan.models.llama.model import Llama
from titan.models.llama.sizes import LlamaSizes

ROOT = Path(__file__).resolve().parents[2]
SMALL_FILE = 60_000  # bytes, so that a tiny model is cut into several


def strong_model(sizes: LlamaSizes, seed: int = 0) -> Llama:
    """Weights far from their small initial values, so that every part of the model matters."""
    model = build(sizes, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name) + seed)) * 0.1
            )
    return model


def tensors_of(model: Llama) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def export(model: Llama, folder: Path, **options: Any) -> None:
    save_weights(folder, LiveWeights(tensors_of(model)), Alone(), sizes=model.sizes, hf=HUGGING_FACE, **options)


def imported(folder: Path, sizes: LlamaSizes, dtype: torch.dtype = torch.float32) -> Llama:
    """A model with other weights, and then with those of the folder."""
    model = build(sizes, seed=9).to(dtype)
    load_weights(folder, tensors_of(model), Alone(), sizes=sizes, hf=HUGGING_FACE)
    return model


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Add tensors to a .safetensors file, or take them out."""
    tensors = load_file(path) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}, path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_hf_headdim_transformers_gives_the_same_logits(tied: bool, scaling: Any, tmp_path: Path) -> None:
    """GQA, and a head_dim that isn't dim / n_heads."""
    model = strong_model(dataclasses.replace(TINY, tied=tied, rope_scaling=scaling))
    export(model, tmp_path / "hf", file_bytes=SMALL_FILE)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokens = torch.randint(0, TINY.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, logits = model(tokens), theirs(tokens).logits
    assert logits.abs().max() > 1
    assert (ours - logits).abs().max() < 1e-5
    assert_equal(tensors_of(imported(tmp_path / "hf", model.sizes)), tensors_of(model))


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    model = strong_model(dataclasses.replace(TINY, tied=True, rope_scaling=SCALING))
    export(model, tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert_equal(tensors_of(imported(tmp_path / "theirs", model.sizes)), tensors_of(model))


def test_files_index_and_config(tmp_path: Path) -> None:
    model = build(TINY)
    export(model, tmp_path / "hf", file_bytes=SMALL_FILE)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in files for name in load_file(file)}
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert len(opened.keys()) == 1 or sum(t.nbytes for t in load_file(file).values()) <= SMALL_FILE
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["torch_dtype"]) == (256, 257, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    with pytest.raises(UserError, match="is there already"):
        export(model, tmp_path / "hf")


def test_hf_tied(tmp_path: Path) -> None:
    """No lm_head, said in config.json, both filled by an import; a copy in the file must be one."""
    sizes = dataclasses.replace(TINY, tied=True)
    model = strong_model(sizes)
    export(model, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    stored = load_file(path)
    assert "lm_head.weight" not in stored
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True
    again = imported(tmp_path / "hf", sizes)
    assert again.output.weight is again.tok_embeddings.weight
    assert torch.equal(again.output.weight, model.output.weight)

    embedding = stored["model.embed_tokens.weight"]
    rewrite(path, **{"lm_head.weight": embedding.clone()})
    assert_equal(tensors_of(imported(tmp_path / "hf", sizes)), tensors_of(model))
    rewrite(path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(UserError, match=r"lm_head\.weight has other values than model\.embed_tokens"):
        imported(tmp_path / "hf", sizes)
    with pytest.raises(UserError, match="so the model isn't tied"):
        open_source(tmp_path / "hf")
    with pytest.raises(UserError, match=r"tied \(stored True, here False\)"):
        imported(tmp_path / "hf", TINY)


def test_hf_vocabpad(tmp_path: Path) -> None:
    """A padded vocabulary is written as it is, or cut to the tokenizer's; a smaller one is padded with zeros."""
    padded = dataclasses.replace(TINY, vocab_size=104)
    model = strong_model(padded)
    export(model, tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["vocab_size"] == 104
    assert_equal(tensors_of(imported(tmp_path / "whole", padded)), tensors_of(model))

    export(model, tmp_path / "cut", vocab_size=101, file_bytes=SMALL_FILE)
    tokens = torch.arange(40).unsqueeze(0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype=torch.float32)(tokens).logits
    assert theirs.shape[-1] == 101
    assert (model(tokens)[..., :101] - theirs).abs().max() < 1e-5
    again = imported(tmp_path / "cut", padded)
    for name in ("tok_embeddings.weight", "output.weight"):
        weight = again.get_parameter(name)
        assert torch.equal(weight[:101], model.get_parameter(name)[:101]) and weight[101:].eq(0).all()
    with pytest.raises(UserError, match=r"vocab_size \(stored 104, here 101\)"):
        imported(tmp_path / "whole", TINY)
    with pytest.raises(UserError, match="vocab_size 105: the model has 104 rows"):
        export(model, tmp_path / "more", vocab_size=105)


@pytest.mark.parametrize(
    ("ours", "asked"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
def test_ck_export_dtype(ours: torch.dtype, asked: torch.dtype, tmp_path: Path) -> None:
    """Every tensor has the type that was asked for; the live model stays as it is."""
    model = strong_model(TINY).to(ours)
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    export(model, tmp_path / "hf", dtype=asked)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {asked}
    assert torch.equal(stored["model.norm.weight"], before["norm.weight"].to(asked))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == str(asked).removeprefix("torch.")
    assert_equal(tensors_of(model), before)
    again = imported(tmp_path / "hf", TINY, ours)
    assert again.norm.weight.dtype == ours
    assert_equal(tensors_of(again), {name: tensor.to(asked).to(ours) for name, tensor in before.items()})


def test_mixed_types_stay_as_they_are(tmp_path: Path) -> None:
    model = strong_model(dataclasses.replace(TINY, ffn_dim=7)).to(torch.bfloat16)
    model.norm.float()
    export(model, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.float32} == {"model.norm.weight"}
    assert torch.equal(stored["lm_head.weight"], model.output.weight)


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<s>": 1, "</s>": 2}, "unk_token": "a"},
}


@pytest.mark.parametrize("named", ["tokenizer", "tokenizer/tokenizer.json", "tokenizer/other.json"])
def test_the_tokenizer_goes_with_it(named: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "other.json"):
        (folder / name).write_text(json.dumps(TOKENIZER))
    ends = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "notes.txt").touch()
    export(build(TINY), tmp_path / "hf", tokenizer_path=str(tmp_path / named))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.convert_tokens_to_ids("</s>")) == (1, 2, 2)
    for file in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "hf" / file).read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (1, 2)
    added = {path.name for path in (tmp_path / "hf").iterdir()} & {path.name for path in folder.iterdir()}
    assert added == {"tokenizer.json", "tokenizer_config.json"}


def test_original_tokenizer_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_text("ranks")
    for number, place in enumerate((tmp_path, tmp_path / "original" / "tokenizer.model")):
        target = tmp_path / str(number)
        target.mkdir()
        copy_tokenizer(str(place), target)
        assert [path.name for path in target.iterdir()] == ["tokenizer.model"]


# --- mistakes


def test_names_and_shapes_are_strict(tmp_path: Path) -> None:
    export(build(TINY), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    rewrite(path, **inv_freq)
    imported(tmp_path / "hf", TINY)  # older files hold the frequencies

    rewrite(path, **{"model.layers.9.mlp.up_proj.weight": torch.ones(2), "model.norm.weight": None})
    with pytest.raises(UserError) as caught:
        imported(tmp_path / "hf", TINY)
    assert "1 missing: model.norm.weight (titan's norm.weight)" in str(caught.value)
    assert "1 not the model's: model.layers.9.mlp.up_proj.weight" in str(caught.value)

    rewrite(path, **{"model.layers.9.mlp.up_proj.weight": None, "model.norm.weight": torch.ones(63)})
    with pytest.raises(UserError, match=r"1 of another shape: model\.norm\.weight \(stored \[63\], here \[64\]\)"):
        imported(tmp_path / "hf", TINY)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    export(build(TINY), tmp_path / "hf", file_bytes=SMALL_FILE)
    last = max((tmp_path / "hf").glob("*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[:-5])
    with pytest.raises(UserError, match=f"{last.name} can't be read"):
        imported(tmp_path / "hf", TINY)
    last.unlink()
    with pytest.raises(UserError, match=f"names {last.name}, which isn't there"):
        imported(tmp_path / "hf", TINY)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    first = min((tmp_path / "hf").glob("*.safetensors"))
    last.write_bytes(content)
    placed = json.loads(index.read_text())
    placed["weight_map"]["lm_head.weight"] = first.name
    index.write_text(json.dumps(placed))
    with pytest.raises(UserError, match=rf"lm_head\.weight is in {first.name}, which doesn't have it"):
        imported(tmp_path / "hf", TINY)
    index.write_text("{}")
    with pytest.raises(UserError, match="isn't an index"):
        imported(tmp_path / "hf", TINY)
    (tmp_path / "hf" / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        imported(tmp_path / "hf", TINY)


# --- layouts

LAYOUTS = {
    "tp2·dp2": ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"],
    "pp2·dp2": [
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
        "--training.local_batch_size=2",
    ],
}
DEEP = SPEC.flavors["deep"]


def small_run(layout: str) -> SmallRun:
    return SmallRun("--model.flavor=deep", *LAYOUTS[layout])


def live(run: SmallRun) -> dict[str, torch.Tensor]:
    named = training_tensors(run.stages.parts, run.optimizer)
    return {name.removeprefix("model."): tensor for name, tensor in named.items() if name.startswith("model.")}


def _load_and_export(layout: str, source: str, target: str) -> dict[str, torch.Tensor]:
    run, ranks = small_run(layout), Ranks(timedelta(seconds=60))
    for tensor in live(run).values():
        torch.nn.init.constant_(tensor, 7.0)
    load_weights(source, live(run), ranks, sizes=DEEP, hf=HUGGING_FACE)
    options: dict[str, Any] = {"sizes": DEEP, "hf": HUGGING_FACE, "tokenizer_path": "tiny", "file_bytes": SMALL_FILE}
    save_weights(f"{target}-float32", LiveWeights(live(run)), ranks, **options)
    save_weights(f"{target}-bfloat16", LiveWeights(live(run)), ranks, **options, dtype=torch.bfloat16)
    return run.weights()


@pytest.mark.parametrize("layout", [pytest.param("tp2·dp2", marks=pytest.mark.slow), "pp2·dp2"])
def test_two_files_into_and_out_of_a_layout(layout: str, worlds: Worlds, tmp_path: Path) -> None:
    model = strong_model(DEEP)
    half = sum(parameter.nbytes for parameter in model.parameters()) * 6 // 10
    export(model, tmp_path / "source", file_bytes=half)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) == 2
    for weights in worlds(4).run(_load_and_export, layout, str(tmp_path / "source"), str(tmp_path / "target")):
        assert_equal(weights, tensors_of(model))
    for dtype in (torch.float32, torch.bfloat16):
        exported = imported(tmp_path / f"target-{str(dtype).removeprefix('torch.')}", DEEP)
        assert_equal(tensors_of(exported), {name: t.to(dtype).float() for name, t in tensors_of(model).items()})


def _float8(source: str, target: str) -> None:
    flags = ["--float8.enable_float8_linear", "--float8.emulate", "--float8.enable_fsdp_float8_all_gather"]
    run = SmallRun("--model.flavor=sixteens", "--parallelism.data_parallel_shard_degree=2", *flags)
    ranks, sizes = Ranks(timedelta(seconds=60)), SPEC.flavors["sixteens"]
    load_weights(source, live(run), ranks, sizes=sizes, hf=HUGGING_FACE)
    save_weights(target, LiveWeights(live(run)), ranks, sizes=sizes, hf=HUGGING_FACE, tokenizer_path="tiny")


@pytest.mark.slow
def test_float8_weights_are_stored_as_they_are_kept(worlds: Worlds, tmp_path: Path) -> None:
    model = strong_model(SPEC.flavors["sixteens"])
    export(model, tmp_path / "source")
    worlds(2).run(_float8, str(tmp_path / "source"), str(tmp_path / "target"))
    assert_equal(tensors_of(imported(tmp_path / "target", model.sizes)), tensors_of(model))


def _load_fails(folder: str) -> str:
    run = small_run("tp2·dp2")
    with pytest.raises((UserError, RuntimeError)) as caught:
        load_weights(folder, live(run), Ranks(timedelta(seconds=60)), sizes=DEEP, hf=HUGGING_FACE)
    return f"{type(caught.value).__name__}: {caught.value}"


def _load_fails_on_last(folder: str) -> str:
    """A file that only the last rank can't read."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 3:

            def broken(*_: Any) -> None:
                raise OSError(errno.EIO, "no such luck")

            patch.setattr("titan.checkpoint.huggingface_load.read_slice", broken)
        return _load_fails(folder)


def _export_fails(target: str) -> str:
    """The disk is full on the rank that writes."""
    run = small_run("pp2·dp2")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:  # the first of the second stage

            def full(self: Any, tensor: torch.Tensor) -> None:
                raise OSError(errno.ENOSPC, "the disk is full")

            patch.setattr(safetensors_files.SafetensorsFile, "write", full)
        with pytest.raises(RuntimeError) as caught:
            ranks = Ranks(timedelta(seconds=60))
            options: dict[str, Any] = {"sizes": DEEP, "hf": HUGGING_FACE, "tokenizer_path": "tiny"}
            save_weights(target, LiveWeights(live(run)), ranks, **options)
    return str(caught.value)


def test_a_failure_on_one_rank_ends_all(worlds: Worlds, tmp_path: Path) -> None:
    export(build(DEEP), tmp_path / "hf")
    for text in worlds(4).run(_load_fails_on_last, str(tmp_path / "hf")):
        assert "rank 3: OSError: [Errno 5] no such luck" in text
    for text in worlds(4).run(_export_fails, str(tmp_path / "target")):
        assert "rank 2: OSError: [Errno 28] the disk is full" in text
    assert not (tmp_path / "target").exists()
    rewrite(tmp_path / "hf" / "model.safetensors", **{"lm_head.weight": None})
    for text in worlds(4).run(_load_fails, str(tmp_path / "hf")):
        assert text.startswith("UserError:") and "1 missing: lm_head.weight" in text


# --- memory

# One of four ranks loads its shard of a model that is stored in one file. What counts is the memory since before it had
# any weights.
MEASURED = """
import json, sys
from dataclasses import replace
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg
from titan.checkpoint.collective import Alone
from titan.checkpoint.huggingface_load import load_weights
from titan.models.llama.huggingface import HUGGING_FACE
from titan.models.llama.model import Llama
from tests.checkpoint.test_huggingface import LARGE
from titan.training.initialize import materialize

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

dist.init_process_group("fake", rank=1, world_size=4, store=fake_pg.FakeStore())
with torch.device("meta"):
    model = Llama(LARGE)
mesh = init_device_mesh("cpu", (4,))
for module in (*model.layers.values(), model):
    fully_shard(module, mesh=mesh)
import safetensors, safetensors.torch
before = peak()
materialize(model, torch.device("cpu"))
tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
load_weights(sys.argv[1], tensors, Alone(), sizes=LARGE, hf=HUGGING_FACE)
shard = sum(tensor.to_local().nbytes for tensor in tensors.values())
largest = max(tensor.numel() * 4 for tensor in tensors.values())
print(json.dumps([peak() - before, shard, largest, sum(t.numel() * 4 for t in tensors.values())]))
"""
LARGE = LlamaSizes(
    dim=512,
    n_layers=10,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=4096,
    vocab_size=20_000,
    max_seq_len=64,
    rope_theta=10_000.0,
)


@pytest.mark.slow
def test_an_import_takes_a_shard_and_a_tensor(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Llama(LARGE)
    tensors = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    save_weights(tmp_path / "hf", LiveWeights(tensors), Alone(), sizes=LARGE, hf=HUGGING_FACE)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, shard, largest, whole = json.loads(done.stdout)
    print(f"MiB: peak {peak >> 20}, shard {shard >> 20}, largest {largest >> 20}, file {whole >> 20}")
    assert whole > 2 * (shard + largest)
    assert peak < shard + largest + 20 * 2**20
