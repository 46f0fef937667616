"""What a run is: one dataclass per TOML section, each field documented here and nowhere else.

These dataclasses are the only place for names, types, defaults and simple bounds. The loader reads them to parse
TOML files and the command line, `--help` and `--job.print_config` print them. Rules that span fields are in checks.py.
"""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal


def setting(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    also: tuple[Any, ...] = (),
    compare: bool = True,
) -> Any:
    """A dataclass field with its documentation and its bounds.

    Args:
        default: the value when neither a file nor the command line gives one; MISSING for a key that each table of a
            list of tables must have.
        meaning: one sentence for `--help`.
        minimum, maximum: inclusive bounds of a number.
        also: values outside the bounds that have a meaning of their own (such as -1).
        compare: False for fields that say how the command was called rather than what the run is.
    """
    metadata = {"meaning": meaning, "minimum": minimum, "maximum": maximum, "also": also}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata, compare=compare)
    return field(default=default, metadata=metadata, compare=compare)


@dataclass
class Job:
    config_file: str | None = setting(
        None, "TOML file of the run, looked up as given, then in train_configs/.", compare=False
    )
    dump_folder: str = setting("./outputs", "Folder for everything that the run writes.")
    description: str = setting("titan run", "One line about the run, printed at its start.")
    print_config: bool = setting(False, "Print the resolved config as TOML and exit.", compare=False)
    save_config_file: str | None = setting(None, "Also write the resolved config to this file.", compare=False)
    check_only: bool = setting(
        False, "Check the config and its layout for WORLD_SIZE ranks, print the plan and exit.", compare=False
    )


@dataclass
class Model:
    name: str = setting("llama3", "Model family: llama2, llama3, or one that experimental.custom_import registers.")
    flavor: str = setting("debugmodel", "Size of the model within its family, such as 8B.")
    vocab_size: int | None = setting(
        None, "Rows of the embedding and the head (unset: the flavor's). May exceed the tokenizer's ids.", minimum=2
    )
    tokenizer_path: str | None = setting(
        None, "Tokenizer file, or a folder that holds one (unset: the embedded byte tokenizer)."
    )
    hf_assets_path: str | None = setting(
        None,
        "Hugging Face folder of the model (config.json, tokenizer, .safetensors): its sizes are compared with the "
        "flavor's, and its tokenizer is used where tokenizer_path is unset.",
    )
    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm"] | None = setting(
        None, "Normalisation (unset: the flavor's, rmsnorm for Llama); np_layernorm is a layer norm without parameters."
    )
    attn_mask: Literal["causal", "document"] = setting(
        "causal",
        "What a token sees: all before it in its window, or (document) only its own document, in which positions begin "
        "anew.",
    )
    attn_backend: Literal["sdpa", "flex", "varlen"] = setting(
        "sdpa",
        "What computes attention: torch's scaled_dot_product_attention; on GPUs also FlexAttention, or FlashAttention "
        "with a document as a sequence, which skip what attn_mask = document hides.",
    )
    print_model: bool = setting(False, "Print the model's modules at the start.")


@dataclass
class ParameterGroup:
    """One of the tables [[optimizer.groups]]."""

    pattern: str = setting(
        MISSING, 'Parameters by full name, such as "*.attention.wq.weight"; * stands for any text, ? for a character.'
    )
    lr_factor: float = setting(1.0, "Their learning rate is that of the schedule times this.", minimum=0)
    weight_decay: float | None = setting(None, "Their weight decay (unset: as for parameters of no group).", minimum=0)


@dataclass
class Optimizer:
    name: Literal["Adam", "AdamW", "Muon"] = setting(
        "AdamW", "Optimizer; Muon is for the matrices of the layers, with AdamW for everything else."
    )
    lr: float = setting(8e-4, "Peak learning rate.", minimum=0)
    beta1: float = setting(0.9, "Decay of the first moment.", minimum=0, maximum=1)
    beta2: float = setting(0.95, "Decay of the second moment.", minimum=0, maximum=1)
    eps: float = setting(1e-8, "Added to the root of the second moment.", minimum=0)
    weight_decay: float = setting(0.1, "Weight decay.", minimum=0)
    decay_norms_and_biases: bool = setting(
        False, "Also decay norm gains and biases, as older trainers do. Off: only matrices decay."
    )
    implementation: Literal["fused", "foreach", "for-loop"] = setting(
        "fused", "How the optimizer runs over the parameters; all three give the same weights."
    )
    state_dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "Type in which the optimizer's moments are kept (unset: training.dtype)."
    )
    early_step_in_backward: bool = setting(
        False,
        "Update each parameter during the backward pass, as soon as its gradient is there, and free the gradient.",
    )
    groups: list[ParameterGroup] = setting(  # noqa: RUF009  (it makes a dataclass field)
        [], "Parameters with a learning rate or a weight decay of their own; the first group that fits a name has it."
    )


