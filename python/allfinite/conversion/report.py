"""What ``convert`` did to a model, to print and to undo."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.nn import Module


@dataclass(frozen=True)
class Swapped:
    """A module whose class was changed.

    Attributes:
        name: its first name in the model; '' is the model itself.
        was: its class before, with module path.
        now: the class whose ``forward`` it has now.
        also: its other names, where it is used more than once.
        note: what no longer happens, or ''.
    """

    name: str
    was: str
    now: str
    also: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Left:
    """A module that was looked at and left as it is, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class SwitchedOff:
    """An attribute of torch's encoder that was set so that no fast path bypasses a swapped module."""

    name: str
    attribute: str


@dataclass
class ConversionReport:
    """The result of ``allfinite.convert``; ``print`` it.

    Attributes:
        swapped: modules that now run through allfinite.
        left: modules of a kind that convert looks for, left alone, with the reason.
        switched_off: fast paths that were turned off.
        already: names of modules that an earlier call had swapped.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    switched_off: list[SwitchedOff] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    _classes: list[tuple[Module, type[Module], type[Module]]] = field(default_factory=list, repr=False)
    _attributes: list[tuple[Module, str, object, object]] = field(default_factory=list, repr=False)

    def change_class(self, module: Module, new: type[Module]) -> None:
        """Changes the class of ``module``, remembering the former one."""
        self._classes.append((module, type(module), new))
        module.__class__ = new

    def change_attribute(self, module: Module, name: str, value: object) -> None:
        """Sets an attribute of ``module``, remembering the former value."""
        self._attributes.append((module, name, getattr(module, name), value))
        setattr(module, name, value)

    def undo(self) -> None:
        """Gives every module back the class and attributes that it had; the objects never changed.

        A second call does nothing. Copies that were made of the converted model stay converted.

        Raises:
            RuntimeError: something else changed a class or attribute since; then nothing is undone.
        """
        for module, _, new in self._classes:
            if type(module) is not new:
                raise RuntimeError(
                    f"allfinite.ConversionReport.undo: expected a module of class {new.__name__}, which convert gave "
                    f"it, but got {type(module).__name__}"
                )
        for module, name, _, value in self._attributes:
            if getattr(module, name) != value:
                raise RuntimeError(
                    f"allfinite.ConversionReport.undo: expected {type(module).__name__}.{name} to be {value!r}, which "
                    f"convert set, but got {getattr(module, name)!r}"
                )
        while self._classes:
            module, old, _ = self._classes.pop()
            module.__class__ = old
        while self._attributes:
            module, name, before, _ = self._attributes.pop()
            setattr(module, name, before)

    def __str__(self) -> str:
        lines = [f"allfinite.convert: {_count(self.swapped, 'module')} swapped, {len(self.left)} left alone"]
        lines += _grouped("swapped", ((s.name, f"{s.was} -> {s.now}") for s in self.swapped))
        lines += [f"    {s.name} is also {', '.join(s.also)}" for s in self.swapped if s.also]
        lines += [f"    {_shown(s.name)}: {s.note}" for s in self.swapped if s.note]
        lines += _grouped("swapped before", ((name, "") for name in self.already))
        lines += _grouped("fast path off", ((s.name, f"{s.attribute}") for s in self.switched_off))
        lines += _grouped("left alone", ((left.name, f"{left.kind}: {left.reason}") for left in self.left))
        return "\n".join(lines)


def _count(items: list[Swapped], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _shown(name: str) -> str:
    return name or "(the model itself)"


def _grouped(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """One line for the modules that differ in the numbers of their names only."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), text), []).append(name)
    lines = [f"  {title}:"] if groups else []
    for (pattern, text), names in groups.items():
        label = _shown(names[0]) if len(names) == 1 else f"{pattern} ({len(names)})"
        lines.append(f"    {label}  {text}".rstrip())
    return lines
