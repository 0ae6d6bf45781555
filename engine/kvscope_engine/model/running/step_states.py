"""From a step's plan to the states that its recurrent layers run on."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import torch

from kvscope_engine.model.running.recurrent import StateBatch
from kvscope_engine.model.running.state_storage import StateStorage
from kvscope_engine.policy.plan import StepPlan
from kvscope_kernels import Ops


def states_of(plan: StepPlan, storage: StateStorage, ops: Ops) -> StateBatch:
    """The states of the plan's sequences, once those that it copies before the step are copied."""
    if plan.state_copies:
        ops.copy_rows(storage.rows, torch.tensor(plan.state_copies, device=storage.device))
    starts = [0, *accumulate(item.num_tokens for item in plan.scheduled)]
    places = {item.request.number: number for number, item in enumerate(plan.scheduled)}
    saves: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for save in plan.state_saves:
        number = places[save.request.number]
        row = starts[number] + save.num_tokens - plan.scheduled[number].start
        saves[number].append((row, save.slot))
    slots = [item.request.state_slot for item in plan.scheduled]
    return StateBatch(storage, slots, [item.start > 0 for item in plan.scheduled], starts, saves)
