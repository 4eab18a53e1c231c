"""What a classifier takes for what, and where it is most wrong."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tinyformer.analysis.charts import confusion_grid
from tinyformer.analysis.subject import Findings

NUM_WORST = 50
"""Examples in the table of the worst."""


def classified_examples(
    probabilities: Float[Tensor, "examples classes"],
    labels: Int[Tensor, " examples"],
    texts: Sequence[str],
    names: Sequence[str],
) -> Findings:
    """The confusion matrix, and the examples whose label the model finds least likely.

    Args:
        probabilities: of each class for each example.
        labels: the true classes.
        texts: of the examples.
        names: of the classes.
    """
    predicted = probabilities.argmax(dim=-1)
    confusion = torch.zeros(len(names), len(names), dtype=torch.long)
    confusion.index_put_((labels, predicted), torch.ones_like(labels), accumulate=True)
    own = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    worst = own.argsort(stable=True)[:NUM_WORST].tolist()
    counts = confusion.tolist()
    return Findings(
        tables={
            "confusion": (["label", *names], [[name, *row] for name, row in zip(names, counts, strict=True)]),
            "worst_examples": (
                ["text", "label", "predicted", "probability_of_label"],
                [[texts[i], names[int(labels[i])], names[int(predicted[i])], float(own[i])] for i in worst],
            ),
        },
        figures={"confusion": confusion_grid(confusion, names)},
    )