@dataclass
class LRScheduler:
    warmup_steps: int = setting(200, "Steps of linear warm-up; step t uses lr * t / warmup_steps.", minimum=0)
    total_steps: int | None = setting(None, "Length of the schedule, when it differs from training.steps.", minimum=1)
    decay_ratio: float | None = setting(
        None,
        "Share of the schedule that decays; the rest between warm-up and decay is constant. "
        "Unset: all after the warm-up.",
        minimum=0,
        maximum=1,
    )
    decay_type: Literal["linear", "sqrt", "cosine"] = setting("linear", "Shape of the decay.")
    min_lr_factor: float = setting(
        0.0, "The decay ends at this factor of the peak learning rate.", minimum=0, maximum=1
    )


@dataclass
class DataLoader:
    num_workers: int = setting(
        0, "Processes of each rank that read and tokenize its rows; 0: a thread of the rank does.", minimum=0
    )
    prefetch_factor: int = setting(2, "Steps that a background thread reads ahead; 0 reads within the loop.", minimum=0)
    pin_memory: bool = setting(
        False, "Lay batches out in pinned memory, from which they are copied to a GPU beside its work."
    )


@dataclass
class TextSource:
    """One of the tables [[training.sources]]."""

    dataset: str = setting(MISSING, "As training.dataset.")
    weight: float = setting(
        MISSING,
        "Its share of the windows, relative to the others'; 0: only stages that name it read it.",
        minimum=0,
    )
    name: str | None = setting(
        None, "What stages, log and checkpoints call it (unset: the last part of its path, else the dataset)."
    )
    dataset_path: str | None = setting(None, "As training.dataset_path.")
    dataset_subset: str | None = setting(None, "As training.dataset_subset.")
    dataset_split: str | None = setting(None, "As training.dataset_split (unset: that).")
    text_field: str | None = setting(None, "As training.text_field (unset: that).")
    text_unit: Literal["file", "line"] | None = setting(None, "As training.text_unit (unset: that).")
    when_exhausted: Literal["loop", "end"] = setting(
        "loop", "At its end: begin again, or leave its share to the other sources; with the last one the data ends."
    )


@dataclass
class SourceStage:
    """One of the tables [[training.source_stages]]: other weights, from some step of the run on."""

    weights: dict[str, float] = setting(  # noqa: RUF009  (it makes a dataclass field)
        MISSING, "Weights by the sources' names, such as {web = 0.5, code = 0.5}; a source that isn't named isn't read."
    )
    after_step: int | None = setting(None, "The last step of the stage before.", minimum=1)
    after_tokens: int | None = setting(
        None, "Tokens of all stages before, rounded up to whole steps; instead of after_step.", minimum=1
    )


