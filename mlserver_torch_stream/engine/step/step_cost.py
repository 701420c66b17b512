"""Learns how long a step takes: a constant, plus a time for each row that decodes and each token of a prompt.

The time of a prompt token grows with the number of keys before it. This module does not read a clock: the batcher
measures the steps. Prompt lookup asks how much time a further row adds; the batcher asks how many prompt tokens fit
into a step.
"""

from __future__ import annotations

from mlserver_torch_stream.engine.scheduler.queue import PromptBudget

# The time that one more row is expected to add: the share _OF_STEP of the step's time, but at most the share _OF_ROW of
# the time per row. On two cores, a second row adds 0.14 of the step's time, and a ninth row adds 0.5 of the time per
# row.
_OF_STEP = 0.1
_OF_ROW = 0.35
_ROW_SPREAD = 8.0  # sum of squared distances of the steps' rows from their mean
_KEPT_ROWS = 0.98  # the factor for the weight of earlier steps: about the last fifty count
_KEPT_PROMPTS = 0.9  # the factor for steps with prompts: about the last ten count
_KEPT_KEYS = 0.99  # the factor for the share of keys in a prompt token's time, which changes little
_KEY_SPREAD = 1e4  # sum of squared distances of the prompts' mean numbers of keys from their mean
_MOST_OF_KEYS = 0.75  # the largest share of keys in the mean time of a prompt token
_KEPT_ERRORS = 0.95  # the factor for the relative errors of earlier predictions: about the last twenty count

# A step that takes longer than predicted by three mean errors should still end within 1.25 times the target.
_LATE = 1.25
_ERRORS = 3.0

_OUTLIER = 2.0  # a step that takes longer counts as this many times the expected time, unless the next step is slow too
_MIN_STEPS = 3  # before these no step is an outlier
# Times the largest measured number of prompt tokens: beyond it the line is a guess. More than 2, because two pages cost
# more than twice as much as the page before them, which has fewer keys before it.
_MAX_GROWTH = 2.25
# Prompts get at least this share of the time that the decoding rows take. The share grows while the oldest prompt
# waits, and has doubled after ``_STARVING`` seconds, until prompts get as much time as the rows.
_FLOOR_SHARE = 0.25
_STARVING = 10.0
_MIN_SLOPE = 1e-9  # seconds; a difference of two measurements can be zero or less


class _Line:
    """A line through points (size, seconds), fitted by least squares with exponential forgetting."""

    def __init__(self, kept: float) -> None:
        self.kept = kept
        self.weight = self._sizes = self._seconds = self._squares = self._products = 0.0

    def note(self, size: float, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("_sizes", size),
            ("_seconds", seconds),
            ("_squares", size * size),
            ("_products", size * seconds),
        ):
            setattr(self, name, self.kept * getattr(self, name) + value)

    @property
    def size(self) -> float:
        """The mean size."""
        return self._sizes / self.weight

    @property
    def seconds(self) -> float:
        """The mean seconds."""
        return self._seconds / self.weight

    def slope(self, expected: float, spread: float) -> float:
        """Returns the seconds that one more unit of size adds.

        The ``expected`` slope has the weight of steps whose sizes have this ``spread``. It dominates while all sizes
        are about the same, because then the measured slope is mostly noise.
        """
        known = self._squares - self._sizes**2 / self.weight
        rise = self._products - self._sizes * self.seconds
        return max(expected / 4, _MIN_SLOPE, (rise + spread * expected) / (known + spread))


