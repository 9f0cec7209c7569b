"""Weights on their way from the trainer to the makers: versioned, in buckets with checksums, all or nothing.

    publisher = Publisher(dtype=torch.bfloat16)                      # the first trainer rank
    publication = publisher.publish(published_weights(learner, torch.bfloat16), version=3)
    subscriber.take(publication, timeout_s=60)                       # each maker, told by a Ray call
    publisher.retire(in_use={3})

`publisher` is the trainer's side, `subscriber` a maker's. `buckets` has the form of what is sent, with its checksums.
`shared_memory`, `object_store` and `nccl` are the transports. `difference` is what changed since the last version.
"""

from rlhf_core.weights.buckets import Publication, WeightsError
from rlhf_core.weights.publisher import Publisher
from rlhf_core.weights.subscriber import Subscriber

__all__ = ["Publication", "Publisher", "Subscriber", "WeightsError"]
