"""What to vary of a policy: ``window=0..8``, ``cooldown_s=0.1..10:log``, ``adaptive=true|false``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from simmoe.errors import UsageError, did_you_mean
from simmoe.policies.parameters import Parameter, Value, format_value, parameters_of
from simmoe.policies.registry import PolicyPart, parse_parts

#: Combinations of extremes worth trying before a search: all of ten ranges'.
MOST_CORNERS = 1024


@dataclass(frozen=True, slots=True)
class Range:
    """The values one parameter may take."""

    name: str
    text: str
    """As given, after the equals sign."""
    choices: tuple[Value, ...] = ()
    """The values, for a list; else empty."""
    low: int | float = 0.0
    """Least value, inclusive."""
    high: int | float = 0.0
    """Largest value, inclusive."""
    log: bool = False
    """Whether equal ratios, not equal differences, matter equally."""
    whole: bool = False
    """Whether only whole numbers will do."""

    @property
    def extremes(self) -> tuple[Value, ...]:
        """Both ends, or every value of a list."""
        return self.choices or (self.low, self.high)

    def rounded(self, value: Value) -> Value:
        """Return a value as the policy is given it: numbers to four significant digits, more if the range is narrow."""
        if self.choices or not isinstance(value, (int, float)):
            return value
        if not self.whole:
            narrow = max(abs(self.low), abs(self.high)) / (self.high - self.low)
            value = float(f"{value:.{min(17, 4 + int(math.log10(narrow)))}g}")
        return min(max(value, self.low), self.high)


class Variation:
    """A policy whose parameters vary.

    Args:
        policy: as parse_policy takes it.
        texts: one ``NAME=VALUES`` a parameter.
    Raises:
        UsageError: a parameter the policy has not, or values that are none of its type.
    """

    def __init__(self, policy: str, texts: Sequence[str]) -> None:
        self.policy = policy
        self._parts = parse_parts(policy)
        declared = [(part, parameters_of(part.load(), part.name)) for part in self._parts]
        self._part_of: dict[str, PolicyPart] = {}
        self.ranges: list[Range] = []
        for text in texts:
            name, equals, values = (word.strip() for word in text.partition("="))
            owners = [(part, parameters[name]) for part, parameters in declared if name in parameters]
            if not equals or not values:
                raise UsageError(f"--vary '{text}' is no range; write NAME=LOW..HIGH or NAME=A|B|C")
            if not owners:
                hint = did_you_mean(name, [name for _, parameters in declared for name in parameters])
                raise UsageError(f"--vary {name}: policy '{policy}' has no such parameter{hint}")
            if len(owners) > 1:
                raise UsageError(f"--vary {name}: both policies of '{policy}' have that parameter; vary one policy")
            if name in self._part_of:
                raise UsageError(f"--vary {name} is given twice; give it once")
            part, parameter = owners[0]
            self._part_of[name] = part
            try:
                self.ranges.append(_parse_range(values, parameter, policy))
            except UsageError as error:
                raise UsageError(f"--vary {name}={values}: {error}") from None

    def corners(self) -> Iterator[str]:
        """Yield the policy at every combination of the ranges' extremes, the first MOST_CORNERS of them."""
        for values in islice(product(*(r.extremes for r in self.ranges)), MOST_CORNERS):
            yield self.text({r.name: value for r, value in zip(self.ranges, values, strict=True)})

    def text(self, values: Mapping[str, Value]) -> str:
        """Return the policy with these values for the parameters that vary."""
        parts = []
        for part in self._parts:
            given = dict(part.given) | {name: value for name, value in values.items() if self._part_of[name] is part}
            parts.append(replace(part, given=tuple(given.items())).text)
        return "+".join(parts)


def _parse_range(text: str, parameter: Parameter, policy: str) -> Range:
    name = parameter.name
    if ".." not in text:
        choices = tuple(parameter.parse(word.strip(), policy) for word in text.split("|"))
        if len(choices) < 2:
            raise UsageError("there is nothing to choose from; write NAME=LOW..HIGH or NAME=A|B|C")
        if twice := [value for value in choices if choices.count(value) > 1]:
            raise UsageError(f"{format_value(twice[0])} is given twice; give it once")
        return Range(name, text, choices)
    if parameter.kind not in (int, float):
        raise UsageError(f"{name} is no number; list its values as in NAME=A|B")
    bounds, colon, scale = text.partition(":")
    if colon and scale != "log":
        raise UsageError(f"'{scale}' is no scale; write :log or nothing")
    low, high = (parameter.parse(word.strip(), policy) for word in bounds.split("..", 1))
    if not isinstance(low, (int, float)) or not isinstance(high, (int, float)) or not 0 < high - low < math.inf:
        raise UsageError("the bounds must be finite numbers, the lower one first")
    if colon and low <= 0:
        raise UsageError("a log scale needs bounds above 0")
    return Range(name, text, (), low, high, bool(colon), parameter.kind is int)
