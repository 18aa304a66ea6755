"""Records below one bit per element: a few parity checks of the rollout's bits instead of the bits.

Guided by all sites before it, a trainer has nearly the rollout's numbers. It would find nearly all parity bits by
itself, and where it would not, its own number lies close to a rounding threshold. So the bits need not be sent: a
*syndrome* is enough, some exclusive-ors of them. Of all rows of bits with that syndrome the trainer takes the likeliest
given its own numbers (source coding with side information, after Slepian and Wolf).

    trainer's numbers     2.38    .74   -2.9    .12
    own bits                 0      1      1      0    parity of the nearest code
    cost of a flip         .12    .01     .4    .13    distance to the threshold: 2.5, .75, 2.5, .25
    rollout sent          "bits 1, 2 and 4 are even"   they are odd; the cheapest repair is bit 2, so .74 rounds to 1

Cost: over a distance d to the threshold the odds of a flip fall about like exp(-d / noise) (measured: linear costs
repair more than squares). So the costs of several flips add up to a log-likelihood when they are distances in units of
the noise, and a common factor of a row does not matter. Within a block the noise is about the same on all steps of the
grid. Between blocks it lies between constant in units of the block scale (V) and constant without it (inputs of the
MLP): the distance is taken times the square root of the scale.

Checks overlap along the row, as in the syndrome-trellis codes of Filler, Judas and Fridrich (2011) and in any
convolutional code. The cheapest flips are found exactly by Viterbi's algorithm over the checks that are open.

    columns (9, 14, 5), height 4     check 0  1  2  3  4 ...
    element 0   9 = 0b1001                 x        x         with every period of three elements
    element 1  14 = 0b1110                    x  x  x         one check closes and one opens
    element 2   5 = 0b0101                 x     x
    element 3   9, one check later            x        x

What was left out: packing syndromes into bytes (their number is counted; `trace_kernels.syndromes` packs one rate),
escapes for blocks that the rollout sees to be ambiguous, and checks that span tokens.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trace_kernels import BlockFormat, pack_bits, unpack_bits
from trace_kernels.round_values import Guide
from trace_kernels.syndrome_decode import own_bits_reference
from trace_lightning.probe.agreement import Arm
from trace_lightning.quantization.guidance import GuidanceRecord
from trace_lightning.quantization.rounding import GuidedRounding
from trace_lightning.recipe import GuidanceConfig

DECISION_BYTES = 2**32  # of one chunk of rows; a row takes a byte per bit and state


@dataclass(frozen=True)
class SyndromeCode:
    """Parity checks along a row of bits, drawn above: bit i of `columns[j]` says that element j is in open check i.

    With `block`, all checks close with the period: a row is cut into independent blocks of `len(columns)` bits.
    """

    columns: tuple[int, ...]
    height: int
    block: bool = False

    def num_checks(self, width: int) -> int:
        """Bits of the syndrome of `width` bits."""
        periods = -(-width // len(self.columns))
        return periods * self.height if self.block else periods + self.height - 1

    def syndrome(self, bits: Tensor) -> Tensor:
        """The checks of 0/1 bits [M, K]: bool [M, num_checks(K)], in the order in which they close.

        Raises:
            ValueError: K is no multiple of a block.
        """
        rows = self._rows(bits)
        sums = rows.float() @ self._matrix(rows.shape[-1], bits.device)  # below 256: exact in BF16 as well
        return (sums.round().int() & 1).bool().reshape(len(bits), -1)

    def decode(self, own: Tensor, cost: Tensor, syndrome: Tensor) -> Tensor:
        """The likeliest bits [M, K] of a given syndrome: `own` with those flips whose costs add up to the least.

        Args:
            own: 0/1 [M, K], what nearest rounding gives.
            cost: FP32 [M, K], not negative: of flipping each bit.
            syndrome: bool [M, num_checks(K)] of the bits sought.
        """
        target = self._checks(self.syndrome(own) ^ syndrome)
        rows, costs = self._rows(own).bool(), self._rows(cost)
        chunk = max(1, DECISION_BYTES // (rows.shape[-1] << self.height))
        parts = zip(costs.split(chunk), target.split(chunk), strict=True)
        flips = torch.cat([self._cheapest_flips(part, wanted) for part, wanted in parts])
        return (rows ^ flips).reshape(own.shape).to(own.dtype)

    def _rows(self, x: Tensor) -> Tensor:
        if self.block and x.shape[-1] % len(self.columns):
            raise ValueError(f"{x.shape[-1]} elements are no multiple of this code's block of {len(self.columns)}")
        return x.reshape(-1, len(self.columns)) if self.block else x

    def _checks(self, syndrome: Tensor) -> Tensor:
        return syndrome.reshape(-1, self.height) if self.block else syndrome

    @functools.cache  # noqa: B019  a few frozen codes live as long as the program
    def _matrix(self, width: int, device: torch.device) -> Tensor:
        """FP32 [width, checks]: 1 where an element takes part in a check."""
        period = len(self.columns)
        matrix = torch.zeros(width, -(-width // period) + self.height - 1)
        for j in range(width):
            for i in range(self.height):
                matrix[j, j // period + i] = self.columns[j % period] >> i & 1
        return matrix.to(device)

    def _cheapest_flips(self, cost: Tensor, target: Tensor) -> Tensor:
        """Bool [M, K]: flips of least total cost [M, K] whose syndrome is `target` [M, checks], by Viterbi's algorithm.

        A state is what the open checks add up to so far, check i in bit i. States come first: [2**height, M].
        """
        cost, target = cost.T.contiguous(), target.T.contiguous()
        (width, rows), states = cost.shape, torch.arange(1 << self.height, device=cost.device)
        best = cost.new_full((len(states), rows), torch.inf)
        best[0] = 0
        flipped = torch.empty(width, len(states), rows, dtype=torch.bool, device=cost.device)
        jumps = [states ^ column for column in self.columns]
        closed = 0
        for j in range(width):
            other = best[jumps[j % len(jumps)]].add_(cost[j])
            torch.lt(other, best, out=flipped[j])
            torch.minimum(best, other, out=best)
            for _ in range(self._closing(j, width)):  # what has the wrong sum ends here; check 1 becomes check 0
                halves = best.view(-1, 2, rows)
                torch.where(target[closed], halves[:, 1], halves[:, 0], out=other[: len(other) // 2])
                other[len(other) // 2 :] = torch.inf
                best, other, closed = other, best, closed + 1
        return self._trace_back(flipped, target)

    def _trace_back(self, flipped: Tensor, target: Tensor) -> Tensor:
        """Walk back from the only state that is left, where all checks are closed."""
        width, _, rows = flipped.shape
        state = torch.zeros(1, rows, dtype=torch.int64, device=flipped.device)
        flips, closed = torch.empty(width, rows, dtype=torch.bool, device=flipped.device), len(target)
        for j in reversed(range(width)):
            for _ in range(self._closing(j, width)):
                closed -= 1
                state = (state << 1) | target[closed]
            torch.gather(flipped[j], 0, state, out=flips[j : j + 1])
            state = state ^ (flips[j] * self.columns[j % len(self.columns)])
        return flips.T

    def _closing(self, j: int, width: int) -> int:
        """Checks that close with element j: all at the end of the row, else one with each period."""
        if j == width - 1:
            return self.height
        return int(j % len(self.columns) == len(self.columns) - 1)


# Convolutional ones: least distances 10, 7, 6 and 4 with 64 states between periods, the best of a random search.
CODES = {
    "one_in_2": SyndromeCode((109, 79), 7),
    "one_in_3": SyndromeCode((101, 69, 115), 7),
    "one_in_4": SyndromeCode((87, 97, 79, 93), 7),
    "one_in_6": SyndromeCode((97, 101, 95, 43, 67, 83), 7),
    "four_of_8": SyndromeCode(tuple(8 | i for i in range(8)), 4, block=True),  # extended Hamming [8, 4, 4]
    "five_of_16": SyndromeCode(tuple(16 | i for i in range(16)), 5, block=True),  # extended Hamming [16, 11, 4]
}


class SyndromeRounding(GuidedRounding):
    """Recovers the parity bits from their syndrome, then rounds by them as any guided trainer.

    Its record has the bits themselves, and of those nothing but the syndrome is used. Rates are tried here; the engine
    writes one of them (`guidance.mode=syndrome`).
    """

    code: SyndromeCode = CODES["one_in_4"]
    parity_layers = 0  # the first layers keep one bit per element

    def values(self, layer: int, site: str, x: Tensor, fmt: BlockFormat, outer: Tensor | None = None) -> Tensor:
        """As `GuidedRounding`."""
        guide = self.rows.guide(layer, site)
        if guide is None or layer < self.parity_layers:
            return super().values(layer, site, x, fmt, outer)
        decoded = self.decoded(x, fmt, guide)
        self.audit(layer, site, x, fmt, decoded)
        return self.guided_values(x, fmt, outer, decoded)

    def decoded(self, x: Tensor, fmt: BlockFormat, guide: Guide) -> Guide:
        """The guide as the trainer reads it: one row per guided token of `x`, with the bits it takes for sent."""
        tokens = (guide.row >= 0).nonzero().squeeze(-1)
        x, guide = x[tokens], replace(guide.followed(tokens), row=torch.full_like(guide.row, -1))
        rows = torch.arange(len(tokens), device=x.device)
        guide.row[tokens] = rows
        packed, cost = own_bits_reference(
            x, rows, guide.scale, guide.outer, fmt.name, guide.per_token, guide.scale_bits
        )
        own, sent = (unpack_bits(bits, cost.shape[1]) for bits in (packed, guide.codes.flatten(1)))
        bits = pack_bits(self.code.decode(own, cost, self.code.syndrome(sent)))
        return replace(guide, codes=bits.view_as(guide.codes))

    @classmethod
    def bytes_per_token(cls, record: GuidanceRecord) -> float:
        """What this would take per token of `record`, which has parity bits, and scales whole or by parity.

        Counted are whole bytes of each token and site: the syndrome, the scales as they are recorded today, and one
        byte per outer scale, which is a power of two.
        """
        total, tokens = 0.0, max(1, record.num_rows)
        for (layer, site), table in record.tables.items():
            elements = 8 * table.codes[0].numel()
            bits = elements if layer < cls.parity_layers else cls.code.num_checks(elements)
            total += -(-bits // 8) + table.scale.nbytes / tokens
            total += table.outer is not None and site not in ("k", "v")
        return total


def syndrome_arms(parity: GuidanceConfig, every: list[str]) -> list[Arm]:
    """Arms by name: a code of `CODES`, `six_` before it for the sites `every`, and what follows.

    Block scales are sent by parity, or with `_whole` as bytes; `_after_4` keeps one bit per element in four layers.
    """
    arms = []
    for name, code in CODES.items():
        for sites, scales, layers in itertools.product(("", "six_"), ("", "_whole"), ("", "_after_4")):
            rounding = type(name, (SyndromeRounding,), {"code": code, "parity_layers": 4 if layers else 0})
            config = replace(parity, scales="whole" if scales else "parity", sites=every if sites else parity.sites)
            arms.append(Arm(f"{sites}{name}{scales}{layers}", config, rounding))
    return arms
