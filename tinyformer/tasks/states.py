"""The states of an encoder without a prediction head."""

from tinyformer.tasks.task import Task


class States(Task):
    """The final states of an encoder without a prediction head, such as a sentence encoder's.

    The output for each token is its final state. There are no predictions and no loss, so that nothing can be trained;
    every method that needs a loss raises an `ArgumentError`.
    """

    has_loss = False

    loss = nats = places = score = metrics = describe = Task.require_loss
