"""Matching networks against literal versions: loops over queries and support images, LSTM cells written out."""

import math

import numpy as np
import pytest
import torch

from fewshot import MatchingHead


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def literal_logits(support, query, temperature):
    """Vinyals et al., equation 1 with the cosine attention of section 2.1.1; [W, K, C] and [M, C], one episode."""
    ways, shots, _ = support.shape
    logits = np.zeros((len(query), ways))
    for i, x in enumerate(query):
        cosines = [x @ s / np.linalg.norm(x) / np.linalg.norm(s) for c in range(ways) for s in support[c]]
        attention = softmax(temperature * np.array(cosines))
        for c in range(ways):
            logits[i, c] = np.log(sum(attention[c * shots + k] for k in range(shots)))
    return logits


def lstm_cell(x, h, c, w_ih, w_hh, b_ih, b_hh):
    """Gates in torch's order: input, forget, cell, output."""
    i, f, g, o = np.split(w_ih @ x + b_ih + w_hh @ h + b_hh, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def literal_context(support, query, weights, steps):
    """Appendix A of Vinyals et al.: [N, C] and [M, C], one episode."""
    channels = support.shape[1]

    def run(rows, suffix):
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        parameters = [weights[f"support_lstm.{name}{suffix}"] for name in names]
        h, c, outputs = np.zeros(channels), np.zeros(channels), []
        for x in rows:
            h, c = lstm_cell(x, h, c, *parameters)
            outputs.append(h)
        return outputs

    forward, backward = run(support, ""), run(support[::-1], "_reverse")[::-1]
    g = np.array([f + b + x for f, b, x in zip(forward, backward, support, strict=True)])

    # Equations 3-6 have one matrix for [h, r]; here its two halves lie in the cell's weights of input and of state.
    w_ih, w_hh = weights["query_cell.weight_ih"], weights["query_cell.weight_hh"]
    w_x, w_hr = w_ih[:, :channels], np.concatenate([w_hh, w_ih[:, channels:]], axis=1)
    bias = weights["query_cell.bias_ih"] + weights["query_cell.bias_hh"]
    embedded = []
    for x in query:
        h, c = np.zeros(channels), np.zeros(channels)
        for _ in range(steps):
            attention = softmax(np.array([h @ row for row in g]))
            r = sum(a * row for a, row in zip(attention, g, strict=True))
            h, c = lstm_cell(x, np.concatenate([h, r]), c, w_x, w_hr, bias, 0)
            h = h + x
        embedded.append(h)
    return g, np.array(embedded)


@pytest.mark.parametrize(("shots", "temperature"), [(1, 10.0), (3, 2.5)])
def test_matching_equals_the_literal_version(shots, temperature):
    rng = np.random.default_rng(0)
    support, query = rng.normal(size=(3, 4, shots, 7)) + 1, rng.normal(size=(3, 10, 7)) + 1
    head = MatchingHead(temperature)
    expected = [literal_logits(s, q, temperature) for s, q in zip(support, query, strict=True)]
    support, query = torch.from_numpy(support), torch.from_numpy(query)
    logits = head.double()(support, query)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-6, atol=1e-6)  # the temperature's float32
    np.testing.assert_allclose(logits.exp().sum(-1).detach().numpy(), 1, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 5])
def test_full_context_equals_the_literal_version_episode_by_episode(steps):
    rng = np.random.default_rng(steps)
    support, query = rng.normal(size=(3, 4, 2, 6)), rng.normal(size=(3, 8, 6))
    head = MatchingHead(full_context=True, num_features=6, context_steps=steps).double()
    with torch.no_grad():
        head.log_temperature.fill_(math.log(4))
        for parameter in head.context.parameters():
            parameter.mul_(2)  # the usual start hardly leaves the skip connections
        logits = head(torch.from_numpy(support), torch.from_numpy(query))
    weights = {name: parameter.detach().numpy() for name, parameter in head.context.named_parameters()}
    for e in range(3):
        g, f = literal_context(support[e].reshape(8, 6), query[e], weights, steps)
        expected = literal_logits(g.reshape(4, 2, 6), f, 4.0)
        np.testing.assert_allclose(logits[e].numpy(), expected, rtol=1e-10, atol=1e-10)


def test_logits_stay_finite_and_every_parameter_learns():
    head = MatchingHead(temperature=1e4, full_context=True, num_features=8)
    support, query = torch.randn(2, 4, 3, 8), torch.randn(2, 8, 8, requires_grad=True)
    logits = head(support, query)
    assert logits.isfinite().all()
    head = MatchingHead(full_context=True, num_features=8)
    head(support, query)[:, :, 0].sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert query.grad.isfinite().all() and query.grad.abs().sum() > 0
    assert not list(MatchingHead(learn_temperature=False).parameters())
    assert "log_temperature" in MatchingHead(learn_temperature=False).state_dict()


@pytest.mark.parametrize("full", [False, True])
def test_logits_are_float32_under_autocast_and_in_16_bits(full):
    support, query = torch.randn(2, 5, 2, 16).bfloat16(), torch.randn(2, 10, 16).bfloat16()
    head = MatchingHead(full_context=full, num_features=16)
    expected = head(support.float(), query.float())
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(support, query)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)
    assert head.bfloat16()(support, query).dtype == torch.float32  # parameters of another dtype than the features


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature of matching must be positive and finite, got 0.0"),
        ({"full_context": True}, "needs num_features"),
        ({"context_steps": 0}, "context_steps must be an integer of at least 1, got 0"),
        ({"full_context": True, "num_features": 0}, "num_features must be"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        MatchingHead(**options)
