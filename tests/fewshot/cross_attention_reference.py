"""Cross attention literally (Hou et al., NeurIPS 2019): every pair of class and query by itself, in loops.

With each pair's correlation map and the tensor ``[W, Q, m, C]`` of attended maps. Weights are a dictionary by the names
of ``CrossAttentionHead.fusion``; its norm is BatchNorm.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Literal(NamedTuple):
    logits: torch.Tensor  # [E, M, W]
    attended_class: torch.Tensor  # [E, M, W, m, C]
    attended_query: torch.Tensor  # [E, M, W, m, C]


def unit(vector):
    return vector / vector.norm().clamp(min=1e-12)


def meta_fusion(rows, weights, training):
    """[pairs, m] to [pairs, m]; updates the running statistics in ``weights`` as a training forward does."""
    hidden = rows @ weights["squeeze.weight"].T + weights["squeeze.bias"]
    if training:
        mean, variance, n = hidden.mean(0), hidden.var(0, correction=0), len(hidden)
        with torch.no_grad():
            weights["norm.running_mean"] = 0.9 * weights["norm.running_mean"] + 0.1 * mean
            weights["norm.running_var"] = 0.9 * weights["norm.running_var"] + 0.1 * variance * n / (n - 1)
    else:
        mean, variance = weights["norm.running_mean"], weights["norm.running_var"]
    hidden = (hidden - mean) / (variance + 1e-5).sqrt() * weights["norm.weight"] + weights["norm.bias"]
    return hidden.relu() @ weights["expand.weight"].T + weights["expand.bias"]


def attention(correlations, weights, training):
    """One direction: how much each of the first positions of ``{pair: [m, m]}`` has in common with the others."""
    fused = meta_fusion(torch.stack([r.mean(0) for r in correlations.values()]), weights, training)
    result = {}
    for (pair, r), w in zip(correlations.items(), fused, strict=True):
        a = torch.stack([sum(r[i, j] * w[j] for j in range(len(w))) / len(w) for i in range(len(r))])
        result[pair] = (a / 0.025).softmax(0)
    return result


def literal(class_maps, query_maps, weights, training=False):
    """[E, W, C, h, w] and [E, M, C, h, w], with the whole tensor of attended maps of both."""
    classes, queries = class_maps.flatten(3).mT, query_maps.flatten(3).mT  # positions, channels
    correlations = {}
    for e in range(len(classes)):
        for i, q in enumerate(queries[e]):
            for c, p in enumerate(classes[e]):
                rows, columns = torch.stack([unit(x) for x in p]), torch.stack([unit(x) for x in q])
                correlations[e, i, c] = rows @ columns.T
    of_class = attention(correlations, weights, training)
    of_query = attention({pair: r.T for pair, r in correlations.items()}, weights, training)
    attended = [[], []]
    for e, i, c in correlations:
        attended[0].append((1 + of_class[e, i, c])[:, None] * classes[e, c])
        attended[1].append((1 + of_query[e, i, c])[:, None] * queries[e, i])
    shape = (len(classes), queries.shape[1], classes.shape[1], *queries.shape[2:])
    of_classes, of_queries = (torch.stack(maps).view(shape) for maps in attended)
    return Literal(
        7 * F.cosine_similarity(of_classes.mean(-2), of_queries.mean(-2), dim=-1, eps=0), of_classes, of_queries
    )


def literal_losses(result, classifier, classes, queries):
    """Global and episodic loss: cross-entropies of every query at every position, one by one."""
    overall, episodic = [], []
    for e, per_query in enumerate(result.attended_query):
        for i, maps in enumerate(per_query):
            true = i // queries
            for position in range(maps.shape[1]):
                logits = classifier[0] @ maps[true, position] + classifier[1]
                overall.append(-logits.log_softmax(0)[classes[e, true]])
                vectors = result.attended_class[e, i].mean(-2)
                cosines = [unit(maps[c, position]) @ unit(vectors[c]) for c in range(len(vectors))]
                episodic.append(-(7 * torch.stack(cosines)).log_softmax(0)[true])
    return torch.stack(overall).mean(), torch.stack(episodic).mean()


def rounds_by_loops(support, query, weights, numbers):
    """One episode, support [W, K, C, h, w]: each round the most confident queries join the class they were given."""
    logits = literal(support.mean(1)[None], query[None], weights).logits[0]
    for number in numbers:
        order = sorted(range(len(query)), key=lambda i: -logits[i].max().item())
        members = [list(maps) for maps in support]
        for i in order[:number]:
            members[int(logits[i].argmax())].append(query[i])
        maps = torch.stack([torch.stack(some).mean(0) for some in members])
        logits = literal(maps[None], query[None], weights).logits[0]
    return logits
