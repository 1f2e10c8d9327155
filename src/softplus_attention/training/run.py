"""A training run, from its configuration to the saved model. Starting it again resumes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch.utils.data import Subset
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments, set_seed

from softplus_attention.huggingface import SoftplusGPTConfig, SoftplusGPTForCausalLM, SoftplusGPTModel, set_power
from softplus_attention.huggingface.attention import power_to_json
from softplus_attention.huggingface.loading import silence_transformers
from softplus_attention.huggingface.saving import save_trained
from softplus_attention.training import checkpoints, distributed
from softplus_attention.training.config import TrainConfig, describe_settings
from softplus_attention.training.data import Folder, RepeatedDataset, SharedDataset, collate, padded_vocabulary
from softplus_attention.training.errors import RunStopped
from softplus_attention.training.losses import linear_loss
from softplus_attention.training.metrics import (
    MetricsWriter,
    ProgressCallback,
    Throughput,
    check_reporter,
    flops_per_token,
    peak_tflops,
)
from softplus_attention.training.model_card import model_card
from softplus_attention.training.run_folder import RunFolder, say, started
from softplus_attention.training.trainer import PowerCallback, SoftplusTrainer, Termination
from softplus_attention.utils import provenance
from softplus_attention.utils.files import write_whole
from softplus_attention.validation import fail


def train(config: TrainConfig, *, accept_changes: bool = False) -> Path:
    """Starts or resumes the run and returns the folder of the saved model. Under torchrun every process calls it."""
    run = RunFolder(Path(config.output))
    silence_transformers()
    folder = Folder(Path(config.data))
    # This also creates the process group, which everything below needs.
    arguments = training_arguments(config)
    with run.locked():
        record = run.load_record(config, folder.fingerprint, accept_changes)
        if record.get("finished") and run.model.is_dir():
            say(f"{run.path} is finished: the model is in {run.model}")
            return run.model
        checkpoint = run.newest_checkpoint() if "starts" in record else None
        step = 0 if checkpoint is None else checkpoints.checkpoint_step(checkpoint)
        if step > config.steps:
            raise RunStopped(
                f"{run.path} is already at step {step}, beyond --steps {config.steps}: raise --steps, or choose "
                "another --output. Nothing was changed"
            )
        # Before anything is written, so that invalid settings are not recorded.
        trainer = build(config, arguments, folder)
        # Loaded now, so that a broken tokenizer does not cost a trained model.
        tokenizer = distributed.run_on_rank0(folder.tokenizer)
        run.check(checkpoint, trainer.model)
        record |= {"starts": [*record.get("starts", []), started(arguments.device, step)]}
        run.write(record)
        if checkpoint is not None:
            say(f"continuing {run.path} from step {step}")
        fit(run, trainer, checkpoint)
        weights = distributed.full_state_dict(trainer.model)
        if distributed.is_rank0():
            run.save(lambda place: save_model(place, config, trainer, weights, tokenizer))
        run.write(record | {"finished": True})
        say(f"the model is in {run.model}")
    return run.model


# ---- the steps of a run


def fit(run: RunFolder, trainer: SoftplusTrainer, checkpoint: Path | None) -> None:
    """Trains from ``checkpoint`` to the last step or a stop signal. The folder must be locked."""
    run.rewind(checkpoint)
    termination = Termination()
    trainer.add_callback(termination)
    with termination.handle_signals():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    termination.raise_if_stopped(trainer.state.global_step, trainer.config.steps)


train.__doc__ = f"""{train.__doc__}

``configured({{"data": ..., "output": ...}}, preset="tiny")`` creates a config from a preset. The settings:

