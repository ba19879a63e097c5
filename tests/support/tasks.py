"""Tasks of a few prompts."""

from __future__ import annotations

from bapo.protocols import Task
from bapo.types import Prompt


class Echo(Task):
    """Ten prompts `aK=`; the response `K` is right."""

    def __init__(self, n: int = 10, text=lambda i: f"a{i}="):
        self.rows = [Prompt(f"echo/{i}", text(i), str(i)) for i in range(n)]

    def prompts(self, split: str) -> list[Prompt]:
        return self.rows

    def verify(self, prompts: list[Prompt], responses: list[str]) -> list[float]:
        assert responses, "a task is not asked about none"
        return [float(response == prompt.answer) for prompt, response in zip(prompts, responses, strict=True)]
