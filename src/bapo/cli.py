"""What stands around a Hydra main function: resolvers, quiet libraries, and errors that a user can act on."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bapo import config_check
from bapo.run_folder import redact, register_resolvers

CONF = Path(__file__).parents[2] / "conf"


def cli(main: Callable[[], Any]) -> None:
    """Runs a Hydra main function; a mistake in the config ends in one clear message, anything else in its traceback."""
    register_resolvers()
    _hush()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on instead of printing them
    try:
        main()
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {redact(explain(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _hush() -> None:
    """Keeps off the screen what libraries say of things that are meant here."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    # Asked on every save whether the file should hold weights alone; it should not.
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    for message in (
        ".*module.*in eval mode at the start of training",  # dropout is off for good, so the mode says nothing
        "Using ModelCheckpoint with manual optimization",  # the state after an update is the state wanted
        ".*sync_dist=True.*",  # every rank logs the same numbers, reduced already
        ".*LeafSpec.*is deprecated",
        ".*does not have many workers",  # mini-batches are in memory
        ".*Checkpoint directory .* exists and is not empty",  # as it must be for a resumed run
    ):
        warnings.filterwarnings("ignore", message=message)


def explain(error: Exception) -> str:
    """What a user needs of an error: Hydra's notes on where it searched left out, the nearest key to a misspelt one added."""
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error)).split("\nConfig search path")[0]
    message = re.sub(r"\n\s*(full_key|object_type)[:=].*", "", message).strip()
    if isinstance(error, HydraException) and (match := re.search(r"Could not override '([^']+)'", message)):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            known = config_check.all_keys(OmegaConf.to_container(compose("train")))
        near = config_check.nearest(match[1], known)
        message = f"unknown key {match[1]!r}" + (f"; nearest: {near!r}" if near else "")
    return message
