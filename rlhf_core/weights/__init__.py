"""Weights on their way from the trainer to the makers: versioned, in buckets with checksums, all or nothing.

    publisher = Publisher(dtype=torch.bfloat16)                      # the first trainer rank
    publication = publisher.publish(published_weights(learner, torch.bfloat16), version=3)
    subscriber.take(publication, timeout_s=60)                       # each maker, told by a Ray call
    publisher.retire(in_use={3})

`manifest` says what is sent, `packing` lays tensors into buckets, a module for each transport moves them.
"""

from rlhf_core.weights.publication import Publication, WeightsError
from rlhf_core.weights.publisher import Publisher
from rlhf_core.weights.subscriber import Subscriber

__all__ = ["Publication", "Publisher", "Subscriber", "WeightsError"]
