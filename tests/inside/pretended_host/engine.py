"""A small paged engine that knows nothing of kvscope: a pool with a prefix cache, and a scheduler that preempts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

SIZE = 4
"""Tokens in a block."""
MAX_TOKENS_PER_STEP = 12


@dataclass
class Block:
    index: int
    num_users: int = 0
    digest: bytes = b""
    """Key by which prompts find it; empty if it is not cached."""


@dataclass(eq=False)
class Job:
    """A request."""

    name: str
    prompt: list[int]
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_done: int = 0
    """Tokens whose KV is in blocks."""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer

    def digest(self, index: int) -> bytes:
        """Return the digest of its text up to the end of block `index`."""
        return hashlib.sha256(repr(self.text[: (index + 1) * SIZE]).encode()).digest()


class PretendedEngine:
    def __init__(self, num_blocks: int) -> None:
        self.pool = [Block(index) for index in range(num_blocks)]
        self.unused = list(self.pool)
        """Blocks that nobody holds, the next one to be given out first."""
        self.cached: dict[bytes, Block] = {}
        self.waiting: list[Job] = []
        self.running: list[Job] = []

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def step(self) -> dict[str, int]:
        """Run each job for some tokens and return how many, by name."""
        ran: dict[str, int] = {}
        left = MAX_TOKENS_PER_STEP
        for job in list(self.running):
            if job in self.running and left:
                left -= self.run(job, min(left, len(job.text) - job.num_done), ran)
        while self.waiting and left and self.unused:
            job = self.waiting.pop(0)
            self.start(job, self.find(job))
            count = self.run(job, min(left, len(job.text) - job.num_done), ran)
            if not count:
                break
            left -= count
        for job in list(self.running):
            if job.num_done == len(job.text):
                job.answer.append((job.text[-1] * 7 + 1) % 50)
                if len(job.answer) >= job.max_tokens:
                    self.end(job, "length")
        return ran

    def run(self, job: Job, count: int, ran: dict[str, int]) -> int:
        needed = -(-(job.num_done + count) // SIZE) - len(job.blocks)
        while needed > len(self.unused):
            victim = self.running[-1]
            self.preempt(victim, job)
            if victim is job:
                ran.pop(job.name, None)
                return 0
            ran.pop(victim.name, None)
        if needed > 0:
            self.allocate(job, needed)
        job.num_done += count
        for index in range(job.num_done // SIZE):
            self.cache(job, index)
        ran[job.name] = count
        return count

    def find(self, job: Job) -> list[Block]:
        """Take the cached blocks that a text begins with; at least one token is left to compute."""
        found: list[Block] = []
        for index in range((len(job.text) - 1) // SIZE):
            block = self.cached.get(job.digest(index))
            if block is None:
                break
            found.append(block)
        for block in found:
            if not block.num_users:
                self.unused.remove(block)
            block.num_users += 1
        job.blocks = list(found)
        return found

    def start(self, job: Job, found: list[Block]) -> None:
        job.num_done = len(found) * SIZE
        self.running.append(job)

    def allocate(self, job: Job, count: int) -> list[Block]:
        given, self.unused = self.unused[:count], self.unused[count:]
        for block in given:
            if block.digest:
                self.evict(block, job)
            block.num_users = 1
        job.blocks += given
        return given

    def evict(self, block: Block, job: Job) -> None:
        del self.cached[block.digest]
        block.digest = b""

    def cache(self, job: Job, index: int) -> bool:
        block, digest = job.blocks[index], job.digest(index)
        if block.digest or digest in self.cached:
            return False
        block.digest, self.cached[digest] = digest, block
        return True

    def preempt(self, job: Job, needy: Job) -> None:
        self.running.remove(job)
        self.release(job)
        job.num_done = 0
        self.waiting.insert(0, job)

    def end(self, job: Job, reason: str) -> None:
        self.running.remove(job)
        self.release(job)

    def release(self, job: Job) -> None:
        for block in reversed(job.blocks):
            block.num_users -= 1
            if not block.num_users:
                self.unused.append(block)
        job.blocks = []