@dataclass
class Training:
    dataset: str = setting(
        "python_stdlib",
        "python_stdlib (the running Python's own library, needs no download), text, json, parquet or tokens (with "
        "dataset_path), c4, a hub id, or a name that experimental.custom_import registers.",
    )
    dataset_path: str | None = setting(
        None,
        "Where the data lies: a file, a folder, a glob, or a folder made by datasets' save_to_disk or, for tokens, by "
        "scripts/prepare_data.py.",
    )
    dataset_subset: str | None = setting(None, "Subset (configuration) of a hub dataset.")
    dataset_split: str = setting("train", "Split of a hub dataset.")
    text_field: str = setting("text", "Column or key that holds a document's text (json, parquet, hub).")
    text_unit: Literal["file", "line"] = setting("file", "What one document of dataset text is: a file or a line.")
    sources: list[TextSource] = setting(  # noqa: RUF009  (it makes a dataclass field)
        [], "Several datasets, mixed window by window in the proportions of their weights, instead of training.dataset."
    )
    source_stages: list[SourceStage] = setting(  # noqa: RUF009  (it makes a dataclass field)
        [], "Stages of the run with other weights than those of the sources, in order."
    )
    bad_rows: Literal["skip", "stop"] = setting(
        "skip", "A row that can't be read (no UTF-8, broken JSON, no text): name it and go on, or stop."
    )
    local_batch_size: int = setting(8, "Windows per microbatch of a rank.", minimum=1)
    global_batch_size: int = setting(
        -1,
        "Windows per step over all ranks; -1: local_batch_size times the batch ranks. A larger multiple "
        "accumulates gradients.",
        minimum=1,
        also=(-1,),
    )
    seq_len: int = setting(2048, "Tokens per window.", minimum=1)
    packing: Literal["concatenate", "best_fit"] = setting(
        "concatenate",
        "How documents fill windows: as one row of tokens, cut every seq_len, or (best_fit) whole where they fit into "
        "one, the rest of each window padded.",
    )
    steps: int = setting(10000, "Optimizer steps of the run.", minimum=1)
    total_tokens: int | None = setting(
        None, "Length of the run in tokens, instead of steps; rounded up to whole steps.", minimum=1
    )
    max_norm: float = setting(1.0, "Clip the gradient's norm to this; 0 clips nothing. Logged either way.", minimum=0)
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "Type in which weights, their gradients and the optimizer's state are kept."
    )
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = setting(
        "bfloat16", "Type of weights and activations in forward and backward; weights are kept in training.dtype."
    )
    mixed_precision_reduce: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "Type in which gradients are summed over ranks."
    )
    enable_cpu_offload: bool = setting(
        False, "Keep weights, gradients and optimizer state in the CPU's memory; the optimizer then runs there."
    )
    nonfinite: Literal["stop", "skip"] = setting(
        "stop", "When the loss or the gradient norm isn't finite: end the run, or leave out the step."
    )
    nonfinite_skip_limit: int = setting(
        10, "With nonfinite = skip: end the run when more steps than this were left out in a row.", minimum=0
    )
    gc_freq: int = setting(50, "Steps between Python garbage collections, which stop all ranks together.", minimum=1)
    shuffle: bool = setting(
        True, "Take documents, of tokens windows, in an order drawn anew from the seed for every epoch."
    )
    infinite: bool = setting(True, "Start over when the data ends. Off: the run ends with the data.")
    dataloader: DataLoader = field(default_factory=DataLoader)


