"""Small local data sets in exactly the public schemas, for tests that read or train on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GSM8K = [
    {"question": "Natalia sold 48 clips and half as many more. How many?", "answer": "48/2=<<48/2=24>>24\n48+24=72\n#### 72"},
    {"question": "  A house costs 80,000 and 40,000 more?  ", "answer": "So #### 3\nno: #### 1,120,000"},
    {"question": "How cold is it?", "answer": "It is\n#### -5.50"},
]
MATH500 = [
    {
        "problem": "Convert $(0,3)$ to polar coordinates.",
        "solution": "So \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.",
        "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    {
        "problem": "What is $1 - \\frac12$?",
        "solution": "\\boxed{\\frac{1}{2}}",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
]
AIME24 = [
    {
        "id": 60,
        "problem": "Every morning Aya goes for a walk.",
        "solution": "s",
        "answer": "204",
        "url": "u",
        "year": "2024",
    },
    {"id": 61, "problem": "Let $x$ be 25.", "solution": "s", "answer": "025", "url": "u", "year": "2024"},
]
AIME25 = [
    {"problem": "Find the sum of all integer bases $b>9$.", "answer": "70", "id": "0"},
    {"problem": "What is $6 \\cdot 8$?", "answer": "48", "id": "1"},
]


def skywork(question: str, truth: str, wrong: int = 8, index: int = 0) -> Row:
    """A row of Skywork-OR1-RL-Data. wrong: attempts of the 7B model; the 1.5B model has two more, the 32B model none."""
    models = {"1.5B": min(wrong + 2, 16), "32B": 0, "7B": wrong}
    return {
        "data_source": "train-math-deepscaler",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {
            "index": index,
            "model_difficulty": {f"DeepSeek-R1-Distill-Qwen-{size}": count for size, count in models.items()},
        },
    }


def verl(question: str, truth: Any, *before: tuple[str, str], index: int = 0) -> Row:
    """A row as verl's own preprocessing writes it. before: (role, content) of earlier turns."""
    turns = [*before, ("user", question)]
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": role, "content": content} for role, content in turns],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index, "answer": "", "question": question},
    }


def jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Row]) -> Path:
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(list(rows)).to_parquet(path)
    return path


def many(row: Callable[[int], Row], n: int = 200) -> list[Row]:
    return [row(index) for index in range(n)]


def local_data(task: str, folder: Path) -> list[str]:
    """The overrides that give a task of conf/task local files in its schema; none for a task that makes its own."""
    if task == "gsm8k":
        for split in ("train", "test"):
            jsonl(folder / f"{split}.jsonl", many(lambda n: {"question": f"{n} + 1?", "answer": f"#### {n + 1}"}))
        return [f"task.path={folder}"]
    if task in ("math500", "aime24", "aime25"):
        rows = {"math500": MATH500, "aime24": AIME24, "aime25": AIME25}[task] * 100
        return [f"task.path={jsonl(folder / 'rows.jsonl', rows)}"]
    if task == "skywork":
        rows = many(lambda n: skywork(f"{n} + 1?", f'["{n + 1}"]', index=n))
        return [f"task.path={parquet(folder / 'math.parquet', rows)}"]
    if task == "files":
        rows = many(lambda n: {"question": f"{n} + 1?", "answer": n + 1})
    elif task == "verl_format":
        rows = many(lambda n: verl(f"{n} + 1?", str(n + 1), index=n))
    else:
        return []
    return [f"task.{split}={parquet(folder / f'{split}.parquet', rows)}" for split in ("train", "test")]
