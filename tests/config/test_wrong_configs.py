"""A wrong config is one mistake that names where it is, the key, the value, and the nearest thing that works."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.config.conftest import Mistakes
from titan.config.errors import ConfigError
from titan.config.fields import all_settings
from titan.config.legacy import RENAMES
from titan.config.loader import load_config
from titan.config.not_built import NEVER, NOT_BUILT

ARGUMENT = "command line: "

# (TOML text, or arguments when it starts with --; what the one mistake must contain)
WRONG: list[tuple[str, list[str]]] = [
    # unknown names
    ("[training]\nseqlen = 64", ["run.toml: training.seqlen = 64", "did you mean training.seq_len?"]),
    ("[training]\nsteps_ = 64", ["training.steps_", "did you mean training.steps?"]),
    ("[training]\nSteps = 64", ["training.Steps", "did you mean training.steps?"]),
    ("[training]\nlr = 1.0", ["training.lr = 1.0", "did you mean optimizer.lr?"]),
    ("[optimizer]\nwarmup_steps = 3", ["optimizer.warmup_steps", "lr_scheduler.warmup_steps?"]),
    ("[optimizer]\nlr_min = 0.1", ["optimizer.lr_min", "did you mean lr_scheduler.min_lr_factor?"]),
    ("[trainng]\nsteps = 5", ["trainng.steps", "did you mean training.steps?"]),
    ("[paralelism]\ntensor_parallel_degree = 2", ["paralelism.", "parallelism.tensor_parallel_degree?"]),
    ("[paralelism]", ["run.toml: [paralelism]", "did you mean [parallelism]?"]),
    ("[training.dataloder]\nprefetch_factor = 1", ["dataloder", "training.dataloader.prefetch_factor?"]),
    ("[training.dataloader]\nprefetch = 1", ["dataloader.prefetch", "training.dataloader.prefetch_factor?"]),
    ("[training]\nprefetch_factor = 1", ["training.prefetch_factor", "training.dataloader.prefetch_factor?"]),
    ("[training.dataloader]\nsteps = 1", ["training.dataloader.steps", "did you mean training.steps?"]),
    ("tensor_parallel_degree = 2", ["run.toml: tensor_parallel_degree = 2", "parallelism.tensor_parallel_degree?"]),
    ("stepz = 2", ["run.toml: stepz", "did you mean training.steps?"]),
    ("extend = 'a.toml'", ["extend", "did you mean extends at the top of the file?"]),
    ("[training]\nextends = 'a.toml'", ["training.extends", "extends at the top of the file?"]),
    ("[zzz]\nqqq = 1", ["zzz.qqq", "the sections are job, model"]),
    ("--training.seq_lenn 64", [ARGUMENT + "--training.seq_lenn 64", "did you mean --training.seq_len?"]),
    ("--training.seq-lenn=64", ["--training.seq-lenn 64", "did you mean --training.seq_len?"]),
    ("--seq_len 64", ["--seq_len", "did you mean --training.seq_len?"]),
    ("--optimizer.steps 64", ["--optimizer.steps", "did you mean --training.steps?"]),
    ("--training.no_steps", ["--training.no_steps", "did you mean --training.steps?"]),
    ("--metrics.no_enable_tensorboard=true", ["no_enable_tensorboard", "--metrics.enable_tensorboard?"]),
    ("--training 5", ["--training 5", "is a section"]),
    # the form of the command line
    ("--training.steps", ["--training.steps", "needs a value", "whole number"]),
    ("--training.steps=", ["--training.steps", "whole number of at least 1"]),
    ("--training.dataset_path", ["--training.dataset_path", "needs a value"]),
    ("--job.config_file", ["--job.config_file", "needs a value"]),
    ("run.toml", ["run.toml: not an option", "--section.field value"]),
    ("--training.steps=5 6", ["6: not an option"]),
    ("-training.steps=5", ["-training.steps=5: not an option"]),
    # checkpoints
    ("--checkpoint.initial_load_path=/no/such", ["initial_load_path", "no such folder"]),
    ("--checkpoint.exclude_from_loading=typo", ["exclude_from_loading", "typo", "optimizer", "dataloader"]),
    ("--checkpoint.exclude_from_loading=optimizer", ["belong together", "name train_state too"]),
    ("--checkpoint.exclude_from_loading=train_state,dataloader", ["belong together", "name optimizer too"]),
    (
        "--checkpoint.create_seed_checkpoint",
        ["create_seed_checkpoint", "nothing is saved with checkpoint.enable = false"],
    ),
    (
        "--checkpoint.create_seed_checkpoint --checkpoint.enable --checkpoint.load_only",
        ["create_seed_checkpoint", "nothing is saved with checkpoint.load_only = true"],
    ),
    (
        "--metrics.rank_log_folder=ranks --checkpoint.enable --checkpoint.load_only",
        ['metrics.rank_log_folder = "ranks"', "checkpoint.load_only = true writes nothing; leave one of them out"],
    ),
    ("--checkpoint.initial_load_in_hf", ["initial_load_in_hf = true: from where?", "model.hf_assets_path"]),
    (
        "--checkpoint.initial_load_in_hf --checkpoint.initial_load_path=. --checkpoint.no_initial_load_model_only",
        ["initial_load_model_only = false", "holds weights alone"],
    ),
    ("--checkpoint.last_save_in_hf --model.norm_type=layernorm", ["last_save_in_hf = true", "rmsnorm"]),
    # validation
    ("--validation.enable --validation.dataset=txt", ["dataset = 'txt'", "Did you mean text?"]),
    ("--validation.enable --validation.dataset=text", ['validation.dataset = "text" needs validation.dataset_path']),
    (
        "--validation.enable --validation.dataset=json --validation.dataset_path=/no/*.json",
        ['validation.dataset_path = "/no/*.json": matches no file'],
    ),
    ("--validation.enable --validation.seq_len=10000", ["validation.seq_len = 10000", "positions for 8192"]),
    ("--validation.freq=0", ["--validation.freq 0", "at least 1"]),
    # sections and keys mixed up
    ("training = 5", ["training = 5", "is a section; write [training]"]),
    ("[[training]]\nsteps = 1", ["training = ", "is a section; write [training]"]),
    ("[training]\ndataloader = 5", ["training.dataloader = 5", "write [training.dataloader]"]),
    ("[training.steps]\nx = 1", ["training.steps = a table", "whole number"]),
    ("[training.batch_size]\nx = 1", ["training.batch_size = a table", "today training.local_batch_size"]),
    ("[job]\nconfig_file = 'x'", ["job.config_file", "write extends at the top"]),
    # types
    ('[training]\nsteps = "100"', ['training.steps = "100"', "whole number", "write 100 without quotes"]),
    ('[training]\nsteps = "many"', ['training.steps = "many"', "whole number of at least 1"]),
    ("[training]\nsteps = true", ["training.steps = true", "whole number"]),
    ("[training]\nsteps = 10.5", ["training.steps = 10.5", "whole number"]),
    ("[training]\nsteps = 10.0", ["training.steps = 10.0", "whole number"]),
    ("[training]\nsteps = [1]", ["training.steps = [1]", "whole number"]),
    ("[training]\nsteps = 9223372036854775808", ["training.steps", "whole number"]),
    ("[training]\nsteps = 1979-05-27", ["training.steps = 1979-05-27", "whole number"]),
    ('[optimizer]\nlr = "3e-4"', ['optimizer.lr = "3e-4"', "finite number", "write 3e-4 without quotes"]),
    ("[optimizer]\nlr = true", ["optimizer.lr = true", "finite number"]),
    ("[optimizer]\nlr = nan", ["optimizer.lr = nan", "finite number"]),
    ("[optimizer]\nlr = inf", ["optimizer.lr = inf", "finite number"]),
    ("[metrics]\nenable_tensorboard = 1", ["metrics.enable_tensorboard = 1", "true or false"]),
    ('[metrics]\nenable_tensorboard = "true"', ["true or false", "write true without quotes"]),
    ("[model]\nflavor = 8", ["model.flavor = 8", "expected a text"]),
    ("--training.steps 10.5", [ARGUMENT + "--training.steps 10.5", "whole number"]),
    ("--training.steps true", ["--training.steps true", "whole number"]),
    ("--training.steps 1e999999999", ["--training.steps 1e999999999", "whole number"]),
    ("--training.steps nan", ["--training.steps nan", "whole number"]),
    ("--optimizer.lr fast", ["--optimizer.lr fast", "finite number"]),
    ("--optimizer.lr 1e999", ["--optimizer.lr 1e999", "finite number"]),
    ("--optimizer.lr nan", ["--optimizer.lr nan", "finite number"]),
    ("--metrics.enable_tensorboard maybe", ["--metrics.enable_tensorboard maybe", "true or false"]),
    ("--metrics.enable_tensorboard=1", ["--metrics.enable_tensorboard 1", "true or false"]),
    ("--job.description \udcff", ["--job.description", "expected a text"]),
    # choices
    ('[training]\nmixed_precision_param = "fp8"', ["mixed_precision_param", '"bfloat16", "float16", "float32"']),
    ('[training]\nmixed_precision_param = "bf16"', ["mixed_precision_param", 'did you mean "bfloat16"?']),
    ('[optimizer]\nname = "adamw"', ['optimizer.name = "adamw"', 'did you mean "AdamW"?']),
    ("--optimizer.name adamw", ["--optimizer.name adamw", 'did you mean "AdamW"?']),
    ("--lr_scheduler.decay_type cos", ["--lr_scheduler.decay_type", '"linear", "sqrt", "cosine"']),
    ("[model]\nnorm_type = 5", ["model.norm_type = 5", '"rmsnorm"']),
    (
        "[compile]\ncomponents = ['model', 'optimiser']",
        ["compile.components", 'a list of "model", "loss", "optimizer"; did you mean "optimizer"?'],
    ),
    ('--compile.components ["model"', ["compile.components", 'a list of "model", "loss", "optimizer"']),
    ("--compile.components model,losses", ["compile.components model,losses", 'did you mean "loss"?']),
    ("[compile]\ncomponents = 'model'", ["compile.components", 'a list of "model", "loss", "optimizer"']),
    # bounds
    ("[training]\nseq_len = 0", ["training.seq_len = 0", "at least 1"]),
    ("[training]\nlocal_batch_size = -1", ["training.local_batch_size = -1", "at least 1"]),
    ("[training]\nglobal_batch_size = 0", ["training.global_batch_size = 0", "at least 1, or -1"]),
    ("[training]\nmax_norm = -1", ["training.max_norm = -1", "at least 0"]),
    ("[optimizer]\nbeta1 = 1.5", ["optimizer.beta1 = 1.5", "at least 0 and at most 1"]),
    ("--checkpoint.load_step -2", ["--checkpoint.load_step -2", "at least 0, or -1"]),
    # files
    ("[training\nsteps = 1", ["run.toml, line 1, column"]),
    ("[training]\nsteps = 1\nsteps = 2\n", ["run.toml, line 3, column"]),
    ("[training]\nsteps = ", ["run.toml, "]),
    ("extends = 5", ["run.toml: extends = 5", "a file name or a list"]),
    ("extends = 'base.toml'", ["run.toml: extends", "base.toml", "looked for base.toml"]),
    ("extends = 'rum.toml'", ["rum.toml", "did you mean run.toml?"]),
    ("extends = 'run.toml'", ["extends itself: run.toml -> run.toml"]),
    ("--job.config_file nope.toml", ["nope.toml: no such file", "looked for nope.toml, train_configs/nope.toml, "]),
    # models, data, and rules across fields
    ("[model]\nname = 'lama3'", ['model.name = "lama3"', "llama2", "llama3", "did you mean llama3?"]),
    ("[model]\nflavor = '8b'", ['model.flavor = "8b"', "did you mean 8B?"]),
    ("[model]\nname = 'llama2'\nflavor = '8B'", ['model.flavor = "8B"', "llama2 has no such flavor", "7B, 13B"]),
    ("[training]\nseq_len = 8193", ["training.seq_len = 8193", "use at most 8192"]),
    ("[model]\nvocab_size = 100", ["model.vocab_size = 100", "set model.vocab_size to 2"]),
    ("[model]\ntokenizer_path = 'nowhere'", ["model.tokenizer_path", "nowhere"]),
    ("[training]\ndataset = 'text'", ['training.dataset = "text"', "needs training.dataset_path"]),
    ("[training]\ndataset = 'json'\ndataset_path = 'x/*.json'", ["training.dataset_path", "matches no file"]),
    ("[training]\ndataset = 'text'\ndataset_path = 'rum.toml'", ["matches no file", "did you mean run.toml?"]),
    ("[training]\ndataset = 'tokens'", ['training.dataset = "tokens" needs', "scripts/prepare_data.py"]),
    ("[training]\ndataset = 'tokens'\ndataset_path = '.'", ["tokens.json is missing, so it has no token files"]),
    ("[training]\ndataset = 'tokens'\ndataset_path = 'rum.toml'", ["matches no file", "did you mean run.toml?"]),
    ("[training.dataloader]\nnum_workers = -1", ["training.dataloader.num_workers = -1", "at least 0"]),
    ("[training]\ndataset = 'jsno'", ["training.dataset = 'jsno' isn't a dataset", "Did you mean json?", "owner/name"]),
    ("[training]\ndataset = 'jsno'\ndataset_path = 'x'", ["training.dataset = 'jsno' isn't a dataset"]),
    ("[training]\ndataset = './run.toml'", ["training.dataset = './run.toml' is a path", "training.dataset_path"]),
    ("[training]\ndataset = ''", ["training.dataset = '' isn't a dataset"]),
    ("[training]\ndataset = '~nobody-here'", ["training.dataset = '~nobody-here' isn't a dataset"]),
    ("[checkpoint]\nload_step = 5", ["checkpoint.load_step = 5", "set checkpoint.enable = true"]),
    ("[experimental]\ncustom_import = 'no_such_module'", ["custom_import = no_such_module", "ModuleNotFoundError"]),
    # older names
    ('[training]\nbatch_size = "8"', ["training.batch_size", "today training.local_batch_size", "whole number"]),
    ("[optimizer]\nfused = 1", ["optimizer.fused = 1", "today optimizer.implementation", "true or false"]),
    ("[training]\ntensor_parallel_degree = 0", ["today parallelism.tensor_parallel_degree", "at least 1"]),
    ("[experimental]\npipeline_parallel_schedule = '1f2b'", ["pipeline_parallel_schedule", 'did you mean "1F1B"?']),
    ("[experimental]\npipeline_parallel_split_points = 'layers.2'", ["a list of texts"]),
    ("[parallelism]\nmodule_fqns_per_model_part = ['layers.0']", ["a list of lists of texts"]),
    ("[training]\nbatch_size = 8\nlocal_batch_size = 4", ["training.local_batch_size = 4", "contradicts"]),
    ("--training.batch_size 8 --training.local_batch_size 4", ["contradicts", "--training.batch_size"]),
    # features that aren't there
    (
        "[parallelism]\nexpert_parallel_degree = 2",
        ["expert_parallel_degree = 2: expert parallelism isn't built yet; leave it at 1"],
    ),
    ("--parallelism.expert_parallel_degree 2", ["expert parallelism isn't built yet; leave it at 1"]),
    ("[parallelism]\nexpert_parallel_degree = true", ["expert parallelism isn't built yet"]),
    ("[training]\ncompile = 3", ["training.compile = 3 (today compile.enable)", "true or false"]),
    ("[model]\nconverters = ['float8']", ["float8.enable_float8_linear = true", "float8.emulate = true"]),
    ("[model]\nconverters = ['mx']", ['the converter "mx" isn\'t offered']),
    ("[model]\nhf_assets_path = './assets'", ['model.hf_assets_path = "./assets"', "no such folder"]),
    ("[experimental]\nenable_compiled_autograd = true", ["compiled autograd isn't offered"]),
    ("[memory_estimation]\nenabled = true", ["memory_estimation.enabled = true", "run estimation.py"]),
    ("--memory_estimation.enable", ["--memory_estimation.enable", "run estimation.py"]),
    (
        "[float8]\nscaling_type_input = 'delayed'",
        ["scaling_type_input", "only dynamic scaling", 'leave it at "dynamic"'],
    ),
]


@pytest.mark.parametrize(("config", "expected"), WRONG, ids=[re.sub(r"\s+", " ", config) for config, _ in WRONG])
def test_one_mistake(config: str, expected: list[str], mistakes: Mistakes) -> None:
    is_arguments = config.startswith("-") or config == "run.toml"
    found = mistakes("", *config.split(" ")) if is_arguments else mistakes(config)
    assert len(found) == 1, found
    for text in expected:
        assert text in found[0]


def test_near_config_files_are_those_of_train_configs_and_beside_the_path(
    mistakes: Mistakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan.config.toml_files.REPOSITORY", Path("repository"))
    for name in (
        "pyproject.toml",
        "here.toml",
        "train_configs/ours.toml",
        "repository/train_configs/theirs.toml",
        "sub/pyproject.toml",
        "sub/beside.toml",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for asked, expected in {
        "xyz.toml": "; there are ours.toml, theirs.toml",
        "project.toml": "; there are ours.toml, theirs.toml",
        "train_configs/our.toml": "; did you mean ours.toml?",
        "train_config/their.toml": "; did you mean theirs.toml?",
        "sub/xyz.toml": "; there are beside.toml, ours.toml, theirs.toml",
    }.items():
        (mistake,) = mistakes("", f"--job.config_file={asked}")
        assert mistake.endswith(expected), mistake
    (mistake,) = mistakes("extends = 'sub/besides.toml'")
    assert mistake.endswith("looked for sub/besides.toml; did you mean beside.toml?")


def test_several_mistakes_at_once(mistakes: Mistakes) -> None:
    toml = """
        stray = 1
        [training]
        seqlen = 64
        steps = "100"
        dataset = "text"
        [model]
        flavor = "8b"
        [parallelism]
        expert_parallel_degree = 2
        tensor_parallel_degree = 3
    """
    found = mistakes(toml, "--metrics.log_freq=0", "--training.qqq", world_size=4)
    subjects = [
        "run.toml: stray",
        "run.toml: training.seqlen",
        "run.toml: training.steps",
        "run.toml: parallelism.expert_parallel_degree",
        "command line: --metrics.log_freq 0",
        "command line: --training.qqq",
        "parallelism.tensor_parallel_degree = 3",
        'model.flavor = "8b"',
        'training.dataset = "text"',
    ]
    assert [any(mistake.startswith(subject) for mistake in found) for subject in subjects] == [True] * 9
    assert len(found) == 9


def test_message_counts_and_lists() -> None:
    with pytest.raises(ConfigError, match=r"^2 mistakes in the config:\n  - .*steps.*\n  - .*seq_len"):
        load_config(["--training.steps=0", "--training.seq_len=0"])


def test_missing_file_doesnt_hide_the_command_line(mistakes: Mistakes) -> None:
    found = mistakes("", "--job.config_file", "nope.toml", "--training.steps", "0")
    assert len(found) == 2


def test_missing_bases_dont_hide_the_file(mistakes: Mistakes) -> None:
    found = mistakes("extends = ['a.toml', 'b.toml']\n[training]\nsteps = 0")
    assert len(found) == 3 and all(
        any(text in mistake for mistake in found) for text in ("a.toml", "b.toml", "steps = 0")
    )


VALUES = [
    "1",
    "-1",
    "0.5",
    "inf",
    "true",
    '""',
    '"x"',
    "[]",
    '["a"]',
    "[[1]]",
    "{}",
    "{ a = 1 }",
    "1979-05-27",
    f"1{'0' * 400}",
]


@pytest.mark.parametrize("key", [*all_settings(), *(row.old for row in RENAMES), *NOT_BUILT, *NEVER, "x", "x.y", "job"])
def test_no_value_of_any_key_gives_anything_but_a_mistake(key: str) -> None:
    section, _, name = key.replace("*", "emulate").rpartition(".")
    for value in VALUES:
        Path("run.toml").write_text((f"[{section}]\n" if section else "") + f"{name} = {value}\n")
        for argv in (["--job.config_file=run.toml"], [f"--{key}={value}"], [f"--{key}"], [f"--{section}.no_{name}"]):
            with contextlib.suppress(ConfigError):
                load_config(argv)


class TestNoFollowUps:
    """A mistake in one field isn't reported again by the rules that read it."""

    def test_batch_size_of_the_wrong_type(self, mistakes: Mistakes) -> None:
        assert len(mistakes("[training]\nlocal_batch_size = '4'\nglobal_batch_size = 4")) == 1

    def test_misspelt_batch_size(self, mistakes: Mistakes) -> None:
        assert len(mistakes("[training]\nlocal_batchsize = 4\nglobal_batch_size = 4")) == 1

    def test_misspelt_section(self, mistakes: Mistakes) -> None:
        assert len(mistakes("[trainin]\nlocal_batch_size = 4\n[training]\nglobal_batch_size = 4")) == 1

    def test_degrees_before_the_batch(self, mistakes: Mistakes) -> None:
        found = mistakes(
            "[parallelism]\ndata_parallel_shard_degree = 3\n[training]\nglobal_batch_size = 4", world_size=4
        )
        assert len(found) == 1

    def test_model_before_its_sizes(self, mistakes: Mistakes) -> None:
        assert len(mistakes("[model]\nname = 'x'\nflavor = 'y'\n[training]\nseq_len = 999999")) == 1

    def test_missing_base_before_everything(self, mistakes: Mistakes) -> None:
        assert len(mistakes("extends = 'x.toml'\n[training]\nglobal_batch_size = 4")) == 1

    def test_dataset_of_a_module_that_cant_be_imported(self, mistakes: Mistakes) -> None:
        assert len(mistakes("[experimental]\ncustom_import = 'zzz'\n[training]\ndataset = 'mine'")) == 1

    def test_model_of_a_module_that_cant_be_imported(self, mistakes: Mistakes) -> None:
        assert len(mistakes("[experimental]\ncustom_import = 'zzz'\n[model]\nname = 'mine'")) == 1