{describe_settings()}
"""


def training_arguments(config: TrainConfig) -> TrainingArguments:
    """Translates ``config`` to Trainer's arguments and creates the process group."""
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ValueError("torch sees no GPU. Pass `device` auto or cpu")
    use_cpu = config.device == "cpu" or not cuda
    if config.precision == "fp16" and use_cpu:
        raise ValueError("fp16 needs a GPU. Pass `precision` bf16 or fp32")
    check_reporter(config.report_to)
    processes = distributed.world_size()
    if processes % config.sharing:
        expected = f"a divisor of the number of processes that torchrun starts ({processes})"
        fail("context_parallel * tensor_parallel", expected, config.sharing)
    readers = processes // config.sharing
    if config.batch_size % readers:
        groups = f"{readers} processes" if config.sharing == 1 else f"{readers} groups of {config.sharing} processes"
        fail("batch_size", f"a multiple of the {groups}", config.batch_size)
    share = config.batch_size // readers
    micro = max(size for size in range(1, min(share, config.micro_batch_size) + 1) if share % size == 0)
    schedule, kwargs = learning_rate_schedule(config)
    distributed.start("cpu" if use_cpu else "cuda")
    arguments = TrainingArguments(
        output_dir=config.output,
        max_steps=config.steps,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=share // micro,
        learning_rate=config.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=config.warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        seed=config.seed,
        use_cpu=use_cpu,
        fp16=config.precision == "fp16",
        bf16=config.precision == "bf16" or (config.precision == "auto" and not use_cpu),
        gradient_checkpointing=config.gradient_checkpointing,
        ddp_backend="gloo" if use_cpu and "RANK" in os.environ else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        dataloader_num_workers=config.workers,
        dataloader_drop_last=True,
        dataloader_pin_memory=not use_cpu,
        logging_strategy="steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if config.evaluate_every else "no",
        eval_steps=config.evaluate_every or None,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=config.save_every,
        remove_unused_columns=False,
        report_to="none" if config.report_to in (None, "tensorboard") else config.report_to,
        run_name=Path(config.output).name,
        project="softplus-attention",
        disable_tqdm=True,
    )
    # One process per GPU (torchrun); Trainer would otherwise use DataParallel.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def learning_rate_schedule(config: TrainConfig) -> tuple[str, dict[str, Any]]:
    if config.schedule == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": config.final_learning_rate}
    decay = {"num_decay_steps": config.in_steps(config.decay), "min_lr_ratio": config.final_learning_rate}
    return "warmup_stable_decay", decay


def model_config(config: TrainConfig, vocabulary: int, end_of_document: int | None) -> SoftplusGPTConfig:
    schedule, by_length = config.power_schedule, config.power_by_length
    power: Any = config.power if schedule is None else schedule.at(0, config.steps)
    try:
        return SoftplusGPTConfig(
            vocab_size=padded_vocabulary(vocabulary) if config.vocab_size is None else config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.sequence_length,
            attention=config.attention,
            power=power if by_length is None else power_to_json(by_length),
            score_scale=config.score_scale,
            window=config.window,
            global_every=config.global_every,
            local_attention=config.local_attention,
            bias=config.bias,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            bos_token_id=end_of_document,
            eos_token_id=end_of_document,
        )
    except StrictDataclassClassValidationError as error:
        # The readable message is in the cause.
        raise ValueError(str(error.__cause__ or error)) from error


