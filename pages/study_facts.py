"""What sentences about the study are made of: numbers of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from claims import MissingError
from study_runs import Curve, Run, Size, Spread, gain_at, gain_error_at, loss_at, passkey_at, rise, spread
from study_sizes import OURS

ROOT = Path(__file__).parents[1]
LEVEL = 0.005  # nats: what is this near is called level


@dataclass(frozen=True)
class Facts:
    """Of one size. An arm is named as in the study, or as `arm+option` where it was changed at inference."""

    size: Size

    def there(self, value: Spread | float | None, arm: str, what: str) -> float:
        if value is None:
            raise MissingError(f"{what} of {arm} at {self.size.name}")
        return value.mean if isinstance(value, Spread) else value

    def runs(self, arm: str) -> list[Run]:
        if arm not in self.size.arms:
            raise MissingError(f"{arm} at {self.size.name}")
        return self.size.arms[arm]

    def curves(self, arm: str) -> list[Curve]:
        name, _, option = arm.partition("+")
        self.runs(name)
        found = self.size.curves(name, option or None)
        if not found:
            raise MissingError(f"{arm} at {self.size.name}")
        return found

    def count(self, arm: str) -> int:
        return len(self.curves(arm))

    def loss(self, arm: str, multiple: int) -> float:
        return self.there(loss_at(self.curves(arm), multiple), arm, f"the loss at {multiple}x")

    def losses(self, arm: str, multiple: int) -> list[float]:
        """Of each seed."""
        self.loss(arm, multiple)
        return [curve.loss[multiple] for curve in self.curves(arm) if multiple in curve.loss]

    def behind(self, arm: str, other: str, multiple: int) -> float:
        return self.loss(arm, multiple) - self.loss(other, multiple)

    def rise(self, arm: str, multiple: int) -> float:
        return self.there(rise(self.curves(arm), multiple), arm, f"the loss at 1x and {multiple}x")

    def apart(self, arm: str, multiple: int) -> float:
        """The highest seed less the lowest."""
        found = self.losses(arm, multiple)
        return max(found) - min(found)

    def gain(self, arm: str, multiple: int) -> float:
        return self.there(gain_at(self.curves(arm), multiple), arm, f"the control at {multiple}x")

    def gain_told_from_none(self, arm: str, multiple: int) -> bool:
        error = gain_error_at(self.curves(arm), multiple)
        return abs(self.gain(arm, multiple)) >= 2 * self.there(error, arm, f"the control's error at {multiple}x")

    def far(self, arm: str) -> list[Curve]:
        self.runs(arm)
        return self.size.far(arm)

    def far_gain(self, arm: str, multiple: int) -> float:
        """Over the last quarter of each text."""
        return self.there(gain_at(self.far(arm), multiple), arm, f"the control of the last quarter at {multiple}x")

    def far_error(self, arm: str, multiple: int) -> float:
        return self.there(gain_error_at(self.far(arm), multiple), arm, f"its error at {multiple}x")

    def passkey(self, arm: str, multiple: int) -> float:
        return self.there(passkey_at(self.runs(arm), multiple), arm, f"pass keys at {multiple}x")

    def passkeys(self, arm: str, multiple: int) -> list[float]:
        """Of each seed."""
        self.passkey(arm, multiple)
        return [share for run in self.runs(arm) if (share := passkey_at([run], multiple)) is not None]

    def found(self, arm: str, multiple: int) -> list[tuple[int, int]]:
        """Of each seed: the keys found, and the trials."""
        self.passkey(arm, multiple)
        cells = [run.passkey.get(multiple, []) for run in self.runs(arm)]
        return [(sum(right for right, _ in own), sum(trials for _, trials in own)) for own in cells]

    def inside(self, arm: str, word: str, multiple: int) -> float:
        found = spread(run.inside.get(multiple, {}).get(word) for run in self.runs(arm))
        return self.there(found, arm, f"{word} at {multiple}x")

    def below(self, arm: str, other: str, multiples: Iterable[int]) -> bool:
        """On the mean over seeds, at every one of these lengths."""
        return all(self.loss(arm, multiple) < self.loss(other, multiple) for multiple in multiples)

    def every_seed_below(self, arm: str, other: str, multiples: Iterable[int]) -> bool:
        return all(max(self.losses(arm, multiple)) < min(self.losses(other, multiple)) for multiple in multiples)

    def level(self, arm: str, other: str, multiple: int) -> bool:
        return abs(self.behind(arm, other, multiple)) <= LEVEL


@dataclass(frozen=True)
class Study:
    sizes: Sequence[Size]

    def __getitem__(self, name: str) -> Facts:
        for size in self.sizes:
            if size.name == name:
                return Facts(size)
        raise MissingError(f"every run at {name}")


Finding = Callable[[Study], str]
LONG = (16, 32, 64)
# Arms by what sentences call them. In the mix every third layer sees everything and has no positions.
LOGN = "softmax-qknorm-logn"
WINDOW, YARN = f"{LOGN}+window=512", f"{LOGN}+rope=yarn:16"
P15, P3, RISING = "lssar-p15", "lssar-p3", "lssar-rising"
GROWING = f"{RISING}+power=grow:15,2"
LOGN_MIX = f"{LOGN}-global3"
LOG_MIX = "lssar-log-global3"
LOCAL_SOFTMAX = f"{OURS}-local-softmax-learned"
LOCAL_SOFTMAX_SOFT, LOCAL_SOFTMAX_WIDE = f"{LOCAL_SOFTMAX}-soft", f"{LOCAL_SOFTMAX}-wide"
THEIRS_SOFT = "softmax-qknorm-logn-learned-soft-global3"
WITHOUT_OFFSET = "lssar-without-offset-learned-log-global3"
