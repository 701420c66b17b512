"""Learns how long a step takes: a constant, plus a time for each row that decodes and each token of a prompt.

The time of a prompt token grows with the number of keys before it. This module does not read a clock: the batcher
measures the steps. Prompt lookup asks how much time a further row adds; the batcher asks how many prompt tokens fit
into a step.
"""

from __future__ import annotations

import math

from mlserver_torch_stream.engine.scheduler.queue import PromptBudget

# The time that one more row is expected to add: the share _OF_STEP of the step's time, but at most the share _OF_ROW of
# the time per row. On two cores, a second row adds 0.14 of the step's time, and a ninth row adds 0.5 of the time per
# row.
_OF_STEP = 0.1
_OF_ROW = 0.35
_ROW_SPREAD = 8.0  # sum of squared distances of the steps' rows from their mean
_KEPT_ROWS = 0.98  # the factor for the weight of earlier steps: about the last fifty count
_KEPT_PROMPTS = 0.9  # the factor for steps with prompts: about the last ten count
# A prompt token is expected to take its share of the mean time, as if a step with half as many tokens as the mean had
# shown it; keys are expected to take none, as if a step with 100 more keys before each token had shown that.
_TOKEN_SPREAD = 0.25  # relative to the square of the mean number of tokens
_KEY_SPREAD = 4e4  # relative to the spread of the tokens: 100 keys before each of the tokens, squared
_MAX_SHARE_OF_KEYS = 0.75  # the largest share of keys in the mean time of the prompt tokens
_KEPT_ERRORS = 0.95  # the factor for the relative errors of earlier predictions: about the last twenty count

# A step that takes longer than predicted by three mean errors should still end within 1.25 times the target.
_LATE = 1.25
_ERRORS = 3.0

_OUTLIER = 2.0  # a step that takes longer counts as this many times the expected time, unless the next step is slow too
# A step with prompts that takes less than this share of what its rows alone were expected to take shows that rows have
# become faster. A single step can be faster by noise alone, but hardly by this much.
_FASTER = 0.9
_MIN_STEPS = 3  # before these no step is an outlier
# Times the largest measured number of prompt tokens: beyond it the line is a guess. More than 2, because two pages cost
# more than twice as much as the page before them, which has fewer keys before it.
_MAX_GROWTH = 2.25
# Prompts get at least this share of the time that the decoding rows take. The share grows while the oldest prompt
# waits, and has doubled after ``_STARVING`` seconds, until prompts get as much time as the rows.
_FLOOR_SHARE = 0.25
_STARVING = 10.0
_MIN_SLOPE = 1e-9  # seconds; a difference of two measurements can be zero or less


class _Fit:
    """Seconds as a constant, plus a time for each unit of size and for each key: least squares with exponential
    forgetting."""

    def __init__(self, kept: float) -> None:
        self.kept = kept
        self.weight = 0.0
        self._sums = [0.0] * 8

    def note(self, size: float, seconds: float, keys: float = 0.0) -> None:
        products = (size * size, size * keys, keys * keys, size * seconds, keys * seconds)
        noted = (size, keys, seconds, *products)
        self.weight = self.kept * self.weight + 1.0
        self._sums = [self.kept * total + value for total, value in zip(self._sums, noted, strict=True)]

    def scale(self, factor: float) -> None:
        """Multiplies all seconds by ``factor``."""
        for index in (2, 6, 7):
            self._sums[index] *= factor

    @property
    def size(self) -> float:
        """The mean size."""
        return self._sums[0] / self.weight

    @property
    def keys(self) -> float:
        """The mean number of keys."""
        return self._sums[1] / self.weight

    @property
    def seconds(self) -> float:
        """The mean seconds."""
        return self._sums[2] / self.weight

    def slopes(self, expected: float, spread: float) -> tuple[float, float]:
        """Returns the seconds that one more unit of size adds, and the seconds that one more key adds.

        The ``expected`` slope of size, and none of keys, have the weight of steps whose sizes have this ``spread``, a
        sum of squared distances from their mean. They dominate while all steps are about the same, because then the
        measured slopes are mostly noise.
        """
        total_size, total_keys, _, sizes, both, keys, size_seconds, key_seconds = self._sums
        sizes += spread - total_size * self.size
        both -= total_size * self.keys
        keys += spread * _KEY_SPREAD - total_keys * self.keys
        size_seconds += spread * expected - total_size * self.seconds
        key_seconds -= total_keys * self.seconds
        most = max(0.0, _MAX_SHARE_OF_KEYS * self.seconds / self.keys) if total_keys else 0.0
        per_key = min(most, max(0.0, (sizes * key_seconds - both * size_seconds) / (sizes * keys - both * both)))
        return max(expected / 4, _MIN_SLOPE, (size_seconds - both * per_key) / sizes), per_key

    def predict(self, size: float, keys: float, slopes: tuple[float, float]) -> float:
        """Returns the seconds, which are at least 0."""
        per_unit, per_key = slopes
        return max(0.0, self.seconds + per_unit * (size - self.size) + per_key * (keys - self.keys))


