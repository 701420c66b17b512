"""Holds a running engine (this package's own or vLLM's) and everything that ends together with it.

It does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.engine.api import AdapterSet, Engine
from mlserver_torch_stream.engine.scheduler.queue import QueueLimits
from mlserver_torch_stream.engine.shared_pool import Lease, ProcessResources
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.types import ModelInfo

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.model import PreparedModel

OnDeath = Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine with its codec and the lease on its weights. vLLM's models have no lease: vLLM holds their weights
    itself.

    The replicas of a ``ReplicatedEngine`` are its ``parts``; all of them share the first replica's codec and weights.
    """

    engine: Engine
    codec: TextCodec
    summary: str  # one line for the log: the model, its devices and the size of the cache
    weights: Lease[PreparedModel] | None
    parts: tuple[RunningEngine, ...] = ()
    adapters: AdapterSet | None = None

    def stop(self, resources: ProcessResources) -> None:
        """Shuts the engine down, ends its lease on the weights and frees its memory. Blocks."""
        self.engine.shutdown()
        for part in self.parts or (self,):
            resources.release(part.codec)
            if part.weights is not None:
                give_back_weights(part.weights)


def give_back_weights(lease: Lease[PreparedModel]) -> None:
    """Ends one use of a model's weights.

    The end of the last use also stops the other ranks, if the model has several ranks.
    """
    ranks = lease.value.ranks
    if lease.end() and ranks is not None:
        ranks.leader.stop()


def model_info(
    codec: TextCodec,
    vocab_size: int,
    context: int,
    max_num_seqs: int,
    default_sampling: Mapping[str, Any],
    attention: str,
) -> ModelInfo:
    """Returns the limits for requests.

    ``vocab_size`` is the size of a row of logits; ``context`` is the context length.
    """
    return ModelInfo(
        vocab_size=min(vocab_size, codec.vocab_size),
        max_model_len=context,
        max_num_seqs=max_num_seqs,
        has_chat_template=codec.has_chat_template,
        default_sampling=default_sampling,
        tool_parser=codec.chat_format.tools,
        reasons=codec.chat_format.reasons,
        template_arguments=codec.chat_format.arguments,
        attention=attention,
    )


def queue_limits(settings: EngineSettings) -> QueueLimits:
    """Returns the queue's limits and the timeouts from the settings."""
    return QueueLimits(
        settings.max_queued_requests,
        settings.max_queued_tokens,
        settings.queue_timeout,
        settings.request_timeout,
        settings.step_timeout,
        settings.chunked_prefill_size,
    )
