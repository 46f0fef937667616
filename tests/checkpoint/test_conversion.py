"""Weights from any format to any other, and Meta's against an independent forward pass with its own rotary pairs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.checkpoint.test_huggingface import assert_equal, strong_model, tensors_of
from tests.distributed.runs import TINY as TINY_RUN
from tests.distributed.runs import train_here
from tests.distributed.tiny_models import SPEC, UNTIED
from tests.distributed.world import Worlds
from titan.checkpoint.conversion import load_model, write_weights
from titan.checkpoint.manifest import read_manifest
from titan.checkpoint.model_names import named_model
from titan.checkpoint.sources import Format, Source, open_source
from titan.checkpoint.tensor_files import read_tensors
from titan.config.errors import UserError
from titan.models.llama.model import Llama
from titan.models.llama.sizes import LlamaSizes, RopeScaling

FORMATS: list[Format] = ["dcp", "hf", "torch", "meta"]


def named(flavor: str) -> Any:
    return named_model(
        ["--experimental.custom_import=tests.distributed.tiny_models", "--model.name=tiny", f"--model.flavor={flavor}"]
    )


def place(folder: Path, form: Format) -> Path:
    return folder / (f"{form}.pt" if form == "torch" else form)


def stored(model: Llama, folder: Path, flavor: str, *forms: Format) -> Source:
    """The model as a torch file and in more formats, each of them made from the one before it."""
    torch.save(model.state_dict(), place(folder, "torch"))
    source = open_source(place(folder, "torch"), named(flavor))
    for form in forms:
        if form != "torch":
            write_weights(source, place(folder, form), form, None)
            source = open_source(place(folder, form), named(flavor))
    return source


def weights_of(source: Source) -> dict[str, torch.Tensor]:
    return {name: source.weights.get(name) for name in source.weights.infos}


@pytest.mark.parametrize("flavor", ["untied", "tied"])
def test_every_format_into_every_other(flavor: str, tmp_path: Path) -> None:
    model = strong_model(SPEC.flavors[flavor])
    stored(model, tmp_path, flavor, *FORMATS)
    for number, (before, after) in enumerate(itertools.permutations(FORMATS, 2)):
        source = open_source(place(tmp_path, before), named(flavor))
        assert source.format == before
        target = place(tmp_path / str(number), after)
        write_weights(source, target, after, None)
        found = open_source(target, named(flavor))
        assert_equal(weights_of(found), tensors_of(model))
        assert found.sizes == model.sizes
    again = load_model(found, torch.device("cpu"), torch.float32)
    tokens = torch.arange(20).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))


def test_a_torch_file_is_a_state_dict(tmp_path: Path) -> None:
    model = strong_model(SPEC.flavors["tied"])
    source = stored(model, tmp_path, "tied", "hf")
    written = write_weights(source, tmp_path / "again.pt", "torch", torch.bfloat16)
    state = torch.load(written, weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    model.load_state_dict(state, strict=True)
    whole = sum(parameter.numel() * 2 for parameter in model.parameters())
    assert written.stat().st_size < whole + 20_000  # the head isn't stored twice, and no view with its file


# --- titan's checkpoints


def test_a_trained_run_becomes_a_folder_and_a_checkpoint_again(worlds: Worlds, tmp_path: Path, alone: None) -> None:
    """From a run on two ranks, whose checkpoint has the optimizer's state beside the weights."""
    arguments = [*TINY_RUN, f"--job.dump_folder={tmp_path}", "--training.steps=1", "--checkpoint.enable"]
    worlds(2).run(train_here, [*arguments, "--training.local_batch_size=2"])
    source = open_source(tmp_path / "checkpoint")
    assert source.config is not None and source.config.model.flavor == "untied" and source.tokenizer_path == "tiny"
    write_weights(source, tmp_path / "hf", "hf", None)
    with pytest.raises(UserError, match="no flavor of titan's has these sizes"):
        write_weights(source._replace(config=None), tmp_path / "new", "dcp", None)
    again = write_weights(open_source(tmp_path / "hf", named("untied")), tmp_path / "new", "dcp", None)
    assert again == tmp_path / "new" / "step-0"
    manifest = read_manifest(again, 0)
    assert {path.name for path in again.iterdir()} == {*manifest.files, "manifest.json"}
    assert_equal(weights_of(open_source(again)), weights_of(source))

    import torch.distributed as dist

    live = {f"model.{name}": torch.zeros(info.shape) for name, info in source.weights.infos.items()}
    assert dist.group.WORLD is not None
    read_tensors(again, live, dist.group.WORLD)  # as a run does
    assert not any(isinstance(tensor, DTensor) for tensor in live.values())
    assert_equal({name.removeprefix("model."): tensor for name, tensor in live.items()}, weights_of(source))


