"""Runs simulations in forked processes, one per CPU core, and reports their progress.

A process ends when the process that forked it has ended, so that a cancelled comparison leaves none behind.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Final

from kvscope_engine.simulator.simulation import Simulation, SimulationSetup
from kvscope_engine.simulator.what_if.compared_figures import SimulatedTimes, simulated_times
from kvscope_telemetry.errors import KvscopeError

_REPORT_S: Final = 0.2
_ADVANCES_PER_CHECK: Final = 256


def simulate_all(setups: Sequence[SimulationSetup], report: Callable[[float], object]) -> list[SimulatedTimes]:
    """Return the times of each simulation, in order. `report` is called with the share done, 0 to 1.

    Raises BadInput for a setup that is not accepted, and KvscopeError if a simulation cannot continue.
    """
    for setup in setups:
        Simulation(setup)  # raises an error here rather than in another process
    num_processes = max(1, min(len(setups), len(os.sched_getaffinity(0))))
    context = get_context("fork")
    results: dict[int, SimulatedTimes] = {}
    num_ended = dict.fromkeys(range(len(setups)), 0)
    num_requests = sum(len(setup.workload.requests) for setup in setups)
    connections: list[Connection] = []
    processes: list[BaseProcess] = []
    for first in range(num_processes):
        receiver, sender = context.Pipe(duplex=False)
        indices = range(first, len(setups), num_processes)
        process = context.Process(
            target=_run, args=([(i, setups[i]) for i in indices], sender, os.getpid()), daemon=True
        )
        process.start()
        sender.close()
        connections.append(receiver)
        processes.append(process)
    try:
        while len(results) < len(setups):
            for ready in wait(connections):
                assert isinstance(ready, Connection), "waits for connections only"
                try:
                    index, message = ready.recv()
                except EOFError:
                    connections.remove(ready)
                    if not connections and len(results) < len(setups):
                        raise KvscopeError("a simulation ended early: too little memory?") from None
                    continue
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, int):
                    num_ended[index] = message
                    report(sum(num_ended.values()) / num_requests)
                else:
                    results[index] = message
    finally:
        for each in processes:
            each.kill()
            each.join()
    return [results[index] for index in range(len(setups))]


def _run(setups: Sequence[tuple[int, SimulationSetup]], connection: Connection, parent: int) -> None:
    gc.freeze()  # the requests of the workload stay until the process ends
    gc.set_threshold(100_000)
    try:
        for index, setup in setups:
            simulation, reported_s, num_advances = Simulation(setup, samples_memory=False), monotonic(), 0
            while simulation.advance():
                num_advances += 1
                if num_advances % _ADVANCES_PER_CHECK == 0:
                    if os.getppid() != parent:
                        return
                    if monotonic() - reported_s > _REPORT_S:
                        reported_s = monotonic()
                        connection.send((index, simulation.tally.num_ended))
            connection.send((index, simulation.num_requests))
            connection.send((index, simulated_times(simulation)))
    except KvscopeError as error:
        connection.send((0, error))
    except BrokenPipeError:
        pass  # the comparison was cancelled