def build(config: TrainConfig, arguments: TrainingArguments, folder: Folder) -> SoftplusTrainer:
    if config.vocab_size is not None and config.vocab_size < folder.index.vocabulary_size:
        fail("vocab_size", f"at least {folder.index.vocabulary_size}, the vocabulary of the data", config.vocab_size)
    kwargs: dict[str, Any] = {"seed": config.seed, "document_mask": config.document_mask}
    sequences = folder.sequences("train", config.sequence_length, **kwargs)
    validation = None
    if config.evaluate_every:
        if not folder.has_validation:
            remedy = "Pass --evaluate-every 0, or prepare again with --validation-fraction"
            raise ValueError(f"{config.data} has no validation split. {remedy}")
        kwargs["seed"] = 0  # the same validation sequences for every seed
        held = folder.sequences("validation", config.sequence_length, **kwargs)
        count = min(len(held), config.evaluate_sequences)
        # With an incomplete last batch some sequences would count twice, depending on the number of processes.
        if count < config.batch_size:
            arguments.per_device_eval_batch_size = 1
            if config.sharing > 1:
                count -= count % (distributed.world_size() // config.sharing)
        else:
            count -= count % config.batch_size
        validation = Subset(held, range(count))
    set_seed(config.seed)
    model = SoftplusGPTForCausalLM(model_config(config, folder.index.vocabulary_size, folder.index.end_of_document))
    dataset = RepeatedDataset(sequences, config.steps * config.batch_size)
    return build_trainer(config, arguments, model, dataset, validation)


def build_trainer(
    config: TrainConfig,
    arguments: TrainingArguments,
    model: PreTrainedModel,
    dataset: Any,
    validation: Any = None,
    *,
    collator: Callable[[list[Any]], Any] = collate,
    title: str = "",
    seconds: float = 0,
) -> SoftplusTrainer:
    """``title`` and ``seconds`` (between lines) are for the progress display."""
    if isinstance(model, SoftplusGPTForCausalLM):
        # With tensor parallelism the head is sharded, and these losses need the whole matrix.
        model.linear_loss = linear_loss(config.loss) if config.tensor_parallel == 1 else None
    model.to(arguments.device)
    count = sum(p.numel() for p in model.parameters())
    schedule = config.power_schedule
    if config.compile:
        compile_model(model, config)
    mesh: Any = None
    if config.parallel == "fsdp" or config.sharing > 1:
        if distributed.world_size() == 1:
            raise ValueError("sharding needs several processes. Start them with torchrun, or pass `parallel` ddp")
        mesh = distributed.build_mesh(arguments.device, config.context_parallel, config.tensor_parallel)
    if config.tensor_parallel > 1:
        distributed.shard_heads(model, mesh["tensor"])
    if config.parallel == "fsdp" or config.tensor_parallel > 1:
        distributed.shard(model, mesh["data"], arguments.bf16)
    if config.sharing > 1:
        dataset = SharedDataset(dataset, arguments.per_device_train_batch_size, config.sharing)
        if validation is not None:
            validation = SharedDataset(validation, arguments.per_device_eval_batch_size, config.sharing)
    power = None if schedule is None else PowerCallback(schedule, config.steps)
    throughput = Throughput(
        config.batch_size * config.sequence_length,
        flops_per_token(count, config.width, config.spans()),
        distributed.world_size(),
        config.peak_tflops or peak_tflops(arguments.device),
    )
    callbacks: list[Any] = [] if power is None else [power]
    if distributed.is_rank0():
        callbacks += [
            MetricsWriter(Path(config.output), config.report_to),
            ProgressCallback(config.steps, title, seconds),
        ]
    trainer = SoftplusTrainer(
        config,
        throughput,
        power,
        model=model,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=validation,
        data_collator=collator,
        callbacks=callbacks,
        group=mesh["context"].get_group() if config.context_parallel > 1 else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def compile_model(model: PreTrainedModel, config: TrainConfig) -> None:
    """Compiles in place, layer by layer: equal layers share their code, so a new power compiles one layer only.

    FSDP2 needs this too, since it gathers and frees weights around each layer. dynamo's recompile limit is raised to
    the number of powers, beyond which it would silently run uncompiled.
    """
    import torch._dynamo

    schedule = config.power_schedule
    powers = 1 if schedule is None else schedule.distinct(config.steps)
    limits: Any = torch._dynamo.config
    # Recompilations of all layers add up: at most two kinds of layers, each with and without gradients, and with and
    # without a document mask.
    limits.recompile_limit = max(limits.recompile_limit, 8 * powers + 8)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * limits.recompile_limit)
    limits.fail_on_recompile_limit_hit = True
    (layers,) = (module.layers for module in model.modules() if isinstance(module, SoftplusGPTModel))
    for layer in layers:
        layer.compile()
    if isinstance(model, SoftplusGPTForCausalLM) and model.linear_loss is not None:
        # Uncompiled, the loss would read and write the logits several times.
        model.linear_loss = torch.compile(model.linear_loss)


def save_model(place: Path, config: TrainConfig, trainer: SoftplusTrainer, weights: Any, tokenizer: Any) -> None:
    """Saves the model for ``from_pretrained``, with the tokenizer and a model card."""
    # A new model, since the trained one may be sharded or compiled. Its config has the final power.
    saved = SoftplusGPTForCausalLM(trainer.model.config)
    saved.load_state_dict(weights)
    growth = config.growth()
    if growth is not None:
        set_power(saved, growth)
    save_trained(saved, place, tokenizer)
    logs = trainer.state.log_history
    card = model_card(Path(config.output).name, saved, config, logs, provenance.commit(), tokenizer)
    write_whole(place / "README.md", card)