@dataclass
class Loss:
    name: Literal["linear_cross_entropy", "cross_entropy"] = setting(
        "linear_cross_entropy",
        "Compute the output projection and the loss chunk by chunk, so that logits never exist whole, or from whole "
        "logits.",
    )
    num_chunks: int = setting(8, "Parts that linear_cross_entropy cuts a microbatch's tokens into.", minimum=1)
    z_loss: float = setting(
        0.0, "Weight of the squared log normaliser, which keeps logits from drifting (1e-4 in PaLM).", minimum=0
    )


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = setting(
        1, "Ranks that each hold a whole copy of the (sharded) model.", minimum=1
    )
    data_parallel_shard_degree: int = setting(
        -1,
        "Ranks over which weights, gradients and optimizer state are sharded (FSDP2); -1: all that are left.",
        minimum=1,
        also=(-1,),
    )
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = setting(
        "default",
        "Free a block's gathered weights after its forward pass: always, never, or (default) all but the last group's, "
        "and none in a pipeline, where every microbatch would gather them again.",
    )
    tensor_parallel_degree: int = setting(1, "Ranks that share each matrix product.", minimum=1)
    enable_sequence_parallel: bool = setting(
        True, "With tensor parallelism: cut the residual stream and the norms over the sequence between products."
    )
    disable_loss_parallel: bool = setting(
        False,
        "With tensor parallelism and loss.name = cross_entropy: gather whole logits instead of computing the loss on "
        "parts of the vocabulary.",
    )
    enable_async_tensor_parallel: bool = setting(
        False, "With tensor parallelism: overlap its communication with the products, piece by piece."
    )
    context_parallel_degree: int = setting(1, "Ranks that share each sequence.", minimum=1)
    context_parallel_load_balancer: Literal["headtail", "none"] = setting(
        "headtail", "Which tokens a rank holds: an early and a late chunk, so that causal attention costs all the same."
    )
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = setting(
        "allgather", "How keys and values reach a rank: gathered at once, or passed around a ring block by block."
    )
    pipeline_parallel_degree: int = setting(1, "Ranks that hold different layers.", minimum=1)
    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = setting("1F1B", "Order in which a pipeline's ranks run forward and backward passes of microbatches.")
    pipeline_parallel_schedule_csv: str | None = setting(
        None, "File with a schedule of one's own, a row of actions (0F0, 0B0 …) per rank, instead of a named one."
    )
    pipeline_parallel_microbatch_size: int = setting(
        1, "Windows per microbatch of the pipeline; divides local_batch_size.", minimum=1
    )
    pipeline_parallel_layers_per_stage: int | None = setting(
        None,
        "Layers of a stage, which sets the number of stages per rank. Unset: one, or two for looped schedules.",
        minimum=1,
    )
    pipeline_parallel_first_stage_less_layers: int = setting(
        1, "Layers that the first stage has less than others, for the embedding it holds.", minimum=0
    )
    pipeline_parallel_last_stage_less_layers: int = setting(
        1, "Layers that the last stage has less than others, for the head it holds.", minimum=0
    )
    module_fqns_per_model_part: list[list[str]] | None = setting(  # noqa: RUF009  (it makes a dataclass field)
        None,
        'The modules of every stage by name, such as [["tok_embeddings", "layers.0"], ["layers.1", '
        '"norm", "output"]], instead of a split by cost.',
    )


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "memory_budget"] = setting(
        "selective",
        "What a block keeps for its backward pass: all, its input alone, some of it (selective_ac_option), or what "
        "torch.compile chooses under memory_budget. The rest is computed again.",
    )
    selective_ac_option: str = setting(
        "op",
        "With mode = selective. op: each block keeps results that are dear to compute; a number N: every N-th layer "
        "keeps its input alone, the others all.",
    )
    memory_budget: float = setting(
        0.5,
        "With mode = memory_budget: share of what torch.compile would keep, from 1 (as none) down to 0 (as full).",
        minimum=0,
        maximum=1,
    )
    offload: bool = setting(False, "Move what checkpointed blocks keep to host memory between forward and backward.")
    offload_use_streams: bool = setting(True, "Copy beside the computation. Off: wait for every copy.")
    early_stop: bool = setting(
        False,
        "Stop computing a block again as soon as its backward has what it needs. Selective op does so in any case.",
    )
    preserve_rng_state: bool = setting(True, "Draw the same random numbers when a block is computed again.")
    determinism_check: Literal["default", "none"] = setting(
        "default", "Check that what is computed again has the shapes, types and devices of the first time, or not."
    )


@dataclass
class Compile:
    enable: bool = setting(False, "Compile what compile.components names with torch.compile.")
    components: list[Literal["model", "loss", "optimizer"]] = setting(  # noqa: RUF009  (it makes a dataclass field)
        ["model", "loss"], "What is compiled: every block of the model, the loss, the optimizer's arithmetic."
    )
    backend: str = setting("inductor", "torch.compile's backend.")


