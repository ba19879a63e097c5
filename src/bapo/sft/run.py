"""One supervised fine-tuning: check the config, build the objects, fit, write the model. Only the entry point imports this."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bapo.export import write_model
from bapo.files import digest
from bapo.policy.causal_lm import load_tokenizer
from bapo.policy.options import PolicyOptions
from bapo.sft.module import SftModule
from bapo.sft.rows import SftData, SftOptions, encode, end_of_sequence, fitting, split
from bapo.training.checks import check_machine, check_numbers
from bapo.training.fit import Training, run_job
from bapo.training.job import Entry, Job, open_job
from bapo.training.run_folder import is_main_process

log = logging.getLogger(__name__)

LARGE_LR = 1e-3  # above, a pretrained model is more likely destroyed than tuned


def check(parts: dict[str, Any]) -> None:
    """Raises ValueError for objects of a config that do not fit together.

    The texts are read here, as `parts["shown"]`: rows that cannot be read are a mistake like any other in the config.
    """
    check_numbers(parts)
    parts["data"].check(parts["task"])
    options, trainer = parts["sft"], parts["trainer"]
    lr = getattr(parts["optimizer"], "keywords", {}).get("lr")
    if parts["policy"].path is not None and lr is not None and lr > LARGE_LR:
        log.warning("optimizer.lr is %g, as for a tiny model that knows nothing; a pretrained model takes about 1e-5", lr)
    if trainer.max_rounds is not None:
        raise ValueError(f"trainer.max_rounds is {trainer.max_rounds}; it must be null: sft.epochs or sft.max_updates counts")
    if options.batch_size < (world := trainer.processes):
        raise ValueError(f"sft.batch_size is {options.batch_size}; it must be >= {world}, the number of processes")
    parts["shown"] = parts["data"](parts["task"])


SFT = Entry(
    "sft.py",
    {
        "name", "tags", "seed", "threads", "resume", "resume_from", "allow_changes", "optimized_metric", "sft", "policy",
        "task", "data", "prompt", "optimizer", "lr_schedule", "trainer", "logger", "callbacks",
    },
    check,
    check_machine,
)  # fmt: skip


def run(cfg: DictConfig) -> dict[str, float]:
    """Fine-tunes as a composed config says, in Hydra's output folder; returns the last value of every metric.

    Raises ValueError for a config that cannot run. However it ends, status.json says so; a whole run leaves FOLDER/model, which
    `policy.path` takes.
    """
    with _prompt_by_its_own_name():
        return run_job(open_job(cfg, SFT), _training)


@contextmanager
def _prompt_by_its_own_name() -> Iterator[None]:
    """In messages: what is `rollout.prompt` in another config is `prompt` in this one."""
    try:
        yield
    except ValueError as error:
        message = str(error).replace("prompt.rollout.prompt", "prompt").replace("rollout.prompt", "prompt")
        if message == str(error):
            raise
        raise ValueError(message) from error


def _training(job: Job, at_the_end: ExitStack) -> Training:
    parts, trainer = job.parts, job.parts["trainer"]
    policy: PolicyOptions = parts["policy"]
    options: SftOptions = parts["sft"]
    path = policy.model_path(parts["task"])
    tokenizer = load_tokenizer(path, **policy.source)
    trained = policy.load(path, 1.0, parts["seed"])
    eos, stops = end_of_sequence(trained.model, tokenizer)
    rows = encode(tokenizer, parts["prompt"], parts["shown"], eos, stops)
    positions = trained.model.config.get_text_config().max_position_embeddings
    train, test = split(fitting(rows, options.max_tokens, positions, options.too_long), options.test_share)
    pad_id = tokenizer.pad_token_id
    data = SftData(train, test, options, pad_id, parts["seed"], trainer.processes)
    log.info("%d demonstrations to train on, %d held out, %d updates", len(train), len(test), data.total)
    module = SftModule(
        trained,
        parts["optimizer"],
        trainer.micro_batch_tokens,
        data.total,
        options.test_every_n_updates,
        lr_schedule=parts["lr_schedule"],
        max_grad_norm=trainer.max_grad_norm,
    )

    def conclude() -> None:
        if is_main_process():
            save_model(module, policy, path, job.folder / "model")
            log.info("model: %s", job.folder / "model")

    return Training(module, data, data.epochs, {"rows": digest([vars(row) for row in parts["shown"]])}, conclude)


def save_model(module: SftModule, policy: PolicyOptions, path: str | Path, folder: Path) -> None:
    """A Hugging Face folder with its tokenizer, an adapter merged into the model; it appears in one piece."""
    with tempfile.TemporaryDirectory(prefix=".model.", dir=folder.parent) as made:
        new = Path(made) / "folder"
        new.mkdir()
        write_model(module.policy, policy, path, new)
        if folder.exists():  # a finished run that was resumed
            shutil.rmtree(folder)
        new.rename(folder)
