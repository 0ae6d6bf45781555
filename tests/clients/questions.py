"""Fifty multiple-choice questions as a task of lm-evaluation-harness, written to a folder.

    python -m tests.clients.questions FOLDER

The task needs no network and no license. Its score means nothing but that two ways to compute it agree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

TASK: Final = "fifty_questions"
CAPITALS: Final = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens",
    "Poland": "Warsaw", "Austria": "Vienna", "Sweden": "Stockholm", "Norway": "Oslo", "Cuba": "Havana",
    "Peru": "Lima", "Chile": "Santiago", "Kenya": "Nairobi", "Iraq": "Baghdad", "Iran": "Tehran",
}  # fmt: skip
OPPOSITES: Final = {
    "hot": "cold", "big": "small", "up": "down", "old": "young", "wet": "dry",
    "day": "night", "open": "closed", "early": "late", "rich": "poor", "left": "right",
    "long": "short", "full": "empty", "hard": "soft", "fast": "slow", "dark": "light",
}  # fmt: skip
ANIMALS: Final = {
    "cow": "milk", "bee": "honey", "hen": "eggs", "sheep": "wool", "spider": "silk",
}  # fmt: skip
NUM_SUMS: Final = 10
NUM_CHOICES: Final = 4
CONFIG: Final = """\
task: fifty_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def questions() -> list[dict[str, object]]:
    """Return the questions: text, choices, and index of the right choice."""
    pairs = [(f"The capital of {country} is", city, list(CAPITALS.values())) for country, city in CAPITALS.items()]
    pairs += [(f"The opposite of {word} is", other, list(OPPOSITES.values())) for word, other in OPPOSITES.items()]
    pairs += [(f"A {animal} gives us", product, list(ANIMALS.values())) for animal, product in ANIMALS.items()]
    sums = [str(3 * number + 4) for number in range(NUM_SUMS)]
    pairs += [(f"{number + 3} + {2 * number + 1} =", sums[number], sums) for number in range(NUM_SUMS)]
    found: list[dict[str, object]] = []
    for number, (text, right, answers) in enumerate(pairs):
        start = answers.index(right)
        choices = [answers[(start + step) % len(answers)] for step in range(NUM_CHOICES)]
        turn = number % NUM_CHOICES
        choices = choices[turn:] + choices[:turn]
        found.append({"question": text, "choices": choices, "answer": choices.index(right)})
    return found


def write_task(folder: Path) -> None:
    """Write the questions and the task's configuration to `folder`."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in questions()))
    (folder / f"{TASK}.yaml").write_text(CONFIG.format(file=file))


if __name__ == "__main__":
    write_task(Path(sys.argv[1]))