class StepCost:
    """Predicts the seconds of steps. One thread calls its methods.

    The cost of rows is learned from steps without prompts. The cost of prompt tokens is learned from how much longer a
    step with prompts takes than its rows alone would. Steps with and without prompts are forgotten separately, so that
    the cost of prompts is still known after an hour of decoding. While prompts keep coming, all steps have prompts;
    then the cost of rows falls if a step takes less time than its rows alone were expected to take. A prompt token
    counts as ``1 + per_key * k`` tokens if ``k`` keys are before it, as in a ``PromptBudget``.
    """

    def __init__(self) -> None:
        self._rows = _Fit(_KEPT_ROWS)
        self._prompts = _Fit(_KEPT_PROMPTS)
        self._errors = _Fit(_KEPT_ERRORS)  # relative errors of the predictions of steps with prompts
        self._largest = 0.0  # the largest recent number of prompt tokens in a step; later, smaller steps lower it
        # Whether the last step was an outlier, for steps without and with prompts.
        self._was_outlier = {False: False, True: False}
        # Whether the last step computed prompts and did not show that its rows take less time than expected.
        self._confirmed = False

    def note(self, prompt_tokens: int, rows: int, seconds: float, keys: float = 0.0) -> None:
        """Notes the time of a step. ``rows`` are the tokens of sequences that decode, their drafts included.

        ``keys`` is the sum, over the prompt tokens, of the number of keys before each token.
        """
        fit = self._prompts if prompt_tokens else self._rows
        if fit.weight:
            expected = self.of(rows, prompt_tokens, keys)
            seconds = self._bounded(fit, expected, seconds)
            if prompt_tokens and expected:
                self._errors.note(0.0, min(1.0, abs(seconds / expected - 1)))
        alone, self._confirmed = self.of(rows), False
        if prompt_tokens:
            if rows and seconds < _FASTER * alone:
                self._rows.scale(seconds / alone)
            else:
                self._confirmed = rows > 0
            fit.note(prompt_tokens, seconds - self.of(rows), keys)
            self._largest = max(prompt_tokens + self.per_key * keys, _KEPT_PROMPTS * self._largest)
        else:
            fit.note(rows, seconds)

    def _bounded(self, fit: _Fit, expected: float, seconds: float) -> float:
        """Returns the seconds to learn from.

        A single slow step counts as at most twice the expected time, because the machine may have paused.
        """
        prompts = fit is self._prompts
        is_outlier = seconds > _OUTLIER * expected > 0 and fit.weight > _MIN_STEPS * fit.kept
        before, self._was_outlier[prompts] = self._was_outlier[prompts], is_outlier
        return _OUTLIER * expected if is_outlier and not before else seconds

    @property
    def per_row(self) -> float:
        """The seconds that one more row adds; 0 before the first step without prompts."""
        fit = self._rows
        if not fit.weight:
            return 0.0
        expected = min(_OF_STEP * fit.seconds, _OF_ROW * fit.seconds / fit.size)
        return fit.slopes(expected, _ROW_SPREAD)[0]

    @property
    def per_key(self) -> float:
        """How much time each earlier key adds to a prompt token, relative to the time of a token without earlier
        keys."""
        if not self._prompts.weight:
            return 0.0
        per_token, per_key = self._of_prompts
        return per_key / per_token

    @property
    def _of_prompts(self) -> tuple[float, float]:
        """The seconds that one more prompt token and one more key before one add."""
        fit = self._prompts
        # Prompts can seem to take no time, if the steps without them were slow.
        return fit.slopes(max(0.0, fit.seconds / fit.size), _TOKEN_SPREAD * fit.size**2)

    def of(self, rows: int, prompt_tokens: int = 0, keys: float = 0.0) -> float:
        """Returns the predicted seconds of a step. What has not been measured yet, rows or prompts, counts as 0."""
        seconds = 0.0
        if (fit := self._rows).weight:
            seconds += fit.predict(rows, 0.0, (self.per_row, 0.0))
        if prompt_tokens and (fit := self._prompts).weight:
            seconds += fit.predict(prompt_tokens, keys, self._of_prompts)
        return seconds

    def budget(
        self,
        target: float,
        rows: int,
        least: int = 1,
        *,
        waited: float = 0.0,
        spent: float = 0.0,
        start: int = 0,
        alone: bool = False,
    ) -> PromptBudget:
        """Returns how many prompt tokens a step of ``target`` seconds can compute beside ``rows`` rows.

        Prompts get at least a quarter of the time of the rows, even if the step then exceeds the target, so that no
        prompt starves; the share grows with the seconds for which the oldest prompt has ``waited``. The first step with
        prompts gets no such share, because it shows whether the rows still take so long. A step gets at least ``least``
        prompt tokens, and about twice the largest number of a recent step at most. The worse the predictions of recent
        steps, the smaller the budget.

        If ``spent`` seconds of the target have passed before the step, the step gets only the prompt tokens that fit
        into the rest of the target, perhaps none. This does not hold if a step with ``least`` tokens of the oldest
        prompt, from its position ``start`` on, takes longer than the target: then every step with prompts is late, and
        prompts would only wait longer.

        All drafts together get the time that decoding leaves of the target, but at least ``least`` drafts. Their number
        is not limited if a sequence decodes ``alone``, because no other stream waits for them.
        """
        fit, decoding, per_row = self._prompts, self.of(rows), self.per_row
        most_drafts = math.inf if alone or not per_row else max(least, (target - decoding) / per_row)
        if not fit.weight:
            return PromptBudget(least, 0.0, least, most_drafts=most_drafts)
        if spent and self.of(rows, least, least * (start + least / 2)) <= target:
            seconds, least = (target - spent) * self._caution - decoding, 0
        else:
            share = min(1.0, _FLOOR_SHARE * (1 + waited / _STARVING)) if self._confirmed else 0.0
            seconds = max(target * self._caution - decoding, share * decoding)
        per_token, per_key = self._of_prompts
        counted = fit.size + (seconds - fit.seconds + per_key * fit.keys) / per_token
        tokens = min(counted, _MAX_GROWTH * self._largest)
        return PromptBudget(max(least, tokens), per_key / per_token, least, per_row / per_token, most_drafts)

    @property
    def _caution(self) -> float:
        """The share of the target time that a step should take."""
        error = self._errors.seconds if self._errors.weight else 0.0
        return min(1.0, _LATE / (1 + _ERRORS * error))