def test_published_sizes_need_no_name(tmp_path: Path) -> None:
    """The debug model is one of titan's flavors, so a folder of its sizes is known by them."""
    debug = named_model(["--model.flavor=debugmodel"])
    sizes = dataclasses.replace(UNTIED, dim=192, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=24, ffn_dim=384)
    sizes = dataclasses.replace(sizes, vocab_size=300, max_seq_len=8192, rope_theta=500_000.0)
    model = strong_model(sizes)
    torch.save(model.state_dict(), tmp_path / "debug.pt")
    assert debug is not None
    debug.model.vocab_size = 300
    write_weights(open_source(tmp_path / "debug.pt", debug), tmp_path / "hf", "hf", None)
    found = open_source(tmp_path / "hf")
    assert found.config is not None
    model_section = found.config.model
    assert (model_section.name, model_section.flavor, model_section.vocab_size) == ("llama3", "debugmodel", 300)
    write_weights(found, tmp_path / "dcp", "dcp", torch.bfloat16)
    assert open_source(tmp_path / "dcp").sizes.vocab_size == 300


# --- Meta's

META_SIZES = dataclasses.replace(UNTIED, rope_scaling=None)


def meta_forward(state: dict[str, torch.Tensor], sizes: LlamaSizes, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `[S, V]` of one window, with neighbouring pairs as complex numbers. Written from the papers."""
    positions = torch.arange(len(tokens), dtype=torch.float64)
    frequencies = sizes.rope_theta ** (-torch.arange(0, sizes.head_dim, 2, dtype=torch.float64) / sizes.head_dim)
    turns = torch.polar(torch.ones(len(tokens), sizes.head_dim // 2).double(), torch.outer(positions, frequencies))
    mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + sizes.norm_eps) * gain

    def heads(x: torch.Tensor, weight: torch.Tensor, turned: bool) -> torch.Tensor:
        out = (x @ weight.T).view(len(tokens), -1, sizes.head_dim)
        if turned:
            pairs = torch.view_as_complex(out.double().reshape(*out.shape[:2], -1, 2)) * turns[:, None]
            out = torch.view_as_real(pairs).flatten(-2).float()
        return out.transpose(0, 1)

    h = state["tok_embeddings.weight"][tokens]
    for layer in range(sizes.n_layers):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in state.items()}
        x = norm(h, w["attention_norm.weight"])
        q, k, v = (heads(x, w[f"attention.w{name}.weight"], name != "v") for name in "qkv")
        k, v = (t.repeat_interleave(sizes.n_heads // sizes.n_kv_heads, dim=0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) / sizes.head_dim**0.5 + mask).softmax(-1)
        h = h + (scores @ v).transpose(0, 1).flatten(1) @ w["attention.wo.weight"].T
        x = norm(h, w["ffn_norm.weight"])
        gated = F.silu(x @ w["feed_forward.w1.weight"].T) * (x @ w["feed_forward.w3.weight"].T)
        h = h + gated @ w["feed_forward.w2.weight"].T
    return norm(h, state["norm.weight"]) @ state["output.weight"].T


TOKENS = torch.randint(0, 101, (48,), generator=torch.Generator().manual_seed(1))


def test_hf_permute(tmp_path: Path) -> None:
    """Exported for Meta, an independent forward pass gives our logits; imported again, the weights are the same."""
    model = strong_model(META_SIZES)
    stored(model, tmp_path, "untied", "hf", "meta")
    state = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    with torch.no_grad():
        ours = model(TOKENS.unsqueeze(0))[0]
    theirs = meta_forward(state, META_SIZES, TOKENS)
    assert theirs.abs().max() > 1
    assert (ours - theirs).abs().max() < 1e-5
    swapped = state | {"layers.0.attention.wk.weight": model.state_dict()["layers.0.attention.wk.weight"]}
    assert (ours - meta_forward(swapped, META_SIZES, TOKENS)).abs().max() > 1e-3  # the test would notice
    assert_equal(weights_of(open_source(tmp_path / "meta", named("untied"))), tensors_of(model))


def split_as_meta(state: dict[str, torch.Tensor], folder: Path, count: int, embedding_dim: int) -> None:
    """A file per tensor-parallel rank; the embedding is cut by its columns in Llama 2, by its rows in Llama 3."""
    by_columns = ("attention.wo.weight", "feed_forward.w2.weight")
    for rank in range(count):
        part = {}
        for name, tensor in state.items():
            dim = embedding_dim if name == "tok_embeddings.weight" else 1 if name.endswith(by_columns) else 0
            part[name] = tensor if tensor.ndim == 1 else tensor.chunk(count, dim)[rank].clone()
        part["rope.freqs"] = torch.ones(6)
        torch.save(part, folder / f"consolidated.{rank:02}.pth")


@pytest.mark.parametrize("embedding_dim", [0, 1])
def test_files_of_several_ranks_are_joined(embedding_dim: int, tmp_path: Path) -> None:
    sizes = dataclasses.replace(UNTIED, vocab_size=104)
    model = strong_model(sizes)
    torch.save(model.state_dict(), tmp_path / "one.pt")
    config = named("untied")
    config.model.vocab_size = 104
    write_weights(open_source(tmp_path / "one.pt", config), tmp_path / "meta", "meta", None)
    state = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    split_as_meta(state, tmp_path / "meta", 2, embedding_dim)
    source = open_source(tmp_path / "meta")  # no name: params.json says it
    assert_equal(weights_of(source), tensors_of(model))
    assert dataclasses.replace(source.sizes, max_seq_len=128) == sizes
    (tmp_path / "meta" / "consolidated.01.pth").unlink()
    with pytest.raises(UserError, match="of another shape"):
        open_source(tmp_path / "meta", config)


# --- mistakes


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = strong_model(UNTIED)
    source = stored(model, tmp_path, "untied", "hf")
    with pytest.raises(UserError, match="no such file or folder"):
        open_source(tmp_path / "nothing")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"none of the formats.*it has notes\.txt"):
        open_source(tmp_path / "else")
    with pytest.raises(UserError, match=r"name it by --model\.name"):
        open_source(tmp_path / "torch.pt")
    with pytest.raises(UserError, match=r"flavor = \"smal\": tiny has no such flavor"):
        named("smal")
    with pytest.raises(UserError, match=r"--model\.flavour 8B: no such option; did you mean --model\.flavor"):
        named_model(["--model.flavour=8B"])
    with pytest.raises(UserError, match=r"isn't a tiny deep: n_layers \(stored 2, here 4\)"):
        open_source(tmp_path / "hf", named("deep"))
    with pytest.raises(UserError, match="of another model:\n  - 18 missing"):
        open_source(tmp_path / "torch.pt", named("deep"))
    with pytest.raises(UserError, match="isn't tied"):
        open_source(tmp_path / "torch.pt", named("tied"))
    write_weights(source, tmp_path / "dcp", "dcp", None)
    with pytest.raises(UserError, match=r"isn't a tiny deep: n_layers"):
        open_source(tmp_path / "dcp", named("deep"))
    with pytest.raises(UserError, match="is there already"):
        write_weights(source, tmp_path / "else", "hf", None)
    with pytest.raises(UserError, match="only a Hugging Face folder"):
        write_weights(source, tmp_path / "new", "meta", None, vocab_size=100)
    (tmp_path / "broken.pt").write_bytes(b"no torch file")
    with pytest.raises(UserError, match="can't be read as a torch file"):
        open_source(tmp_path / "broken.pt", named("untied"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match="expected a dict of tensors"):
        open_source(tmp_path / "list.pt", named("untied"))
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mistral"}))
    with pytest.raises(UserError, match="model_type = 'mistral': titan has llama"):
        open_source(tmp_path / "hf")
    with pytest.raises(UserError, match="model_type = 'mistral'"):
        open_source(tmp_path / "hf", named("untied"))


def test_other_norms_stay_in_titan_s_formats(tmp_path: Path) -> None:
    source = stored(strong_model(SPEC.flavors["layernorm"]), tmp_path, "layernorm", "dcp")
    for form in ("hf", "meta"):
        with pytest.raises(UserError, match="no norm but rmsnorm"):
            write_weights(source, tmp_path / "new", form, None)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
    assert open_source(tmp_path / "dcp").sizes.norm_type == "layernorm"


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    stored(strong_model(UNTIED), tmp_path, "untied", "dcp")
    step = tmp_path / "dcp" / "step-0"
    shutil.copytree(step, tmp_path / "dcp" / "step-10")  # of another step by its manifest
    assert open_source(tmp_path / "dcp").format == "dcp"
    with pytest.raises(UserError, match=r"no complete checkpoint there \(step-10: "):
        open_source(tmp_path / "dcp" / "step-10")
    (file,) = step.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"is damaged: {file.name}"):
        open_source(step)
    (step / "manifest.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint there"):
        open_source(tmp_path / "dcp")


def test_scaled_positions_survive_meta(tmp_path: Path) -> None:
    sizes = dataclasses.replace(UNTIED, rope_scaling=RopeScaling(8.0))
    model = strong_model(sizes)
    torch.save(model.state_dict(), tmp_path / "one.pt")
    source = open_source(tmp_path / "one.pt", named("untied"))._replace(sizes=sizes)
    write_weights(source, tmp_path / "meta", "meta", None)
    assert open_source(tmp_path / "meta").sizes.rope_scaling == RopeScaling(8.0)
