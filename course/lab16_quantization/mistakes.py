"""Spoilers of lab 16: codes in the wrong half of a byte, scales of the wrong weights, wrong levels."""

import torch

from course.kit.answers import answers_of
from course.kit.exercises import KnownAnswers

right = answers_of("16_quantization")

# Groups of four bits.

int4_groups = KnownAnswers("int4-groups")

int4_groups.mistake(
    "high half first",
    {
        "halves[:, 0::2] | (halves[:, 1::2] << 4), scale": "(halves[:, 0::2] << 4) | halves[:, 1::2], scale",
        "torch.stack((packed & 15, packed >> 4), dim=-1)": "torch.stack((packed >> 4, packed & 15), dim=-1)",
    },
    says="The first of two codes belongs in the low half; here it is in the high one.",
)
int4_groups.mistake(
    "halves of the row instead of neighbours",
    {"halves[:, 0::2]": "halves.chunk(2, 1)[0]", "halves[:, 1::2]": "halves.chunk(2, 1)[1]"},
    says="A byte holds two neighbours of a row; here it holds one code of each half of the row.",
)
int4_groups.mistake(
    "one scale per output",
    {"scale = (2 * groups.abs().amax(-1) / 15).bfloat16()":
     "scale = (2 * groups.abs().amax((1, 2))[:, None].expand(groups.shape[:2]) / 15).bfloat16()"},
    says="All groups of an output got one scale, that of its largest weight.",
)  # fmt: skip
int4_groups.mistake(
    "scale of max / 8",
    {"2 * groups.abs().amax(-1) / 15": "groups.abs().amax(-1) / 8"},
    says="max|w| / 8 is 16 steps over the range; between 16 codes there are 15.",
)
int4_groups.mistake(
    "scale of max / 7",
    {"2 * groups.abs().amax(-1) / 15": "groups.abs().amax(-1) / 7"},
    says="max|w| / 7 never uses code -8: 15 steps lead from -max|w| to max|w|.",
)
int4_groups.mistake(
    "largest, not largest in size",
    {"groups.abs().amax(-1)": "groups.amax(-1)"},
    says="The largest weight is not the largest in size: negative ones count, too.",
)
int4_groups.mistake(
    "codes for the exact scale",
    {
        "scale = (2 * groups.abs().amax(-1) / 15).bfloat16()": "scale = 2 * groups.abs().amax(-1) / 15",
        "(halves[:, 1::2] << 4), scale": "(halves[:, 1::2] << 4), scale.bfloat16()",
    },
    says="Codes were chosen for the scale before it was rounded to bfloat16, and will be read back with another.",
)
int4_groups.mistake(
    "cut instead of rounded",
    {"torch.round(groups / scale.float()[..., None])": "torch.trunc(groups / scale.float()[..., None])"},
    says="Codes were cut towards zero instead of rounded: the error is up to a whole step.",
)
int4_groups.mistake(
    "eight added twice", {"clamp(-8, 7)": "clamp(-8, 7).add(8)"}, says="8 was added to the codes twice."
)
int4_groups.mistake(
    "not shifted back",
    {"(halves.float() - 8)": "halves.float()"},
    says="Stored codes are 0 .. 15: subtract 8 before you multiply.",
)
int4_groups.mistake(
    "0 / 0 in a group of zeros",
    {"scale = torch.where(scale == 0, 1, scale)": ""},
    expect="a group of zeros has the scale 1, and yours is 0",
)
int4_groups.mistake(
    "a small scale in a group of zeros",
    {"torch.where(scale == 0, 1, scale)": "scale.clamp(min=1e-8)"},
    expect="a group of zeros has the scale 1, and yours is 1.*e-08",
)
int4_groups.mistake(
    "small scales count as 0",
    {"scale == 0, 1, scale": "scale < 1e-3, 1, scale"},
    says="A group of small weights got the scale 1, and all its codes are 0.",
)
int4_groups.mistake("weights in float64", {"halves.float()": "halves.double()"}, expect="asks for weights, float32")
int4_groups.mistake(
    "8 not cut to 7",
    {".clamp(-8, 7)": ""},
    says="Codes of 8 were not cut to 7: stored as 16 they have a fifth bit, which runs over into the "
    "other half or out of the byte.",
)
int4_groups.mistake(
    "cut at -7", {".clamp(-8, 7)": ".clamp(-7, 7)"}, says="Codes were cut at -7, and they run from -8 to 7."
)
int4_groups.mistake("one code to a byte", {"halves[:, 0::2] | (halves[:, 1::2] << 4), scale": "halves, scale"},
        expect="uint8 \\[out, in / 2\\]")  # fmt: skip
int4_groups.mistake("scales in float32", {"15).bfloat16()": "15)"}, expect="scales, bfloat16")
int4_groups.mistake(
    "low halves unpacked before all high ones",
    {"torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)": "torch.cat((packed & 15, packed >> 4), dim=1)"},
    says="Unpacked, low and high halves take turns; here all low ones come first.",
)


