"""Tasks of a few prompts."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bapo.protocols import Task
from bapo.tasks.dataset import DatasetTask
from bapo.training.cli import CONF
from bapo.types import Prompt


def dataset(name: str, **fields: Any) -> DatasetTask:
    """The task of conf/task/NAME.yaml with some fields changed."""
    with initialize_config_dir(str(CONF / "task"), version_base="1.3"):
        options: dict[str, Any] = OmegaConf.to_container(compose(name)) | fields  # type: ignore[operator]
    assert options.pop("_target_") == "bapo.tasks.dataset.DatasetTask"
    return DatasetTask(**options)


class Echo(Task):
    """Ten prompts `aK=`; the response `K` is right."""

    def __init__(self, n: int = 10, text=lambda i: f"a{i}="):
        self.rows = [Prompt(f"echo/{i}", text(i), str(i)) for i in range(n)]

    def prompts(self, split: str) -> list[Prompt]:
        return self.rows

    def verify(self, prompts: list[Prompt], responses: list[str]) -> list[float]:
        assert responses, "a task is not asked about none"
        return [float(response == prompt.answer) for prompt, response in zip(prompts, responses, strict=True)]
