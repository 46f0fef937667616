"""Train a language model: `torchrun --nproc_per_node=N train.py --job.config_file NAME.toml [--section.field value …]`.

This file is the run from top to bottom. Every decision stands here in order, each one call away from its detail. Torch
is imported once the config is known to be right, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan.config.startup import config_from_command_line, save_config

if TYPE_CHECKING:
    from titan.config.loader import LoadedConfig
    from titan.observability.device import Device
    from titan.observability.signals import StopSignals
    from titan.observability.watchdog import Watchdog
    from titan.parallelisms.parallel_dims import ParallelDims


def main() -> None:
    import time

    started = time.time()
    loaded = config_from_command_line()  # a mistake ends the program here, before any process group exists

    from titan.observability.failures import failures_shown
    from titan.observability.signals import StopSignals

    with failures_shown(), StopSignals(loaded.config.checkpoint.save_on_signal) as signals:
        if loaded.config.job.check_only:
            check(loaded)
        else:
            train(loaded, signals, started)


def check(loaded: LoadedConfig) -> None:
    """Say what the run would be, without starting it."""
    import os

    from titan.observability.device import find_device
    from titan.observability.plan import describe_layout, describe_run
    from titan.parallelisms.parallel_dims import ParallelDims

    if os.environ.get("RANK", "0") != "0":
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = find_device()
    dims = ParallelDims.from_config(loaded.config.parallelism, world_size, device.type)
    plan = [*describe_run(loaded.config, dims, device), *describe_layout(loaded.config, dims)]
    for line in [*loaded.warnings, *plan]:
        print(line)


def train(loaded: LoadedConfig, signals: StopSignals | None = None, started: float | None = None) -> None:
    """Train as a checked config says. Collective over the job's ranks.

    Args:
        signals: asks to save and end, when there is one.
        started: when the process did, in unix seconds; None: now.

    Raises:
        SystemExit: REQUEUE_STATUS, when a rank was asked to end, on all ranks.
    """
    import os
    import time
    from pathlib import Path

    import torch.distributed as dist

    from titan.config.derived import rank_log
    from titan.config.errors import refused_by_system
    from titan.observability.device import configure_allocator, find_device
    from titan.observability.exchange import job_exchange
    from titan.observability.flight_recorder import record_collectives
    from titan.observability.logging import init_logging, logger, warn_once_per_job
    from titan.observability.plan import describe_run
    from titan.observability.preflight import preflight
    from titan.observability.signals import REQUEUE_STATUS
    from titan.observability.watchdog import Watchdog
    from titan.parallelisms.parallel_dims import ParallelDims
    from titan.parallelisms.process_group import start_process_group
    from titan.training.reproducibility import set_determinism

    started = time.time() if started is None else started
    job = loaded.config

    rank = int(os.environ.get("RANK", "0"))
    with refused_by_system(f"metrics.rank_log_folder = {job.metrics.rank_log_folder!r}"):
        init_logging(rank, not job.metrics.disable_color_printing, rank_log(job, rank))

    # 1. Where: this process's device, the job's process group, one mesh over all its ranks.
    configure_allocator()
    set_determinism(job.debug)
    device = find_device()
    traces = None if job.checkpoint.load_only else Path(job.job.dump_folder) / job.comm.save_traces_folder
    record_collectives(job.comm.trace_buf_size, traces)
    owns_group = start_process_group(device, job.comm.init_timeout_seconds)
    world_size = dist.get_world_size()
    if owns_group and world_size > 1:
        warn_once_per_job(dist.distributed_c10d._get_default_store())
    with Watchdog(rank, job_exchange() if owns_group else None, traces) as watchdog:
        watchdog.expect("set-up", job.comm.init_timeout_seconds, "comm.init_timeout_seconds")
        preflight(job, device)
        dims = ParallelDims.from_config(job.parallelism, world_size, device.type)
        dims.build()
        for warning in loaded.warnings if rank == 0 else []:
            logger.warning(warning)
        for line in describe_run(job, dims, device):
            logger.info(line)
        stopped = run(loaded, device, dims, signals, watchdog, started)
    if owns_group:
        dist.destroy_process_group()
    if stopped:
        raise SystemExit(REQUEUE_STATUS)


def run(
    loaded: LoadedConfig,
    device: Device,
    dims: ParallelDims,
    signals: StopSignals | None,
    watchdog: Watchdog,
    started: float,
) -> bool:
    """Sections 2 to 5 of `train`. Returns whether the run was asked to end before its last step."""
    import gc
    import time
    from dataclasses import asdict
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from titan.checkpoint.manager import CheckpointManager
    from titan.config.derived import (
        global_batch_size,
        huggingface_folder,
        model_sizes,
        resolved_steps,
        tokenizer_path,
    )
    from titan.config.errors import UserError
    from titan.config.toml_text import to_toml
    from titan.data.fingerprint import batch_fingerprint
    from titan.data.loader import DataLoader
    from titan.data.sources import open_source
    from titan.data.tokenizer import build_tokenizer
    from titan.data.validation import validation_rows
    from titan.models.spec import model_families
    from titan.observability.device import measure_peak_flops, pins_memory
    from titan.observability.logging import logger
    from titan.observability.memory_snapshots import open_memory_snapshots
    from titan.observability.metrics import MetricsLogger, StepResult
    from titan.observability.plan import describe_text
    from titan.observability.prediction import predict
    from titan.observability.profiling import Profiler
    from titan.observability.regions import region
    from titan.observability.signals import clear_requeue, mark_requeue
    from titan.parallelisms.compile import describe_compilation
    from titan.parallelisms.process_group import set_timeout
    from titan.training.initialize import initialize_weights, materialize
    from titan.training.lr_schedule import lr_factor
    from titan.training.optimizer import build_optimizer, set_lr
    from titan.training.optimizer_groups import plan_updates
    from titan.training.reproducibility import seed_step
    from titan.training.step import TrainStep, agree_on_step, build_model, build_stages
    from titan.training.validate import evaluate

    job = loaded.config
    rank, world_size = dist.get_rank(), dist.get_world_size()
    prediction = predict(job, dims, dims.world.get_local_rank("pp"), device)
    for line in prediction.lines:
        logger.info(line)

    # 2. On what: the data, in an order that no layout changes.
    tokenizer = build_tokenizer(tokenizer_path(job))
    logger.info(tokenizer.description)
    global_batch = global_batch_size(job, dims.batch_degree)
    tokens_per_step = global_batch * job.training.seq_len
    pins = job.training.dataloader.pin_memory and pins_memory(device.type)
    loader = DataLoader(
        open_source(job.training, tokenizer),
        tokenizer,
        job.training,
        seed=job.debug.seed,
        global_batch=global_batch,
        batch_rank=dims.batch.get_local_rank(),
        batch_degree=dims.batch_degree,
        group=dims.batch.get_group(),
        document_mask=job.model.attn_mask == "document",
        pin_for=device.torch_device if pins else None,
    )

    validation = None
    if job.validation.enable:
        with watchdog.pause("reading the validation set"):
            validation = validation_rows(job, tokenizer, global_batch, dims)

    # 3. What: the model, made without memory, spread over the ranks, and only then given its share of it.
    family, sizes = model_families()[job.model.name], model_sizes(job)
    snapshots = open_memory_snapshots(job.profiling, Path(job.job.dump_folder), device, rank)
    model = build_model(job)
    if job.model.print_model:
        logger.info(model)
    updates = plan_updates(job, model)
    stages = build_stages(model, job, dims, device.torch_device)
    for part in stages.parts:
        materialize(part, device.torch_device, weights_on_cpu=job.training.enable_cpu_offload)
    optimizer = build_optimizer(job, updates, stages.parts)

    # 4. From where: this run's newest checkpoint, or initial weights.
    dump_folder = Path(job.job.dump_folder)
    checkpoint = CheckpointManager(
        job.checkpoint,
        dump_folder,
        model_parts=stages.parts,
        optimizer=optimizer,
        config_toml=to_toml(job, loaded.origins),
        layout=dims.degrees(),
    )
    step, tokens_seen = 0, 0
    with watchdog.pause("loading a checkpoint"):
        state = checkpoint.load()
        if state is None and job.checkpoint.initial_load_in_hf:
            assert family.huggingface is not None  # config/checks_checkpoint.py
            checkpoint.load_huggingface(huggingface_folder(job), sizes, family.huggingface)
            state = {}
    if state is None:
        for part in stages.parts:
            initialize_weights(part, job.debug.seed)
    else:
        step, tokens_seen = state.get("step", 0), state.get("tokens_seen", 0)
        if "data" in state:
            loader.load_state_dict(state["data"])
    save_config(loaded)  # as config.toml in the dump folder
    if rank == 0 and not job.checkpoint.load_only:
        clear_requeue(dump_folder)

    # 5. The loop.
    steps = resolved_steps(job, global_batch)
    if job.checkpoint.create_seed_checkpoint:
        if state is not None and "step" in state:
            raise UserError(f"checkpoint.create_seed_checkpoint = true: {dump_folder} has a checkpoint of step {step}")
        steps = 0  # the last step comes before the first, and is saved
    elif step >= steps:
        length = "training.steps" if job.training.total_tokens is None else "training.total_tokens"
        advice = f"raise {length}, or choose another job.dump_folder"
        logger.info(f"step {step} of {steps}: nothing is left to do; {advice}")
    schedule_steps = job.lr_scheduler.total_steps or steps
    precision = job.training.mixed_precision_param
    measured = measure_peak_flops(device, getattr(torch, precision)) if job.metrics.measure_peak_flops else None
    metrics = MetricsLogger(
        job.metrics,
        None if job.checkpoint.load_only else dump_folder,
        device=device,
        rank=rank,
        world_size=world_size,
        total_steps=steps,
        start_step=step,
        tokens_seen=tokens_seen,
        started=started,
        layout=dims.degrees(),
        config=asdict(job),
        flops=family.flops_per_token(sizes, job.training.seq_len),
        peak_flops=measured or device.peak_flops(precision),
    )
    if state and "health" in state:
        metrics.load_state_dict(state["health"])
    profiler = Profiler(
        job.profiling,
        dump_folder,
        device=device,
        rank=rank,
        first_step=step + 1,
        parts=stages.parts,
        snapshots=snapshots,
    )
    train_step = TrainStep(stages, optimizer, job, dims, device.torch_device)

    def save_if_due(*, last: bool) -> None:
        if not checkpoint.may_be_due(step, last=last):
            return
        with metrics.pause("checkpoint"), watchdog.pause(f"saving step {step}"):
            if checkpoint.due(step, last=last):
                state = {"step": step, "tokens_seen": tokens_seen, "data": loader.state_dict()}
                state["health"] = metrics.state_dict()
                checkpoint.save(step, state, finished=last and step > 0 and not stopped)

    gc.collect()
    gc.disable()  # a collection on one rank makes all others wait; they collect together, every gc_freq steps
    first_step, stopped = step + 1, False
    try:
        while step < steps:
            limit = "init_timeout_seconds" if step < first_step else "train_timeout_seconds"
            watchdog.expect(f"step {step + 1}", getattr(job.comm, limit), f"comm.{limit}")
            profiler.begin(step + 1)
            waiting = time.perf_counter()
            with region("data"):
                microbatches = loader.next_step()
            data_seconds = time.perf_counter() - waiting
            metrics.ready()
            agreed = agree_on_step(microbatches, dims.ranks_per_row, stop=signals is not None and signals.received)
            if microbatches is None or agreed.data_ended or agreed.stop:
                loader.put_back()
                stopped = agreed.stop
                logger.info(f"{'asked to end' if stopped else 'the data ended'} after step {step}")
                break
            step += 1
            if step == 1:
                logger.info(describe_text(tokenizer, microbatches[0].tokens[0].tolist()))

            fingerprint = batch_fingerprint(microbatches, dims.batch.get_group()) if job.metrics.fingerprint else None
            lr = job.optimizer.lr * lr_factor(job.lr_scheduler, step, schedule_steps)
            set_lr(optimizer, lr)
            seed_step(job.debug.seed, step, dims.batch.get_local_rank())
            outcome = train_step.run(step, microbatches, agreed.valid_tokens, logged=metrics.logs(step))

            tokens_seen += tokens_per_step
            metrics.step(
                StepResult(
                    step,
                    outcome.loss,
                    outcome.grad_norm,
                    lr,
                    tokens_per_step,
                    data_seconds,
                    outcome.synced,
                    outcome.layer_norms,
                    fingerprint,
                )
            )
            profiler.end()
            if step == first_step:
                set_timeout(job.comm.train_timeout_seconds)
                compiling = f"; {describe_compilation()}" if job.compile.enable else ""
                logger.info(f"First step done {time.time() - started:.1f} s after the start{compiling}")
            if step == first_step + 1 and (compared := prediction.beside(device)):
                logger.info(compared)
            if profiler.writes_after(step):
                set_timeout(job.comm.init_timeout_seconds)  # ranks write for different times, and then wait for all
                with metrics.pause("profiling"), watchdog.pause(f"writing the trace of step {step}"):
                    profiler.write(step)
                    dist.all_reduce(torch.zeros(1))
                set_timeout(job.comm.train_timeout_seconds)
            if step % job.training.gc_freq == 0:
                gc.collect(1)
            if validation and (step % job.validation.freq == 0 or step == steps):
                with metrics.pause("validation"), watchdog.pause(f"validating after step {step}"):
                    score = evaluate(stages, job, dims, device.torch_device, validation.microbatches)
                metrics.validation(step, score, validation.bytes_per_token)
            save_if_due(last=step == steps)
        if step >= first_step or job.checkpoint.create_seed_checkpoint:
            save_if_due(last=True)  # also where the data ended early, or the run was asked to end
        with metrics.pause("checkpoint"), watchdog.pause("the last save"):
            checkpoint.wait()
            if job.checkpoint.last_save_in_hf and not (stopped or job.checkpoint.load_only):
                assert family.huggingface is not None  # config/checks_checkpoint.py
                set_timeout(job.comm.init_timeout_seconds)  # while one rank writes, others wait within a gather
                folder = dump_folder / "hf" / f"step-{step}"
                checkpoint.save_huggingface(folder, sizes, family.huggingface, tokenizer_path(job))
        metrics.finish()
        if stopped and rank == 0 and not job.checkpoint.load_only:
            mark_requeue(dump_folder, step)
    except torch.OutOfMemoryError:
        with watchdog.pause("writing what filled the memory"):
            profiler.out_of_memory(step)
        raise
    finally:
        gc.enable()
        profiler.close()
        loader.close()
        checkpoint.close()
        metrics.close()
    return stopped


if __name__ == "__main__":
    main()
