"""What EpochFile and identity say when a broker begins on what its disk holds."""

from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import Identity


def begin_epochs(
    epochs: EpochFile, identity: Identity, *, store_epoch: int, start: int, end: int
) -> None:
    """The log reaches from `start` to `end`, its newest record is of `store_epoch`.

    A log from before it had replicas was written by one broker: to the others it is one epoch.
    Epochs whose records a crash took are none (R12).
    """
    if epochs.is_new and end > start:
        epochs.append(max(1, store_epoch), start)
    epochs.cut_suffix(end)
    identity.accept(max(identity.epoch, epochs.last_epoch))


def begin_alone(epochs: EpochFile, identity: Identity, epoch: int, position: int) -> int:
    """A broker without replicas leads from `position`: nobody else counts, so the next epoch is
    its own.  Returns which one that is, `epoch` or later; it is on the disk then (R6)."""
    epoch = max(epoch, identity.epoch + 1)
    identity.accept(epoch)
    epochs.append(epoch, position)
    return epoch
