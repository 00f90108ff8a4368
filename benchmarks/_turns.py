"""Threads that take turns."""

from __future__ import annotations

from threading import Semaphore


class Turns:
    """Lets threads take turns of a few steps each.

    The speed of a shared host changes within milliseconds; with short turns it changes for both.
    """

    def __init__(self, members: list[object]) -> None:
        self._members = list(members)
        self._gates = {id(member): Semaphore(0) for member in members}
        self._gates[id(members[0])].release()

    def wait(self, member: object) -> None:
        self._gates[id(member)].acquire()

    def next(self, member: object) -> None:
        """Give the others a turn each, then continue."""
        self._gates[id(self._after(member))].release()
        self.wait(member)

    def leave(self, member: object) -> None:
        after = self._after(member)
        self._members.remove(member)  # before the release: the other thread runs from then on
        self._gates[id(after)].release()

    def _after(self, member: object) -> object:
        return self._members[(self._members.index(member) + 1) % len(self._members)]