def _by_output(weight, group):
    rows, scales = [], []
    for row in weight:
        codes, own = [], []
        for part in row.split(group):
            scale = (part.abs().max() * 2 / 15).to(torch.bfloat16)
            scale = scale if scale > 0 else torch.ones((), dtype=torch.bfloat16)
            codes.append((part / scale.float()).round().clamp(-8, 7).int() + 8)
            own.append(scale)
        codes = torch.cat(codes).view(-1, 2)
        rows.append((codes[:, 0] + 16 * codes[:, 1]).to(torch.uint8))
        scales.append(torch.stack(own))
    return torch.stack(rows), torch.stack(scales)


def _into_place(packed, scale):
    codes = torch.empty(len(packed), 2 * packed.shape[1])
    codes[:, ::2], codes[:, 1::2] = packed % 16, packed // 16
    return (codes - 8) * scale.float().repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)


int4_groups.alternative("group by group, remainders instead of bits")((_by_output, _into_place))


def _by_floor(weight, group):
    scale = (weight.view(len(weight), -1, group).abs().amax(2) / 7.5).bfloat16()
    scale = scale.masked_fill(scale == 0, 1)
    steps = weight / scale.float().repeat_interleave(group, 1)
    codes = (steps + 8.5).floor().clamp(0, 15).to(torch.uint8)
    return codes[:, ::2] + 16 * codes[:, 1::2], scale


int4_groups.alternative("rounded by floor")((_by_floor, _into_place))
int4_groups.alternative("scales spread over the weights")((right.quantize_int4, _into_place))

# NF4.

nf4 = KnownAnswers("nf4")

nf4.mistake(
    "sides exchanged",
    {"torch.cat((negative,": "torch.cat((-positive,", "positive.flip(0)))": "-negative.flip(0)))"},
    says="Eight levels lie above 0 and seven below; here it is the other way round.",
)
nf4.mistake(
    "not divided by the largest",
    {"(levels / levels.max()).float()": "levels.float()"},
    says="The levels still reach the quantile 1.85: divide all of them by the largest.",
)
nf4.mistake(
    "evenly spaced",
    {"return (levels / levels.max()).float()": "return torch.linspace(-1, 1, 16)"},
    says="These levels are evenly spaced: int4's, not those of a normal distribution.",
)
nf4.mistake(
    "the logistic function's quantiles",
    {
        "positive = torch.special.ndtri(": "positive = torch.logit(",
        "negative = -torch.special.ndtri(": "negative = -torch.logit(",
    },
    says="These are quantiles of the logistic distribution, not of the normal one.",
)  # fmt: skip
nf4.mistake(
    "quantiles from p = 1",
    {"ndtri(torch.linspace(0.9677083, 0.5, 9": "ndtri(torch.linspace(0.999, 0.5, 9"},
    says="The largest level is not a quantile near 1: p begins at 0.9677083.",
)
nf4.mistake(
    "with both zeros", {"0.5, 9, dtype=torch.float64)[:-1]": "0.5, 9, dtype=torch.float64)"}, expect="16 levels"
)
nf4.mistake("in float64", {"levels.max()).float()": "levels.max())"}, expect="16 levels, float32")
nf4.mistake(
    "the level below instead of the nearest",
    {"(relative[..., None] - levels).abs().argmin(-1)": "(relative[..., None] >= levels - 1e-6).sum(-1) - 1"},
    says="Each weight got the level below it, not the nearest one.",
)  # fmt: skip
nf4.mistake(
    "the nearest in the square of the level",
    {"(relative[..., None] - levels).abs()": "(relative.abs()[..., None] - levels).abs()"},
    says="Negative weights got the code of their size: the sign is lost.",
)
nf4.mistake(
    "largest of the whole tensor",
    {"largest = blocks.abs().amax(-1)": "largest = blocks.abs().max().expand(len(blocks)).clone()"},
    says="Every block was divided by the largest weight of all blocks.",
)
nf4.mistake(
    "largest with its sign lost the other way",
    {"blocks.abs().amax(-1)": "blocks.amax(-1)"},
    says="A block's largest weight in size may be negative: take it without its sign.",
)
nf4.mistake("blocks along the other way", {"weight.view(-1, block)": "weight.view(block, -1).T"},
        says="A block is so many weights in a row; here its weights are apart from each other.")  # fmt: skip


def _between(weight, block):
    levels = right.nf4_levels()
    blocks = weight.view(-1, block)
    largest = blocks.abs().max(dim=1).values
    return torch.bucketize((blocks / largest.clamp(min=1e-30)[:, None]).flatten(), (levels[1:] + levels[:-1]) / 2).to(
        torch.uint8
    ), largest


def _from_the_normal_distribution():
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    sides = [
        normal.icdf(0.9677083 + (0.5 - 0.9677083) * torch.arange(count, dtype=torch.float64) / count)
        for count in (7, 8)
    ]
    return (torch.cat((-sides[0], torch.zeros(1), sides[1])).sort().values / sides[1][0]).float()


nf4.alternative("between the middles of levels")((right.nf4_levels, _between))
nf4.alternative("a distribution's own quantiles")((_from_the_normal_distribution, _between))
