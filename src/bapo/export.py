"""Writes what a run has trained as a Hugging Face folder: python -m bapo.export RUN_DIR OUT [--adapter]

OUT is a whole model with its tokenizer, a LoRA adapter merged into it, or, with --adapter, the adapter alone in PEFT's files.
It is made from the newest checkpoint, appears in one piece, and loads in transformers, PEFT and `vllm serve`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from bapo.engines.weight_sync import save_adapter
from bapo.policy.causal_lm import CausalLMPolicy, load_model, load_tokenizer
from bapo.policy.checkpoint import with_base
from bapo.policy.options import PolicyOptions
from bapo.training.cli import cli
from bapo.training.process import hush
from bapo.training.resume import newest_checkpoint, read_checkpoint
from bapo.training.run_folder import read_config


def export(run_dir: Path, out: Path, adapter: bool = False) -> None:
    """Writes the newest policy of `run_dir` into the new folder `out`; ValueError if either cannot be used.

    adapter: the LoRA adapter alone, which names the model it was trained over.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"OUT is {str(out)!r}; it must be a new or an empty folder")
    config = policy_config(run_dir)
    options, path = policy_options(config)
    if adapter and options.lora is None:
        raise ValueError(f"--adapter needs a run with policy.lora; in {run_dir} it is null, and the model was trained whole")
    policy = trained_policy(run_dir, config, options, path)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        folder = Path(made) / "folder"
        folder.mkdir()
        if adapter:
            write_adapter(policy, options, folder)
        else:
            write_model(policy, options, path, folder)
        folder.rename(out)


def policy_config(run_dir: Path) -> dict[str, Any]:
    """`policy`, `task`, `seed`, `temperature` of a run, resolved. ValueError for a folder without a run."""
    cfg = read_config(run_dir)
    plain: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["policy", "task", "seed"]), resolve=True)
    return plain | {"temperature": OmegaConf.select(cfg, "rollout.sampling.temperature", default=1.0)}  # fine-tuned: at 1


def policy_options(config: dict[str, Any]) -> tuple[PolicyOptions, str | Path]:
    """The policy's options of a run and where its model comes from; a warm start that is no longer kept is made again."""
    try:
        options = instantiate(config["policy"], _convert_="all")
        return options, options.model_path(None if options.path else instantiate(config["task"], _convert_="all"))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"the run's policy cannot be made again: {error.__cause__ or error}") from error


def trained_policy(
    run_dir: Path, config: dict[str, Any], options: PolicyOptions, path: str | Path, checkpoint: Path | None = None
) -> CausalLMPolicy:
    """The policy with the weights of a checkpoint of the run, the newest unless given, on the CPU. ValueError without one."""
    checkpoint = checkpoint or newest_checkpoint(run_dir)
    if checkpoint is None:
        raise ValueError(f"RUN_DIR is {str(run_dir)!r}; there is no checkpoint in it")
    policy = options.load(path, config["temperature"], config["seed"])
    module = nn.ModuleDict({"policy": policy})  # as the Lightning module names it
    state = read_checkpoint(checkpoint)
    with_base(module, state)
    module.load_state_dict(state["state_dict"])
    return policy


def write_model(policy: CausalLMPolicy, options: PolicyOptions, path: str | Path, folder: Path) -> None:
    model = load_model(path, options.dtype, **options.source)  # with its generation config, and without anything of PEFT
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in policy.named_weights():
            own.pop(name).copy_(value)
    assert not own
    sampled = model.generation_config
    if any(getattr(sampled, name) is not None for name in ("temperature", "top_p", "top_k")):
        sampled.do_sample = True  # some models' files lack it; transformers reads such a file and would not write it
    model.save_pretrained(folder)
    load_tokenizer(path, **options.source).save_pretrained(folder)


def write_adapter(policy: CausalLMPolicy, options: PolicyOptions, folder: Path) -> None:
    adapter = policy.adapter()
    assert adapter is not None
    config = adapter.config | {"revision": options.revision}  # of the model that `base_model_name_or_path` names
    save_adapter(folder, replace(adapter, config=config))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo.export", description="Write a run's policy as a Hugging Face folder.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapter alone, as PEFT's files")
    args = parser.parse_args(arguments)
    hush()
    export(args.run_dir, args.out, args.adapter)
    print(args.out)


if __name__ == "__main__":
    cli(main)
