"""Losses, paired differences with their intervals, and the retained long-range gain.

An evaluation has the nats of each held-out row, in all and by part: `nats`, `by_position` and `by_recurrence`; its
`rows` have the bounds of the parts and the tokens of each row, which all models of a plan share.

A difference is of two models on the same held-out rows, nats per token, the mean over seeds that both have. Its 95 %
interval is the wider one of two by Student's t: over the rows (each the mean of its seeds; a ratio of sums, as rows
have different numbers of tokens), and over the seeds. One seed has the first alone.
"""

import math

# 97.5 % of Student's t with 1, 2, ... degrees of freedom.
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def student(freedom):
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = 1.959964  # Fisher's expansion
    first, second = z * (z * z + 1) / 4, z * ((5 * z * z + 16) * z * z + 3) / 96
    return z + first / freedom + second / freedom**2


def all_tokens(evaluation):
    """(nats, tokens) of each row."""
    return list(zip(evaluation["nats"], evaluation["rows"]["tokens"], strict=True))


def parts(name, chosen):
    """Losses in the parts, `by_position` or `by_recurrence`, whose bounds `chosen` accepts."""

    def of(evaluation):
        shared = evaluation["rows"][name]
        places = [i for i, (low, high) in enumerate(shared["bounds"]) if chosen(low, high)]
        rows = zip(evaluation[name], shared["tokens"], strict=True)
        return [(sum(nats[i] for i in places), sum(tokens[i] for i in places)) for nats, tokens in rows]

    return of


# Recurring tokens: those that followed the same eight tokens before (BPE: three), by distance.
far_recurrences = parts("by_recurrence", lambda low, high: low > 4096)
non_recurring = parts("by_recurrence", lambda low, high: high == 0)


def beyond(position):
    return parts("by_position", lambda low, high: low >= position)


def loss(evaluations, of=all_tokens):
    """Nats per token, the mean over the seeds; None where there are no such tokens."""
    sums = [[sum(column) for column in zip(*of(evaluation), strict=True)] for evaluation in evaluations]
    return sum(nats / tokens for nats, tokens in sums) / len(sums) if all(tokens for _, tokens in sums) else None


def difference(ours, theirs, of=all_tokens):
    """(mean, half of the 95 % interval or None) of two lists of evaluations, one for each seed; None without tokens."""
    seeds = []
    for mine, other in zip(ours, theirs, strict=True):
        pairs = list(zip(of(mine), of(other), strict=True))
        if any(a[1] != b[1] for a, b in pairs):
            raise ValueError("the rows of the two models have different numbers of tokens")
        seeds.append([(a[0] - b[0], a[1]) for a, b in pairs])
    tokens = [n for _, n in seeds[0] if n]
    if not tokens:
        return None
    rows = [sum(seed[i][0] for seed in seeds) / len(seeds) for i, (_, n) in enumerate(seeds[0]) if n]
    mean = sum(rows) / sum(tokens)
    widths = []
    if len(rows) >= 4:
        squares = sum((d - mean * n) ** 2 for d, n in zip(rows, tokens, strict=True))
        widths.append(student(len(rows) - 1) * math.sqrt(squares * len(rows) / (len(rows) - 1)) / sum(tokens))
    if len(seeds) > 1:
        means = [sum(d for d, _ in seed) / sum(n for _, n in seed) for seed in seeds]
        variance = sum((value - mean) ** 2 for value in means) / (len(means) - 1)
        widths.append(student(len(means) - 1) * math.sqrt(variance / len(means)))
    return mean, max(widths, default=None)


def retained_gain(ours, full, window, of=all_tokens):
    """(L_window - L) / (L_window - L_full), or None where full attention is not ahead of the window."""
    here, best, least = (loss(evaluations, of) for evaluations in (ours, full, window))
    return None if None in (here, best, least) or least <= best else (least - here) / (least - best)
