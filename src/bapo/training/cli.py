"""The surroundings of a Hydra main function: resolvers, short words of the command line, errors that a user can act on."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from bapo.training import config_check
from bapo.training.run_folder import redact, register_resolvers
from bapo.training.trainer import OWNED

CONF = Path(__file__).parents[3] / "conf"
TAKES_MORE = ("trainer", "optimizer", "lr_schedule", "logger", "callbacks")
"""Groups of classes that take more arguments than their files in conf name."""


def cli(main: Callable[[], Any], config: str = "train") -> None:
    """Runs a Hydra main function; a mistake in the config ends in one clear message, anything else in its traceback.

    config: the file of conf that `main` composes.
    """
    register_resolvers()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    sys.argv[1:] = overrides = [plain_overlay(argument) for argument in sys.argv[1:]]
    sys.path.insert(0, os.getcwd())  # _target_: my_loss.MyLoss, from a file beside the run
    try:
        if any(redact(override) != override for override in overrides):
            raise ValueError("the command line holds a secret; name its environment variable instead: KEY='${oc.env:NAME}'")
        config_check.check_hydra_keys(overrides)
        main()
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {redact(explain(error, overrides, config))}", file=sys.stderr)
        sys.exit(2)
    except (OSError, RuntimeError) as error:  # a folder that cannot be made, an engine that died: what it says is enough
        from bapo.protocols import EngineError  # torch only now

        if not isinstance(error, OSError | EngineError):
            raise
        print(f"error: {redact(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def plain_overlay(argument: str) -> str:
    """`+experiment=x` as `experiment=x`: the defaults have these groups, so both are right."""
    return re.sub(r"^\+(?=(experiment|sweep|debug)=)", "", argument)


def explain(error: Exception, overrides: Sequence[str] = (), config: str = "train") -> str:
    """The message of an error, without Hydra's notes on its search path and with the nearest key to a misspelt one.

    overrides: the command line, whose choices of groups decide which keys there are.
    """
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error)).split("\nConfig search path")[0]
    message = re.sub(r"\n\s*(full_key|object_type|reference_type)[:=].*", "", message).strip()
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key or message.removeprefix('Missing mandatory value: ')} is missing; it has no default"
    if message.startswith("Config group override must be a string"):
        return f"{' '.join(o for o in overrides if o.endswith('=null'))}: a group cannot be null; name a file of conf/GROUP"
    if isinstance(error, HydraException) and (match := re.search(r"Could not override '([^']+)'", message)):
        key = match[1]
        overlay = re.search(r"To append to your default list use (\S+)", message)
        near = overlay[1] if overlay else _section_of(key, overrides)
        near = near or config_check.nearest(key, _known_keys(overrides, config))
        message = f"unknown key {key!r}" + (f"; nearest: {near!r}" if near else "")
        if key.split(".")[0] in TAKES_MORE and "." in key:
            why = OWNED.get(key.removeprefix("trainer."))
            message = f"{key} cannot be set; the loop sets it: {why}" if why else f"{message}; to add it: +{key}=VALUE"
    if match := re.fullmatch(r"([\w.]+) is {.*}; it must be a section with a _target_ or null", message):
        maker = _section_of(f"{match[1]}.", overrides)
        message += f": {maker} makes one" if maker else ""
    if match := re.fullmatch(r"In '[^']*': Could not load '([\w./-]+)'\.?", message):
        message = message.rstrip(".") + _files_beside(match[1])
    return message


def _files_beside(choice: str) -> str:
    """The files of the group of `group/file`, which does not exist, and the nearest of them."""
    group, _, name = choice.rpartition("/")
    names = sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml")) if group else []
    near = difflib.get_close_matches(name.removesuffix(".yaml"), names, n=1)
    return (f"; nearest: {near[0]!r}" if near else "") + (f"; conf/{group} has {', '.join(names)}" if names else "")


def _section_of(key: str, overrides: Sequence[str]) -> str | None:
    """The overlay that makes the section in which `key` would be: +rollout/partial=default for rollout.partial.max_spans.

    None where there is none, or it is on the command line.
    """
    group = key.rpartition(".")[0].replace(".", "/")
    overlay = f"+{group}=default"
    return overlay if "/" in group and (CONF / group / "default.yaml").is_file() and overlay not in overrides else None


def _known_keys(overrides: Sequence[str], config: str) -> set[str]:
    """Every key of the config with the groups that `overrides` choose."""
    choices = {f"{path.parent.relative_to(CONF)}={path.stem}" for path in CONF.rglob("*.yaml")}
    chosen = [override for override in overrides if override.lstrip("+") in choices]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config_check.all_keys(OmegaConf.to_container(compose(config, overrides=chosen)))
