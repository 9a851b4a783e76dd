"""Which memory has been through a conversion, and which version counters must not have moved since.

Pure bookkeeping: keys are opaque and hashable, tags are whatever the caller hangs on them.  Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

Tag = TypeVar("Tag")
Life = Callable[[], bool]
Subject = Callable[[], object]  # an object that was itself tagged, as a weak reference to it
Counter = Callable[[], int | None]  # a version counter's value now; None when it can no longer be read


class Watch(NamedTuple):
    """A version counter and the value it had when it was last known to be right."""

    counter: Counter
    version: int


class _Entry(Generic[Tag]):
    __slots__ = ("excused", "gone", "stale", "subjects", "sweep_at", "tag", "watches")

    def __init__(self, tag: Tag, gone: Life) -> None:
        self.tag = tag
        self.gone = gone
        self.watches: list[Watch] = []
        self.subjects: dict[int, Subject] = {}
        self.sweep_at = 8
        self.excused = 0  # by how much its counters may move for no write
        self.stale = False  # a write was let through: its counters move once the write has run


class _Group:
    """Keys that stand for the same memory."""

    __slots__ = ("key", "lives")

    def __init__(self, key: Hashable, gone: Life) -> None:
        self.key = key
        self.lives = [gone]

    def gone(self) -> bool:
        return all(gone() for gone in self.lives)


class Ledger(Generic[Tag]):
    """Tags by key; a key whose ``gone()`` is true is a stranger again.

    Example:
        >>> ledger = Ledger()
        >>> ledger.tag("storage 1", "x.to(...)", gone=lambda: False)
        >>> ledger.find(["storage 2", "storage 1"])
        'x.to(...)'
    """

    __slots__ = ("_entries", "_groups", "_sweep_at")

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry[Tag]] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def tag(
        self, key: Hashable, tag: Tag, gone: Life, watches: Iterable[Watch] = (), subjects: Iterable[Subject] = ()
    ) -> None:
        """Hang ``tag`` on ``key`` in place of an earlier one, whose subjects stay."""
        group = self._groups.get(key)
        if group is not None:
            key, gone = group.key, group.gone
        entry = self._live(key)
        if entry is None:
            if len(self._entries) >= self._sweep_at:
                self._sweep()
            entry = self._entries[key] = _Entry(tag, gone)
        entry.tag = tag
        entry.watches = list(watches)
        entry.subjects.update((id(subject), subject) for subject in subjects)  # a weak reference is one for its object
        if len(entry.subjects) > entry.sweep_at:
            entry.subjects = {name: subject for name, subject in entry.subjects.items() if subject() is not None}
            entry.sweep_at = max(8, 2 * len(entry.subjects))
        entry.excused, entry.stale = 0, False

    def is_subject(self, keys: Iterable[Hashable], candidate: object) -> bool:
        """Whether ``candidate`` itself, and not only what it shares ``keys`` with, was tagged."""
        entries = (self._live(key) for key in keys)
        return any(
            subject() is candidate for entry in entries if entry is not None for subject in entry.subjects.values()
        )

    def join(self, key: Hashable, gone: Life, other: Hashable, other_gone: Life) -> None:
        """From now on ``key`` stands for what ``other`` stands for."""
        group = self._groups.get(other)
        if group is None:
            group = self._groups[other] = _Group(other, other_gone)
        group.lives.append(gone)
        self._groups[key] = group
        entry = self._entries.get(group.key)
        if entry is not None:
            entry.gone = group.gone

    def find(self, keys: Iterable[Hashable]) -> Tag | None:
        """The tag of the first tagged key, or ``None``."""
        for key in keys:
            entry = self._live(key)
            if entry is not None:
                return entry.tag
        return None

    def settled(self, key: Hashable) -> Tag | None:
        """The tag of ``key``, if nothing has happened to it since it was hung there."""
        entry = self._live(key)
        if entry is None or entry.stale or any(watch.counter() != watch.version for watch in entry.watches):
            return None
        return entry.tag

    def let_through(self, keys: Iterable[Hashable]) -> None:
        """A write to ``keys`` has been reported already: their counters are about to move, rightly."""
        for key in keys:
            entry = self._live(key)
            if entry is not None:
                entry.stale = True

    def excuse(self, keys: Iterable[Hashable]) -> None:
        """Something that is no write is about to move the counters of ``keys`` by one."""
        for key in keys:
            entry = self._live(key)
            if entry is not None:
                entry.excused += 1

    def add_subject(self, keys: Iterable[Hashable], subject: Subject) -> None:
        """An object that was not tagged stands for one that was."""
        for key in keys:
            entry = self._live(key)
            if entry is not None:
                entry.subjects[id(subject)] = subject

    def moved(self, keys: Iterable[Hashable] | None = None) -> Iterator[Tag]:
        """The tags of those of ``keys`` (of all) whose counters moved with no write reported, each told once."""
        for key in list(self._entries) if keys is None else keys:
            entry = self._live(key)
            if entry is None:
                continue
            now = [(watch, watch.counter()) for watch in entry.watches]
            steps = [version - watch.version for watch, version in now if version is not None]
            changed, written = any(steps), any(abs(step) > entry.excused for step in steps)
            stale, entry.stale, entry.excused = entry.stale, False, 0
            if changed:
                entry.watches = [Watch(watch.counter, version) for watch, version in now if version is not None]
                if written and not stale:
                    yield entry.tag

    def clear(self) -> None:
        self._entries.clear()
        self._groups.clear()

    def _live(self, key: Hashable) -> _Entry[Tag] | None:
        if self._groups and key in self._groups:
            key = self._groups[key].key
        entry = self._entries.get(key)
        if entry is not None and entry.gone():
            del self._entries[key]
            return None
        return entry

    def _sweep(self) -> None:
        """Forget what is gone; doing so only as the ledger doubles keeps the cost per tag constant."""
        self._entries = {key: entry for key, entry in self._entries.items() if not entry.gone()}
        self._sweep_at = max(64, 2 * len(self._entries))
