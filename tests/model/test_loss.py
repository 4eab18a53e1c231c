"""The loss of each text: by hand, and that of an evaluation."""

import torch
import torch.nn.functional as F

from model.models import TEXTS, answerer, causal, classifier, masked, translator


def test_language_models_by_hand():
    causal_lm, masked_lm = causal(), masked()
    losses, masked_losses = causal_lm.loss(TEXTS), masked_lm.loss(TEXTS)
    for row, text in enumerate(TEXTS):
        tokens, _ = causal_lm.tokenize(text)
        torch.testing.assert_close(losses[row], F.cross_entropy(causal_lm.logits(text)[0, :-1], tokens[0, 1:]))
        tokens, _ = masked_lm.tokenize(text)
        positions = torch.arange(1, tokens.shape[1])
        each_masked = tokens.repeat(len(positions), 1)
        each_masked[positions - 1, positions] = masked_lm.tokenizer.mask_id
        logits = masked_lm.logits(each_masked)[positions - 1, positions]
        torch.testing.assert_close(masked_losses[row], F.cross_entropy(logits, tokens[0, 1:]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(causal_lm.loss(TEXTS[1]), losses[1:2])


def test_the_other_tasks_by_hand():
    model = classifier()
    expected = -model.logits(TEXTS).log_softmax(-1)[range(3), [2, 0, 1]]
    torch.testing.assert_close(model.loss(TEXTS, ["maybe", "no", "yes"]), expected)
    torch.testing.assert_close(model.loss(TEXTS, [2, 0, 1]), expected)
    torch.testing.assert_close(model.loss(TEXTS[1], "no"), expected[1:2])
    model.task.labels = ["3", "1", "2"]  # integers, so that a number is a name
    for labels in (["2", "3", "1"], [2, 3, 1], [2.0, "3.0", 1]):
        torch.testing.assert_close(model.loss(TEXTS, labels), expected)
    model, targets = translator(), ["le chat", "un", "oiseau"]
    found, eos = model.loss(TEXTS, targets), model.tokenizer.eos_id
    for row, (text, target) in enumerate(zip(TEXTS, targets, strict=True)):
        source, predicted = ([*ids, eos] for ids in model.tokenizer.encode_batch([text, target]))
        logits = model.network(torch.tensor([source]), torch.tensor([[eos, *predicted[:-1]]]))[0]
        torch.testing.assert_close(found[row], F.cross_entropy(logits, torch.tensor(predicted)))
        torch.testing.assert_close(model.loss(torch.tensor([source]), [predicted[:-1]])[0], found[row])
    model = answerer()
    # [eos, w, h, o, eos, a, space, c, a, t]
    scores = model.run("who", "a cat").logits[0].mT
    scores[:, 1:5] = -torch.inf
    expected = -scores.log_softmax(-1)[[0, 1], [7, 9]].mean()
    torch.testing.assert_close(model.loss("who", "a cat", "cat"), expected.view(1))
    first = -scores.log_softmax(-1)[:, 5].mean()  # of the two occurrences
    torch.testing.assert_close(model.loss("who", "a cat", "a"), first.view(1))
    none = -scores.log_softmax(-1)[:, 0].mean()
    torch.testing.assert_close(model.loss(["who", "who"], "a cat", ["cat", ""]), torch.stack([expected, none]))
    # Two windows of 19 and 14 bytes of the context; the second begins behind the answer.
    context = "the cat sat in the tree"
    first, second = model.run("who", context).logits.mT
    first[:, 1:5] = second[:, 1:5] = second[:, 19:] = -torch.inf
    both = first.log_softmax(-1)[[0, 1], [9, 11]].mean(), second.log_softmax(-1)[:, 0].mean()
    torch.testing.assert_close(model.loss("who", context, "cat"), -sum(both).view(1) / 2)