@dataclass
class Float8:
    enable_float8_linear: bool = setting(False, "Multiply in float8 in the linears of the blocks.")
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = setting(
        None,
        "What shares a scale: a tensor (unset, and the fastest), a row or column of it, or the latter with weights' "
        "gradients in high precision.",
    )
    enable_fsdp_float8_all_gather: bool = setting(
        False, "Cast weights before FSDP gathers them, which halves its traffic. Tensorwise only."
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = setting(
        False, "With that: find all weights' scales at once after each step, not one by one before each gather."
    )
    filter_fqns: list[str] = setting(  # noqa: RUF009  (it makes a dataclass field)
        ["output"], "Leave out the linears whose names contain one of these; the head, output, is always left out."
    )
    emulate: bool = setting(
        False, "Compute products in float32 from operands rounded to float8: for tests, on any machine."
    )


@dataclass
class Checkpoint:
    enable: bool = setting(False, "Save checkpoints and resume from the newest.")
    folder: str = setting(
        "checkpoint", "Folder for checkpoints, within job.dump_folder; or a URL, such as s3://bucket/run."
    )
    interval_type: Literal["steps", "seconds"] = setting("steps", "What checkpoint.interval counts.")
    interval: int = setting(500, "Steps or seconds between saves; the last step is saved in any case.", minimum=1)
    load_step: int = setting(-1, "Step to resume from; -1: the newest complete one.", minimum=0, also=(-1,))
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = setting(
        "disabled",
        "Write beside training, from a copy in host memory: in a thread, or from pinned memory in another process.",
    )
    on_failure: Literal["stop", "continue"] = setting("stop", "What a run does when a save fails.")
    initial_load_path: str | None = setting(
        None,
        "Checkpoint to start from while the run has none of its own: a folder step-N, or one of such folders, whose "
        "newest it is.",
    )
    initial_load_model_only: bool = setting(
        True, "Of checkpoint.initial_load_path take the weights alone. Off: optimizer, step and data position too."
    )
    initial_load_in_hf: bool = setting(
        False,
        "What checkpoint.initial_load_path names, or else model.hf_assets_path, is a folder of Hugging Face weights.",
    )
    exclude_from_loading: list[Literal["optimizer", "train_state", "dataloader"]] = setting(  # noqa: RUF009
        [],
        "What isn't loaded of a checkpoint but starts anew: the optimizer's state with train_state (step, and so the "
        "learning rate), dataloader (position in the data).",
    )
    last_save_model_only: bool = setting(
        False, "Save the model alone after the last step; the run can't be extended then."
    )
    last_save_in_hf: bool = setting(
        False, "Write the final weights as a Hugging Face folder too, to hf/step-N in job.dump_folder."
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", "Type of the weights that last_save_model_only and last_save_in_hf save."
    )
    create_seed_checkpoint: bool = setting(
        False, "Save the initial weights as step 0 and end, for runs that start from the same ones."
    )
    keep_latest_k: int = setting(10, "Complete checkpoints to keep; 0 keeps all.", minimum=0)
    enable_first_step_checkpoint: bool = setting(False, "Also save after the first step, to try storage early.")
    load_only: bool = setting(
        False, "Resume, but write nothing in job.dump_folder: no checkpoints, metrics, events or config, only the log."
    )
    save_on_signal: bool = setting(
        True, "On SIGTERM or SIGUSR1 to any rank: save after the step, and end with status 75. Off: end at once."
    )
    verify: Literal["size", "checksum", "none"] = setting(
        "size", "What is checked of every file of a checkpoint before it is loaded."
    )


@dataclass
class Metrics:
    log_freq: int = setting(10, "Steps between log lines; step 1 and the last are always logged.", minimum=1)
    enable_tensorboard: bool = setting(False, "Write TensorBoard events.")
    enable_wandb: bool = setting(False, "Log to Weights & Biases too; its own WANDB_* environment variables count.")
    save_tb_folder: str = setting("tb", "Folder for TensorBoard events, within job.dump_folder.")
    save_for_all_ranks: bool = setting(
        False, "Every rank writes TensorBoard events, each to its own folder. Off: rank 0."
    )
    disable_color_printing: bool = setting(False, "Print without colours.")
    progress: Literal["auto", "bar", "lines", "none"] = setting(
        "auto", "A progress bar under the log lines, lines alone, or nothing; auto: a bar on a terminal."
    )
    rank_log_folder: str | None = setting(
        None, "Each rank also keeps all of its log in a file here, within job.dump_folder; unset: no rank does."
    )
    fingerprint: bool = setting(
        False, "Log a hash of the last step's global batch, which is the same in every layout: to compare runs' data."
    )
    layer_norms: bool = setting(False, "Log the 2-norms of each layer's gradient and weights.")
    measure_peak_flops: bool = setting(
        False,
        "Time a matrix product at the start and take its speed as the device's peak, so that a device "
        "whose peak isn't known shows an MFU.",
    )


@dataclass
class Profiling:
    enable_profiling: bool = setting(False, "Write traces of chosen steps, for each rank, with a summary beside each.")
    save_traces_folder: str = setting("profile_traces", "Folder for traces, within job.dump_folder.")
    profile_freq: int = setting(
        10, "Steps between the ends of two traces, and between two snapshots of the memory.", minimum=1
    )
    profiler_active: int = setting(1, "Steps in a trace: the last ones of each profile_freq.", minimum=1)
    profiler_warmup: int = setting(3, "Steps before those in which the profiler runs and keeps nothing.", minimum=0)
    enable_memory_snapshot: bool = setting(
        False, "Write what a GPU's memory holds every profile_freq steps, and when it has run out."
    )
    save_memory_snapshot_folder: str = setting(
        "memory_snapshot", "Folder for snapshots of the memory, within job.dump_folder."
    )


@dataclass
class Validation:
    enable: bool = setting(False, "Measure the loss on a validation set every validation.freq steps and at the end.")
    dataset: str | None = setting(None, "Dataset as training.dataset names it; unset: the training set's.")
    dataset_path: str | None = setting(None, "Where it lies, as training.dataset_path.")
    dataset_split: str | None = setting(None, "Its split, of a hub dataset; unset: training.dataset_split.")
    freq: int = setting(100, "Steps between validations.", minimum=1)
    steps: int = setting(
        -1,
        "Take the set's first windows alone, as many as so many training steps have; -1: all.",
        minimum=1,
        also=(-1,),
    )
    local_batch_size: int | None = setting(
        None, "Windows per forward pass of a rank; unset: training.local_batch_size.", minimum=1
    )
    seq_len: int | None = setting(None, "Tokens per window; unset: training.seq_len.", minimum=1)


@dataclass
class Comm:
    init_timeout_seconds: int = setting(
        300, "Time limit of set-up and of the first step, and of a collective in them.", minimum=1
    )
    train_timeout_seconds: int = setting(
        100, "Time limit of a step after the first, and of a collective in it; saving isn't counted.", minimum=1
    )
    trace_buf_size: int = setting(
        20000, "Collectives that a rank remembers and writes down when it hangs; 0 remembers none.", minimum=0
    )
    save_traces_folder: str = setting(
        "comm_traces", "Folder for what ranks that hung write down, within job.dump_folder."
    )
    preflight: Literal["auto", "on", "off"] = setting(
        "auto",
        "Compare the ranks at the start: versions, environment, speed, clocks, the dump folder; auto: beyond 8 ranks.",
    )


@dataclass
class Debug:
    seed: int = setting(0, "Seed of the initial weights, the data's order, and every random draw.", minimum=0)
    deterministic: bool = setting(False, "Use deterministic algorithms only; some are slower.")
    deterministic_warn_only: bool = setting(False, "Warn where no deterministic algorithm exists instead of failing.")


@dataclass
class Experimental:
    custom_import: str = setting(
        "", "Python module to import first, which registers models, datasets or tokenizers of your own."
    )


@dataclass
class Estimation:
    """Of the dry run, estimation.py; train.py reads none of it."""

    gpus: int | None = setting(None, "Ranks of the run (unset: WORLD_SIZE).", minimum=1, compare=False)
    method: Literal["analytic", "trace", "both"] = setting(
        "analytic",
        "How memory is estimated: in closed form, from a trace of titan's own step on tensors without memory, or by "
        "both; the trace then says what fits.",
        compare=False,
    )
    hardware: str = setting(
        "h100",
        "What the run is for: a100-40gb, a100-80gb, h100, h100-500w, h200, b200, mi300x, or a TOML file of your own.",
        compare=False,
    )
    json: str | None = setting(None, "Also write the estimate to this file, as JSON.", compare=False)
    html: str | None = setting(
        None, "Also draw the estimate, as one HTML page that needs no other file.", compare=False
    )
    search: bool = setting(
        False,
        "Find the layout that trains fastest on so many ranks; trace the five best if estimation.method = trace.",
        compare=False,
    )
    search_output: str | None = setting(
        None, "With estimation.search: write the layout that was found to this TOML file.", compare=False
    )
    calibrate: str | None = setting(
        None,
        "metrics.jsonl of a run of this very config on this hardware, by whose speed times are scaled.",
        compare=False,
    )
    compat: Literal["torchtitan-2024", "torchtitan-2025"] | None = setting(
        None, "Estimate another trainer's step, to compare published figures.", compare=False
    )


@dataclass
class JobConfig:
    """The whole of a run. Sections in the order of `--help`."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    loss: Loss = field(default_factory=Loss)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    float8: Float8 = field(default_factory=Float8)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    validation: Validation = field(default_factory=Validation)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    experimental: Experimental = field(default_factory=Experimental)
    estimation: Estimation = field(default_factory=Estimation)