class StepCost:
    """Predicts the seconds of steps. One thread calls its methods.

    The cost of rows is learned from steps without prompts. The cost of prompt tokens is learned from how much longer a
    step with prompts takes than its rows alone would. Steps with and without prompts are forgotten separately, so that
    the cost of prompts is still known after an hour of decoding. A prompt token counts as ``1 + per_key * k`` tokens if
    ``k`` keys are before it, as in a ``PromptBudget``.
    """

    def __init__(self) -> None:
        self._rows = _Line(_KEPT_ROWS)
        self._prompts = _Line(_KEPT_PROMPTS)
        self._keys = _Line(_KEPT_KEYS)  # the mean number of keys before a prompt token, and the seconds of the token
        self._errors = _Line(_KEPT_ERRORS)  # relative errors of the predictions of steps with prompts
        self._largest = 0.0  # the largest recent number of prompt tokens in a step; later, smaller steps lower it
        # Whether the last step was an outlier, for steps without and with prompts.
        self._was_outlier = {False: False, True: False}

    def note(self, prompt_tokens: int, rows: int, seconds: float, keys: float = 0.0) -> None:
        """Notes the time of a step. ``rows`` are the tokens of sequences that decode, their drafts included.

        ``keys`` is the sum, over the prompt tokens, of the number of keys before each token.
        """
        line = self._prompts if prompt_tokens else self._rows
        if line.weight:
            expected = self.of(rows, prompt_tokens, keys)
            seconds = self._bounded(line, expected, seconds)
            if prompt_tokens and expected:
                self._errors.note(0.0, min(1.0, abs(seconds / expected - 1)))
        if prompt_tokens:
            beyond = seconds - self.of(rows)
            self._keys.note(keys / prompt_tokens, max(0.0, beyond) / prompt_tokens)
            counted = prompt_tokens + self.per_key * keys
            line.note(counted, beyond)
            self._largest = max(counted, _KEPT_PROMPTS * self._largest)
        else:
            line.note(rows, seconds)

    def _bounded(self, line: _Line, expected: float, seconds: float) -> float:
        """Returns the seconds to learn from.

        A single slow step counts as at most twice the expected time, because the machine may have paused.
        """
        prompts = line is self._prompts
        is_outlier = seconds > _OUTLIER * expected > 0 and line.weight > _MIN_STEPS * line.kept
        before, self._was_outlier[prompts] = self._was_outlier[prompts], is_outlier
        return _OUTLIER * expected if is_outlier and not before else seconds

    @property
    def per_row(self) -> float:
        """The seconds that one more row adds; 0 before the first step without prompts."""
        line = self._rows
        if not line.weight:
            return 0.0
        expected = min(_OF_STEP * line.seconds, _OF_ROW * line.seconds / line.size)
        return line.slope(expected, _ROW_SPREAD)

    @property
    def per_key(self) -> float:
        """How much time each earlier key adds to a prompt token, relative to the time of a token without earlier
        keys."""
        line = self._keys
        # Prompts can seem to take no time, if the steps without them were slow.
        if not line.weight or not line.size or line.seconds <= _MIN_SLOPE:
            return 0.0
        added = min(line.slope(0.0, _KEY_SPREAD), _MOST_OF_KEYS * line.seconds / line.size)
        return added / (line.seconds - added * line.size)

    @property
    def _per_prompt_token(self) -> float:
        line = self._prompts
        return line.slope(max(0.0, line.seconds / line.size), line.size**2)

    def of(self, rows: int, prompt_tokens: int = 0, keys: float = 0.0) -> float:
        """Returns the predicted seconds of a step. What has not been measured yet, rows or prompts, counts as 0."""
        seconds = 0.0
        if (line := self._rows).weight:
            seconds += max(0.0, line.seconds + self.per_row * (rows - line.size))
        if prompt_tokens and (line := self._prompts).weight:
            counted = prompt_tokens + self.per_key * keys
            seconds += max(0.0, line.seconds + self._per_prompt_token * (counted - line.size))
        return seconds

    def budget(
        self, target: float, rows: int, least: int = 1, *, waited: float = 0.0, spent: float = 0.0
    ) -> PromptBudget:
        """Returns how many prompt tokens a step of ``target`` seconds can compute beside ``rows`` rows.

        Prompts get at least a quarter of the time of the rows, even if the step then exceeds the target, so that no
        prompt starves; the share grows with the seconds for which the oldest prompt has ``waited``. A step gets at
        least ``least`` prompt tokens, and about twice the largest number of a recent step at most. The worse the
        predictions of recent steps, the smaller the budget.

        If ``spent`` seconds of the target have passed before the step, the step gets only the prompt tokens that fit
        into the rest of the target, perhaps none. This does not hold if a step with ``least`` tokens takes longer than
        the target: then every step is late, and prompts would only wait longer.
        """
        line, decoding = self._prompts, self.of(rows)
        if not line.weight:
            return PromptBudget(least, 0.0, least)
        if spent and self.of(rows, least) <= target:
            seconds, least = (target - spent) * self._caution - decoding, 0
        else:
            share = min(1.0, _FLOOR_SHARE * (1 + waited / _STARVING))
            seconds = max(target * self._caution - decoding, share * decoding)
        tokens = min(line.size + (seconds - line.seconds) / self._per_prompt_token, _MAX_GROWTH * self._largest)
        return PromptBudget(max(least, tokens), self.per_key, least, self.per_row / self._per_prompt_token)

    @property
    def _caution(self) -> float:
        """The share of the target time that a step should take."""
        error = self._errors.seconds if self._errors.weight else 0.0
        return min(1.0, _LATE / (1 + _ERRORS * error))
