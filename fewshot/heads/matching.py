"""Matching networks: attention over the support set."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.heads.base import EpisodeHead, accumulating
from swbn_lightning.errors import InputError, require_positive, require_positive_number


class MatchingHead(EpisodeHead):
    """Classify by cosine attention over the support set (Vinyals et al., NeurIPS 2016).

    The probability of a class is the attention on its support images (equation 1 of the paper):
    ``p(c | x) = sum of a(x, x_i) over the x_i of class c``, with
    ``a(x, x_i) = softmax over all i of temperature * cos(f(x), g(x_i))`` (section 2.1.1). The logits are the logarithms
    of these probabilities. Their cross-entropy is therefore the negative log-likelihood.

    Args:
        temperature: initial factor of the cosine, above 0. The paper has none, but a cosine is at most 1: with 5
            classes and one shot, a perfect match beside cosines of 0 would only get a probability of ``e / (e + 4)`` =
            0.40.
        learn_temperature: learn the factor. The parameter is its logarithm, so the factor stays positive.
        full_context: use full context embeddings, in which the embedding of an image depends on the whole support set
            (:class:`FullContext`).
        num_features: ``C``, the backbone's ``num_features``; required with ``full_context``.
        context_steps: reading steps of full context embeddings; the paper does not give their number.

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: a temperature that is not positive and finite; ``context_steps`` below 1; ``full_context`` without
            ``num_features``.
    """

    log_temperature: Tensor

    def __init__(
        self,
        temperature: float = 10.0,
        learn_temperature: bool = True,
        full_context: bool = False,
        num_features: int | None = None,
        context_steps: int = 5,
    ) -> None:
        super().__init__()
        require_positive_number("matching", temperature=temperature)
        logarithm = torch.tensor(float(temperature)).log()
        if learn_temperature:
            self.log_temperature = nn.Parameter(logarithm)
        else:
            self.register_buffer("log_temperature", logarithm)
        # The LSTM's products and states; the normalised beside the given.
        self.features_held = 14 if full_context else 2
        require_positive("matching", context_steps=context_steps)
        self.context: FullContext | None = None
        if full_context:
            if num_features is None:
                raise InputError("matching with full_context needs num_features, the channels of the features.")
            self.context = FullContext(num_features, context_steps)

    def uneven_logits(self, support: Sequence[Tensor], query: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            attention = self._attention(*accumulating(torch.cat(list(support))[None], query[None]))[0]
        of_classes = attention.split([len(images) for images in support], dim=-1)
        return torch.stack([own.logsumexp(-1) for own in of_classes], dim=-1)

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        attention = self._attention(support.flatten(1, 2), query)
        return attention.unflatten(-1, support.shape[1:3]).logsumexp(-1)

    def _attention(self, examples: Tensor, query: Tensor) -> Tensor:
        """Logarithm of ``a(x, x_i)``: examples ``[E, N, C]``, class after class, query ``[E, M, C]``; ``[E, M, N]``."""
        if self.context is not None:
            examples, query = self.context(examples, query)
        cosine = F.normalize(query, dim=-1) @ F.normalize(examples, dim=-1).mT
        return (cosine * self.log_temperature.exp()).log_softmax(-1)


class FullContext(nn.Module):
    """Full context embeddings (Vinyals et al., section 2.1.2 and appendix A).

    Support images: ``g(x_i) = forward_i + backward_i + g'(x_i)``, the hidden states of a bidirectional LSTM over the
    support set plus a skip connection (appendix A.2). The LSTM reads the set in the order of the episode: class after
    class as in its ``classes``, and the shots of each class as drawn. This order is random in every episode. As in the
    paper, a different order gives different embeddings.

    Query images: an LSTM takes ``f'(x)`` at each step and reads the support set (equations 3-6):

    - ``r = sum_i softmax_i(h^T g(x_i)) g(x_i)``,
    - ``h, c = LSTM(f'(x), [h, r], c)``, and then ``h + f'(x)``.

    It starts from zeros, so the first reading is the mean of the support set. The LSTM is implemented with input
    ``[f'(x), r]`` and state ``h``, which is equivalent.

    Args:
        num_features: ``C``, of input, states and output.
        steps: number of readings of the support set, at least 1.
    """

    def __init__(self, num_features: int, steps: int) -> None:
        super().__init__()
        require_positive("full context", num_features=num_features, steps=steps)
        self.steps = steps
        self.support_lstm = nn.LSTM(num_features, num_features, batch_first=True, bidirectional=True)
        self.query_cell = nn.LSTMCell(2 * num_features, num_features)

    def forward(self, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Embed support ``[E, N, C]`` and query ``[E, M, C]``, same shapes out; computed in the parameters' dtype."""
        given, own = query.dtype, self.query_cell.weight_ih.dtype
        support, query = support.to(own), query.to(own)
        states, _ = self.support_lstm(support)
        support = support + states.unflatten(-1, (2, -1)).sum(-2)
        return support.to(given), self._read(support, query).to(given)

    def _read(self, support: Tensor, query: Tensor) -> Tensor:
        """Return the query embeddings ``[E, M, C]``; ``support`` is ``g``."""
        hidden = state = torch.zeros_like(query).flatten(0, 1)
        for _ in range(self.steps):
            reading = (hidden.view_as(query) @ support.mT).softmax(-1) @ support
            hidden, state = self.query_cell(torch.cat([query, reading], dim=-1).flatten(0, 1), (hidden, state))
            hidden = hidden + query.flatten(0, 1)
        return hidden.view_as(query)
